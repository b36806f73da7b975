"""Held-out evidence of one host: losses with and without each seed, and the greedy score."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from esper.kasmina.evidence import score_sites
from esper.kasmina.hosts import SegmentedHost
from esper.kasmina.probing import evaluated
from esper.kasmina.slot import SeedSlot
from esper.kasmina.switches import bypassed
from esper.leyline.stages import SeedStage
from esper.runtime.host import HostRun
from esper.runtime.splits import Split

_CHUNK = 2048
SCORE_EXAMPLES = 32  # Examples that the greedy score looks at, once per epoch.


def incubated_slots(run: HostRun) -> list[SeedSlot]:
    """Return the slots whose seed trains in the shadow of the host."""
    return [slot for slot in run.slots if slot.state.stage is SeedStage.TRAINING]


def measured_slots(run: HostRun) -> list[SeedSlot]:
    """Return the slots whose seed is on probation.

    What a seed contributes on its ramp says nothing about the end.
    """
    return [slot for slot in run.slots if slot.state.stage is SeedStage.PROBATIONARY]


def measure(run: HostRun, split: Split, ablated: Sequence[SeedSlot] | None = None) -> Tensor:
    """Measure a host on a split: [2] or [2 + 2 * S], in float64.

    The first two are loss and accuracy. If slots are incubated or `ablated`, each slot's gain and
    its error follow; they are 0 for other slots.
    """
    slots = measured_slots(run) if ablated is None else [*ablated]
    incubated = incubated_slots(run)
    scored = _score_passes(run, split, slots, incubated)  # [passes, 2, examples]
    losses = scored[:, 0]  # [passes, examples]
    result = torch.stack([row.mean() for row in scored[0]])  # [2]
    if slots or incubated:
        gains = losses[1:] - losses[:1]  # without the seed minus with it ...
        gains[len(slots) :] *= -1  # ... and for incubated seeds the other way round
        # one by one: torch adds a row in another order where others stand beside it, and graphs
        # have more of them
        pairs = [torch.stack([gain.mean(), gain.std() / len(split) ** 0.5]) for gain in gains]
        pair_of = dict(zip(slots + incubated, pairs, strict=True))
        rows = [pair_of.get(slot, torch.zeros_like(result)) for slot in run.slots]
        result = torch.cat([result, *rows])
    return result


def score_examples(run: HostRun, split: Split) -> Tensor:
    """Return loss and correctness of every example, [2, examples], of the network as it is.

    What is switched off stays so.
    """
    return _score_passes(run, split, [], [])[0]


def _score_passes(
    run: HostRun, split: Split, slots: list[SeedSlot], incubated: list[SeedSlot]
) -> Tensor:
    """Loss and correctness of every example in each of `_passes`: [passes, 2, examples]."""
    parts = []
    with torch.no_grad(), evaluated(run.model):
        for rows in torch.arange(len(split), device=run.device).split(_CHUNK):
            inputs, targets = split.gather(rows)
            outputs = _passes(run, slots, incubated, inputs)
            scores = [torch.stack(run.task.score(output.float(), targets)) for output in outputs]
            parts.append(torch.stack(scores))  # [passes, 2, rows]
    return torch.cat(parts, -1).double()


def _passes(
    run: HostRun, slots: list[SeedSlot], incubated: list[SeedSlot], inputs: Tensor
) -> Iterator[Tensor]:
    """Outputs of the whole network, then without each slot's seed, then of the shadows.

    Passes without a seed share what comes before it.
    """
    host = cast(SegmentedHost, run.model.host)
    whole: Callable[[], Tensor] = partial(run.model, inputs)
    passes = dict.fromkeys(slots, whole)
    with run.autocast():
        features = inputs
        before = None
        for slot in slots if run.has_segments else ():
            features = host.forward_to_segment(slot.slot_id, features, before)
            before = slot.slot_id
            whole = partial(host.forward_from_segment, before, features)
            passes[slot] = whole
        yield whole()
        for slot, run_pass in passes.items():
            with bypassed(slot):
                yield run_pass()
        for slot in incubated:
            with run.model.at_full_strength(slot.slot_id):
                yield run.model(inputs)


def greedy_scores(run: HostRun) -> Tensor:
    """Return the greedy score of each slot, [S].

    It is measured on the first examples of the epoch just drawn. The host does not change.
    """
    sites = [run.model.site(slot.slot_id) for slot in run.slots]
    drawn = run.plan.placed[:, :SCORE_EXAMPLES]
    inputs, targets = run.splits.train.gather(drawn[0], drawn[1:])

    def losses() -> Tensor:
        with run.autocast():
            outputs = run.model(inputs)
        return run.task.score(outputs.float(), targets)[0]

    with evaluated(run.model):
        return score_sites(losses, sites, [slot.kind for slot in run.slots])
