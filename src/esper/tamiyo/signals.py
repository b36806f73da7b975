"""What a policy remembers of one host's readings:

history, records, plateaus. Plain data; the encoding is elsewhere.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from pydantic import TypeAdapter

from esper.leyline.errors import SettingError
from esper.leyline.reports import SeedStateReport
from esper.leyline.slots import SlotConfig

HISTORY = 5  # Held-out readings that are kept.
_PROGRESS = 1e-3  # Part of the loss scale that counts as getting better.
_MEASURED = ("train_loss", "held_out_loss", "train_accuracy", "held_out_accuracy")


@dataclass(frozen=True, slots=True)
class EpochSignals:
    """One epoch of one host, as measured; None is not measured."""

    progress: float  # share of the host's episode that is over
    lr_share: float  # learning rate over its peak
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


class SignalTracker:
    """Follows one host:

    `update` once per epoch, `tracked` is what the observation reads; `loss_scale` is guessing.
    """

    def __init__(self, slots: SlotConfig, loss_scale: float):
        if not loss_scale > 0:
            raise SettingError(
                f"loss_scale must be above 0, got {loss_scale}; give the loss of random guessing."
            )
        self.slots, self.loss_scale = slots, loss_scale
        self.tracked: TrackedSignals | None = None
        self.reports: dict[str, SeedStateReport] = {}

    def update(
        self, signals: EpochSignals, reports: Mapping[str, SeedStateReport]
    ) -> TrackedSignals:
        """Take in one epoch; every enabled slot must be in the reports.

        NaN and Inf count as not measured.
        """
        if missing := [slot for slot in self.slots.slot_ids if slot not in reports]:
            raise SettingError(
                f"no report for slots {', '.join(missing)}; pass the reports of every enabled slot."
            )
        self.reports = {slot: reports[slot] for slot in self.slots.slot_ids}
        # what broke tells nothing: one NaN would stay in the best values for the rest of an episode
        broken: dict[str, Any] = {
            name: None for name in _MEASURED if not math.isfinite(getattr(signals, name) or 0.0)
        }
        signals = replace(signals, **broken)
        self.tracked = self._follow(self.tracked or TrackedSignals(signals), signals)
        return self.tracked

    def _follow(self, before: TrackedSignals, signals: EpochSignals) -> TrackedSignals:
        loss, accuracy = signals.held_out_loss, signals.held_out_accuracy
        after = replace(before, last=signals)
        if loss is not None:
            is_better = (
                before.best_loss is None or loss < before.best_loss - _PROGRESS * self.loss_scale
            )
            least = loss if before.best_loss is None else min(loss, before.best_loss)
            plateau = 0 if is_better else before.plateau_epochs + 1
            after = replace(
                after,
                losses=(*before.losses, loss)[-HISTORY:],
                best_loss=least,
                plateau_epochs=plateau,
            )
        if accuracy is not None:
            best = accuracy if before.best_accuracy is None else max(accuracy, before.best_accuracy)
            after = replace(
                after, accuracies=(*before.accuracies, accuracy)[-HISTORY:], best_accuracy=best
            )
        return after

    def state(self) -> dict[str, Any] | None:
        """What has been seen, ready for JSON; the reports come anew with the next epoch."""
        return None if self.tracked is None else asdict(self.tracked)

    def load(self, state: dict[str, Any] | None) -> Self:
        self.tracked = None if state is None else TypeAdapter(TrackedSignals).validate_python(state)
        return self
