"""A run on disk: every name in its folder, who may write to it, what it was started with.

No training in here. Only the numbered files of a save are named by the code that saves them.
"""

import fcntl
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from filelock import FileLock, Timeout
from pydantic import NonNegativeInt

from esper.leyline.errors import EsperError, SaveError
from esper.storage.files import make_folder, names_in, open_plain, read_plain, write_durably
from esper.storage.store import digest_json

# -- names -----------------------------------------------------------------------------------------

LOCK = "lock"
"""Held by the process that writes to the folder."""

CONFIG = "config.json"
"""What the run was started with."""

EVENTS = "events-0.jsonl"
"""The first segment of the events of rank 0; `events_of` names all of them."""

MANIFEST = "manifest.json"
"""Lists the saves in `CHECKPOINTS`, and in the folder of a saved garden those beside it."""

CHECKPOINTS = "checkpoints"
"""Folder of the saves that a resume continues from."""

POLICY = "policy.safetensors"
"""The run's own copy of the checkpoint that decides, whatever becomes of the original."""

POLICY_MANIFEST = "policy.json"
"""Lists the copy of the policy, with its checksum."""

TWINS = "twins"
"""Folder of the never-grown twins that a reward compares with."""

ARMS = "arms"
"""Folder of the finished arms of a comparison."""

PRETRAINED = "pretrained"
"""Folder of the hosts that a comparison trains before its arms begin."""

PLANS = "plans"
"""Folder of what searches have tried."""

NETWORKS = "networks"
"""Folder of each host's network, to be rebuilt without esper; `network_folder` names them."""

EXPORTED = "exported"
"""Folder of the network that `esper export` copies by default."""

TENSORBOARD = "tensorboard"
"""Folder of the curves that TensorBoard draws."""

WANDB = "wandb"
"""Folder that Weights & Biases writes."""

RESULTS = "results.json"
"""What a run or a comparison came to."""

RESULTS_TABLE = "results.csv"
"""The results as a table, one row per host, or per arm and host seed of a comparison."""

FIGURE = "figure.svg"
"""A comparison's results, drawn."""

GARDEN_COMMAND = "garden"
"""Stands in place of a command in the configuration of a user's own training loop."""

COMPARE_COMMAND = "compare"
"""Stands in the configuration of a comparison, which is no run."""

CHECKSUM = "sha256"
"""Key of the checksum in files that are plain for people and read back all the same."""

_FOLDERS = (CHECKPOINTS, TWINS, ARMS, PRETRAINED, PLANS, NETWORKS, TENSORBOARD, WANDB)
_LEARNER = re.compile(r"round-([0-9]{1,9})\.safetensors")
_EVENTS = re.compile(r"events-(0|[1-9][0-9]{0,8})(?:\.([1-9][0-9]{0,8}))?\.jsonl")

# Seconds that a writer waits: a process that looks at a run touches its lock for an instant.
_PATIENCE = 0.2


class Position(NamedTuple):
    """Where a rank's events end."""

    segment: NonNegativeInt
    size: NonNegativeInt  # bytes of that segment


BEGINNING = Position(segment=0, size=0)
"""Before the first event of a rank."""


class Segment(NamedTuple):
    """Names one file of events."""

    rank: int
    number: int


def events_of(rank: int, segment: int = 0) -> str:
    """The name of one file of events."""
    return f"events-{rank}.{segment}.jsonl" if segment else f"events-{rank}.jsonl"


def event_files(folder: Path) -> dict[Segment, Path]:
    """The events of every rank and segment, in order, for all that are regular files."""
    paths = {}
    for name in names_in(folder):
        match = _EVENTS.fullmatch(name)
        if match:
            segment = Segment(rank=int(match[1]), number=int(match[2] or 0))
            paths[segment] = folder / name
    return {
        segment: path
        for segment, path in sorted(paths.items())
        if path.is_file() and not path.is_symlink()
    }


def cut_events(folder: Path, rank: int, end: Position) -> None:
    """Take away what a rank wrote behind a position; segments before that are not touched."""
    for segment, path in event_files(folder).items():
        if segment.rank != rank:
            continue
        if segment.number > end.segment:
            os.unlink(path)
        elif segment.number == end.segment and path.stat().st_size > end.size:
            os.truncate(path, end.size)


def label_policies(names: Iterable[str]) -> dict[str, str]:
    """What people call each policy or arm: a checkpoint by its run and round, others by name.

    Two that would be called alike keep their own names.
    """
    labels = {name: _label(name) for name in names}
    counts = Counter(labels.values())
    return {name: label if counts[label] == 1 else name for name, label in labels.items()}


def _label(name: str) -> str:
    follower, of, policy = name.rpartition(" of ")  # a network of fixed size follows an arm
    path = PurePath(policy)
    if path.suffix != ".safetensors":
        return name
    learner = _LEARNER.fullmatch(path.name)
    run = (path.parent.parent if path.parent.name == CHECKPOINTS else path.parent).name
    if learner is not None and run:
        return f"{follower}{of}{run} round {int(learner[1])}"
    if path.name == POLICY and run:
        return f"{follower}{of}the policy of {run}"
    return f"{follower}{of}{path.stem}"


