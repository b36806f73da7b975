"""Learning-rate plans: the rate at each point of an episode, and when it is low.

Pure functions of numbers; what writes a rate into an optimiser is elsewhere.
"""

import math

LOW_RATE = 0.1
"""From this share of the peak down a new seed learns little, and losses show a fossil's worth."""

_ROUNDING = 1e-6  # 3e-5 is a tenth of 3e-4, whatever floating point says


def constant_then_cosine(peak: float, share: float, constant_share: float) -> float:
    """The rate after `share` (0 to 1) of an episode: `peak`, then half a cosine down to 0.

    It is constant up to `constant_share` of the episode.

    >>> constant_then_cosine(0.2, share=0.25, constant_share=0.5)
    0.2
    >>> round(constant_then_cosine(0.2, share=0.75, constant_share=0.5), 6)
    0.1
    """
    if share <= constant_share:
        return peak
    fallen = min(1.0, (share - constant_share) / (1.0 - constant_share))
    return peak * 0.5 * (1.0 + math.cos(math.pi * fallen))


def warmup_constant_decay(peak: float, share: float, warmup: float, decay: float) -> float:
    """The rate after `share` (0 to 1) of an episode: up to `peak`, constant, down to 0.

    `warmup` and `decay` are the shares of the episode in which it rises and falls, in a straight
    line.

    >>> [warmup_constant_decay(0.2, share, 0.25, 0.25) for share in (0.0, 0.125, 0.5, 1.0)]
    [0.0, 0.1, 0.2, 0.0]
    """
    rising = share / warmup
    falling = (1.0 - share) / decay
    return peak * max(0.0, min(1.0, rising, falling))


def is_low(rate: float, peak: float) -> bool:
    """Whether a rate is at most `LOW_RATE` of its peak."""
    return rate <= LOW_RATE * peak * (1 + _ROUNDING)
