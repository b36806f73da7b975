"""Decides: action masks and policies, from rules of thumb to controls that must be beaten. Knows no training."""

from esper.tamiyo.masks import MaskSeedInfo, build_slot_states, compute_action_masks, compute_batch_masks, masks_for
from esper.tamiyo.policies import Policy, RulePolicy
from esper.tamiyo.rules import RULES, Ground, Heuristic, Never, Random, Schedule, Sham, make_policy, replay, script_of

__all__ = [
    "RULES",
    "Ground",
    "Heuristic",
    "MaskSeedInfo",
    "Never",
    "Policy",
    "Random",
    "RulePolicy",
    "Schedule",
    "Sham",
    "build_slot_states",
    "compute_action_masks",
    "compute_batch_masks",
    "make_policy",
    "masks_for",
    "replay",
    "script_of",
]
