"""How sure a mean is: bootstrap intervals of means and of paired differences.

Numbers in, numbers out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np

from esper.leyline.errors import SettingError

DRAWS = 10_000
"""Resampled means of which percentiles are taken."""

CONFIDENCE = 0.95
"""Part of the intervals that hold the truth."""

FEWEST = 5
"""Values below which no claim is made."""


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval; one value alone has no interval."""

    mean: float
    low: float | None
    high: float | None
    count: int

    @property
    def verdict(self) -> str:
        """What may be claimed of a difference.

        An interval of very few values is too narrow to claim anything by.
        """
        if self.count < FEWEST or self.low is None or self.high is None:
            return f"fewer than {FEWEST} seeds"
        if self.low > 0:
            return "ahead"
        return "behind" if self.high < 0 else "unsupported"


def estimate_mean(values: Sequence[float], *, seed: int = 0) -> Estimate:
    """The mean and its 95 % interval, by the bootstrap with expanded percentiles."""
    sample = np.asarray(values, np.float64)
    if sample.ndim != 1 or not len(sample) or not np.isfinite(sample).all():
        raise SettingError(f"an estimate needs one or more finite numbers, got {list(values)}.")
    mean = float(sample.mean())
    count = len(sample)
    if count < 2:
        return Estimate(mean=mean, low=None, high=None, count=count)
    draws = np.random.default_rng(seed).integers(count, size=(DRAWS, count))
    means = sample[draws].mean(1)
    # plain percentiles of resampled means are too narrow for ten or so values; they are taken as
    # much further out as Student's t lies outside the normal curve, which about keeps the promise
    # and never leaves the range of the data
    quantile = student_quantile((1 + CONFIDENCE) / 2, count - 1)
    tail = NormalDist().cdf(-math.sqrt(count / (count - 1)) * quantile)
    low, high = np.quantile(means, [tail, 1 - tail])
    return Estimate(mean=mean, low=float(low), high=float(high), count=count)


@cache
def student_quantile(share: float, freedom: int) -> float:
    """Below this value lies `share`, above a half, of the weight of Student's t.

    `freedom` is its number of degrees of freedom.
    """
    grid = np.linspace(0.0, math.pi / 2, 20_001)  # arc tangents map the tail to a finite interval
    heights = np.cos(grid) ** (freedom - 1)
    low = 0.0
    high = 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        is_beyond = grid >= math.atan(middle / math.sqrt(freedom))
        weight_beyond = heights[is_beyond].sum() / heights.sum() / 2
        if weight_beyond > 1 - share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def compare_pairs(values: Sequence[float], others: Sequence[float], *, seed: int = 0) -> Estimate:
    """The mean of value minus other, pair by pair, with its interval."""
    if len(values) != len(others):
        raise SettingError(f"{len(values)} values cannot be paired with {len(others)}.")
    differences = [value - other for value, other in zip(values, others, strict=True)]
    return estimate_mean(differences, seed=seed)
