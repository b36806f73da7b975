"""A run on disk: who may write to it, what it was started with, which checkpoints are whole. No training in here."""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from esper.leyline.errors import SaveError

EVENTS, CONFIG, MANIFEST, CHECKPOINTS, TWINS = "events-0.jsonl", "config.json", "manifest.json", "checkpoints", "twins"
_LOCK = "lock"


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; a second writer is refused."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / _LOCK, "w")  # noqa: SIM115  # held as long as the lock
    except OSError as problem:
        raise SaveError(
            f"cannot write to the run folder {folder}: {problem.strerror}. Choose another --out."
        ) from problem
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            raise SaveError(
                f"another process is writing to {folder}. Wait for it, stop it, or choose another --out."
            ) from problem
        yield


def require_fresh(folder: Path) -> None:
    """A folder with anything in it is not begun anew."""
    if any(path.name != _LOCK for path in folder.iterdir()):
        raise SaveError(f"the run folder {folder} is not empty. Go on with --resume, or choose another --out.")


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """All or nothing: the file has the old content until it has the new."""
    write_atomically(path, (json.dumps(values, indent=1, allow_nan=False) + "\n").encode())


def write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".new")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as problem:
        temporary.unlink(missing_ok=True)
        raise SaveError(
            f"cannot save {path}: {problem.strerror}. What was saved before is untouched; make room and use --resume."
        ) from problem


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
    return path.is_file() and not path.is_symlink() and digest(path) == entry["sha256"]
