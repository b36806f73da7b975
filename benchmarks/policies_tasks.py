"""The small tasks on which `policies.py` asks what credit by slot is worth.

An example is a list of pairs of numbers. Each branch of a host is linear and sees one pair, and a
slot sits on each branch. The label is the sign of the sum of the products of some pairs: no linear
map can tell the classes apart, and a seed can compute the product of its branch's pair. Seeds on
branches whose pair does not count help nobody. There may be as many seeds as pairs that count.

In `pairs_N` branch k sees pair k, so a policy can learn by heart where to plant. In `shuffled_N`
each host's own randomness decides which branch sees which pair: a policy has to plant, measure,
and keep or cull.
"""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from esper.runtime.splits import SealedSplit, Splits, TensorSplit, carve
from esper.runtime.tasks.registry import register_task
from esper.runtime.tasks.task import Task

EXAMPLES = 2400
COUNTING = {3: (1,), 8: (1, 4, 6)}
"""Pairs that count, by the number of pairs."""


class Branches(nn.Module):
    """Linear branches, each of one pair, a sum over them, and a linear head."""

    order: Tensor

    def __init__(self, pairs: int, shuffles: bool, width: int = 6):
        super().__init__()
        order = torch.randperm(pairs) if shuffles else torch.arange(pairs)
        self.register_buffer("order", order)
        self.branches = nn.ModuleList(nn.Linear(2, width) for _ in range(pairs))
        self.head = nn.Linear(width, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        pairs = inputs.unflatten(1, (-1, 2))[:, self.order].unbind(1)
        outputs = [branch(pair) for branch, pair in zip(self.branches, pairs, strict=True)]
        return self.head(torch.stack(outputs).sum(0))


def load_pairs(root: Path | None, pairs: int) -> Splits:
    """Points in a cube, with the sign of the summed products of the pairs that count."""
    draw = torch.Generator().manual_seed(0)
    points = torch.rand(EXAMPLES, 2 * pairs, generator=draw) * 2 - 1
    products = points.unflatten(1, (-1, 2)).prod(-1)
    labels = products[:, list(COUNTING[pairs])].sum(1) > 0
    whole = TensorSplit(points, labels.long())
    seen, test = carve(whole, share=0.25)
    train, validation = carve(seen, share=0.25)
    return Splits(train, validation, SealedSplit(test))


def pairs_task(pairs: int, shuffles: bool) -> Task:
    """A task with one slot for each pair."""
    counting = len(COUNTING[pairs])
    place = "differs by host" if shuffles else "is the same in all hosts"
    return Task(
        name=f"{'shuffled' if shuffles else 'pairs'}_{pairs}",
        summary=f"sign of a sum of products; where {counting} of {pairs} seeds can help {place}",
        source="generated",
        load=partial(load_pairs, pairs=pairs),
        build_host=partial(Branches, pairs, shuffles),
        chance=0.5,
        batch=32,
        epochs=16 if pairs == 3 else 24,
        epoch_examples=640 if pairs == 3 else 320,
        slots=tuple(f"branches.{number}" for number in range(pairs)),
        blueprints=("mlp",),
        budget=100.0,
        max_seeds=counting,
    )


TASKS = {
    task.name: register_task(task, replace=True)
    for task in (pairs_task(pairs, shuffles) for shuffles in (False, True) for pairs in COUNTING)
}
"""By name."""
