"""Decides: signals, observation, action masks, rules of thumb and controls, and the recurrent network."""

from esper.tamiyo.distributions import MaskedCategorical
from esper.tamiyo.heads import HeadSpec
from esper.tamiyo.masks import MaskSeedInfo, build_slot_states, compute_action_masks, compute_batch_masks
from esper.tamiyo.network import FactoredRecurrentActorCritic
from esper.tamiyo.normalising import RunningMeanStd
from esper.tamiyo.policies import NetworkPolicy, Policy, RulePolicy
from esper.tamiyo.rules import Heuristic, HostFacts, replay
from esper.tamiyo.signals import SignalTracker

__all__ = [
    "FactoredRecurrentActorCritic",
    "HeadSpec",
    "Heuristic",
    "HostFacts",
    "MaskSeedInfo",
    "MaskedCategorical",
    "NetworkPolicy",
    "Policy",
    "RulePolicy",
    "RunningMeanStd",
    "SignalTracker",
    "build_slot_states",
    "compute_action_masks",
    "compute_batch_masks",
    "replay",
]
