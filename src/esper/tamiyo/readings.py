"""What the growth policy reads of a network: the same numbers in an episode and in a user's loop.

Everything is relative: losses to how far they have fallen, prices to the room left, scores to the
slots' mean. What is not known is absent, and a flag says so; `layout` has the names.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.kasmina.blueprints import COPY, COPY_ZERO, REGISTRY, BlueprintTraits
from esper.leyline.errors import SettingError
from esper.leyline.legality import GrowthView
from esper.leyline.reports import SeedStateReport
from esper.leyline.stages import SeedStage
from esper.tamiyo.layout import (
    BASE_ROW,
    BLUEPRINT_ROW,
    PAIR_ROW,
    SLOT_ROW,
    ObservationLayout,
    RowLayout,
)
from esper.tamiyo.rules import HostFacts
from esper.tamiyo.signals import TrackedSignals, measure_trend

FURTHEST = 5.0
"""No number is further from zero."""

GROUPS = ("guessing", "train_loss", "share", "rate", "loss", "score", "telemetry")
"""Readings that a loop may lack: the loss of guessing, training losses, how much of the episode is
left, the learning rate, held-out losses (where `evaluate` returns scores), scores (where it returns
losses), gradients and greedy scores of slots."""

_LEAST_DROP = 0.01  # of the first loss: a fall by less is noise
_CLOSED = (SeedStage.CULLED, SeedStage.EMBARGOED, SeedStage.RESETTING)
_BEFORE_BLENDING = (SeedStage.GERMINATED, SeedStage.TRAINING)

Number = float | None
Row = list[float]


@dataclass(frozen=True)
class Sight:
    """All that is read of one network after an epoch."""

    tracked: TrackedSignals
    view: GrowthView
    facts: HostFacts
    guessing: float | None = None
    """loss of guessing all classes alike, if known"""
    has_telemetry: bool = True
    """whether gradients and greedy scores are read"""


def observe(
    sights: Iterable[Sight],
    layout: ObservationLayout | None = None,
    lacking: Sequence[Collection[str]] | None = None,
) -> NDArray[np.float32]:
    """Observations of N networks, [N, F].

    Args:
        sights: what is read of each.
        layout: where numbers lie; by default that of the first network. It may be larger.
        lacking: by network the `GROUPS` that are not to be read.
    """
    rows = []
    for index, sight in enumerate(sights):
        layout = layout or layout_for(sight.view)
        lacks = () if lacking is None else lacking[index]
        rows.append(read_host(without(sight, lacks), layout))
    return np.stack(rows)


def layout_for(view: GrowthView) -> ObservationLayout:
    """The observation of a network that has these actions."""
    _, slots, blueprints, _ = view.space.sizes
    return ObservationLayout(slots, blueprints)


def without(sight: Sight, lacking: Collection[str]) -> Sight:
    """The same as a loop sees it that lacks these groups of readings."""
    unknown = [group for group in lacking if group not in GROUPS]
    if unknown:
        raise SettingError(f"readings that may lack are {', '.join(GROUPS)}; got {unknown[0]!r}.")
    changes: dict[str, Any] = {}
    tracked = sight.tracked
    last = tracked.last
    if "train_loss" in lacking:
        tracked = replace(tracked, train_losses=())
        last = replace(last, train_loss=None)
    if "share" in lacking:
        last = replace(last, progress=None)
    if "rate" in lacking:
        last = replace(last, lr_share=None)
    if "loss" in lacking:
        last = replace(last, held_out_loss=None)
        tracked = replace(tracked, losses=(), first_loss=None, best_loss=None, since_best=0)
    if "score" in lacking:
        last = replace(last, held_out_accuracy=None)
        tracked = replace(tracked, accuracies=(), first_accuracy=None, best_accuracy=None)
    if "guessing" in lacking:
        changes["guessing"] = None
    if "telemetry" in lacking:
        changes["has_telemetry"] = False
    return replace(sight, tracked=replace(tracked, last=last), **changes)


def draw_lacking(chance: float, draw: np.random.Generator) -> frozenset[str]:
    """Groups that a loop lacks, each with this chance; a loop with scores has no losses."""
    drawn = {group for group in GROUPS if draw.random() < chance}
    if {"loss", "score"} <= drawn:
        drawn.remove("loss")
    return frozenset(drawn)


def read_host(sight: Sight, layout: ObservationLayout) -> NDArray[np.float32]:
    """The observation of one network, [F]."""
    space = sight.view.space
    _, slots, blueprints, _ = space.sizes
    if slots > layout.num_slots or blueprints > layout.num_blueprints:
        raise SettingError(
            f"a host with {slots} slots and {blueprints} blueprints does not fit a layout of "
            f"{layout.num_slots} and {layout.num_blueprints}; give a larger one."
        )
    prices = read_prices(sight)
    row = np.zeros(layout.width, np.float32)
    base, of_slots, of_blueprints, of_pairs = np.split(row, np.cumsum(layout.sizes)[:-1])
    base[:] = _base_row(sight)
    slot_rows = of_slots.reshape(layout.num_slots, SLOT_ROW.width)
    slot_rows[:slots] = _slot_rows(sight, prices)
    blueprint_rows = of_blueprints.reshape(layout.num_blueprints, BLUEPRINT_ROW.width)
    blueprint_rows[:blueprints] = _blueprint_rows(sight, prices)
    pair_rows = of_pairs.reshape(layout.num_slots, layout.num_blueprints, PAIR_ROW.width)
    pair_rows[:slots, :blueprints] = prices.pairs
    return row.clip(-FURTHEST, FURTHEST)


# -- the host --------------------------------------------------------------------------------------


def _encode(row: RowLayout, numbers: dict[str, Number], switches: dict[str, bool]) -> Row:
    """Numbers, flags and switches in the order of the row; what is absent is 0."""
    values = [numbers[name] for name in row.numbers]
    filled = [0.0 if value is None else value for value in values]
    flags = [float(numbers[name] is not None) for name in row.optional]
    return [*filled, *flags, *(float(switches[name]) for name in row.switches)]


def _stretch(value: float) -> float:
    """Small values ten times as large, large ones by their logarithm."""
    return math.asinh(10 * value)


def _long(epochs: int) -> float:
    return math.log1p(epochs) / 3


@dataclass(frozen=True)
class _Fall:
    """From where a loss has fallen, and how far."""

    start: float
    drop: float

    def share(self, loss: float) -> float:
        """How much of the fall a loss stands for: 1 at the lowest, 0 at the start."""
        return math.asinh((self.start - loss) / self.drop)

    def learnt(self, loss: float) -> float:
        """By which part of itself the loss has fallen."""
        return math.asinh((self.start - loss) / abs(self.start))


def _fall_of(sight: Sight) -> _Fall | None:
    """The fall of the held-out loss: from guessing where that is known, or its first reading."""
    tracked = sight.tracked
    start = tracked.first_loss if sight.guessing is None else sight.guessing
    if not start or tracked.best_loss is None:
        return None
    drop = max(start - tracked.best_loss, _LEAST_DROP * abs(start))
    return _Fall(start, drop)


def _in_errors(value: float | None, error: float | None) -> Number:
    """A value in its standard errors, squeezed."""
    if value is None or error is None:
        return None
    if error == 0:
        return 0.0 if value == 0 else math.copysign(FURTHEST, value)
    return math.asinh(value / error)


def _base_row(sight: Sight) -> Row:
    """What is read of the host as a whole."""
    view = sight.view
    reports = view.reports.values()
    fossils = sum(report.fossil_count for report in reports)
    live = sum(report.is_live for report in reports)
    room = None if view.budget is None else max(view.budget - view.params_used, 0)
    host = max(sight.facts.host_params, 1)
    last = sight.tracked.last
    numbers: dict[str, Number] = {
        "epochs": math.log1p(sight.tracked.epochs) / 2,
        "grown": math.log(max(view.params_used, 1) / host),
        "live_share": live / len(reports),
        "fossils": math.log1p(fossils),
        "slots": math.log(len(reports)) / 2,
        "share_left": None if last.progress is None else 1 - last.progress,
        "rate": last.lr_share,
        "params_share": None if view.budget is None else view.params_used / max(view.budget, 1),
        "room": None if room is None else math.log1p(room / host),
        "seeds_share": None if not view.max_seeds else view.seeds_used / view.max_seeds,
        **_course_of(sight),
    }
    switches = {"present": True, "guessing_known": sight.guessing is not None}
    return _encode(BASE_ROW, numbers, switches)


def _course_of(sight: Sight) -> dict[str, Number]:
    """How losses and scores have run."""
    tracked = sight.tracked
    fall = _fall_of(sight)
    losses = tracked.losses
    trend = measure_trend(losses)
    numbers: dict[str, Number] = dict.fromkeys(_COURSE)
    numbers["score"] = _score_of(tracked)
    scores = measure_trend(tracked.accuracies)
    numbers["score_slope_in_errors"] = _in_errors(scores.slope, scores.error)
    if fall is None or not losses:
        return numbers
    for ago in range(min(len(losses), len(_STANDINGS))):
        numbers[_STANDINGS[ago]] = fall.share(losses[-1 - ago])
    numbers["learnt"] = fall.learnt(losses[-1])
    numbers["slope_in_errors"] = _in_errors(trend.slope, trend.error)
    numbers["slope"] = None if trend.slope is None else _stretch(trend.slope / fall.drop)
    numbers["since_best"] = _long(tracked.since_best)
    train = tracked.last.train_loss
    if train is not None:
        loss = losses[-1]
        numbers["train_learnt"] = fall.learnt(train)
        numbers["gap"] = math.asinh((loss - train) / fall.drop)
        together = abs(loss) + abs(train)
        numbers["gap_share"] = 2 * (loss - train) / together if together else 0.0
        slope = measure_trend(tracked.train_losses).slope
        numbers["train_slope"] = None if slope is None else _stretch(slope / fall.drop)
    return numbers


_STANDINGS = ("standing", *(f"standing_{ago}_ago" for ago in range(1, 5)))
_COURSE = (
    "learnt",
    *_STANDINGS,
    "slope_in_errors",
    "slope",
    "since_best",
    "train_learnt",
    "train_slope",
    "gap",
    "gap_share",
    "score",
    "score_slope_in_errors",
)


def _score_of(tracked: TrackedSignals) -> Number:
    """Where the last score stands between the first one, 0, and the best one, 1."""
    first = tracked.first_accuracy
    best = tracked.best_accuracy
    if first is None or best is None:
        return None
    rise = best - first
    return (tracked.accuracies[-1] - first) / rise if rise > 0 else 0.0


# -- prices ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prices:
    """What seeds cost: [S, K] parameters, NaN where a blueprint does not fit, and the rows."""

    params: NDArray[np.float64]
    work: NDArray[np.float64]
    pairs: NDArray[np.float32]


def read_prices(sight: Sight) -> Prices:
    """Prices of every blueprint in every slot, with the cheapest blend, as the network stands."""
    view = sight.view
    params, work = _price_table(sight)
    fits = ~np.isnan(params)
    rows = np.zeros((*params.shape, PAIR_ROW.width), np.float32)
    host = max(sight.facts.host_params, 1)
    rows[..., 0] = np.where(fits, np.log1p(np.nan_to_num(params) / host), 0)
    has_work = fits & (np.nan_to_num(work) > 0)
    if has_work.any():
        middle = np.log(work[has_work]).mean()
        rows[has_work, 1] = (np.log(work[has_work]) - middle) / 2
    rows[..., 3] = has_work
    if view.budget is not None:
        room = max(view.budget - view.params_used, 1)
        rows[..., 2] = np.where(fits, np.arcsinh(np.nan_to_num(params) / room), 0)
        rows[..., 4] = fits
    rows[..., 5] = fits
    return Prices(params, work, rows)


def _price_table(sight: Sight) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Parameters and FLOPs [S, K] of seeds with the cheapest blend; NaN where none fits."""
    space = sight.view.space
    costs = sight.view.costs
    params = np.full((space.slots.num_slots, len(space.blueprint_ids)), np.nan)
    work = np.full(params.shape, np.nan)
    for row, slot_id in enumerate(space.slots.slot_ids):
        counted = sight.facts.prices.get(slot_id, {})
        for column, name in enumerate(space.blueprint_ids):
            if name is None:
                continue
            known = [costs.get((slot_id, name, blend)) for blend in space.blends]
            prices = [price for price in known if price is not None]
            if prices:
                params[row, column] = min(prices)
                seed = counted.get((name, False))
                work[row, column] = np.nan if seed is None else seed.flops
    return params, work


