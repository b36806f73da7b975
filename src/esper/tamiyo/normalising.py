"""Running mean and variance of what a policy sees or earns.

They change in `update`, never while being used.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

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
