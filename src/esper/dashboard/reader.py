"""A run folder as a view that keeps up with it by byte offsets, and as a line of a list.

Nothing is written to it.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf, isfinite, isnan
from pathlib import Path
from statistics import fmean
from typing import Any, BinaryIO, NamedTuple

from esper.dashboard.episode import Episode
from esper.dashboard.view import RunView
from esper.leyline.errors import SaveError
from esper.storage.files import open_plain, reading
from esper.storage.runfolder import (
    ARMS,
    CHECKSUM,
    COMPARE_COMMAND,
    CONFIG,
    GARDEN_COMMAND,
    RESULTS,
    event_files,
    is_being_written,
    label_policies,
)
from esper.telemetry.sink import SEGMENT

LONGEST_LINE = 2**18
"""Bytes of a line; a longer one is no event of ours."""

LARGEST_CONFIG = 2**20
"""Bytes of a config.json that are read."""

_LARGEST_EVENTS = 16 * SEGMENT
_TAIL = 4096
_decode = json.JSONDecoder(parse_constant=lambda name: None).decode


class FileStamp(NamedTuple):
    """What changes with a file."""

    inode: int
    size: int
    modified: int  # nanoseconds


class Stamp(NamedTuple):
    """What changes with a run. Nothing of the run is read for it."""

    written: float  # when its last event was
    is_running: bool
    files: list[FileStamp]

    @property
    def size(self) -> int:
        """Bytes of the run's files."""
        return sum(file.size for file in self.files)


class Progress(NamedTuple):
    """Whole rounds (ppo) or epochs (run)."""

    done: int
    total: int  # 0 where the run folder does not record it


@dataclass
class Bookmark:
    """How far one file is folded."""

    offset: int = 0
    is_inside: bool = False  # whether the offset lies inside a line that is too long
    tail: bytes = b""  # what stands before the offset: in another file it is something else
    rounds: dict[int, int] = field(default_factory=dict)  # round -> the offset where it begins


