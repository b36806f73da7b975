"""Which examples a host sees, and in what order:

its own endless stream of permutations, gathered on the device.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from esper.runtime.splits import Split, draw_offsets


def whole_steps(examples: int, batch: int) -> tuple[int, int]:
    """How many steps an epoch has, and how many examples each:

    at most `batch`, together at least `examples`.
    """
    # a tiny last batch would be mostly noise, right before the measurement; and steps of one size
    # are one graph
    steps = -(-examples // batch)
    return steps, -(-examples // steps)


class ExampleStream:
    """Row numbers of one host, drawn from its own generator:

    whole permutations of the split, one after the other.
    """

    def __init__(self, count: int, seed: int):
        self.count = count
        self.generator = torch.Generator().manual_seed(seed)
        self.permutation = torch.empty(0, dtype=torch.long)
        self.position = 0

    def draw(self, count: int, out: Tensor | None = None) -> Tensor:
        """The next `count` rows."""
        out, done = torch.empty(count, dtype=torch.long) if out is None else out, 0
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
        """A permutation is replaced and never written into, so that it needs no copy."""
        return {
            "generator": self.generator.get_state(),
            "permutation": self.permutation,
            "position": self.position,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.permutation, self.position = state["permutation"], state["position"]


class EpochPlan:
    """One host's next epoch on its device: rows, augmentation offsets, and a cursor that a graph
    can advance.

    `steps` are the most that an epoch may have, and the examples of each; `self.steps` are those of
    the next one.
    """

    def __init__(
        self,
        split: Split,
        stream: ExampleStream,
        steps: tuple[int, int],
        augment: bool,
        device: torch.device,
    ):
        self.split, self.stream = split, stream
        self.most, self.size = steps
        self.steps = self.most
        shape = 4 if augment else 1, self.examples
        self._drawn = torch.zeros(shape, dtype=torch.long, pin_memory=device.type == "cuda")
        self.placed = self._drawn.to(device, copy=True)  # rows, then offsets where there are any
        self.rows = self.placed[0]
        self.cursor = torch.zeros((), dtype=torch.long, device=device)
        self._step = torch.arange(self.size, device=device)

    @property
    def examples(self) -> int:
        return self.steps * self.size

    def draw(self) -> None:
        """Rows and offsets of a new epoch, the last things that leave the generator for it; the
        cursor stays.
        """
        count = self.examples
        self.stream.draw(count, self._drawn[0, :count])
        if len(self._drawn) > 1:
            draw_offsets(count, self.stream.generator, self._drawn[1:, :count])
        if (
            0 < count < self._drawn.shape[1]
        ):  # greedy scores look at 32 examples, however few are learnt from
            self._drawn[:, count:] = self._drawn[
                :, torch.arange(count, self._drawn.shape[1]) % count
            ]
        self.placed.copy_(self._drawn, non_blocking=True)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """The next batch, found by the cursor on the device, so that a captured call goes on by
        itself.
        """
        drawn = self.placed[:, self.cursor + self._step]
        self.cursor += self.size
        return self.split.gather(drawn[0], drawn[1:])


def shared_batches(plans: Sequence[EpochPlan]) -> Iterator[tuple[Tensor, Tensor]]:
    """One gather per step for many hosts on one device:

    yields inputs [N, B, ...] and targets [N, B, ...].
    """
    first = plans[0]
    for start in range(0, max(plan.examples for plan in plans), first.size):
        # a host whose epoch has fewer steps than others' is left out of the later ones
        parts = [
            plan.placed[:, start : start + first.size] for plan in plans if start < plan.examples
        ]
        drawn = torch.cat(parts, 1)
        inputs, targets = first.split.gather(drawn[0], drawn[1:])
        yield inputs.unflatten(0, (len(parts), -1)), targets.unflatten(0, (len(parts), -1))
