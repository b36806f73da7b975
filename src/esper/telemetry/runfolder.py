"""A run on disk: who may write to it, what it was started with, which checkpoints are whole. No training in here."""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from esper.leyline.errors import EsperError, SaveError

EVENTS, CONFIG, MANIFEST, CHECKPOINTS, TWINS = "events-0.jsonl", "config.json", "manifest.json", "checkpoints", "twins"
_LOCK = "lock"
_TRIES = 10


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; a second writer is refused. A folder that stays empty is not left behind."""
    try:
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.fdopen(os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644), "r+")
    except OSError as problem:
        raise SaveError(
            f"cannot write to the run folder {folder}: {problem.strerror}. Choose another --out."
        ) from problem
    with lock:
        if not _take(lock):
            raise SaveError(f"another process is writing to {folder}. Wait for it, stop it, or choose another --out.")
        try:
            yield
        finally:
            with suppress(OSError):
                if [path.name for path in folder.iterdir()] == [_LOCK]:
                    (folder / _LOCK).unlink()
                    if is_new:
                        folder.rmdir()


def _take(lock: TextIO) -> bool:
    """Hold the lock, unless a writer has it. Whoever looks at a run touches it for an instant: that is waited for."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            time.sleep(0.02)
    return False


def is_there(path: Path) -> bool:
    """Whether a file exists; a place that one may not look into, or no file can have, is refused."""
    try:
        return path.exists()
    except OSError as problem:
        raise SaveError(f"cannot read {path}: {problem.strerror}. Choose another --out.") from problem


def is_begun_with(folder: Path, values: Mapping[str, Any]) -> bool:
    """Whether the folder holds the run of exactly this configuration."""
    try:
        return bool(json.loads((folder / CONFIG).read_text(encoding="utf-8")) == dict(values))
    except (OSError, ValueError):
        return False


def require_fresh(folder: Path) -> None:
    """A folder with anything in it is not begun anew."""
    if any(path.name != _LOCK for path in folder.iterdir()):
        raise SaveError(f"the run folder {folder} is not empty. Go on with --resume, or choose another --out.")


@contextmanager
def begun(folder: Path, values: Mapping[str, Any]) -> Iterator[None]:
    """Note what a run is started with, where nothing says so yet. A start that is refused leaves nothing behind."""
    config = folder / CONFIG
    is_first = not config.exists()
    if is_first:
        write_json(config, values)
    try:
        yield
    except EsperError:
        sizes = event_sizes(folder)
        empty = {events_of(int(rank)) for rank, size in sizes.items() if not size}
        if is_first and {path.name for path in folder.iterdir()} <= {_LOCK, CONFIG, *empty}:
            for name in (CONFIG, *empty):
                (folder / name).unlink()
        raise


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """All or nothing: the file has the old content until it has the new."""
    write_atomically(path, (json.dumps(values, indent=1, allow_nan=False) + "\n").encode())


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file and the folders that it is in; whoever reads it finds the old content or the new."""
    temporary = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as file:  # a link in its place is not followed
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as problem:
        with suppress(OSError):
            temporary.unlink()
        raise SaveError(
            f"cannot save {path}: {problem.strerror}. What was saved before is untouched; make room and use --resume."
        ) from problem


def events_of(rank: int) -> str:
    return f"events-{rank}.jsonl"


def event_sizes(folder: Path) -> dict[str, int]:
    """Rank -> bytes of events."""
    found = {path.name.removeprefix("events-").removesuffix(".jsonl"): path for path in folder.glob("events-*.jsonl")}
    return {rank: path.stat().st_size for rank, path in found.items() if rank.isdigit() and not path.is_symlink()}


def cut_events(folder: Path, sizes: Mapping[str, int], ranks: int) -> None:
    """Rewind the events of ranks that are not there any more; those that are do it themselves."""
    for rank, size in event_sizes(folder).items():
        if int(rank) >= ranks and size > sizes.get(rank, 0):
            os.truncate(folder / events_of(int(rank)), sizes.get(rank, 0))


def read_manifest(folder: Path) -> dict[str, Any]:
    """What the folder says about itself; empty where there is no checkpoint yet."""
    path = folder / MANIFEST
    if not path.exists():
        return {"checkpoints": []}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise SaveError(f"{path} cannot be read: {problem}. Restore it from a copy, or start anew.") from problem
    if not isinstance(found, dict) or not isinstance(found.get("checkpoints"), list):
        raise SaveError(f"{path} is not a manifest of this version. Restore it from a copy, or start anew.")
    return found


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_whole(folder: Path, entry: Mapping[str, Any]) -> bool:
    """Whether a checkpoint is there, byte for byte."""
    path = folder / CHECKPOINTS / str(entry["file"])
    try:
        return path.is_file() and not path.is_symlink() and digest(path) == entry["sha256"]
    except OSError:
        return False