class RunReader:
    """The view of one run folder. `refresh` takes in what is new."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        # why the folder cannot be shown: a file is damaged, or all of it is older
        self.problem: str | None = None
        self.is_older = False
        # (rank, segment) -> how far it is folded
        self.bookmarks: dict[tuple[int, int], Bookmark] = {}
        self.view = _blank(self._config())

    def refresh(self) -> int:
        """Fold what the files have that the view has not; returns how many records."""
        blank = _blank(self._config())
        if self.is_older:
            return 0
        if self.problem is None:
            self.view.config = blank.config
        files = event_files(self.folder)
        is_same = all(
            key in files and _is_same(files[key], bookmark)
            for key, bookmark in self.bookmarks.items()
        )
        if not is_same or (self.problem is None and self.view.kind != blank.kind):
            self.view = blank
            self.bookmarks = {}
        before = self.view.events
        for key, path in files.items():
            self._read_on(path, self.bookmarks.setdefault(key, Bookmark()), key.rank)
        return self.view.events - before

    def _read_on(self, path: Path, bookmark: Bookmark, rank: int) -> None:
        """Fold what one file has behind its bookmark."""
        with reading(path) as file:
            if os.fstat(file.fileno()).st_size > _LARGEST_EVENTS:
                self.problem = (
                    f"{path} is too large to be events of ours. "
                    "Look at a copy of the run without it."
                )
                return
            _follow(file, bookmark, self.view, rank)
            size = min(bookmark.offset, _TAIL)
            file.seek(bookmark.offset - size)
            bookmark.tail = file.read(size)

    def status(self) -> str:
        """Return running, finished, stopped, damaged or older format.

        Damaged is a run whose config.json or events are none of ours.
        """
        if self.problem is not None:
            return "older format" if self.is_older else "damaged"
        view = self.view
        # its process may live on, with the folder in its hands
        if view.config.get("command") == GARDEN_COMMAND and view.is_harvested:
            return "finished"
        if is_being_written(self.folder):
            return "running"
        done, total = self.progress()
        if view.config.get("command") != GARDEN_COMMAND and view.kind == "run":
            done = len(view.results)
            total = _whole(view.config.get("hosts"))
        return "finished" if 0 < total <= done else "stopped"

    def progress(self) -> Progress:
        """Return how far the run is."""
        view = self.view
        if view.kind == "ppo":
            done = int(view.rounds.last("round") or 0) + 1 if view.rounds.rows else 0
            return Progress(done=done, total=_whole(view.config.get("rounds")))
        ended = max((_whole(result["epochs"]) for result in view.results), default=0)
        trained = [int(episode.epochs.last("epoch") or 0) for episode in view.episodes.values()]
        planned = _whole(view.config["task"].get("epochs"))
        return Progress(done=max(min(trained, default=0), ended), total=planned or ended)

    def episode(self, round: int, host: int) -> Episode | None:
        """Return one host's episode in any round that there was.

        It is read from disk where it is not the newest.
        """
        newest = self.view.episodes.get(host)
        if newest is not None and newest.round == round:
            return newest
        past = _blank(self.view.config)
        # a round is saved, so it is in one segment
        for key, path in event_files(self.folder).items():
            starts = self.bookmarks.get(key, Bookmark()).rounds
            if round not in starts:
                continue
            later = [start for start in starts.values() if start > starts[round]]
            with reading(path) as file:
                start = Bookmark(offset=starts[round])
                _follow(file, start, past, key.rank, end=min(later, default=inf))
        return past.episodes.get(host)

    def _config(self) -> dict[str, Any]:
        """Read what the run was started with, and note why it cannot be shown, if so."""
        path = self.folder / CONFIG
        try:
            with open_plain(path) as file:
                config = json.loads(file.read(LARGEST_CONFIG), parse_constant=lambda name: None)
            if not isinstance(config, dict) or not isinstance(config.get("task"), dict):
                raise ValueError("it names no task")
            command = config.get("command", "ppo")
            if command not in ("ppo", "run", "grow", GARDEN_COMMAND, COMPARE_COMMAND):
                raise ValueError(f"it is of `esper {command}`, which no page shows")
        except FileNotFoundError:
            raise SaveError(
                f"{self.folder} is not a run folder: it has no {CONFIG}. Name a run's --out."
            ) from None
        except (OSError, ValueError, RecursionError) as problem:
            self.problem = f"{path} is damaged: {problem}"
            return {"task": {}}
        if command == COMPARE_COMMAND:
            raise SaveError(
                f"{self.folder} is a comparison. Look at it with esper serve, "
                f"or with esper report {self.folder}."
            )
        self.is_older = command == "grow" or "life" in config["task"]  # as 0.1 wrote them
        self.problem = None
        if self.is_older:
            self.problem = (
                f"{self.folder} is of an older format. "
                "Look at it with the version of esper that wrote it."
            )
        config.pop(CHECKSUM, None)
        return config


def _blank(config: dict[str, Any]) -> RunView:
    command = config.get("command", "ppo")
    return RunView("run" if command == GARDEN_COMMAND else command, config)


def open_run(folder: Path) -> RunReader:
    """Return a reader of a run that this version can show."""
    reader = RunReader(folder)
    if reader.is_older:
        raise SaveError(str(reader.problem))
    return reader


def _follow(file: BinaryIO, bookmark: Bookmark, view: RunView, rank: int, end: float = inf) -> None:
    """Fold whole lines from a bookmark on, at most to `end`, and move the bookmark along."""
    file.seek(bookmark.offset)
    while bookmark.offset < end:
        line = file.readline(LONGEST_LINE)
        is_whole = line.endswith(b"\n")
        if not is_whole and len(line) < LONGEST_LINE:
            return  # the file ends, or the rest of the line is being written
        if is_whole:
            record = {} if bookmark.is_inside else _read_record(line)
            view.fold(record, rank)
            if record.get("type") == "RoundBegan" and record.get("round") == view.begun.get(rank):
                bookmark.rounds[view.begun[rank]] = bookmark.offset
        bookmark.is_inside = not is_whole
        bookmark.offset += len(line)


def records_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Read all whole records of a run's events, rank by rank, without a view of them."""
    for path in event_files(folder).values():
        with reading(path) as file:
            is_inside = False  # of a line that is too long to be an event of ours
            for line in iter(lambda: file.readline(LONGEST_LINE), b""):
                is_whole = line.endswith(b"\n")
                record = _read_record(line) if is_whole and not is_inside else {}
                is_inside = not is_whole
                if record:
                    yield record


def _read_record(line: bytes) -> dict[str, Any]:
    """Return the record in a line; empty where it is none."""
    with suppress(ValueError, RecursionError):
        record = _decode(line.decode())
        if isinstance(record, dict):
            return record
    return {}


def _is_same(path: Path, bookmark: Bookmark) -> bool:
    """Whether a file still holds what was folded of it."""
    with suppress(OSError), open_plain(path) as file:
        file.seek(bookmark.offset - len(bookmark.tail))
        return file.read(len(bookmark.tail)) == bookmark.tail
    return False


def _whole(value: object) -> int:
    """Return a whole number above 0 as it is, and anything else as 0."""
    return value if type(value) is int and value > 0 else 0


@dataclass(frozen=True)
class RunSummary:
    """One run in a list; None is not known yet."""

    name: str
    path: Path
    kind: str  # ppo, run or compare
    task: str
    policy: str
    status: str  # as `RunReader.status` says
    done: int
    total: int  # rounds (ppo), epochs (run), arms (compare); a total of 0 is not written down
    # held-out: the best round's mean (ppo), the best host's last (run); the best arm's mean on test
    # examples (compare)
    best_accuracy: float | None
    params: int | None  # of that host (run) or arm (compare), mean of the newest episodes (ppo)
    age_seconds: float | None  # since the last event
    events: int
    # of a loop of one's own without accuracy: the best host's, by loss where there is one
    best_loss: float | None = None
    best_score: float | None = None

    @property
    def best(self) -> str:
        """The best accuracy, or else the loss or the score; nothing where none is measured."""
        if self.best_accuracy is not None:
            return f"{self.best_accuracy:.2%}"
        if self.best_loss is not None:
            return f"loss {self.best_loss:.4g}"
        return "" if self.best_score is None else f"score {self.best_score:.4g}"


