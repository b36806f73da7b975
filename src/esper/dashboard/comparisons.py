"""The folder of `esper compare` as plain data: arms, intervals, paired differences, curves.

Nothing is written to it, and nothing is measured again.
"""

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from esper.dashboard.reader import (
    LARGEST_CONFIG,
    RunReader,
    RunSummary,
    is_comparison,
    is_run,
    open_run,
    summarise,
)
from esper.leyline.errors import SaveError
from esper.storage.files import names_in, open_plain
from esper.storage.runfolder import (
    ARMS,
    CHECKSUM,
    CONFIG,
    RESULTS,
    is_being_written,
    label_policies,
    read_json,
)
from esper.telemetry.wording import describe_drawn

FINALS = ("final", "final-equal-flops", "final-whole")
CONTROLS = ("never", "sham", "random", "schedule", "search", "start", *FINALS, "oracle")
"""What every other arm is measured against, where it is there, with whatever settings."""

_LARGEST_RESULTS = 2**27


class Interval(BaseModel):
    """A mean with its 95 % interval; one seed alone has none."""

    mean: float
    low: float | None
    high: float | None


class Difference(Interval):
    """By how much an arm is better than another, and what may be claimed of it."""

    verdict: str


class ArmSummary(BaseModel):
    """One arm at the rate that validation chose, as `results.json` has it."""

    arm: str
    rate: float
    seeds: list[int]
    episodes: int | None
    plan: str | None = None
    test_accuracy: Interval
    test_loss: Interval
    final_params: float
    peak_params: float
    flops: float
    seconds: float
    germinated: float
    fossilized: float
    culled: float
    minus: dict[str, dict[str, Difference]]
    curve: dict[str, list[float]] = {}


class SeedRow(BaseModel):
    """What one episode reached."""

    arm: str
    seed: int
    rate: float
    test_accuracy: float
    test_loss: float
    variation: int | None = None  # of a host that differs from others, with what it has drawn
    drawn: dict[str, float] = {}


class Results(BaseModel):
    """What of `results.json` a page shows."""

    arms: dict[str, ArmSummary]
    rows: list[SeedRow]


class ComparisonReader:
    """The results of one comparison, or how far it is. `refresh` takes in what is new."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.problem: str | None = None  # why the folder cannot be shown
        self.config: dict[str, Any] = {}
        self.results: Results | None = None
        self.version = 0  # of the results; another number is another content
        self._seen: tuple[int, int, int] | None = None

    def refresh(self) -> None:
        """Read the settings, and the results if they are other ones."""
        self.problem = None
        try:
            with open_plain(self.folder / CONFIG) as file:
                config = json.loads(file.read(LARGEST_CONFIG), parse_constant=lambda name: None)
            config.pop(CHECKSUM, None)
            self.config = config
            self._read_results()
        except (OSError, ValueError, RecursionError, AttributeError, SaveError) as problem:
            self.problem = f"{self.folder} cannot be shown: {_first_line(problem)}"
            self.results = None
            self._seen = None

    def _read_results(self) -> None:
        path = self.folder / RESULTS
        if not path.exists():
            self.results = None
            return
        status = path.stat()
        seen = (status.st_ino, status.st_size, status.st_mtime_ns)
        if seen == self._seen:
            return
        if status.st_size > _LARGEST_RESULTS:
            raise SaveError(f"{path} is too large to be results of ours.")
        self.results = TypeAdapter(Results).validate_python(read_json(path))
        self._seen = seen
        self.version += 1

    def status(self) -> str:
        """Return running, finished, stopped or damaged."""
        if self.problem is not None:
            return "damaged"
        if is_being_written(self.folder):
            return "running"
        return "stopped" if self.results is None else "finished"

    def played(self) -> int:
        """How many arms are played, each rate of its own counted."""
        with suppress(OSError):
            return sum(name.endswith(".json") for name in names_in(self.folder / ARMS))
        return 0


FolderReader = RunReader | ComparisonReader


def open_folder(folder: Path) -> FolderReader:
    """Return a reader of a run, or of a comparison."""
    return ComparisonReader(folder) if is_comparison(folder) else RunReader(folder)


def open_shown(folder: Path) -> FolderReader:
    """Return a reader that has taken in a folder which this version can show."""
    if is_comparison(folder.resolve()):
        comparison = ComparisonReader(folder)
        comparison.refresh()
        if comparison.problem is not None:
            raise SaveError(comparison.problem)
        return comparison
    if not is_run(folder.resolve()):
        raise SaveError(
            f"{folder} is neither a run folder nor a comparison: it has no {CONFIG} with events "
            "or arms. Name the --out of a run or of esper compare."
        )
    run = open_run(folder)
    run.refresh()
    return run


def summarise_comparison(reader: ComparisonReader) -> RunSummary:
    """Return a comparison in one line of a list: its best arm, by the mean on test examples."""
    arms = {} if reader.results is None else reader.results.arms
    best = max(arms.values(), key=lambda arm: arm.test_accuracy.mean, default=None)
    task = reader.config.get("task")
    policies = reader.config.get("policies")
    labels = label_policies(map(str, policies) if isinstance(policies, list) else ())
    return RunSummary(
        name=reader.folder.resolve().name,
        path=reader.folder,
        kind="compare",
        task=str(task.get("name", "")) if isinstance(task, dict) else "",
        policy=", ".join(labels.values()),
        status=reader.status(),
        done=len(arms) or reader.played(),
        total=len(arms),
        best_accuracy=None if best is None else best.test_accuracy.mean,
        best_loss=None if best is None else best.test_loss.mean,
        best_score=None,
        params=None if best is None else round(best.final_params),
        age_seconds=max(0.0, time.time() - written_at(reader.folder)),
        events=0,
    )


def summarise_folder(reader: FolderReader) -> RunSummary:
    """Return a run or a comparison in one line of a list."""
    if isinstance(reader, ComparisonReader):
        return summarise_comparison(reader)
    return summarise(reader)


def written_at(folder: Path) -> float:
    """When a comparison last wrote something that is shown."""
    times = [0.0]
    for name in (CONFIG, ARMS, RESULTS):
        with suppress(OSError):
            times.append((folder / name).stat().st_mtime)
    return max(times)


def comparison_header(reader: ComparisonReader) -> dict[str, Any]:
    """Return a comparison's line of the list as plain data."""
    summary = summarise_comparison(reader)
    return {name: value for name, value in vars(summary).items() if name != "path"}


