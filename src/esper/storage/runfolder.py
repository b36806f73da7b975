"""A run on disk:

the names in its folder, who may write to it, what it was started with. No training in here.
"""

import fcntl
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import NonNegativeInt

from esper.leyline.errors import EsperError, SaveError
from esper.storage.files import make_folder, names_in, open_plain, read_plain, write_durably
from esper.storage.store import digest_json

EVENTS, CONFIG, RESULTS, LOCK = "events-0.jsonl", "config.json", "results.json", "lock"
MANIFEST, CHECKPOINTS, TWINS, ARMS, PRETRAINED = (
    "manifest.json",
    "checkpoints",
    "twins",
    "arms",
    "pretrained",
)
PLANS, NETWORKS = (
    "plans",
    "networks",
)  # What searches have tried; each host's network, to be rebuilt without esper.
FOLDERS = (CHECKPOINTS, TWINS, ARMS, PRETRAINED, PLANS, NETWORKS, "tensorboard", "wandb")
# What stands in place of a command in the configuration of a training loop of one's own.
GARDEN = "garden"
# A run's own copy of the checkpoint that decides, whatever becomes of the original.
POLICY = "policy.safetensors"
CHECKSUM = "sha256"  # Key of the files above that are plain for people and read back all the same.
Position = tuple[
    NonNegativeInt, NonNegativeInt
]  # Where a rank's events end: number of the segment, bytes of it.
_EVENTS = re.compile(r"events-(0|[1-9][0-9]{0,8})(?:\.([1-9][0-9]{0,8}))?\.jsonl")
_PATIENCE = (
    0.2  # Seconds that a writer waits: whoever looks at a run touches its lock for an instant.
)


@contextmanager
def only_writer(folder: Path, *, fresh: bool = False) -> Iterator[None]:
    """Hold the folder for this process; a second writer is refused, and with `fresh` a folder with
    anything in it.
    """
    lock = FileLock(folder / LOCK, mode=0o644)
    try:
        require_plain(folder)
        is_new = not folder.exists()
        make_folder(folder)
        before = names_in(folder)
        lock.acquire(timeout=_PATIENCE, poll_interval=_PATIENCE / 10)
    except Timeout:
        way_out = "Wait for it, stop it, or choose another folder (--out)."
        raise SaveError(f"another process is writing to {folder}. {way_out}") from None
    except OSError as problem:
        raise SaveError(
            f"cannot write to {folder}: {problem.strerror}. Choose another folder (--out)."
        ) from problem
    try:
        if fresh:
            require_fresh(folder)
        yield
    finally:
        with suppress(
            OSError
        ):  # a folder that stays empty is not left behind, nor a lock in one that stays as it was
            if names_in(folder) in (
                [LOCK],
                sorted([*before, LOCK]),
            ):  # a lock of before is not this one
                (folder / LOCK).unlink()
                if is_new:
                    folder.rmdir()
        lock.release()


def require_plain(folder: Path) -> None:
    """Refuse a run folder that leads elsewhere:

    what is written, deleted or read in it must lie in it.
    """
    # links in place of other files are replaced when these are written, and refused when they are
    # read
    folders = [folder / name for name in FOLDERS] + list((folder / NETWORKS).glob("host-*"))
    in_place = [folder / LOCK, *folder.glob("events-*.jsonl")]
    for path in (path for path in (*folders, *in_place) if os.path.lexists(path)):
        found, is_file = path.lstat(), path in in_place
        is_own = (
            found.st_nlink == 1 and stat.S_ISREG(found.st_mode)
            if is_file
            else stat.S_ISDIR(found.st_mode)
        )
        if not is_own:
            kind = "file of its own" if is_file else "folder"
            way_out = "Put a copy in its place, or choose another --out."
            raise SaveError(
                f"{path} is not a {kind}; nothing in a run folder may lead elsewhere. {way_out}"
            )


def is_being_written(folder: Path) -> bool:
    """Whether a process holds the folder.

    Nothing but trying can tell; a shared lock is given back at once.
    """
    try:
        with open_plain(folder / LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as problem:
        return isinstance(problem, BlockingIOError)
    return False


def is_there(path: Path) -> bool:
    """Whether a file exists; a path that is unreadable or impossible is refused."""
    try:
        return path.exists()
    except OSError as problem:
        raise SaveError(
            f"cannot read {path}: {problem.strerror}. Choose another --out."
        ) from problem


def read_start(folder: Path) -> dict[str, Any]:
    """What the folder's run was started with; nothing where that cannot be read."""
    with suppress(SaveError):
        return read_json(folder / CONFIG)
    return {}


def require_fresh(folder: Path) -> None:
    """A folder with anything in it is not begun anew."""
    if any(path.name != LOCK for path in folder.iterdir()):
        way_out = (
            "Use --resume (in your own loop: esper.load a save of this run), or "
            "choose another folder (--out)."
        )
        raise SaveError(f"the run folder {folder} is not empty. {way_out}")


@contextmanager
def begun(folder: Path, values: Mapping[str, Any]) -> Iterator[None]:
    """Note what a run is started with, where nothing says so yet.

    A start that is refused leaves nothing behind.
    """
    is_first = not (folder / CONFIG).exists()
    if is_first:
        write_json(folder / CONFIG, values)
    try:
        yield
    except (EsperError, OSError):
        empty = {path.name for path in event_files(folder).values() if not path.stat().st_size}
        if is_first and {path.name for path in folder.iterdir()} <= {LOCK, CONFIG, *empty}:
            for name in (CONFIG, *empty):
                (folder / name).unlink()
        raise


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a file that people read and `read_json` reads back; it holds its own checksum."""
    plain = json.loads(
        json.dumps(
            {key: value for key, value in values.items() if key != CHECKSUM}, allow_nan=False
        )
    )
    write_durably(
        path, (json.dumps({**plain, CHECKSUM: digest_json(plain)}, indent=1) + "\n").encode()
    )


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote."""
    try:
        found = dict(json.loads(read_plain(path)))
        known, own = found.pop(CHECKSUM, None), digest_json(found)
    except (OSError, ValueError, TypeError, RecursionError) as problem:
        raise SaveError(
            f"{path} cannot be read ({problem}). Restore it, or choose another --out."
        ) from problem
    if known is None:
        raise SaveError(
            f"{path} is of an older format. Use the Esper that wrote it, or choose another --out."
        )
    if known != own:
        raise SaveError(
            f"{path} was changed after it was written. Restore it, or choose another --out."
        )
    return found


def events_of(rank: int, segment: int = 0) -> str:
    return f"events-{rank}.{segment}.jsonl" if segment else f"events-{rank}.jsonl"


def event_files(folder: Path) -> dict[tuple[int, int], Path]:
    """(rank, segment) -> its events, in order, for all that are regular files."""
    found = {
        (int(m[1]), int(m[2] or 0)): folder / m[0]
        for m in map(_EVENTS.fullmatch, names_in(folder))
        if m
    }
    return {
        key: path for key, path in sorted(found.items()) if path.is_file() and not path.is_symlink()
    }


def cut_events(folder: Path, rank: int, end: Position) -> None:
    """Take away what a rank wrote behind a position; segments before that are not touched."""
    for (owner, segment), path in event_files(folder).items():
        if owner == rank and segment > end[0]:
            os.unlink(path)
        elif (owner, segment) == (rank, end[0]) and path.stat().st_size > end[1]:
            os.truncate(path, end[1])
