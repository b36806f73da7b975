"""What a run of `esper ppo` spends beside its hosts' episodes: twins, and the policy's learning."""

import math

from torch import nn

from esper.episodes import costs_by_phase, decision_flops
from esper.runtime.ledger import Charge, Ledger
from esper.simic.ppo.diagnostics import UpdateRecord
from esper.tamiyo.heads import HeadSpec
from esper.tamiyo.network import RecurrentActorCritic
from esper.telemetry.events import CostsBooked

TWINS, EPISODES, LEARNING = "twins", "episodes", "learning"
"""What a run spends on."""
_PASSES = 3  # forward, and backward to weights and to features


def learning_flops(network: RecurrentActorCritic) -> int:
    """FLOPs of judging one stored decision forward and backward.

    It costs more than a decision: each head is asked in every case, whatever was chosen before.

    >>> spec = HeadSpec.independent([3, 5])
    >>> network = RecurrentActorCritic(4, spec, hidden_dim=8, head_dim=8)
    >>> learning_flops(network) == 3 * decision_flops(network)
    True
    """
    repeated = 0
    for index, head in enumerate(network.spec.heads):
        last_layer = [*network.policy_heads[head.name].modules()][-1]
        assert isinstance(last_layer, nn.Linear)
        repeated += (count_cases(network.spec, index) - 1) * 2 * last_layer.weight.numel()
    return _PASSES * (decision_flops(network) + repeated)


def count_cases(spec: HeadSpec, index: int) -> int:
    """In how many cases a head is asked: combinations of the earlier choices that it sees."""
    uses = spec.uses(spec.heads[index])
    sizes = [earlier.size for earlier in spec.earlier(index)]
    return math.prod([len(uses), *sizes[1:]] if sizes else [])


def learning_ledger(network: RecurrentActorCritic, record: UpdateRecord, seconds: float) -> Ledger:
    """What an update has cost; its examples are the decisions judged in all passes together."""
    ledger = Ledger()
    charge = Charge("learning", examples=record.judged, flops_each=learning_flops(network))
    ledger.settle([charge], seconds)
    return ledger


def book(what: str, number: int, ledger: Ledger) -> CostsBooked:
    """The costs of a ledger as an event of a round."""
    return CostsBooked(what=what, round=number, **costs_by_phase(ledger))
