"""What a comparison came to: one row per arm and host seed, means, and paired differences.

Plain data in, plain data out; nothing is played here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from esper.runtime.tasks.families import Variation
from esper.telemetry.events import ArmFinished, to_record
from esper.telemetry.statistics import compare_pairs, estimate_mean
from esper.trials.arms import Planting
from esper.trials.config import CompareConfig

ORACLE = "oracle"
"""Stands for the best of all single plantings."""

METRICS = {"test_accuracy": 1.0, "test_loss": -1.0}
"""What arms are compared by; of two arms the one with more of it times the sign is ahead."""

COSTS = (
    "final_params",
    "peak_params",
    "flops",
    "seconds",
    "germinated",
    "fossilized",
    "culled",
    "epochs",
)
"""Columns of which only the mean is reported."""

_OPPOSITE = {"ahead": "behind", "behind": "ahead"}

# What is summed up of such numbers is finite.
Count = Annotated[int, Field(strict=True, ge=-(10**30), le=10**30)]
Measure = Annotated[float, Field(strict=True, ge=-(10**30), le=10**30)]
Text = Annotated[str, Field(max_length=10**5)]


class ArmRow(BaseModel):
    """One arm's episode on one host seed: `ArmFinished` and the most parameters that it had.

    Of a host that differs from others it has what the host has drawn.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Text
    arm: Text
    seed: Count
    epochs: Count
    start_params: Count
    final_params: Count
    validation_accuracy: Measure
    test_accuracy: Measure
    test_loss: Measure
    flops: Count
    seconds: Measure
    germinated: Count
    fossilized: Count
    culled: Count
    peak_params: Count
    variation: Count | None = None
    drawn: dict[Text, Count | Measure] = {}

    @classmethod
    def of(
        cls, result: ArmFinished, peak_params: int, variation: Variation | None = None
    ) -> "ArmRow":
        """The row of an episode that is over."""
        drawn: dict[str, Any] = {}
        if variation is not None:
            drawn = {"variation": variation.number, "drawn": variation.drawn}
        return cls(**to_record(result), peak_params=peak_params, **drawn)

    def to_record(self) -> dict[str, Any]:
        """The row as plain data; where hosts are alike, it does not say what they have drawn."""
        return self.model_dump(exclude=None if self.drawn else {"variation", "drawn"})


class CurvePoint(NamedTuple):
    """One epoch of an episode as its arm's curve has it."""

    epoch: int
    flops: int  # all phases since the episode began
    held_out_loss: float


Curve = tuple[CurvePoint, ...]
"""How one episode went, epoch by epoch; an epoch whose loss is no number is left out."""


@dataclass(frozen=True)
class Trials:
    """One arm at one rate, seed by seed, as plain data."""

    arm: str
    rate: float
    rows: tuple[ArmRow, ...]
    architectures: tuple[tuple[Planting, ...], ...]
    events: tuple[tuple[dict[str, Any], ...], ...]  # what sham growth replays
    # episodes played before to find what decides here; None where a checkpoint does not say
    episodes: int | None = 0
    plan: str | None = None  # what a search found, as a policy
    curves: tuple[Curve, ...] = ()  # seed by seed

    def column(self, name: str) -> list[float]:
        """One number of every row, seed by seed."""
        return [float(getattr(row, name)) for row in self.rows]

    def mean(self, name: str) -> float:
        """The mean of a column."""
        return sum(self.column(name)) / len(self.rows)

    def to_record(self) -> dict[str, Any]:
        """The trials as plain data, ready for JSON."""
        return {**vars(self), "rows": [row.to_record() for row in self.rows]}

    def describe(self) -> dict[str, Any]:
        """Means of all columns, with intervals where arms are compared or chosen by them."""
        description: dict[str, Any] = {
            "arm": self.arm,
            "rate": self.rate,
            "seeds": [row.seed for row in self.rows],
            "episodes": self.episodes,
        }
        if self.plan is not None:
            description["plan"] = self.plan
        for name in (*METRICS, "validation_accuracy"):
            description[name] = asdict(estimate_mean(self.column(name)))
        for name in COSTS:
            description[name] = self.mean(name)
        description["curve"] = mean_curve(self.curves)
        return description

    def minus(self, other: "Trials") -> dict[str, Any]:
        """By how much this arm is better than another, paired by seed, for each metric.

        The verdict says which way the interval excludes zero, if it does.
        """
        differences = {}
        for name, sign in METRICS.items():
            difference = compare_pairs(self.column(name), other.column(name))
            verdict = difference.verdict
            if sign < 0:
                verdict = _OPPOSITE.get(verdict, verdict)
            differences[name] = {**asdict(difference), "verdict": verdict}
        return differences


def mean_curve(curves: Sequence[Curve]) -> dict[str, list[float]]:
    """The mean over episodes, epoch by epoch; only epochs that all of them have."""
    points_by_epoch = [{point.epoch: point for point in curve} for curve in curves]
    shared = set.intersection(*map(set, points_by_epoch)) if points_by_epoch else set()
    columns: dict[str, list[float]] = {name: [] for name in CurvePoint._fields}
    for epoch in sorted(shared):
        points = [by_epoch[epoch] for by_epoch in points_by_epoch]
        columns["epoch"].append(epoch)
        columns["flops"].append(fmean(point.flops for point in points))
        columns["held_out_loss"].append(fmean(point.held_out_loss for point in points))
    return columns


def best_by_validation(trials: Sequence[Trials]) -> Trials:
    """Those with the highest validation accuracy on average; ties go to the first."""
    return max(trials, key=lambda tried: tried.mean("validation_accuracy"))


def summarise(config: CompareConfig, done: Mapping[tuple[str, float], Trials]) -> dict[str, Any]:
    """Every arm at the rate that its validation accuracy chose, and how it stands to the others.

    `done` has the trials of every arm and rate. All single plantings are one arm.
    """
    by_arm: dict[str, list[Trials]] = {}
    for trials in done.values():
        name = ORACLE if trials.arm.startswith(f"{ORACLE} ") else trials.arm
        by_arm.setdefault(name, []).append(trials)
    chosen = {name: best_by_validation(trials) for name, trials in by_arm.items()}
    arms = {}
    for name, trials in chosen.items():
        arms[name] = trials.describe()
        others = {other: than for other, than in chosen.items() if other != name}
        arms[name]["minus"] = {other: trials.minus(than) for other, than in others.items()}
    rows = []
    for trials in done.values():
        rows += [{**row.to_record(), "rate": trials.rate} for row in trials.rows]
    return {
        "config": config.model_dump(mode="json", exclude={"out", "data_root"}),
        "arms": arms,
        "rows": rows,
    }