def network_folder(run: Path, host: int) -> Path:
    """The folder of the network that one host of a run leaves behind."""
    return run / NETWORKS / f"host-{host}"


# -- who may write ---------------------------------------------------------------------------------


@contextmanager
def only_writer(folder: Path, *, fresh: bool = False) -> Iterator[None]:
    """Hold the folder for this process.

    A second writer is refused, and with `fresh` a folder with anything in it. A folder that is new
    and stays empty is removed again, and so is a lock in a folder that stays as it was.
    """
    lock = FileLock(folder / LOCK, mode=0o644)
    try:
        require_plain(folder)
        is_new = not folder.exists()
        make_folder(folder)
        names_before = names_in(folder)
        lock.acquire(timeout=_PATIENCE, poll_interval=_PATIENCE / 10)
    except Timeout:
        raise SaveError(
            f"another process is writing to {folder}. "
            "Wait for it, stop it, or choose another folder (--out)."
        ) from None
    except OSError as problem:
        raise SaveError(
            f"cannot write to {folder}: {problem.strerror}. Choose another folder (--out)."
        ) from problem
    try:
        if fresh:
            require_fresh(folder)
        yield
    finally:
        with suppress(OSError):
            # a lock that was there before is not this one
            if names_in(folder) in ([LOCK], sorted([*names_before, LOCK])):
                (folder / LOCK).unlink()
                if is_new:
                    folder.rmdir()
        lock.release()


def require_plain(folder: Path) -> None:
    """Refuse a run folder that leads elsewhere.

    What is written, deleted or read in it must lie in it. Links in place of other files are
    replaced when these are written, and refused when they are read.
    """
    for path in (*(folder / name for name in _FOLDERS), *(folder / NETWORKS).glob("host-*")):
        if os.path.lexists(path) and not stat.S_ISDIR(path.lstat().st_mode):
            raise SaveError(
                f"{path} is not a folder; nothing in a run folder may lead elsewhere. "
                "Put a copy in its place, or choose another --out."
            )
    for path in (folder / LOCK, *folder.glob("events-*.jsonl")):
        if os.path.lexists(path) and not _is_regular_and_unshared(path):
            raise SaveError(
                f"{path} is not a file of its own; nothing in a run folder may lead elsewhere. "
                "Put a copy in its place, or choose another --out."
            )


def _is_regular_and_unshared(path: Path) -> bool:
    """Whether this is a file that no second name leads to."""
    status = path.lstat()
    return status.st_nlink == 1 and stat.S_ISREG(status.st_mode)


def is_being_written(folder: Path) -> bool:
    """Whether a process holds the folder.

    The only way to know is to try; the shared lock is given back at once.
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


def require_fresh(folder: Path) -> None:
    """Refuse to start in a folder with anything in it but the lock."""
    if any(path.name != LOCK for path in folder.iterdir()):
        raise SaveError(
            f"the run folder {folder} is not empty. Use --resume (in your own loop: "
            "esper.load a save of this run), or choose another folder (--out)."
        )


# -- what a run is started with --------------------------------------------------------------------


@contextmanager
def begun(folder: Path, values: Mapping[str, Any]) -> Iterator[None]:
    """Note what a run is started with, unless an earlier start noted it.

    A start that is refused leaves nothing behind.
    """
    is_first = not (folder / CONFIG).exists()
    if is_first:
        write_json(folder / CONFIG, values)
    try:
        yield
    except (EsperError, OSError):
        if is_first:
            _remove_start(folder)
        raise


def _remove_start(folder: Path) -> None:
    """Remove the note and the empty files of events, if nothing else was written."""
    removable = {CONFIG}
    for path in event_files(folder).values():
        if not path.stat().st_size:
            removable.add(path.name)
    names = {path.name for path in folder.iterdir()}
    if names <= {LOCK, *removable}:
        for name in removable:
            (folder / name).unlink()


def read_start(folder: Path) -> dict[str, Any]:
    """What the folder's run was started with; nothing where that cannot be read."""
    with suppress(SaveError):
        return read_json(folder / CONFIG)
    return {}


# -- files that people read ------------------------------------------------------------------------


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a file that people read and `read_json` reads back; it holds its own checksum."""
    unsigned = {key: value for key, value in values.items() if key != CHECKSUM}
    plain = json.loads(json.dumps(unsigned, allow_nan=False))
    signed = {**plain, CHECKSUM: digest_json(plain)}
    write_durably(path, (json.dumps(signed, indent=1) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote."""
    try:
        values = dict(json.loads(read_plain(path)))
        written = values.pop(CHECKSUM, None)
        computed = digest_json(values)
    except (OSError, ValueError, TypeError, RecursionError) as problem:
        raise SaveError(
            f"{path} cannot be read ({problem}). Restore it, or choose another --out."
        ) from problem
    if written is None:
        raise SaveError(
            f"{path} is of an older format. Use the Esper that wrote it, or choose another --out."
        )
    if written != computed:
        raise SaveError(
            f"{path} was changed after it was written. Restore it, or choose another --out."
        )
    return values
