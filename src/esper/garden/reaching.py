"""Whether training still runs the modules on which something grew."""

from collections.abc import Sequence

import torch
from torch import nn

from esper.garden import processes
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.probing import buffers_kept
from esper.kasmina.randomness import own_randomness
from esper.kasmina.slot import SeedSlot
from esper.leyline.errors import HostError

_TRIES = 32
"""Passes in which a layer that training skips by chance may show itself."""


def refuse_unreached(model: MorphogeneticModel) -> None:
    """Refuse what grew where no training pass of any process came since the last step.

    It has learnt nothing, and the rest has learnt without it. Whoever calls the host itself, or
    compiles it or a part of it, passes by what is counted, and is not judged; nor is a layer that
    training skips by chance.
    """
    totals: dict[str, int] = {}
    for passes in processes.gather(lambda: _count_passes(model)):
        if passes is None:
            return
        for slot_id, count in passes.items():
            totals[slot_id] = totals.get(slot_id, 0) + count
    missed = []
    for slot in model.ordered_slots:
        has_grown = slot.seed is not None or len(slot.fossils) > 0
        if has_grown and not totals[slot.slot_id]:
            model.site(slot.slot_id)  # a module that was replaced has a reason of its own
            missed.append(slot)
    if not missed:
        return
    by_chance: set[str] = set()
    for slot_ids in processes.gather(lambda: _find_skipped(model, missed)):
        by_chance |= slot_ids
    for slot in missed:
        if slot.slot_id in by_chance:
            continue
        module = model.slot_config.modules[slot.slot_id]
        raise HostError(
            f"slot {slot.slot_id} sits on {module!r}, which no training pass has run since the "
            f"last step: what grew there learns nothing, and the rest learns without it. "
            f"Gradient checkpointing that runs a container's children by themselves does "
            f"this, and so does use_reentrant=True on inputs without gradients. Let training "
            f"call {module!r}: checkpoint it as a whole, with use_reentrant=False."
        )


def _find_skipped(model: MorphogeneticModel, missed: Sequence[SeedSlot]) -> set[str]:
    """Of these slots, those that a pass in training mode does reach: chance has skipped them."""
    if model.sample is None:
        return set()
    host = model.host
    modes = [(module, module.training) for module in host.modules()]
    before = {slot.slot_id: slot.passes for slot in model.ordered_slots}
    try:
        host.train()
        for number in range(_TRIES):
            with torch.enable_grad(), own_randomness(number), buffers_kept(host):
                model.sample.run(host)
            if all(slot.passes for slot in missed):
                break
        return {slot.slot_id for slot in missed if slot.passes}
    except Exception:  # whatever a user's network does with the rows that it began with
        return set()
    finally:
        for slot in model.ordered_slots:
            slot.set_plain(passes=before[slot.slot_id])
        for module, mode in modes:
            module.training = mode


def begin_epoch(model: MorphogeneticModel) -> None:
    """Count what training runs from 0 again."""
    model.examples = dict.fromkeys(model.examples, 0)
    for slot in model.ordered_slots:
        slot.set_plain(passes=0)


def _count_passes(model: MorphogeneticModel) -> dict[str, int] | None:
    """Training passes of each slot; None where they cannot be counted, or there were none."""
    if not model.examples["training"] or any(map(_is_compiled, model.modules())):
        return None
    return {slot.slot_id: slot.passes for slot in model.ordered_slots}


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
