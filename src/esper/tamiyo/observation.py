"""What the policy network sees:

named features, scaled to about one. The lists are the layout and its only size.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from esper.kasmina.blueprints import REGISTRY, BlueprintTraits
from esper.leyline.errors import SettingError
from esper.leyline.reports import SeedStateReport
from esper.leyline.slots import SlotConfig
from esper.leyline.stages import SeedStage
from esper.tamiyo.policies import Reports
from esper.tamiyo.signals import HISTORY, SignalTracker, TrackedSignals

UNKNOWN = -1.0  # Stands for "not measured" in features that are otherwise never negative.
LARGEST = 5.0  # No feature is further from zero.
_LONG, _STEEP, _DEEP = 20.0, 10.0, 3.0
"""Epochs that count as long, a high greedy score of a few dozen channels, layers of the deepest
built-in blueprint.
"""

_LIFE = (
    SeedStage.GERMINATED,
    SeedStage.TRAINING,
    SeedStage.BLENDING,
    SeedStage.PROBATIONARY,
    SeedStage.FOSSILIZED,
)

Base = Callable[[TrackedSignals, float], float]  # (signals, loss scale) -> feature
Slot = Callable[[SeedStateReport, float], float]


def _is_known(value: float | None) -> TypeGuard[float]:
    return value is not None and not math.isnan(value)


def _loss(value: float | None, scale: float) -> float:
    """A loss in units of guessing; far beyond it, it no longer matters how far."""
    return min(value / scale, 3.0) if _is_known(value) else UNKNOWN


def _change(value: float | None, scale: float) -> float:
    """A signed change, a tenth of the scale being one; none known is none."""
    return math.tanh(10 * value / scale) if _is_known(value) else 0.0


def _last_change(values: Sequence[float]) -> float | None:
    return values[-1] - values[-2] if len(values) > 1 else None


def _share(value: float | None) -> float:
    return min(value, 1.5) if _is_known(value) else UNKNOWN


def _past(values: Sequence[float], ago: int) -> float | None:
    return values[-1 - ago] if ago < len(values) else None


BASE_FEATURES: dict[str, Base] = {
    "progress": lambda s, _: s.last.progress,
    "lr_share": lambda s, _: s.last.lr_share,
    "train_loss": lambda s, scale: _loss(s.last.train_loss, scale),
    "held_out_loss": lambda s, scale: _loss(s.last.held_out_loss, scale),
    "held_out_loss_change": lambda s, scale: _change(_last_change(s.losses), scale),
    "train_accuracy": lambda s, _: _share(s.last.train_accuracy),
    "held_out_accuracy": lambda s, _: _share(s.last.held_out_accuracy),
    "held_out_accuracy_change": lambda s, _: _change(_last_change(s.accuracies), 1.0),
    "plateau_epochs": lambda s, _: min(s.plateau_epochs / _LONG, 1.0),
    "best_accuracy": lambda s, _: _share(s.best_accuracy),
    "best_loss": lambda s, scale: _loss(s.best_loss, scale),
    **{
        f"held_out_loss_{ago}_ago": lambda s, scale, ago=ago: _loss(_past(s.losses, ago), scale)  # type: ignore[misc]
        for ago in range(HISTORY)
    },
    **{
        f"held_out_accuracy_{ago}_ago": lambda s, _, ago=ago: _share(_past(s.accuracies, ago))  # type: ignore[misc]
        for ago in range(HISTORY)
    },
    "params_share": lambda s, _: _share(s.last.params_share),
    "seeds_share": lambda s, _: _share(s.last.seeds_share),
}

STATE_FEATURES: dict[str, Slot] = {
    "occupied": lambda r, _: float(r.is_live),
    "stage": lambda r, _: (_LIFE.index(r.stage) + 1) / len(_LIFE) if r.stage in _LIFE else 0.0,
    "alpha": lambda r, _: r.alpha,
    "contribution": lambda r, scale: _change(r.metrics.counterfactual_contribution, scale),
}

BLUEPRINT_FEATURES: dict[str, Slot] = {
    "relative_size": lambda r, _: min(
        r.metrics.seed_param_count / max(r.metrics.host_param_count, 1), 2.0
    ),
    "spatial": lambda r, _: _traits(r).spatial,
    "attention_like": lambda r, _: _traits(r).attention_like,
    "normalising": lambda r, _: _traits(r).normalising,
    "depth": lambda r, _: min(_traits(r).depth / _DEEP, 2.0),
}

TELEMETRY_FEATURES: dict[str, Slot] = {
    "gradient_norm": lambda r, _: _logarithm(r.metrics.seed_gradient_norm),
    "gradient_ratio": lambda r, _: _logarithm(r.metrics.seed_gradient_norm_ratio),
    "gradient_health": lambda r, _: _health(r.metrics.seed_gradient_norm_ratio),
    "vanishing": lambda r, _: float(
        _is_known(ratio := r.metrics.seed_gradient_norm_ratio) and ratio <= 0.01
    ),
    "exploding": lambda r, _: float(
        _is_known(ratio := r.metrics.seed_gradient_norm_ratio) and ratio >= 100.0
    ),
    "epochs_in_stage": lambda r, _: min(r.epochs_in_stage / _LONG, 1.0),
    "seed_age": lambda r, _: min(r.seed_age_epochs / _LONG, 1.0),
    "contribution_error": lambda r, scale: _change(r.metrics.counterfactual_standard_error, scale),
    "contribution_measured": lambda r, _: float(r.is_measured),
    "greedy_score": lambda r, _: _logarithm(r.metrics.greedy_score, _STEEP),
}
_OF_THE_PLACE = ("greedy_score", "epochs_in_stage")
"""Telemetry of the slot rather than of its seed: there with an empty slot too."""


def _traits(report: SeedStateReport) -> BlueprintTraits:
    return REGISTRY.get(report.kind, str(report.blueprint_id)).traits


def _logarithm(value: float | None, unit: float = 1.0) -> float:
    """From 0 up, steep at first: 1 is about 1.7, so that small differences near 0 still show."""
    return min(math.log1p(value / unit), LARGEST) if _is_known(value) else UNKNOWN


def _health(ratio: float | None) -> float:
    """1 where seed and host move alike, 0 where one moves a hundred times as much as the other."""
    if not _is_known(ratio):
        return UNKNOWN
    return 0.0 if ratio <= 0 else max(0.0, 1.0 - abs(math.log10(ratio)) / 2)


def feature_names(slots: SlotConfig, use_telemetry: bool = True) -> tuple[str, ...]:
    """Names of all features in the order of the observation."""
    own = [
        f"{slot}.{name}"
        for slot in slots.slot_ids
        for name in (*STATE_FEATURES, *BLUEPRINT_FEATURES)
    ]
    told = [
        f"{slot}.{name}" for slot in slots.slot_ids for name in TELEMETRY_FEATURES if use_telemetry
    ]
    return (*BASE_FEATURES, *own, *told)


def signals_to_features(
    tracked: TrackedSignals,
    reports: Reports,
    slots: SlotConfig,
    loss_scale: float,
    use_telemetry: bool = True,
) -> NDArray[np.float32]:
    """The observation of one host, [F].

    What an empty slot cannot have is 0; what was not measured is flagged.
    """
    values = [feature(tracked, loss_scale) for feature in BASE_FEATURES.values()]
    own, each = (
        [reports[slot] for slot in slots.slot_ids],
        (*STATE_FEATURES.values(), *BLUEPRINT_FEATURES.values()),
    )
    for report in own:
        values += [feature(report, loss_scale) if report.is_live else 0.0 for feature in each]
    for report in own if use_telemetry else ():
        there = TELEMETRY_FEATURES if report.is_live else _OF_THE_PLACE
        told = (
            feature(report, loss_scale) if name in there else 0.0
            for name, feature in TELEMETRY_FEATURES.items()
        )
        values += told if report.is_live else (max(0.0, value) for value in told)
    return np.clip(np.asarray(values, np.float32), -LARGEST, LARGEST)


def observe(trackers: Sequence[SignalTracker], use_telemetry: bool = True) -> NDArray[np.float32]:
    """Observations of N hosts, [N, F]."""
    rows: list[Any] = []
    for tracker in trackers:
        if tracker.tracked is None or not tracker.reports:
            raise SettingError(
                "a tracker has nothing to show before its first epoch; call update(...) first."
            )
        seen = tracker.tracked, tracker.reports, tracker.slots, tracker.loss_scale
        rows.append(signals_to_features(*seen, use_telemetry))
    return np.stack(rows)
