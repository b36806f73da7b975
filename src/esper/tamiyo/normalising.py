"""Running mean and variance of what a policy sees or earns.

They change in `update`, never while being used.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from esper.tamiyo.layout import AnyLayout, RowLayout, Seen

Pool = Callable[[Tensor], Tensor]
"""Adds up what all processes have."""


class RunningMeanStd(nn.Module):
    """Mean and variance over all rows seen so far, in float64.

    They travel with the network's weights.
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, width: int = 1):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float64))
        self.register_buffer("var", torch.ones(width, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @property
    def std(self) -> Tensor:
        """The standard deviation, never zero."""
        return (self.var + 1e-8).sqrt()

    @torch.no_grad()
    def update(self, rows: Tensor, pool: Pool = lambda values: values) -> None:
        """Take in [R, width] rows, and with `pool` those of all processes.

        Without rows nothing changes.
        """
        rows = rows.double()
        count = pool(torch.as_tensor(float(len(rows)), device=rows.device)).to(self.count)
        if not bool(count > 0):
            return  # statistics of no rows are not numbers
        mean = pool(rows.sum(0)) / count
        var = pool((rows - mean).square().sum(0)) / count
        total = self.count + count
        shift = mean - self.mean
        moment = self.var * self.count + var * count
        moment = moment + shift.square() * self.count * count / total
        self.mean.add_(shift * count / total)
        self.var.copy_(moment / total)
        self.count.copy_(total)

    def normalise(self, values: Tensor, limit: float = 10.0) -> Tensor:
        """Values as numbers of standard deviations from the mean, at most `limit` of them."""
        mean = self.mean.to(values.dtype)
        std = self.std.to(values.dtype)
        return ((values - mean) / std).clamp(-limit, limit)


class TokenMeanStd(RunningMeanStd):
    """Mean and variance of each number of a host, a slot, a blueprint and a pair.

    All slots share theirs, and so do all blueprints and pairs. Only numbers that are there count,
    and what is absent stays 0. `count` is how many observations were taken in, `counts` how often
    each number was there.
    """

    counts: Tensor
    layout: AnyLayout
    LEAST = 0.1
    """least deviation: numbers are about one, and what hardly varied here may vary elsewhere"""
    MOST = 5.0
    """no number is further from zero"""

    def __init__(self, layout: AnyLayout):
        rows = (layout.base, layout.slot, layout.blueprint, layout.pair)
        sizes = [len(row.numbers) for row in rows]
        super().__init__(sum(sizes))
        self.layout = layout
        self.sizes = sizes
        self.register_buffer("counts", torch.zeros(sum(self.sizes), dtype=torch.float64))

    @torch.no_grad()
    def update(self, rows: Tensor, pool: Pool = lambda values: values) -> None:
        """Take in observations [R, width], and with `pool` those of all processes."""
        seen = self.layout.split(rows.double())
        present = [row.presence(values) for row, values in self._rows(seen)]
        counts = pool(_sums(present)).to(self.counts)
        here = torch.as_tensor(float(len(rows)), device=rows.device)
        self.count.add_(pool(here).to(self.count))
        numbers = [values[..., : len(row.numbers)] for row, values in self._rows(seen)]
        divisor = counts.clamp(min=1)
        mean = pool(_sums([a * b for a, b in zip(numbers, present, strict=True)])) / divisor
        squares = []
        for values, there, middle in zip(numbers, present, mean.split(self.sizes), strict=True):
            squares.append((values - middle).square() * there)
        var = pool(_sums(squares)) / divisor
        total = (self.counts + counts).clamp(min=1)
        shift = mean - self.mean
        moment = self.var * self.counts + var * counts
        moment = moment + shift.square() * self.counts * counts / total
        is_new = counts > 0
        self.mean.copy_(torch.where(is_new, self.mean + shift * counts / total, self.mean))
        self.var.copy_(torch.where(is_new, moment / total, self.var))
        self.counts.add_(counts)

    def normalised(self, states: Tensor) -> Seen:
        """Observations [..., width] in their parts, with numbers in deviations from their mean."""
        statistics, presence, is_number = _indices(self.layout, states.device)
        mean = self.mean.to(states.dtype)[statistics]
        std = self.std.clamp(min=self.LEAST).to(states.dtype)[statistics]
        numbers = ((states - mean) / std).clamp(-self.MOST, self.MOST)
        if presence is not None:
            numbers = torch.where(is_number, numbers * states[..., presence], states)
        return self.layout.split(numbers)

    def _rows(self, seen: Seen) -> list[tuple[RowLayout, Tensor]]:
        layout = self.layout
        rows = (layout.base, layout.slot, layout.blueprint, layout.pair)
        return list(zip(rows, seen, strict=True))


@cache
@torch.inference_mode(mode=False)
def _indices(layout: AnyLayout, device: torch.device) -> tuple[Tensor, Tensor | None, Tensor]:
    """For each number its statistics and the number that says whether it is there, if any does.

    The last one says which are numbers at all.
    """
    statistics = torch.tensor(layout.columns.statistics, device=device)
    presence = torch.tensor(layout.columns.presence, device=device)
    has_presence = bool(layout.columns.presence)
    return statistics.clamp(min=0), presence if has_presence else None, statistics >= 0


def _sums(parts: list[Tensor]) -> Tensor:
    """The sum of each column of several tables, one after the other."""
    return torch.cat([part.flatten(0, -2).sum(0) for part in parts])
