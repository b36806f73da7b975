"""Where a reader stands, kept in a cache so that a long run opens at once. What does not fit exactly is ignored."""

import json
import os
from array import array
from base64 import b64decode, b64encode
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from esper.dashboard import series, view
from esper.dashboard.series import Series
from esper.dashboard.view import LOG_LINES, Episode, LogLine, RunView, SeedSpan

State = dict[str, Any]


@dataclass
class Place:
    """How far one file is folded."""

    offset: int = 0
    is_inside: bool = False
    """whether the offset lies inside a line that is too long"""
    sample: str = ""
    """digest of the first bytes and of those before the offset: another file has another one"""
    rounds: dict[int, int] = field(default_factory=dict)
    """round -> where it begins"""


Standing = tuple[RunView, dict[int, Place]]
"""A view and, by rank, how far each file is folded into it."""


def cache_folder() -> Path:
    """$ESPER_CACHE, or esper's own among the user's caches."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("ESPER_CACHE") or Path(caches, "esper"))


def save(folder: Path, cache: Path, standing: Standing) -> None:
    """Keep a standing for the next reader of the folder; a cache that cannot be written is no loss."""
    found, places = standing
    state = {"of": _identity(folder), "view": {**vars(found), "lines": found.log, "unread": []}, "places": places}
    content = json.dumps(state, default=_plain).encode()
    path = _path(folder, cache)
    with suppress(OSError):
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=cache, prefix=path.name, delete=False) as file:
            file.write(sha256(content).hexdigest().encode() + content)
        os.replace(file.name, path)


def load(folder: Path, cache: Path) -> Standing | None:
    """What was kept about this folder by this version; None where there is nothing that is whole."""
    try:
        kept = _path(folder, cache).read_bytes()
        if sha256(kept[64:]).hexdigest().encode() != kept[:64]:
            return None
        state = json.loads(kept[64:])
        if state["of"] != _identity(folder):
            return None
        places = {
            int(rank): Place(**{**place, "rounds": _numbered(place["rounds"])})
            for rank, place in state["places"].items()
        }
        return _view(state["view"]), places
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _path(folder: Path, cache: Path) -> Path:
    return cache / f"{sha256(os.fsencode(folder.resolve())).hexdigest()[:32]}.json"


def _identity(folder: Path) -> list[str]:
    return [str(folder.resolve()), _code()]


@cache
def _code() -> str:
    """Another version may fold in another way."""
    sources = [Path(str(module.__file__)).read_bytes() for module in (series, view)]
    return sha256(b"".join(sources)).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, array):
        return b64encode(value).decode()
    return list(value) if isinstance(value, deque) else vars(value)


def _numbered(state: State) -> dict[int, Any]:
    return {int(key): value for key, value in state.items()}


def _series(state: State) -> Series:
    found = Series()
    found.names, found.rows, found.values = state["names"], state["rows"], array("d", b64decode(state["values"]))
    return found


def _span(state: State) -> SeedSpan:
    stages = [(name, epoch) for name, epoch in state["stages"]]
    return SeedSpan(**{**state, "stages": stages, "readings": _series(state["readings"])})


def _episode(state: State) -> Episode:
    return Episode(**{**state, "epochs": _series(state["epochs"]), "spans": [_span(span) for span in state["spans"]]})


def _view(state: State) -> RunView:
    changed = {
        "rounds": _series(state["rounds"]),
        "begun": _numbered(state["begun"]),
        "chosen": {rank: Counter(ops) for rank, ops in _numbered(state["chosen"]).items()},
        "closed": tuple(state["closed"]),
        "episodes": {host: _episode(episode) for host, episode in _numbered(state["episodes"]).items()},
        "lines": deque((LogLine(**line) for line in state["lines"]), LOG_LINES),
        "unread": deque(maxlen=LOG_LINES),
    }
    return RunView(**{**state, **changed})
