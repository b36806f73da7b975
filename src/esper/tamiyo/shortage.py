"""Whether data are missing: the training loss falls, and the held-out loss does not follow."""

from collections.abc import Sequence
from statistics import fmean

from esper.tamiyo.signals import HISTORY, Signals, measure_trend

Losses = list[list[float]]
"""Training and held-out loss of the last epochs, oldest first; plain data, for a rule's memory."""

_BEGUN = 0.05
"""Before the held-out loss is below guessing by this part, nothing is learnt that holds."""
_NOTHING = 0.02
"""A training loss that is not below guessing by this part has learnt nothing at all."""
_FLAT = 0.005
"""A training loss that falls by less per epoch has stopped falling: a part of guessing, or of
itself. Where nothing is learnt, twice that: the noise of small batches is all there is."""


def add_losses(losses: Losses, signals: Signals) -> Losses:
    """The losses with those of one more epoch, if both are known; the last `HISTORY` of them."""
    if signals.train_loss is None or signals.held_out_loss is None:
        return losses
    return [*losses, [signals.train_loss, signals.held_out_loss]][-HISTORY:]


def lacks_data(losses: Losses, guessing: float | None, held_out_part: float) -> bool:
    """Whether these losses say that data are missing, or that it is too early to tell.

    They do if the held-out loss has fallen less than `held_out_part` as far as the training loss:
    below the loss of guessing, or per epoch where that is not known. A training loss that does not
    fall says nothing of the kind: the network is too small for its task, or was trained before. Nor
    do losses that are not known.
    """
    if not losses or not held_out_part:
        return False
    train = [pair[0] for pair in losses]
    held_out = [pair[1] for pair in losses]
    if _has_stopped_falling(train, guessing):
        return False
    if guessing is None:
        return _has_gap_that_grows(train, held_out, held_out_part)
    learnt = guessing - fmean(train)
    holds = guessing - fmean(held_out)
    return holds < max(_BEGUN * guessing, held_out_part * learnt)


def _has_stopped_falling(train: Sequence[float], guessing: float | None) -> bool:
    """Whether the training loss does not fall any more, or never began to."""
    # a loss of densities may be negative
    scale = abs(fmean(train)) if guessing is None else guessing
    if guessing is not None and len(train) > 1 and fmean(train) > (1 - _NOTHING) * guessing:
        return train[0] - train[-1] < 2 * _FLAT * scale * (len(train) - 1)
    slope = measure_trend(train).slope
    return slope is not None and -slope < _FLAT * scale


def _has_gap_that_grows(
    train: Sequence[float], held_out: Sequence[float], held_out_part: float
) -> bool:
    """Whether the held-out loss is the larger one, and falls too slowly beside the other."""
    train_slope = measure_trend(train).slope
    held_out_slope = measure_trend(held_out).slope
    if train_slope is None or held_out_slope is None:
        return False
    return fmean(held_out) > fmean(train) and held_out_slope > held_out_part * train_slope
