"""A host with its slots as one list of named features, scaled to about one.

It is for networks of one's own; the growth policy reads `readings`. The tables of features below
are the layout and its only size.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from esper.kasmina.blueprints import REGISTRY, BlueprintTraits
from esper.leyline.reports import SeedStateReport
from esper.leyline.slots import SlotConfig
from esper.leyline.stages import SeedStage
from esper.tamiyo.policies import Reports
from esper.tamiyo.signals import HISTORY, TrackedSignals

UNKNOWN = -1.0
"""Stands for "not measured" in features that are otherwise never negative."""

LARGEST = 5.0
"""No feature is further from zero."""

_LONG = 20.0  # epochs that count as long
_STEEP = 10.0  # a high greedy score of a few dozen channels
_DEEP = 3.0  # layers of the deepest built-in blueprint
_LEAST_RATIO = 0.01  # of a seed's gradients to its host's, at or below which they vanish
_MOST_RATIO = 100.0  # at or above which they explode

_LIFE = (
    SeedStage.GERMINATED,
    SeedStage.TRAINING,
    SeedStage.BLENDING,
    SeedStage.PROBATIONARY,
    SeedStage.FOSSILIZED,
)

BaseFeature = Callable[[TrackedSignals, float], float]
"""A feature of the host, from its signals and the loss scale."""

SlotFeature = Callable[[SeedStateReport, float], float]
"""A feature of one slot, from its report and the loss scale."""


def _is_known(value: float | None) -> TypeGuard[float]:
    return value is not None and not math.isnan(value)


def _loss(value: float | None, scale: float) -> float:
    """A loss in units of guessing; far beyond it, it no longer matters how far."""
    return min(value / scale, 3.0) if _is_known(value) else UNKNOWN


def _change(value: float | None, scale: float) -> float:
    """A signed change, a tenth of the scale being one; none known is none."""
    return math.tanh(10 * value / scale) if _is_known(value) else 0.0


def _last_change(values: Sequence[float]) -> float | None:
    """The newest value minus the one before it."""
    return values[-1] - values[-2] if len(values) > 1 else None


def _share(value: float | None) -> float:
    """A share as it is, as long as it is not far above one."""
    return min(value, 1.5) if _is_known(value) else UNKNOWN


def _as_it_is(value: float | None) -> float:
    return value if _is_known(value) else UNKNOWN


def _past(values: Sequence[float], ago: int) -> float | None:
    """The value of so many epochs ago."""
    return values[-1 - ago] if ago < len(values) else None


def _loss_ago(ago: int) -> BaseFeature:
    return lambda signals, scale: _loss(_past(signals.losses, ago), scale)


def _accuracy_ago(ago: int) -> BaseFeature:
    return lambda signals, _: _share(_past(signals.accuracies, ago))


BASE_FEATURES: dict[str, BaseFeature] = {
    "progress": lambda s, _: _as_it_is(s.last.progress),
    "lr_share": lambda s, _: _as_it_is(s.last.lr_share),
    "train_loss": lambda s, scale: _loss(s.last.train_loss, scale),
    "held_out_loss": lambda s, scale: _loss(s.last.held_out_loss, scale),
    "held_out_loss_change": lambda s, scale: _change(_last_change(s.losses), scale),
    "train_accuracy": lambda s, _: _share(s.last.train_accuracy),
    "held_out_accuracy": lambda s, _: _share(s.last.held_out_accuracy),
    "held_out_accuracy_change": lambda s, _: _change(_last_change(s.accuracies), 1.0),
    "plateau_epochs": lambda s, _: min(s.plateau_epochs / _LONG, 1.0),
    "best_accuracy": lambda s, _: _share(s.best_accuracy),
    "best_loss": lambda s, scale: _loss(s.best_loss, scale),
    **{f"held_out_loss_{ago}_ago": _loss_ago(ago) for ago in range(HISTORY)},
    **{f"held_out_accuracy_{ago}_ago": _accuracy_ago(ago) for ago in range(HISTORY)},
    "params_share": lambda s, _: _share(s.last.params_share),
    "seeds_share": lambda s, _: _share(s.last.seeds_share),
}
"""Features of the host, in the order of the observation."""


def _stage(report: SeedStateReport) -> float:
    """How far a seed has come, from 0 (nothing planted) to 1 (fossilized)."""
    if report.stage not in _LIFE:
        return 0.0
    return (_LIFE.index(report.stage) + 1) / len(_LIFE)


STATE_FEATURES: dict[str, SlotFeature] = {
    "occupied": lambda r, _: float(r.is_live),
    "stage": lambda r, _: _stage(r),
    "alpha": lambda r, _: r.alpha,
    "contribution": lambda r, scale: _change(r.metrics.counterfactual_contribution, scale),
}
"""Where the seed of a slot stands."""

BLUEPRINT_FEATURES: dict[str, SlotFeature] = {
    "relative_size": lambda r, _: _relative_size(r),
    "spatial": lambda r, _: _traits(r).spatial,
    "attention_like": lambda r, _: _traits(r).attention_like,
    "normalising": lambda r, _: _traits(r).normalising,
    "depth": lambda r, _: min(_traits(r).depth / _DEEP, 2.0),
}
"""What the seed of a slot is."""

TELEMETRY_FEATURES: dict[str, SlotFeature] = {
    "gradient_norm": lambda r, _: _logarithm(r.metrics.seed_gradient_norm),
    "gradient_ratio": lambda r, _: _logarithm(r.metrics.seed_gradient_norm_ratio),
    "gradient_health": lambda r, _: _health(r.metrics.seed_gradient_norm_ratio),
    "vanishing": lambda r, _: _is_vanishing(r.metrics.seed_gradient_norm_ratio),
    "exploding": lambda r, _: _is_exploding(r.metrics.seed_gradient_norm_ratio),
    "epochs_in_stage": lambda r, _: min(r.epochs_in_stage / _LONG, 1.0),
    "seed_age": lambda r, _: min(r.seed_age_epochs / _LONG, 1.0),
    "contribution_error": lambda r, scale: _change(r.metrics.counterfactual_standard_error, scale),
    "contribution_measured": lambda r, _: float(r.is_measured),
    "greedy_score": lambda r, _: _logarithm(r.metrics.greedy_score, _STEEP),
}
"""How the seed of a slot learns; a policy may be trained without these."""

# Telemetry of the slot rather than of its seed: an empty slot has it too.
_OF_THE_SLOT = ("greedy_score", "epochs_in_stage")


def _relative_size(report: SeedStateReport) -> float:
    """Parameters of the seed over those of the host, at most 2."""
    metrics = report.metrics
    return min(metrics.seed_param_count / max(metrics.host_param_count, 1), 2.0)


def _is_vanishing(ratio: float | None) -> float:
    return float(_is_known(ratio) and ratio <= _LEAST_RATIO)


def _is_exploding(ratio: float | None) -> float:
    return float(_is_known(ratio) and ratio >= _MOST_RATIO)


def _traits(report: SeedStateReport) -> BlueprintTraits:
    """What the blueprint of the seed is like."""
    return REGISTRY.get(report.kind, str(report.blueprint_id)).traits


def _logarithm(value: float | None, unit: float = 1.0) -> float:
    """From 0 up, steep at first: 1 is about 1.7, so that small differences near 0 still show."""
    return min(math.log1p(value / unit), LARGEST) if _is_known(value) else UNKNOWN


def _health(ratio: float | None) -> float:
    """1 where seed and host move alike, 0 where one moves a hundred times as much as the other."""
    if not _is_known(ratio):
        return UNKNOWN
    if ratio <= 0:
        return 0.0
    return max(0.0, 1.0 - abs(math.log10(ratio)) / 2)


def feature_names(slots: SlotConfig, use_telemetry: bool = True) -> tuple[str, ...]:
    """Names of all features in the order of the observation."""
    names = list(BASE_FEATURES)
    for slot in slots.slot_ids:
        names += [f"{slot}.{name}" for name in (*STATE_FEATURES, *BLUEPRINT_FEATURES)]
    if use_telemetry:
        for slot in slots.slot_ids:
            names += [f"{slot}.{name}" for name in TELEMETRY_FEATURES]
    return tuple(names)


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
    seed_features = (*STATE_FEATURES.values(), *BLUEPRINT_FEATURES.values())
    for slot in slots.slot_ids:
        report = reports[slot]
        if report.is_live:
            values += [feature(report, loss_scale) for feature in seed_features]
        else:
            values += [0.0] * len(seed_features)
    if use_telemetry:
        for slot in slots.slot_ids:
            values += _telemetry_of(reports[slot], loss_scale)
    return np.clip(np.asarray(values, np.float32), -LARGEST, LARGEST)


def _telemetry_of(report: SeedStateReport, loss_scale: float) -> list[float]:
    """Telemetry of one slot; of an empty one only what is the slot's, and nothing is flagged."""
    values = []
    for name, feature in TELEMETRY_FEATURES.items():
        if report.is_live:
            values.append(feature(report, loss_scale))
        elif name in _OF_THE_SLOT:
            values.append(max(0.0, feature(report, loss_scale)))
        else:
            values.append(0.0)
    return values