# -- slots -----------------------------------------------------------------------------------------


def _slot_rows(sight: Sight, prices: Prices) -> list[Row]:
    """What is read of each slot."""
    view = sight.view
    slot_ids = view.space.slots.slot_ids
    reports = [view.reports[slot_id] for slot_id in slot_ids]
    middle = _mean_score(reports) if sight.has_telemetry else None
    fall = _fall_of(sight)
    rows = []
    for index, report in enumerate(reports):
        numbers: dict[str, Number] = {
            "place": index / max(len(reports) - 1, 1),
            "fossils": math.log1p(report.fossil_count),
            "epochs_in_stage": _long(report.epochs_in_stage),
            **_seed_numbers(report, fall),
            **_telemetry_numbers(report, middle, sight.has_telemetry),
            **_price_numbers(prices.params[index].tolist(), sight),
        }
        rows.append(_encode(SLOT_ROW, numbers, _slot_switches(report, index, len(reports))))
    return rows


def _mean_score(reports: Sequence[SeedStateReport]) -> Number:
    """The mean logarithm of the greedy scores that are known."""
    logs = []
    for report in reports:
        score = report.metrics.greedy_score
        if score is not None and score > 0 and math.isfinite(score):
            logs.append(math.log(score))
    return sum(logs) / len(logs) if logs else None


