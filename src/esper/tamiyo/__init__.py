"""Decides: signals, observation, action masks, rules of thumb and controls, and the recurrent network."""

from esper.tamiyo.distributions import MaskedCategorical
from esper.tamiyo.heads import HeadSpec
from esper.tamiyo.learned import NetworkPolicy
from esper.tamiyo.masks import MaskSeedInfo, build_slot_states, compute_action_masks, compute_batch_masks, masks_for
from esper.tamiyo.network import FactoredRecurrentActorCritic
from esper.tamiyo.normalising import RunningMeanStd
from esper.tamiyo.observation import feature_names, observation_width, observe, signals_to_features
from esper.tamiyo.policies import Policy, RulePolicy
from esper.tamiyo.rules import (
    RULES,
    Greedy,
    Heuristic,
    HostFacts,
    Never,
    Random,
    Schedule,
    Sham,
    is_rule,
    make_policy,
    read_rule,
    replay,
    script_of,
)
from esper.tamiyo.signals import EpochSignals, SignalTracker

__all__ = [
    "RULES",
    "EpochSignals",
    "FactoredRecurrentActorCritic",
    "Greedy",
    "HeadSpec",
    "Heuristic",
    "HostFacts",
    "MaskSeedInfo",
    "MaskedCategorical",
    "NetworkPolicy",
    "Never",
    "Policy",
    "Random",
    "RulePolicy",
    "RunningMeanStd",
    "Schedule",
    "Sham",
    "SignalTracker",
    "build_slot_states",
    "compute_action_masks",
    "compute_batch_masks",
    "feature_names",
    "is_rule",
    "make_policy",
    "masks_for",
    "observation_width",
    "observe",
    "read_rule",
    "replay",
    "script_of",
    "signals_to_features",
]
