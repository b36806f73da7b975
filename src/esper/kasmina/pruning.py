"""Late pruning: once the learning rate has fallen, fossils that do not pay leave the network."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from esper.kasmina.blueprints import SHAM
from esper.kasmina.evidence import measure_pairs
from esper.kasmina.model import MorphogeneticModel
from esper.leyline.gates import Measurement


@dataclass(frozen=True)
class FossilVerdict:
    """What one fossil contributes, and whether it stays for that."""

    slot_id: str
    blueprint_id: str
    # None where the losses without it, or with it, are not finite: nothing can be said, it stays
    contribution: Measurement | None
    is_kept: bool


class FossilPosition(NamedTuple):
    """Which fossil: its slot, and its number among the slot's fossils."""

    slot_id: str
    number: int


class Pruning(NamedTuple):
    """What was judged, and what the network that is left measured."""

    verdicts: list[FossilVerdict]
    measured: Tensor


def find_judged(model: MorphogeneticModel) -> list[FossilPosition]:
    """Every fossil that grew and has an effect: slots in order, newest first in each."""
    positions: list[FossilPosition] = []
    for slot in model.ordered_slots:
        for number in reversed(range(slot.built_in, len(slot.fossils))):
            if slot.fossil_names[number] != SHAM:
                positions.append(FossilPosition(slot.slot_id, number))
    return positions


def prune(model: MorphogeneticModel, measure: Callable[[], Tensor], base: Tensor) -> Pruning:
    """Measure the network without each fossil and remove those that do not pay.

    A fossil pays if its contribution is above `least_gain`. Each is judged in the network that
    those before it have left. Nothing is removed before all are judged, so a measurement that fails
    leaves the network as it was.

    Args:
        model: the network.
        measure: returns rows, held-out losses in the first.
        base: what `measure` returns now.
    """
    verdicts: list[FossilVerdict] = []
    removed: list[FossilPosition] = []
    with ExitStack() as gone:
        for position in find_judged(model):
            with ExitStack() as off:
                off.enter_context(model.fossil_off(position.slot_id, position.number))
                without = measure()
                verdict = _judge(model, position, base[0], without[0])
                verdicts.append(verdict)
                if not verdict.is_kept:
                    base = without
                    removed.append(position)
                    gone.push(off.pop_all())
    for position in removed:  # newest first, so that the numbers stay true
        model.remove_fossil(position.slot_id, position.number)
    return Pruning(verdicts, base)


def _judge(
    model: MorphogeneticModel, position: FossilPosition, losses: Tensor, without: Tensor
) -> FossilVerdict:
    """Compare held-out losses of the same examples with a fossil and without it."""
    gain = gain_of(losses, without)
    return FossilVerdict(
        slot_id=position.slot_id,
        blueprint_id=model.slot(position.slot_id).fossil_names[position.number],
        contribution=gain,
        is_kept=gain is None or gain.mean > model.settings.least_gain,
    )


def gain_of(losses: Tensor, without: Tensor) -> Measurement | None:
    """What a fossil contributes, from held-out losses of the same examples with it and without it.

    None where some are not finite: nothing can be said.
    """
    if not torch.isfinite(losses).all() or not torch.isfinite(without).all():
        return None
    return measure_pairs(better=losses, than=without)