def _traits_of(report: SeedStateReport) -> BlueprintTraits | None:
    """What the live seed of a slot is like; None without one."""
    if not report.is_live or report.blueprint_id is None:
        return None
    return REGISTRY.get(report.kind, report.blueprint_id).traits


def _seed_numbers(report: SeedStateReport, fall: _Fall | None) -> dict[str, Number]:
    """What is read of the live seed; an empty slot has none of it."""
    metrics = report.metrics
    traits = _traits_of(report)
    gain = metrics.counterfactual_contribution if report.is_live else None
    if gain is not None and not math.isfinite(gain):
        gain = None
    relative = metrics.seed_param_count / max(metrics.host_param_count, 1)
    return {
        "seed_age": _long(report.seed_age_epochs) if report.is_live else 0.0,
        "alpha": report.alpha if report.is_live else 0.0,
        "relative_size": math.log1p(relative) if report.is_live else 0.0,
        "depth": 0.0 if traits is None else traits.depth / 3,
        "contribution_in_errors": _in_errors(gain, metrics.counterfactual_standard_error),
        "contribution": None if gain is None or fall is None else _stretch(gain / fall.drop),
    }


def _telemetry_numbers(
    report: SeedStateReport, middle: Number, has_telemetry: bool
) -> dict[str, Number]:
    """Gradients of the live seed, and the greedy score of the slot beside the others'."""
    numbers: dict[str, Number] = {"gradient_ratio": None, "score_ratio": None}
    ratio = report.metrics.seed_gradient_norm_ratio
    is_known = ratio is not None and math.isfinite(ratio) and ratio > 0
    if has_telemetry and report.is_live and is_known and ratio is not None:
        numbers["gradient_ratio"] = math.log10(ratio)
    score = report.metrics.greedy_score
    if middle is not None and score is not None and score > 0 and math.isfinite(score):
        numbers["score_ratio"] = math.log(score) - middle
    return numbers


