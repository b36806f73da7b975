"""The runs in a folder, and each of them in one line. No drawing."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from esper.dashboard.reader import RunReader
from esper.dashboard.view import RunView
from esper.leyline.errors import SaveError
from esper.telemetry.runfolder import CONFIG, event_files, is_being_written


@dataclass(frozen=True)
class RunSummary:
    """One run in a list; None is not known yet."""

    name: str
    path: Path
    kind: str
    task: str
    policy: str
    status: str
    """as `RunReader.status` says"""
    done: int
    total: int
    """rounds (ppo) or epochs (run); a total of 0 is not written down"""
    best_accuracy: float | None
    """held-out: the best round's mean (ppo), the best host's last (run)"""
    params: int | None
    """of that host (run), mean of the newest episodes (ppo)"""
    age_seconds: float | None  # since the last event
    events: int


def is_run(folder: Path) -> bool:
    """Whether a folder looks like what a training command leaves behind; a link does not."""
    config = folder / CONFIG
    return not folder.is_symlink() and config.is_file() and not config.is_symlink() and bool(event_files(folder))


def find_runs(folder: Path) -> list[Path]:
    """The run folders in a folder, by name; or the folder itself where it is one."""
    try:
        if is_run(folder):
            return [folder]
        return sorted(path for path in folder.iterdir() if path.is_dir() and is_run(path))
    except OSError as problem:
        raise SaveError(f"cannot list the runs in {folder}: {problem.strerror}. Name their folder.") from problem


class Stamp(NamedTuple):
    """What changes when a run has something new to tell."""

    is_running: bool
    newest: float
    """when the last event was written"""
    files: tuple[tuple[int, int, int], ...]


def stamp_of(folder: Path) -> Stamp:
    """The stamp of a run; nothing of the run is read."""
    try:
        config, *events = [path.stat() for path in (folder / CONFIG, *event_files(folder).values())]
    except OSError:
        return Stamp(False, 0.0, ())
    files = tuple((file.st_ino, file.st_size, file.st_mtime_ns) for file in (config, *events))
    return Stamp(is_being_written(folder), max((file.st_mtime for file in events), default=0.0), files)


def summarise(reader: RunReader) -> RunSummary:
    """A run in one line, as far as its reader has come."""
    view = reader.view
    done, total = reader.progress()
    accuracy, params = (_best_grown if view.kind == "run" else _best_round)(view)
    times = [path.stat().st_mtime for path in event_files(reader.folder).values()]
    return RunSummary(
        name=reader.folder.resolve().name,
        path=reader.folder,
        kind=view.kind,
        task=str(view.config.get("task", {}).get("name", "")),
        policy=str(view.config.get("policy", "")) if view.kind == "run" else "ppo",
        status=reader.status(),
        done=done,
        total=total,
        best_accuracy=accuracy,
        params=params,
        age_seconds=max(0.0, time.time() - max(times)) if times else None,
        events=view.events,
    )


def _best_grown(view: RunView) -> tuple[float | None, int | None]:
    found = [(result["validation_accuracy"], result["final_params"]) for result in view.results]
    if not found:
        last = [(episode.epochs.last("accuracy"), episode.epochs.last("params")) for episode in view.episodes.values()]
        found = [(accuracy, int(params)) for accuracy, params in last if accuracy is not None and params is not None]
    return max(found, default=(None, None))


def _best_round(view: RunView) -> tuple[float | None, int | None]:
    sizes = [size for episode in view.episodes.values() if (size := episode.epochs.last("params")) is not None]
    best = max((value for value in view.rounds.column("accuracy") if value == value), default=None)
    return best, round(sum(sizes) / len(sizes)) if sizes else None
