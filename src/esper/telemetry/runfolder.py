"""A run on disk: the names in its folder, who may write to it, what it was started with. No training in here."""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from esper.leyline.errors import EsperError, SaveError
from esper.leyline.files import digest, make_folder, open_plain, read_plain, write_durably
from esper.telemetry.store import Store

EVENTS, CONFIG, RESULTS, LOCK = "events-0.jsonl", "config.json", "results.json", "lock"
MANIFEST, CHECKPOINTS, TWINS, ARMS, PRETRAINED = "manifest.json", "checkpoints", "twins", "arms", "pretrained"
NETWORKS = "networks"
"""Folder of a finished run that holds each host's network, ready to be rebuilt without esper."""
POLICY = "policy.safetensors"
"""A run's own copy of the checkpoint that decides: it goes on the same whatever becomes of the original."""
DIGESTS = "digests.json"
"""Digests of the files above that are plain for people and read back all the same."""
_EVENTS = re.compile(r"events-(0|[1-9][0-9]{0,8})\.jsonl")
_PATIENCE = 0.2
"""Seconds that a writer waits: whoever looks at a run touches its lock for an instant."""


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; a second writer is refused. A folder that stays empty is not left behind."""
    lock = FileLock(folder / LOCK, mode=0o644)
    try:
        is_new = not folder.exists()
        make_folder(folder)
        lock.acquire(timeout=_PATIENCE, poll_interval=_PATIENCE / 10)
    except Timeout:
        raise SaveError(
            f"another process is writing to {folder}. Wait for it, stop it, or choose another --out."
        ) from None
    except OSError as problem:
        raise SaveError(
            f"cannot write to the run folder {folder}: {problem.strerror}. Choose another --out."
        ) from problem
    try:
        yield
    finally:
        with suppress(OSError):
            if [path.name for path in folder.iterdir()] == [LOCK]:
                (folder / LOCK).unlink()
                if is_new:
                    folder.rmdir()
        lock.release()


def is_being_written(folder: Path) -> bool:
    """Whether a process holds the folder. Nothing but trying can tell; a shared lock is given back at once."""
    try:
        with open_plain(folder / LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
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
        return bool(read_json(folder / CONFIG) == dict(values))
    except SaveError:
        return False


def require_fresh(folder: Path) -> None:
    """A folder with anything in it is not begun anew."""
    if any(path.name != LOCK for path in folder.iterdir()):
        raise SaveError(f"the run folder {folder} is not empty. Go on with --resume, or choose another --out.")


@contextmanager
def begun(folder: Path, values: Mapping[str, Any]) -> Iterator[None]:
    """Note what a run is started with, where nothing says so yet. A start that is refused leaves nothing behind."""
    is_first = not (folder / CONFIG).exists()
    if is_first:
        write_json(folder / CONFIG, values)
    try:
        yield
    except EsperError:
        empty = {path.name for path in event_files(folder).values() if not path.stat().st_size}
        if is_first and {path.name for path in folder.iterdir()} <= {LOCK, CONFIG, DIGESTS, *empty}:
            for name in (CONFIG, DIGESTS, *empty):
                (folder / name).unlink()
        raise


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a file of a run folder that people read and `read_json` reads back."""
    write_listed(path, (json.dumps(values, indent=1, allow_nan=False) + "\n").encode())


def write_listed(path: Path, content: bytes) -> None:
    """Write a file of a run folder, its digest first: at any moment the content that is there is a listed one."""
    _list(path.parent, {path.name: hashlib.sha256(content).hexdigest()})
    write_durably(path, content)


def list_files(folder: Path, paths: Iterable[Path]) -> None:
    """List the digests of files that are in a run folder already."""
    _list(folder, {path.relative_to(folder).as_posix(): digest(path) for path in paths})


def require_listed(folder: Path, path: Path) -> bytes:
    """What is in a file of a run folder, if it is what the run wrote there."""
    name = path.relative_to(folder).as_posix()
    content = read_plain(path)
    generation = _digests(folder).newest()
    if generation is None:
        raise SaveError(
            f"{folder} is not a run folder of this version of Esper: {DIGESTS} is missing. A run of an older format is "
            "gone on with by the version that began it; or start anew."
        )
    if hashlib.sha256(content).hexdigest() not in generation.facts.get(name, ()):
        raise SaveError(f"{path} was changed after it was written. Restore it; what shall be different is an option.")
    return content


def read_json(path: Path) -> Any:
    """What `write_json` wrote."""
    try:
        found = json.loads(read_plain(path))
        require_listed(path.parent, path)
    except SaveError:
        raise
    except (OSError, ValueError, RecursionError) as problem:
        raise SaveError(f"{path} cannot be read ({problem}).") from problem
    return found


def _digests(folder: Path) -> Store:
    return Store(folder / DIGESTS, "list of digests")


def _list(folder: Path, digests: Mapping[str, str]) -> None:
    """Earlier digests stay: until the file is written, and after a power cut, it has the content of one of them."""
    store = _digests(folder)
    generation = store.newest()
    known = {} if generation is None else generation.facts
    store.save(known | {name: list(dict.fromkeys([*known.get(name, ()), new])) for name, new in digests.items()})


def events_of(rank: int) -> str:
    return f"events-{rank}.jsonl"


def event_files(folder: Path) -> dict[int, Path]:
    """Rank -> its events, for all that are regular files."""
    names = [(_EVENTS.fullmatch(path.name), path) for path in folder.glob("events-*.jsonl") if not path.is_symlink()]
    return dict(sorted((int(name[1]), path) for name, path in names if name and path.is_file()))


def event_sizes(folder: Path) -> dict[str, int]:
    """Rank -> bytes of events."""
    return {str(rank): path.stat().st_size for rank, path in event_files(folder).items()}


def cut_events(folder: Path, sizes: Mapping[str, int], ranks: int) -> None:
    """Rewind the events of ranks that are not there any more; those that are do it themselves."""
    for rank, path in event_files(folder).items():
        if rank >= ranks and path.stat().st_size > sizes.get(str(rank), 0):
            os.truncate(path, sizes.get(str(rank), 0))
