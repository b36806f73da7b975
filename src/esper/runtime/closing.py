"""What an episode leaves at its end: the network without its undecided seeds, measured again."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from torch import Tensor

from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.pruning import FossilPosition, find_judged, gain_of
from esper.kasmina.slot import SeedSlot
from esper.kasmina.switches import bypassed
from esper.leyline.gates import Measurement


@dataclass(frozen=True)
class Remains:
    """What is left of a network at the end of its episode, as measured on held-out examples."""

    loss: float
    accuracy: float
    left_out: tuple[str, ...]
    """slots whose seed was undecided"""
    contributions: Mapping[FossilPosition, Measurement | None]
    """what every fossil contributes, in the order of `find_judged`; None is not finite"""


def undecided_slots(model: MorphogeneticModel) -> list[SeedSlot]:
    """The slots that hold a seed of their own: at the end of an episode it is left out."""
    return [slot for slot in model.ordered_slots if slot.state.is_live]


def leaves_more_than_the_host(model: MorphogeneticModel) -> bool:
    """Whether there is something to measure once more: an undecided seed or a fossil."""
    return bool(undecided_slots(model) or find_judged(model))


def measure_remains(model: MorphogeneticModel, measure: Callable[[], Tensor]) -> Remains:
    """Measure a network without its undecided seeds, and then without each fossil as well.

    Nothing is removed, and all is as before afterwards.

    Args:
        model: the network.
        measure: returns held-out loss and correctness of every example, [2, examples].
    """
    undecided = undecided_slots(model)
    contributions: dict[FossilPosition, Measurement | None] = {}
    with ExitStack() as without_seeds:
        for slot in undecided:
            if slot.is_in_output:
                without_seeds.enter_context(bypassed(slot))
        scored = measure()
        for position in find_judged(model):
            with model.fossil_off(position.slot_id, position.number):
                without = measure()
            contributions[position] = gain_of(scored[0], without[0])
    loss, accuracy = scored.mean(1).tolist()
    return Remains(
        loss=loss,
        accuracy=accuracy,
        left_out=tuple(slot.slot_id for slot in undecided),
        contributions=contributions,
    )
