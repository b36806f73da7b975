"""Decides: signals, observation, action masks, rules of thumb and controls, and the recurrent network."""

from esper.tamiyo.distributions import MaskedCategorical as MaskedCategorical
from esper.tamiyo.heads import HeadSpec as HeadSpec
from esper.tamiyo.masks import MaskSeedInfo as MaskSeedInfo
from esper.tamiyo.masks import build_slot_states as build_slot_states
from esper.tamiyo.masks import compute_action_masks as compute_action_masks
from esper.tamiyo.masks import compute_batch_masks as compute_batch_masks
from esper.tamiyo.network import FactoredRecurrentActorCritic as FactoredRecurrentActorCritic
from esper.tamiyo.normalising import RunningMeanStd as RunningMeanStd
from esper.tamiyo.policies import NetworkPolicy as NetworkPolicy
from esper.tamiyo.policies import Policy as Policy
from esper.tamiyo.policies import RulePolicy as RulePolicy
from esper.tamiyo.rules import Heuristic as Heuristic
from esper.tamiyo.rules import HostFacts as HostFacts
from esper.tamiyo.rules import replay as replay
from esper.tamiyo.signals import SignalTracker as SignalTracker
