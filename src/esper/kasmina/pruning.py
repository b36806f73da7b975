"""Late pruning: once the learning rate has fallen, fossils that do not pay leave the network."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.kasmina.blueprints import SHAM
from esper.kasmina.evidence import measure_pairs
from esper.kasmina.model import MorphogeneticModel
from esper.leyline.gates import Measurement


@dataclass(frozen=True)
class FossilVerdict:
    slot_id: str
    blueprint_id: str
    contribution: Measurement | None
    """None where the losses without it, or with it, are not finite:

    nothing can be said, and it stays
    """
    is_kept: bool


def find_judged(model: MorphogeneticModel) -> list[tuple[str, int]]:
    """(slot, number) of every fossil that grew and has an effect:

    slots in order, newest first in each.
    """
    return [
        (slot.slot_id, number)
        for slot in map(model.slot, model.slot_config.slot_ids)
        for number in reversed(range(slot.built_in, len(slot.fossils)))
        if slot.fossil_names[number] != SHAM
    ]


def prune(
    model: MorphogeneticModel, measure: Callable[[], Tensor], base: Tensor
) -> tuple[list[FossilVerdict], Tensor]:
    """Measure the network without each fossil and remove those whose contribution is not above
    `least_gain`.

    Each is judged in the network that those before it have left. `measure` returns rows, held-out
    losses in the first; `base` is what it returns now. Also returns what it returned for the
    network that is left. Nothing is removed before all are judged, so a measurement that fails
    leaves the network as it was.
    """
    verdicts: list[FossilVerdict] = []
    removed: list[tuple[str, int]] = []
    with ExitStack() as gone:
        for slot_id, number in find_judged(model):
            with ExitStack() as off:
                off.enter_context(model.fossil_off(slot_id, number))
                without = measure()
                is_finite = bool(torch.isfinite(base[0]).all() and torch.isfinite(without[0]).all())
                gain = measure_pairs(better=base[0], than=without[0]) if is_finite else None
                is_kept = gain is None or gain.mean > model.settings.least_gain
                verdicts.append(
                    FossilVerdict(slot_id, model.slot(slot_id).fossil_names[number], gain, is_kept)
                )
                if not is_kept:
                    base = without
                    removed.append((slot_id, number))
                    gone.push(off.pop_all())
    for place in removed:  # newest first, so that the numbers stay true
        model.remove_fossil(*place)
    return verdicts, base
