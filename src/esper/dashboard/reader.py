"""A run folder as a view that keeps up with it, by byte offsets into its events files. Never writes into the folder."""

import json
import os
import re
from collections.abc import Iterator, Set
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from esper.dashboard import index
from esper.dashboard.index import Place
from esper.dashboard.view import LOG_LINES, OF_HOST, Episode, RunView
from esper.leyline.errors import SaveError
from esper.leyline.files import open_plain
from esper.telemetry.actions import ACTION_TAKEN
from esper.telemetry.runfolder import CHECKSUM, CONFIG, event_files, is_being_written

LONGEST_LINE = 2**18
"""A longer line is no event of ours."""
WORTH_KEEPING = 2**22
"""Bytes folded anew after which the standing is kept in the cache, or a quarter more; fewer are read faster."""
WORTH_SKIPPING = 2**22
"""Bytes to be folded from which on it pays to look for what need not be."""
_CHUNK, _SAMPLE, _LARGEST_WINDOW = 2**20, 4096, 2**26
_BEGINS = re.compile(rb'\n(?=\{"type": "RoundBegan", "round": \d+\}\n)')
_OF_LIVES = frozenset(kind.encode() for kind in (*OF_HOST, ACTION_TAKEN))
_decode = json.JSONDecoder(parse_constant=lambda name: None).raw_decode