def is_run(folder: Path) -> bool:
    """Whether a folder looks like what a training command leaves behind; a link does not."""
    config = folder / CONFIG
    if folder.is_symlink() or config.is_symlink() or not config.is_file():
        return False
    return bool(event_files(folder))


def is_comparison(folder: Path) -> bool:
    """Whether a folder looks like what `esper compare` leaves behind; a link does not."""
    config = folder / CONFIG
    if folder.is_symlink() or config.is_symlink() or not config.is_file() or event_files(folder):
        return False
    with suppress(OSError, ValueError, RecursionError), open_plain(config) as file:
        start = json.loads(file.read(LARGEST_CONFIG))
        return isinstance(start, dict) and start.get("command") == COMPARE_COMMAND
    return False


def find_runs(folder: Path) -> list[Path]:
    """Return the folders of runs and comparisons in a folder, by name.

    Where the folder is one itself, it is the only one.
    """
    try:
        if is_run(folder) or is_comparison(folder):
            return [folder]
        return sorted(path for path in folder.iterdir() if is_run(path) or is_comparison(path))
    except OSError as problem:
        raise SaveError(
            f"cannot list the runs in {folder}: {problem.strerror}. Name their folder."
        ) from problem


def stamp_of(folder: Path) -> Stamp:
    """Return the stamp of a run or comparison; nothing of it is read."""
    try:
        config = (folder / CONFIG).stat()
        shown = [path.stat() for path in event_files(folder).values()]
        if not shown:
            shown = [(folder / name).stat() for name in (ARMS, RESULTS) if (folder / name).exists()]
    except OSError:
        return Stamp(written=0.0, is_running=False, files=[])
    return Stamp(
        written=max(file.st_mtime for file in shown or [config]),
        is_running=is_being_written(folder),
        files=[
            FileStamp(inode=file.st_ino, size=file.st_size, modified=file.st_mtime_ns)
            for file in (config, *shown)
        ],
    )


def summarise(reader: RunReader) -> RunSummary:
    """Return a run in one line, as far as its reader has come."""
    view = reader.view
    times = [path.stat().st_mtime for path in event_files(reader.folder).values()]
    progress = reader.progress()
    best = _best_grown(view) if view.kind == "run" else _best_taught(view)
    policy = str(view.config.get("policy", "")) if view.kind == "run" else "ppo"
    return RunSummary(
        name=reader.folder.resolve().name,
        path=reader.folder,
        kind=view.kind,
        task=_task_name(view.config),
        policy=label_policies([policy])[policy],
        status=reader.status(),
        done=progress.done,
        total=progress.total,
        best_accuracy=best.accuracy,
        best_loss=best.loss,
        best_score=best.score,
        params=best.params,
        age_seconds=max(0.0, time.time() - max(times)) if times else None,
        events=view.events,
    )


def _task_name(config: dict[str, Any]) -> str:
    """The task of a run; of a suite all its families."""
    with suppress(LookupError, TypeError, AttributeError):
        return ", ".join(str(family["task"]["name"]) for family in config["suite"]["families"])
    return str(config.get("task", {}).get("name", ""))


class _Best(NamedTuple):
    """The best accuracy, loss or score, and the parameters that go with it."""

    accuracy: float | None = None
    loss: float | None = None
    score: float | None = None
    params: int | None = None


def _best_taught(view: RunView) -> _Best:
    """Return the best round's mean accuracy, and the newest episodes' mean size."""
    accuracies = [value for value in view.rounds.column("accuracy") if not isnan(value)]
    sizes = [state.params for state in _newest_states(view) if state.params is not None]
    return _Best(
        accuracy=max(accuracies, default=None), params=round(fmean(sizes)) if sizes else None
    )


def _best_grown(view: RunView) -> _Best:
    """Return the best host's accuracy and size: of the results, or else of the newest epochs."""
    if view.results:
        best = max(view.results, key=lambda r: (r["validation_accuracy"], r["final_params"]))
        return _Best(accuracy=best["validation_accuracy"], params=best["final_params"])
    states = _newest_states(view)
    return max(states, key=_goodness, default=_Best())


def _goodness(state: _Best) -> tuple[bool, float, bool, float, bool, float, int]:
    """Orders hosts: by accuracy where it is measured, else by loss, else by score."""
    return (
        state.accuracy is not None,
        state.accuracy or 0.0,
        state.loss is not None,
        -(state.loss or 0.0),
        state.score is not None,
        state.score or 0.0,
        state.params or 0,
    )


def _newest_states(view: RunView) -> list[_Best]:
    """Return the newest readings and the size of every host whose size is known."""
    states = []
    for episode in view.episodes.values():
        last = episode.epochs.last
        params = last("params")
        if params is not None and isfinite(params):
            state = _Best(
                accuracy=last("accuracy"),
                loss=last("held_out_loss"),
                score=last("score"),
                params=int(params),
            )
            states.append(state)
    return states
