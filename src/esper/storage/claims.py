"""One writer at a time, where files are saved together, and a note of what is being written."""

import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from esper.leyline.errors import SaveError
from esper.storage import files as disk

PATIENCE = 10.0
"""Seconds that a writer waits for the one before it."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""How a file system says that it knows no locks; a save is then made without one."""


class Claim:
    """The right to write what one lock file stands for.

    The file holds the names of what is being written, so that the next writer can clear up after
    one that was killed. `is_over` is whether there is nothing to clear up.
    """

    def __init__(self, handle: int):
        self._handle = handle
        self.is_over = True

    def note(self, names: Iterable[str]) -> None:
        """Say what is being written; the note is durable as soon as its folder is."""
        self.is_over = False
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, json.dumps(sorted(names)).encode(), 0)
        os.fsync(self._handle)


def lock_of(path: Path) -> Path:
    """The file that is held by whoever writes `path` and what belongs to it."""
    return path.with_name(f"{path.name}.lock")


def noted(lock: Path) -> list[str]:
    """What a killed writer noted in its lock; nothing where none was killed."""
    if not os.path.lexists(lock):
        return []
    with disk.naming_failures(lock):
        text = disk.read_plain(lock)
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):  # the power was cut while it was written
        return []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


@contextmanager
def claimed(path: Path) -> Iterator[Claim]:
    """Hold the lock of a path, whose folder is there; whoever comes second waits, or is refused.

    The lock goes when all is over. One that stays is of a writer that failed or was killed.
    """
    lock = lock_of(path)
    with disk.naming_failures(path):
        handle = _acquire(lock)
    try:
        claim = Claim(handle)
        try:
            yield claim
        finally:
            if claim.is_over:
                with suppress(OSError):
                    os.unlink(lock)
    finally:
        os.close(handle)


def _acquire(lock: Path) -> int:
    """The handle of the lock, once it is ours and still the one with this name."""
    end = time.monotonic() + PATIENCE
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        try:
            _require_own(handle, lock)
            if _is_ours(handle, lock):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
        if time.monotonic() > end:
            raise SaveError(
                f"another process is writing to {lock.parent}. Wait for it, or choose another "
                "folder."
            )
        time.sleep(0.01)


def _require_own(handle: int, lock: Path) -> None:
    """Refuse a device, a pipe, a file that has a second name, and one that holds no note."""
    status = os.fstat(handle)
    is_regular = stat.S_ISREG(status.st_mode) and status.st_nlink <= 1
    # a list of names, or what a power cut leaves of one
    if not is_regular or os.pread(handle, 1, 0) not in (b"", b"[", b"\0"):
        raise SaveError(f"{lock} is not a lock of Esper's. Remove it, or choose another folder.")


def _is_ours(handle: int, lock: Path) -> bool:
    """Whether the lock could be taken, and was not given back and removed meanwhile."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as problem:
        if problem.errno not in _NO_LOCKS:
            raise
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(lock))
    except FileNotFoundError:
        return False