class RunReader:
    """The view of one run folder. `refresh` takes in what is new."""

    def __init__(self, folder: Path, *, cache: Path | None = None):
        self.folder = Path(folder)
        self.cache = index.cache_folder() if cache is None else cache
        self.problem: str | None = None
        """what is wrong with config.json"""
        self.view = self._blank(self._config())
        self.places: dict[int, Place] = {}
        self._kept = 0
        kept = index.load(self.folder, self.cache)
        if kept is not None and kept[0].kind == self.view.kind and self._fits(kept[1]):
            self.view, self.places = kept
            self._kept = self._bytes()

    def refresh(self) -> int:
        """Fold what the files have that the view has not; returns how many records."""
        blank = self._blank(self._config())
        if self.problem is None:
            self.view.config = blank.config
        if not self._fits(self.places) or (self.problem is None and self.view.kind != blank.kind):
            self.view, self.places, self._kept = blank, {}, 0
        before = self.view.events
        for rank, path in event_files(self.folder).items():
            place = self.places.setdefault(rank, Place())
            with _reading(path) as file:
                _follow(file, place, self.view, rank)
                place.sample = _sample(file, place.offset)
        if self._bytes() - self._kept >= max(WORTH_KEEPING, self._kept // 4):
            index.save(self.folder, self.cache, (self.view, self.places))
            self._kept = self._bytes()
        return self.view.events - before

    def status(self) -> str:
        """running, finished, stopped; damaged where config.json does not tell what was started."""
        if self.problem is not None:
            return "damaged"
        if is_being_written(self.folder):
            return "running"
        done, total = self.progress()
        if self.view.kind == "run":
            done, total = len(self.view.results), _whole(self.view.config.get("hosts"))
        return "finished" if 0 < total <= done else "stopped"

    def progress(self) -> tuple[int, int]:
        """Whole rounds (ppo) or epochs (run) so far, and how many there will be: 0 where nobody wrote that down."""
        view = self.view
        if view.kind == "ppo":
            return int(view.rounds.last("round") or 0) + 1 if view.rounds.rows else 0, _whole(view.config.get("rounds"))
        told = max((_whole(result["epochs"]) for result in view.results), default=0)
        done = min((int(episode.epochs.last("epoch") or 0) for episode in view.episodes.values()), default=0)
        return max(done, told), _whole(view.config["task"].get("epochs")) or told

    def episode(self, round: int, host: int) -> Episode | None:
        """One host's episode in any round that there was, read from disk where it is not the newest."""
        newest = self.view.episodes.get(host)
        if newest is not None and newest.round == round:
            return newest
        past = self._blank(self.view.config)
        for rank, path in event_files(self.folder).items():
            starts = self.places[rank].rounds if rank in self.places else {}
            if round in starts:
                end = min((start for start in starts.values() if start > starts[round]), default=None)
                with _reading(path) as file:
                    _follow(file, Place(starts[round]), past, rank, end)
        return past.episodes.get(host)

    def _blank(self, config: dict[str, Any]) -> RunView:
        return RunView(config.get("command", "ppo"), config)

    def _config(self) -> dict[str, Any]:
        path = self.folder / CONFIG
        try:
            with open_plain(path) as file:
                config = json.loads(file.read(_CHUNK), parse_constant=lambda name: None)
            if not isinstance(config, dict) or not isinstance(config.get("task"), dict):
                raise ValueError("it names no task")
            if (command := config.get("command", "ppo")) not in ("ppo", "run"):
                raise ValueError(f"it is of `esper {command}`, which this version does not have")
        except FileNotFoundError:
            raise SaveError(f"{self.folder} is no run folder: it has no {CONFIG}. Name the --out of a run.") from None
        except (OSError, ValueError, RecursionError) as problem:
            self.problem = f"{path} is damaged: {problem}"
            return {"task": {}}
        self.problem = None
        config.pop(CHECKSUM, None)
        return config

    def _bytes(self) -> int:
        return sum(place.offset for place in self.places.values())

    def _fits(self, places: dict[int, Place]) -> bool:
        """Whether every file still begins with what was folded of it."""
        files = event_files(self.folder)
        return all(rank in files and _is_same(files[rank], place) for rank, place in places.items())


@contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    try:
        with open_plain(path) as file:
            yield file
    except OSError as problem:
        raise SaveError(f"cannot read {path}: {problem.strerror}. Make it readable, or copy the run.") from problem


def _follow(file: BinaryIO, place: Place, view: RunView, rank: int, end: int | None = None) -> None:
    """Fold whole lines from a place on, at most to `end`, and move the place along."""
    needed = _first_needed(file, place.offset) if end is None and view.kind == "ppo" else 0
    while end is None or place.offset < end:
        file.seek(place.offset)
        chunk = file.read(_CHUNK if end is None else min(_CHUNK, end - place.offset))
        *lines, rest = chunk.split(b"\n")
        slots = {slot.encode() for slot in view.slots}
        for line in lines:
            if place.offset < needed and not place.is_inside and _leaves_no_trace(line, slots):
                view.events += 1
            else:
                record = {} if place.is_inside or len(line) > LONGEST_LINE else _read_line(line)
                view.fold(record, rank)
                if record.get("type") == "RoundBegan" and record.get("round") == view.begun.get(rank):
                    place.rounds[view.begun[rank]] = place.offset
                place.is_inside = False
            place.offset += len(line) + 1
        if len(rest) > LONGEST_LINE:
            place.offset += len(rest)
            place.is_inside = True
        if len(chunk) < _CHUNK:
            return


def _first_needed(file: BinaryIO, offset: int) -> int:
    """Where to begin to look at episodes, 0 for everywhere: neither the view nor its log needs those before."""
    size = os.fstat(file.fileno()).st_size
    window = WORTH_SKIPPING
    while window <= min(size - offset, _LARGEST_WINDOW):
        file.seek(size - window)
        tail = file.read(window)
        begins = [found.end() for found in _BEGINS.finditer(tail)]
        for begin in reversed(begins[:-1]):  # the newest round takes over who lived in the one before
            if tail.count(b"\n", begin) > LOG_LINES:
                return size - window + begin
        window *= 4
    return 0


def _leaves_no_trace(line: bytes, slots: Set[bytes]) -> bool:
    """Whether a line tells of an episode only, and of no new slot."""
    if line[10 : line.find(b'"', 10)] not in _OF_LIVES:
        return False
    slot = line.find(b'"slot": "') + 9
    return slot < 9 or line[slot : line.find(b'"', slot)] in slots


def _read_line(line: bytes) -> dict[str, Any]:
    """The record on a line; empty where there is none."""
    try:
        text = line.decode()
        record, end = _decode(text)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) and end == len(text) else {}


def _sample(file: BinaryIO, offset: int) -> str:
    size = min(offset, _SAMPLE)
    file.seek(0)
    first = file.read(size)
    file.seek(offset - size)
    return blake2b(first + file.read(size), digest_size=16).hexdigest()


def _is_same(path: Path, place: Place) -> bool:
    try:
        with open_plain(path) as file:
            return os.fstat(file.fileno()).st_size >= place.offset and _sample(file, place.offset) == place.sample
    except OSError:
        return False


def _whole(value: object) -> int:
    return value if type(value) is int and value > 0 else 0
