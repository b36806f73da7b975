"""Which examples a host sees, and in what order: its own endless stream of permutations, gathered on the device."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from esper.runtime.splits import Split, draw_offsets


def whole_steps(examples: int, batch: int) -> tuple[int, int]:
    """How many steps an epoch has, and how many examples each of them: at most `batch`, together at least `examples`.

    A last batch of what is left over may be tiny. Its gradient and its batch statistics are then mostly noise, and it
    comes right before the measurement. And steps of one size are one graph.
    """
    steps = -(-examples // batch)
    return steps, -(-examples // steps)


class ExampleStream:
    """Row numbers of one host, drawn from its own generator: whole permutations of the split, one after the other."""

    def __init__(self, count: int, seed: int):
        self.count = count
        self.generator = torch.Generator().manual_seed(seed)
        self.permutation = torch.empty(0, dtype=torch.long)
        self.position = 0

    def draw(self, count: int) -> Tensor:
        """The next `count` rows."""
        parts = []
        while count:
            if self.position == len(self.permutation):
                self.permutation = torch.randperm(self.count, generator=self.generator)
                self.position = 0
            part = self.permutation[self.position : self.position + count]
            parts.append(part)
            self.position += len(part)
            count -= len(part)
        return torch.cat(parts)

    def state(self) -> dict[str, Any]:
        return {
            "generator": self.generator.get_state(),
            "permutation": self.permutation.clone(),
            "position": self.position,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.permutation, self.position = state["permutation"].clone(), state["position"]


class EpochPlan:
    """One host's next epoch on its device: rows, augmentation offsets, and a cursor that a graph can advance."""

    def __init__(
        self, split: Split, stream: ExampleStream, steps: tuple[int, int], augment: bool, device: torch.device
    ):
        self.split, self.stream, self.augment = split, stream, augment
        self.steps, self.size = steps
        examples = self.examples
        self._drawn = torch.zeros((4 if augment else 1, examples), dtype=torch.long, pin_memory=device.type == "cuda")
        self._placed = self._drawn.to(device, copy=True)
        self.rows = self._placed[0]
        self.offsets = self._placed[1:] if augment else None
        self.cursor = torch.zeros((), dtype=torch.long, device=device)
        self._step = torch.arange(self.size, device=device)

    @property
    def examples(self) -> int:
        return self.steps * self.size

    def draw(self) -> None:
        """Rows and offsets of a new epoch; the last thing that leaves the host's generator for this epoch."""
        self._drawn[0, : self.examples] = self.stream.draw(self.examples)
        if self.offsets is not None:
            self._drawn[1:, : self.examples] = draw_offsets(self.examples, self.stream.generator)
        self._placed.copy_(self._drawn, non_blocking=True)
        self.cursor.zero_()

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """The next batch, found by the cursor on the device, so that a captured call goes on by itself."""
        drawn = self._placed[:, self.cursor + self._step]
        self.cursor += self.size
        return self.split.gather(drawn[0], drawn[1:] if self.augment else None)


class SharedBatchIterator:
    """One gather per step for many hosts on one device: yields inputs [N, B, ...] and targets [N, B, ...]."""

    def __init__(self, plans: Sequence[EpochPlan]):
        self.plans = plans

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        first = self.plans[0]
        for start in range(0, first.examples, first.size):
            end = start + first.size
            rows = torch.cat([plan.rows[start:end] for plan in self.plans])
            offsets = None
            if first.augment:
                offsets = torch.cat([plan.offsets[:, start:end] for plan in self.plans if plan.offsets is not None], 1)
            inputs, targets = first.split.gather(rows, offsets)
            hosts = len(self.plans)
            yield inputs.view(hosts, -1, *inputs.shape[1:]), targets.view(hosts, -1, *targets.shape[1:])