def comparison_data(reader: ComparisonReader) -> dict[str, Any]:
    """Return what a page shows of a comparison; without results it has no arms yet."""
    results = reader.results
    data: dict[str, Any] = {
        "header": comparison_header(reader),
        "config": reader.config,
        "version": reader.version,
        "arms": [],
        "pairs": [],
        "hosts": [],
    }
    if results is None:
        return data
    labels = label_policies(results.arms)
    data["arms"] = [
        _arm_data(name, labels[name], arm, results.rows) for name, arm in results.arms.items()
    ]
    data["pairs"] = [
        pair for pair in pairs_of(results.arms) if pair[1] in results.arms[pair[0]].minus
    ]
    data["hosts"] = _hosts_data(results.rows)
    return data


def _hosts_data(rows: Iterable[SeedRow]) -> list[dict[str, Any]]:
    """What each host seed has drawn; nothing where hosts are alike."""
    hosts = {}
    for row in rows:
        if row.variation is not None:
            drawn = describe_drawn(row.drawn)
            hosts[row.seed] = {"seed": row.seed, "variation": row.variation, "drawn": drawn}
    return list(hosts.values())


def _arm_data(name: str, label: str, arm: ArmSummary, rows: Iterable[SeedRow]) -> dict[str, Any]:
    """One arm with what each of its host seeds reached."""
    reached = {row.seed: row for row in rows if (row.arm, row.rate) == (arm.arm, arm.rate)}
    seeds = [seed for seed in arm.seeds if seed in reached]
    return {
        **arm.model_dump(),
        "name": name,
        "label": label,
        "seeds": seeds,
        "accuracies": [reached[seed].test_accuracy for seed in seeds],
        "losses": [reached[seed].test_loss for seed in seeds],
    }


def pairs_of(arms: Iterable[str]) -> list[tuple[str, str]]:
    """Return the pairs (arm, other) to be held against each other.

    These are every policy with the controls and with the policies before it.
    """
    names = list(arms)
    finals = {
        f"{kind} of {arm}": arm for kind in CONTROLS for arm in names
    }  # each held against its own arm only
    others = [name for name in names if name not in finals]
    controls = [name for name in others if name.partition(":")[0] in CONTROLS]
    if not (tried := [name for name in others if name not in controls]):
        controls, tried = [], others  # each control with those before it
    pairs = []
    for name in others:
        before = [*controls, *tried[: tried.index(name)]] if name in tried else []
        pairs += [
            (name, other) for other in (*before, *(one for one in names if finals.get(one) == name))
        ]
    return pairs


def _first_line(problem: Exception) -> str:
    if isinstance(problem, ValidationError):
        where = ".".join(map(str, problem.errors()[0]["loc"]))
        return f"{RESULTS} does not have {where} as esper compare writes it."
    return str(problem).partition("\n")[0]
