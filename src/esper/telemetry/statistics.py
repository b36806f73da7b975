"""How sure a mean is:

bootstrap intervals of means and of paired differences. Numbers in, numbers out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np

from esper.leyline.errors import SettingError

DRAWS, CONFIDENCE = 10_000, 0.95
FEWEST = 5  # Values below which no claim is made.


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval; one value alone has no interval."""

    mean: float
    low: float | None
    high: float | None
    count: int

    @property
    def verdict(self) -> str:
        """What may be claimed of a difference; an interval of very few values is too narrow to
        claim anything by.
        """
        if self.count < FEWEST or self.low is None or self.high is None:
            return f"fewer than {FEWEST} seeds"
        return "ahead" if self.low > 0 else "behind" if self.high < 0 else "unsupported"


def estimate_mean(values: Sequence[float], *, seed: int = 0) -> Estimate:
    """The mean and its 95 % interval, by the bootstrap with expanded percentiles."""
    sample = np.asarray(values, np.float64)
    if sample.ndim != 1 or not len(sample) or not np.isfinite(sample).all():
        raise SettingError(f"an estimate needs one or more finite numbers, got {list(values)}.")
    mean, count = float(sample.mean()), len(sample)
    if count < 2:
        return Estimate(mean, None, None, count)
    means = sample[np.random.default_rng(seed).integers(count, size=(DRAWS, count))].mean(1)
    # plain percentiles of resampled means are too narrow for ten or so values; they are taken as
    # much further out as Student's t lies outside the normal curve, which about keeps the promise
    # and never leaves the range of the data
    tail = NormalDist().cdf(
        -math.sqrt(count / (count - 1)) * student_quantile((1 + CONFIDENCE) / 2, count - 1)
    )
    low, high = np.quantile(means, [tail, 1 - tail])
    return Estimate(mean, float(low), float(high), count)


@cache
def student_quantile(share: float, freedom: int) -> float:
    """Where Student's t with this many degrees of freedom has `share` (above a half) of its weight
    below.
    """
    grid = np.linspace(0.0, math.pi / 2, 20_001)  # arc tangents map the tail to a finite interval
    heights = np.cos(grid) ** (freedom - 1)
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        beyond = heights[grid >= math.atan(middle / math.sqrt(freedom))].sum() / heights.sum() / 2
        low, high = (middle, high) if beyond > 1 - share else (low, middle)
    return (low + high) / 2


def compare_pairs(values: Sequence[float], others: Sequence[float], *, seed: int = 0) -> Estimate:
    """The mean of value minus other, pair by pair, with its interval."""
    if len(values) != len(others):
        raise SettingError(f"{len(values)} values cannot be paired with {len(others)}.")
    return estimate_mean(
        [value - other for value, other in zip(values, others, strict=True)], seed=seed
    )
