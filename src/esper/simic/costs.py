"""What a run of `esper ppo` spends beside its hosts' episodes: twins, and the policy's learning."""

from esper.runtime.ledger import Charge, Ledger, costs_by_phase
from esper.simic.ppo.diagnostics import UpdateRecord
from esper.tamiyo.network import ActorCritic
from esper.telemetry.events import CostsBooked

TWINS, EPISODES, LEARNING = "twins", "episodes", "learning"
"""What a run spends on."""
_PASSES = 3  # forward, and backward to weights and to features


def learning_flops(network: ActorCritic) -> int:
    """FLOPs of judging one stored decision forward and backward.

    It costs more than a decision where each head is asked in every case, whatever was chosen.

    >>> spec = HeadSpec.independent([3, 5])
    >>> network = RecurrentActorCritic(4, spec, hidden_dim=8, head_dim=8)
    >>> learning_flops(network) == 3 * network.decision_flops
    True
    """
    return _PASSES * network.judging_flops


def learning_ledger(network: ActorCritic, record: UpdateRecord, seconds: float) -> Ledger:
    """What an update has cost; its examples are the decisions judged in all passes together."""
    ledger = Ledger()
    charge = Charge("learning", examples=record.judged, flops_each=learning_flops(network))
    ledger.settle([charge], seconds)
    return ledger


def book(what: str, number: int, ledger: Ledger) -> CostsBooked:
    """The costs of a ledger as an event of a round."""
    return CostsBooked(what=what, round=number, **costs_by_phase(ledger))
