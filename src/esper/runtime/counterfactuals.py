"""Held-out evidence of one host: losses with and without each seed, sharing the prefix; and the greedy score."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import cast

import torch
from torch import Tensor

from esper.kasmina.evidence import score_sites
from esper.kasmina.hosts import SegmentedHost
from esper.kasmina.slot import SeedSlot
from esper.leyline.stages import SeedStage
from esper.runtime.host import HostRun
from esper.runtime.splits import Split

_CHUNK = 2048
SCORE_EXAMPLES = 32
"""Examples that the greedy score looks at, once per epoch."""


@contextmanager
def bypassed(slot: SeedSlot) -> Iterator[None]:
    """The network as if the live seed were not there. A change of structure, unlike `MorphogeneticModel.slot_off`:

    nothing of the seed is computed, and a captured graph holds no alpha of the day it was captured.
    """
    slot.is_in_output = False
    try:
        yield
    finally:
        slot.is_in_output = True


def incubated_slots(run: HostRun) -> list[SeedSlot]:
    """Slots whose seed trains in the shadow of the host."""
    return [slot for slot in run.slots if slot.state.stage is SeedStage.TRAINING]


def measured_slots(run: HostRun) -> list[SeedSlot]:
    """Slots whose live seed takes part in the output."""
    return [slot for slot in run.slots if slot.is_in_output and slot.state.alpha > 0]


def measure(run: HostRun, split: Split) -> Tensor:
    """[loss, accuracy, mean and standard error of each slot's gain ...], on the device, in float64.

    First the contributions of measured slots, then what incubated seeds would gain at full strength.
    """
    slots, incubated = measured_slots(run), incubated_slots(run)
    count = len(split)
    losses, correct = [], []
    was_training = run.model.training
    run.model.eval()
    with torch.no_grad():
        for rows in torch.arange(count, device=run.device).split(_CHUNK):
            inputs, targets = split.gather(rows)
            passes = chain(_passes(run, slots, inputs), _shadow_passes(run, incubated, inputs))
            scored = [run.task.score(outputs.float(), targets) for outputs in passes]
            losses.append(torch.stack([loss for loss, _ in scored]))
            correct.append(scored[0][1])
        together = torch.cat(losses, 1).double()  # [1 + slots, examples]
        result = torch.stack([together[0].mean(), torch.cat(correct).double().mean()])
        if slots or incubated:
            gains = together[1:] - together[:1]  # without the seed minus with it ...
            gains[len(slots) :] *= -1  # ... and for incubated seeds the other way round
            evidence = torch.stack([gains.mean(1), gains.std(1) / count**0.5], 1)
            result = torch.cat([result, evidence.flatten()])
    run.model.train(was_training)
    return result


def _passes(run: HostRun, slots: list[SeedSlot], inputs: Tensor) -> Iterator[Tensor]:
    """Outputs of the whole network, then without each slot's seed; features before the first of them are shared."""
    host = cast(SegmentedHost, run.model.host)
    with torch.autocast(run.device.type, run.amp or torch.bfloat16, enabled=run.amp is not None):
        if not (run.has_segments and slots):
            yield run.model(inputs)
            for slot in slots:
                with bypassed(slot):
                    yield run.model(inputs)
            return
        arrived: dict[str, Tensor] = {}
        features, before = inputs, None
        for slot in slots:
            features = host.forward_to_segment(slot.slot_id, features, before)
            arrived[slot.slot_id] = features
            before = slot.slot_id
        yield host.forward_from_segment(slots[-1].slot_id, features)
        for slot in slots:
            with bypassed(slot):
                yield host.forward_from_segment(slot.slot_id, arrived[slot.slot_id])


def _shadow_passes(run: HostRun, slots: list[SeedSlot], inputs: Tensor) -> Iterator[Tensor]:
    for slot in slots:
        with run.model.at_full_strength(slot.slot_id):
            yield run.model(inputs)


def greedy_scores(run: HostRun) -> Tensor:
    """The greedy score of each slot, [S].

    Read off the first training examples of the epoch just drawn, in evaluation mode: no buffer and no weight changes.
    """
    sites = [run.model.site(slot.slot_id) for slot in run.slots]
    was_training = run.model.training
    run.model.eval()
    try:
        size = min(SCORE_EXAMPLES, run.examples)
        offsets = None if run.plan.offsets is None else run.plan.offsets[:, :size]
        inputs, targets = run.splits.train.gather(run.plan.rows[:size], offsets)
        return score_sites(
            lambda: run.task.score(run.model(inputs).float(), targets)[0], sites, [slot.kind for slot in run.slots]
        )
    finally:
        run.model.train(was_training)
