"""Which examples a host sees, and in what order.

Every host has its own endless stream of permutations, gathered on the device.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper.runtime.splits import Split, draw_offsets


class Steps(NamedTuple):
    """The steps of an epoch: how many, and how many examples each has."""

    number: int
    size: int


def whole_steps(examples: int, batch: int) -> Steps:
    """Return steps of one size, each of at most `batch`, together of at least `examples`."""
    # a tiny last batch would be mostly noise, right before the measurement; and steps of one size
    # are one graph
    number = -(-examples // batch)
    return Steps(number=number, size=-(-examples // number))


class ExampleStream:
    """Row numbers of one host: whole permutations of its split, one after the other.

    They are drawn from the host's own generator.
    """

    def __init__(self, count: int, seed: int):
        self.count = count
        self.generator = torch.Generator().manual_seed(seed)
        self.permutation = torch.empty(0, dtype=torch.long)
        self.position = 0

    def draw(self, count: int, out: Tensor | None = None) -> Tensor:
        """Return the next `count` rows, in `out` if it is there."""
        if out is None:
            out = torch.empty(count, dtype=torch.long)
        done = 0
        while done < count:
            if self.position == len(self.permutation):
                self.permutation = torch.randperm(self.count, generator=self.generator)
                self.position = 0
            taken = min(count - done, len(self.permutation) - self.position)
            out[done : done + taken] = self.permutation[self.position : self.position + taken]
            self.position += taken
            done += taken
        return out

    def state(self) -> dict[str, Any]:
        """Return what `load` goes back to."""
        return {
            "generator": self.generator.get_state(),
            # replaced and never written into, so that it needs no copy
            "permutation": self.permutation,
            "position": self.position,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from where `state` was taken."""
        self.generator.set_state(state["generator"])
        self.permutation = state["permutation"]
        self.position = state["position"]


class EpochPlan:
    """One host's next epoch on its device: rows, offsets of augmentation, and a cursor.

    A graph can advance the cursor. `steps` has the most steps that an epoch may have; `self.steps`
    is how many the next one has.
    """

    def __init__(
        self,
        split: Split,
        stream: ExampleStream,
        steps: Steps,
        augment: bool,
        device: torch.device,
    ):
        self.split = split
        self.stream = stream
        self.most = steps.number
        self.size = steps.size
        self.steps = self.most
        shape = (4 if augment else 1, self.examples)
        self._drawn = torch.zeros(shape, dtype=torch.long, pin_memory=device.type == "cuda")
        self.placed = self._drawn.to(device, copy=True)  # rows, then offsets where there are any
        self.rows = self.placed[0]
        self.cursor = torch.zeros((), dtype=torch.long, device=device)
        self._step = torch.arange(self.size, device=device)

    @property
    def examples(self) -> int:
        """Examples of the next epoch."""
        return self.steps * self.size

    def draw(self) -> None:
        """Draw rows and offsets of a new epoch; the cursor stays.

        They are the last that leave the generator for this epoch.
        """
        count = self.examples
        most = self._drawn.shape[1]
        self.stream.draw(count, self._drawn[0, :count])
        if len(self._drawn) > 1:
            draw_offsets(count, self.stream.generator, self._drawn[1:, :count])
        if 0 < count < most:
            # greedy scores look at 32 examples, however few are learnt from
            repeated = torch.arange(count, most) % count
            self._drawn[:, count:] = self._drawn[:, repeated]
        self.placed.copy_(self._drawn, non_blocking=True)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Return the next batch of inputs and targets.

        The cursor on the device finds it, so that a captured call continues by itself.
        """
        drawn = self.placed[:, self.cursor + self._step]
        self.cursor += self.size
        return self.split.gather(drawn[0], drawn[1:])


def shared_batches(plans: Sequence[EpochPlan]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of many hosts on one device, with one gather per step.

    Each is inputs [N, B, ...] and targets [N, B, ...] of the N hosts that still have a step.
    """
    first = plans[0]
    most = max(plan.examples for plan in plans)
    for start in range(0, most, first.size):
        # a host whose epoch has fewer steps than others' is left out of the later ones
        training = [plan for plan in plans if start < plan.examples]
        parts = [plan.placed[:, start : start + first.size] for plan in training]
        drawn = torch.cat(parts, 1)  # [1 or 4, N * B]
        inputs, targets = first.split.gather(drawn[0], drawn[1:])
        shape = (len(training), -1)
        yield inputs.unflatten(0, shape), targets.unflatten(0, shape)