def _price_numbers(params: Sequence[float], sight: Sight) -> dict[str, Number]:
    """What planting in a slot costs at least and in the mean: of the host, and of the room left."""
    names = ("cheapest", "mean_price", "cheapest_of_room", "mean_of_room")
    numbers: dict[str, Number] = dict.fromkeys(names)
    known = [price for price in params if not math.isnan(price)]
    if not known:
        return numbers
    cheapest = min(known)
    mean = sum(known) / len(known)
    host = max(sight.facts.host_params, 1)
    numbers["cheapest"] = math.log1p(cheapest / host)
    numbers["mean_price"] = math.log1p(mean / host)
    if sight.view.budget is not None:
        room = max(sight.view.budget - sight.view.params_used, 1)
        numbers["cheapest_of_room"] = math.asinh(cheapest / room)
        numbers["mean_of_room"] = math.asinh(mean / room)
    return numbers


def _slot_switches(report: SeedStateReport, index: int, count: int) -> dict[str, bool]:
    """What a slot and its seed are like."""
    traits = _traits_of(report) or BlueprintTraits()
    return {
        "present": True,
        "first": index == 0,
        "last": index == count - 1,
        "image": report.kind == "image",
        "sequence": report.kind == "sequence",
        "vector": report.kind == "vector",
        "dormant": report.stage is SeedStage.DORMANT,
        "training": report.stage in _BEFORE_BLENDING,
        "blending": report.stage is SeedStage.BLENDING,
        "on_probation": report.stage is SeedStage.PROBATIONARY,
        "fossilized": report.stage is SeedStage.FOSSILIZED,
        "closed": report.stage in _CLOSED,
        "spatial": traits.spatial > 0,
        "attention_like": traits.attention_like > 0,
        "normalising": traits.normalising > 0,
    }


