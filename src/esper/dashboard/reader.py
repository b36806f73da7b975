"""A run folder as a view that keeps up with it by byte offsets, and as a line of a list.

Nothing is written to it.
"""

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path
from statistics import fmean
from typing import Any, BinaryIO

from esper.dashboard.view import Episode, RunView
from esper.leyline.errors import SaveError
from esper.storage.files import open_plain, reading
from esper.storage.runfolder import CHECKSUM, CONFIG, GARDEN_COMMAND, event_files, is_being_written
from esper.telemetry.sink import SEGMENT

LONGEST_LINE = 2**18  # A longer line is no event of ours.
_LARGEST_CONFIG, _LARGEST_EVENTS, _TAIL = 2**20, 16 * SEGMENT, 4096
Stamp = tuple[
    float, bool, list[tuple[int, int, int]]
]  # When its last event was written; what changes with news.
_decode = json.JSONDecoder(parse_constant=lambda name: None).decode


@dataclass
class Place:
    """How far one file is folded."""

    offset: int = 0
    is_inside: bool = False  # whether the offset lies inside a line that is too long
    tail: bytes = b""  # what stands before the offset: in another file it is something else
    rounds: dict[int, int] = field(default_factory=dict)  # round -> where it begins


class RunReader:
    """The view of one run folder. `refresh` takes in what is new."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.problem: str | None = (
            None  # why the folder cannot be shown: a file is damaged, or all of it is older
        )
        self.is_older = False
        self.places: dict[tuple[int, int], Place] = {}  # (rank, segment) -> how far it is folded
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
            key in files and _is_same(files[key], place) for key, place in self.places.items()
        )
        if not is_same or (self.problem is None and self.view.kind != blank.kind):
            self.view, self.places = blank, {}
        before = self.view.events
        for key, path in files.items():
            place = self.places.setdefault(key, Place())
            with reading(path) as file:
                if os.fstat(file.fileno()).st_size > _LARGEST_EVENTS:
                    self.problem = (
                        f"{path} is too large to be events of ours. Look at a "
                        f"copy of the run without it."
                    )
                    continue
                _follow(file, place, self.view, key[0])
                size = min(place.offset, _TAIL)
                file.seek(place.offset - size)
                place.tail = file.read(size)
        return self.view.events - before

    def status(self) -> str:
        """running, finished, stopped; damaged where config.json or events are none of ours; or
        older format.
        """
        if self.problem is not None:
            return "older format" if self.is_older else "damaged"
        if is_being_written(self.folder):
            return "running"
        done, total = self.progress()
        if self.view.config.get("command") == GARDEN_COMMAND:
            done, total = (1, 1) if self.view.ledgers else (done, total)  # harvested
        elif self.view.kind == "run":
            done, total = len(self.view.results), _whole(self.view.config.get("hosts"))
        return "finished" if 0 < total <= done else "stopped"

    def progress(self) -> tuple[int, int]:
        """Whole rounds (ppo) or epochs (run) so far, and how many there will be:

        0 where nobody wrote that down.
        """
        view = self.view
        if view.kind == "ppo":
            return int(view.rounds.last("round") or 0) + 1 if view.rounds.rows else 0, _whole(
                view.config.get("rounds")
            )
        told = max((_whole(result["epochs"]) for result in view.results), default=0)
        done = min(
            (int(episode.epochs.last("epoch") or 0) for episode in view.episodes.values()),
            default=0,
        )
        return max(done, told), _whole(view.config["task"].get("epochs")) or told

    def episode(self, round: int, host: int) -> Episode | None:
        """One host's episode in any round that there was, read from disk where it is not the
        newest.
        """
        if (newest := self.view.episodes.get(host)) is not None and newest.round == round:
            return newest
        past = _blank(self.view.config)
        for (rank, segment), path in event_files(
            self.folder
        ).items():  # a round is saved, so it is in one segment
            starts = self.places.get((rank, segment), Place()).rounds
            if round in starts:
                end = min(
                    (start for start in starts.values() if start > starts[round]), default=inf
                )
                with reading(path) as file:
                    _follow(file, Place(starts[round]), past, rank, end)
        return past.episodes.get(host)

    def _config(self) -> dict[str, Any]:
        path = self.folder / CONFIG
        try:
            with open_plain(path) as file:
                config = json.loads(file.read(_LARGEST_CONFIG), parse_constant=lambda name: None)
            if not isinstance(config, dict) or not isinstance(config.get("task"), dict):
                raise ValueError("it names no task")
            command = config.get("command", "ppo")
            if command not in ("ppo", "run", "grow", GARDEN_COMMAND):
                raise ValueError(f"it is of `esper {command}`, which no page shows")
        except FileNotFoundError:
            raise SaveError(
                f"{self.folder} is not a run folder: it has no {CONFIG}. Name a run's --out."
            ) from None
        except (OSError, ValueError, RecursionError) as problem:
            self.problem = f"{path} is damaged: {problem}"
            return {"task": {}}
        self.is_older = command == "grow" or "life" in config["task"]  # as 0.1 wrote them
        advice = "Look at it with the version of esper that wrote it."
        self.problem = f"{self.folder} is of an older format. {advice}" if self.is_older else None
        config.pop(CHECKSUM, None)
        return config


def _blank(config: dict[str, Any]) -> RunView:
    command = config.get("command", "ppo")
    return RunView("run" if command == GARDEN_COMMAND else command, config)


def open_run(folder: Path) -> RunReader:
    """A reader of a run that this version can show."""
    reader = RunReader(folder)
    if reader.is_older:
        raise SaveError(str(reader.problem))
    return reader


def _follow(file: BinaryIO, place: Place, view: RunView, rank: int, end: float = inf) -> None:
    """Fold whole lines from a place on, at most to `end`, and move the place along."""
    file.seek(place.offset)
    while place.offset < end and (line := file.readline(LONGEST_LINE)):
        is_whole = line.endswith(b"\n")
        if not is_whole and len(line) < LONGEST_LINE:
            return  # its rest is being written
        if is_whole:
            record: dict[str, Any] = {}
            with suppress(ValueError, RecursionError):
                if not place.is_inside and isinstance(found := _decode(line.decode()), dict):
                    record = found
            view.fold(record, rank)
            if record.get("type") == "RoundBegan" and record.get("round") == view.begun.get(rank):
                place.rounds[view.begun[rank]] = place.offset
        place.is_inside = not is_whole
        place.offset += len(line)


def _is_same(path: Path, place: Place) -> bool:
    """Whether a file still holds what was folded of it."""
    with suppress(OSError), open_plain(path) as file:
        file.seek(place.offset - len(place.tail))
        return file.read(len(place.tail)) == place.tail
    return False


def _whole(value: object) -> int:
    return value if type(value) is int and value > 0 else 0


@dataclass(frozen=True)
class RunSummary:
    """One run in a list; None is not known yet."""

    name: str
    path: Path
    kind: str
    task: str
    policy: str
    status: str  # as `RunReader.status` says
    done: int
    total: int  # rounds (ppo) or epochs (run); a total of 0 is not written down
    best_accuracy: float | None  # held-out: the best round's mean (ppo), the best host's last (run)
    params: int | None  # of that host (run), mean of the newest episodes (ppo)
    age_seconds: float | None  # since the last event
    events: int


def is_run(folder: Path) -> bool:
    """Whether a folder looks like what a training command leaves behind; a link does not."""
    config = folder / CONFIG
    return (
        not folder.is_symlink()
        and config.is_file()
        and not config.is_symlink()
        and bool(event_files(folder))
    )


def find_runs(folder: Path) -> list[Path]:
    """The run folders in a folder, by name; or the folder itself where it is one."""
    try:
        return [folder] if is_run(folder) else sorted(filter(is_run, folder.iterdir()))
    except OSError as problem:
        raise SaveError(
            f"cannot list the runs in {folder}: {problem.strerror}. Name their folder."
        ) from problem


def stamp_of(folder: Path) -> Stamp:
    """The stamp of a run; nothing of the run is read."""
    try:
        found = [path.stat() for path in (folder / CONFIG, *event_files(folder).values())]
    except OSError:
        return 0.0, False, []
    files = [(file.st_ino, file.st_size, file.st_mtime_ns) for file in found]
    return max(file.st_mtime for file in found[1:] or found), is_being_written(folder), files


def summarise(reader: RunReader) -> RunSummary:
    """A run in one line, as far as its reader has come."""
    view = reader.view
    times = [path.stat().st_mtime for path in event_files(reader.folder).values()]
    age = max(0.0, time.time() - max(times)) if times else None
    task, policy = (
        str(view.config.get("task", {}).get("name", "")),
        str(view.config.get("policy", "")),
    )
    what = (
        reader.folder.resolve().name,
        reader.folder,
        view.kind,
        task,
        policy if view.kind == "run" else "ppo",
    )
    return RunSummary(*what, reader.status(), *reader.progress(), *_best(view), age, view.events)


def _best(view: RunView) -> tuple[float | None, int | None]:
    last = [
        (episode.epochs.last("accuracy"), episode.epochs.last("params"))
        for episode in view.episodes.values()
    ]
    known = [
        (accuracy, int(params))
        for accuracy, params in last
        if params is not None and isfinite(params)
    ]
    if view.kind != "run":
        best = max(
            (value for value in view.rounds.column("accuracy") if value == value), default=None
        )
        return best, round(fmean(params for _, params in known)) if known else None
    found = [(result["validation_accuracy"], result["final_params"]) for result in view.results]
    # one's own loop may have no accuracy
    return max(
        found or [pair for pair in known if pair[0] is not None] or known[:1], default=(None, None)
    )
