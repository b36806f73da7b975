"""Late pruning of graphed hosts:

as of eager ones to the bit, and no graph of the larger network afterwards.
"""

from dataclasses import replace

import pytest
import torch

from cuda.test_executors import GROWTH, PHOTOS, _deterministic, build  # noqa: F401
from esper.runtime.executors.structure import good_state_key
from runtime.episodes import differing, play, print_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TASK = replace(PHOTOS, epochs=10)
DUE = next(epoch for epoch in range(TASK.epochs + 1) if TASK.is_rate_low(epoch))


@torch.no_grad()
def spoil(fossil):
    fossil.scale.copy_(torch.linspace(-30, 30, fossil.scale.numel()).view_as(fossil.scale))


def pruned(executor):
    """A host that grew, lost its harmful fossil and trained on; with what it was told."""
    population = build(TASK, [7], executor)
    play(population, DUE - 1, {0: GROWTH})
    population.train_epoch()
    population.evaluate()
    spoil(population.runs[0].slots[0].fossils[0])
    before = good_state_key(population.runs[0])
    verdicts = population.prune(0)
    assert not all(verdict.is_kept for verdict in verdicts)
    assert good_state_key(population.runs[0]) != before
    population.tick()
    play(population, TASK.epochs - DUE, start=DUE)
    return population, verdicts


def test_graphed_equals_eager_after_pruning_to_the_bit():
    (graphed, told), (eager, expected) = pruned("graphed"), pruned("eager")
    assert told == expected
    assert differing(print_of(graphed), print_of(eager)) == []
