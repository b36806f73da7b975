"""A host's readings: what rules are given, and what a policy remembers of them.

Plain data; the encoding is in `observation`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Self

from pydantic import TypeAdapter

from esper.leyline.errors import SettingError
from esper.leyline.reports import SeedStateReport
from esper.leyline.slots import SlotConfig

HISTORY = 5
"""Held-out readings that are kept."""

# Part of the loss scale that counts as getting better.
_PROGRESS = 1e-3
_MEASURED = ("train_loss", "held_out_loss", "train_accuracy", "held_out_accuracy")


@dataclass(frozen=True, slots=True)
class Signals:
    """What rules and policies read of one network after an epoch; None is not known.

    In a garden `guessing` is not known, `train_loss` only if you pass it to `garden.step`, `share`
    only with `GrowthSettings(epochs=...)`. Where `evaluate` returns scores, no held-out loss is
    known, and so no slope.

    >>> import esper
    >>> def is_stuck(signals: esper.Signals):
    ...     if signals.slope is None or signals.error is None:
    ...         return False
    ...     return signals.slope > -2 * signals.error
    >>> is_stuck(esper.Signals(held_out_loss=0.4, slope=-0.1, error=0.02))
    False
    >>> is_stuck(esper.Signals(held_out_loss=0.4))
    False
    """

    held_out_loss: float | None = None
    slope: float | None = None
    """how much the held-out loss changes per epoch, by a straight line through its last readings
    (at most 5, at least 3)"""
    error: float | None = None
    """standard error of `slope`: how much the readings scatter about that line"""
    train_loss: float | None = None
    """mean over the epoch, in which the network changed"""
    share: float | None = None
    """share of the episode that is over, from 0 to 1"""
    rate: float | None = None
    """learning rate over its peak"""
    guessing: float | None = None
    """loss of guessing all classes alike"""


class Trend(NamedTuple):
    """Slope of a line through losses, per epoch, and its standard error."""

    slope: float | None
    error: float | None


def measure_trend(losses: Sequence[float]) -> Trend:
    """The straight line through losses of consecutive epochs, the last `HISTORY` of them.

    Two losses always lie on a line, and say nothing about its error: fewer than three have none.

    >>> trend = measure_trend([3.0, 2.0, 1.0])
    >>> round(trend.slope, 6), round(trend.error, 6)
    (-1.0, 0.0)
    >>> measure_trend([3.0, 2.0])
    Trend(slope=None, error=None)
    """
    recent = losses[-HISTORY:]
    count = len(recent)
    if count < 3:
        return Trend(None, None)
    middle = (count - 1) / 2
    mean = sum(recent) / count
    spread = sum((epoch - middle) ** 2 for epoch in range(count))
    slope = sum((epoch - middle) * loss for epoch, loss in enumerate(recent)) / spread
    squares = 0.0
    for epoch, loss in enumerate(recent):
        squares += (loss - mean - slope * (epoch - middle)) ** 2
    return Trend(slope, math.sqrt(squares / (count - 2) / spread))


@dataclass(frozen=True, slots=True)
class EpochSignals:
    """One epoch of one host, as measured; None is not measured."""

    progress: float | None  # share of the host's episode that is over
    lr_share: float | None  # learning rate over its peak
    train_loss: float | None
    held_out_loss: float | None
    train_accuracy: float | None
    held_out_accuracy: float | None
    params_share: float  # parameters used, of the budget
    seeds_share: float  # seeds used, of max_seeds


@dataclass(frozen=True, slots=True)
class TrackedSignals:
    """The last epoch and what came before it."""

    last: EpochSignals
    losses: tuple[float, ...] = ()  # held-out losses, oldest first, at most HISTORY
    accuracies: tuple[float, ...] = ()
    best_loss: float | None = None
    best_accuracy: float | None = None
    plateau_epochs: int = 0  # epochs since the held-out loss last got better
    epochs: int = 0
    train_losses: tuple[float, ...] = ()
    first_loss: float | None = None  # the first held-out loss that was measured
    first_accuracy: float | None = None
    since_best: int = 0  # epochs since the lowest held-out loss


def follow(
    before: TrackedSignals | None, signals: EpochSignals, least_progress: float = 0.0
) -> TrackedSignals:
    """History and records after one more epoch; None is before the first.

    NaN and Inf count as not measured. A held-out loss that falls by less than `least_progress`
    does not end a plateau.
    """
    # what broke says nothing: one NaN would stay in the best values for the rest of an episode
    broken = [name for name in _MEASURED if not math.isfinite(getattr(signals, name) or 0.0)]
    unmeasured: dict[str, Any] = dict.fromkeys(broken)
    signals = replace(signals, **unmeasured)
    before = before or TrackedSignals(signals)
    after = replace(before, last=signals, epochs=before.epochs + 1)
    if signals.train_loss is not None:
        losses = (*before.train_losses, signals.train_loss)
        after = replace(after, train_losses=losses[-HISTORY:])
    loss = signals.held_out_loss
    if loss is not None:
        best_loss = math.inf if before.best_loss is None else before.best_loss
        is_better = loss < best_loss - least_progress
        after = replace(
            after,
            losses=(*before.losses, loss)[-HISTORY:],
            first_loss=loss if before.first_loss is None else before.first_loss,
            best_loss=min(loss, best_loss),
            plateau_epochs=0 if is_better else before.plateau_epochs + 1,
            since_best=0 if loss < best_loss else before.since_best + 1,
        )
    accuracy = signals.held_out_accuracy
    if accuracy is not None:
        best_accuracy = -math.inf if before.best_accuracy is None else before.best_accuracy
        first_accuracy = before.first_accuracy
        after = replace(
            after,
            accuracies=(*before.accuracies, accuracy)[-HISTORY:],
            first_accuracy=accuracy if first_accuracy is None else first_accuracy,
            best_accuracy=max(accuracy, best_accuracy),
        )
    return after


class SignalTracker:
    """Follows one host: `update` once per epoch, and read `tracked`.

    `loss_scale` is the loss of random guessing.
    """

    def __init__(self, slots: SlotConfig, loss_scale: float):
        if not loss_scale > 0:
            raise SettingError(
                f"loss_scale must be above 0, got {loss_scale}; give the loss of random guessing."
            )
        self.slots = slots
        self.loss_scale = loss_scale
        self.tracked: TrackedSignals | None = None
        self.reports: dict[str, SeedStateReport] = {}

    def update(
        self, signals: EpochSignals, reports: Mapping[str, SeedStateReport]
    ) -> TrackedSignals:
        """Take in one epoch; every enabled slot must be in the reports.

        NaN and Inf count as not measured.
        """
        missing = [slot for slot in self.slots.slot_ids if slot not in reports]
        if missing:
            raise SettingError(
                f"no report for slots {', '.join(missing)}; pass the reports of every enabled slot."
            )
        self.reports = {slot: reports[slot] for slot in self.slots.slot_ids}
        self.tracked = follow(self.tracked, signals, _PROGRESS * self.loss_scale)
        return self.tracked

    @property
    def signals(self) -> Signals:
        """What rules are given of the last epoch; nothing is known before the first."""
        if self.tracked is None:
            return Signals()
        last = self.tracked.last
        trend = measure_trend(self.tracked.losses)
        return Signals(
            held_out_loss=last.held_out_loss,
            slope=trend.slope,
            error=trend.error,
            train_loss=last.train_loss,
            share=last.progress,
            rate=last.lr_share,
            guessing=self.loss_scale,
        )

    def state(self) -> dict[str, Any] | None:
        """What has been seen, ready for JSON; the next epoch brings new reports."""
        return None if self.tracked is None else asdict(self.tracked)

    def load(self, state: dict[str, Any] | None) -> Self:
        """Continue with what `state` had seen."""
        self.tracked = None if state is None else TypeAdapter(TrackedSignals).validate_python(state)
        return self