# -- blueprints ------------------------------------------------------------------------------------


def _blueprint_rows(sight: Sight, prices: Prices) -> list[Row]:
    """What each blueprint is like where it fits; the first one is none."""
    view = sight.view
    kinds = [view.reports[slot_id].kind for slot_id in view.space.slots.slot_ids]
    pairs = prices.pairs
    # columns of a pair: size, work, size of room, whether work is known, ..., whether it fits
    fitting = pairs[..., 5].sum(0).tolist()
    sizes = pairs[..., 0].sum(0).tolist()
    counted = pairs[..., 3].sum(0).tolist()
    work = pairs[..., 1].sum(0).tolist()
    rows = []
    for column, name in enumerate(view.space.blueprint_ids):
        fits = pairs[:, column, 5].tolist()
        traits = _mean_traits(name, [kind for kind, fit in zip(kinds, fits, strict=True) if fit])
        numbers: dict[str, Number] = {
            **traits,
            "size": sizes[column] / fitting[column] if fitting[column] else None,
            "work": work[column] / counted[column] if counted[column] else None,
        }
        switches = {
            "present": True,
            "none": name is None,
            "copies": name in (COPY, COPY_ZERO),
            "begins_as_identity": name is not None and name != COPY,
        }
        rows.append(_encode(BLUEPRINT_ROW, numbers, switches))
    return rows


def _mean_traits(name: str | None, kinds: Sequence[str]) -> dict[str, float]:
    """Traits of a blueprint in the mean of the slots that it fits; 0 where it fits none."""
    totals = dict.fromkeys(("spatial", "attention_like", "normalising", "depth"), 0.0)
    if name is None:
        return totals
    for kind, count in Counter(kinds).items():
        traits = REGISTRY.get(kind, name).traits
        part = count / len(kinds)
        totals["spatial"] += part * traits.spatial
        totals["attention_like"] += part * traits.attention_like
        totals["normalising"] += part * traits.normalising
        totals["depth"] += part * traits.depth / 3
    return totals
