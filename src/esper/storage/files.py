"""Files that survive a power cut.

Every write that matters goes through here; what a save is, the store knows.
"""

import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from io import BufferedReader
from pathlib import Path

from safetensors import SafetensorError

from esper.leyline.errors import SaveError

Content = (
    bytes | Callable[[Path], None]
)  # What a file is to hold, or a function that writes it to a given path.
MOST_BYTES = 2**27  # A file that is read whole and larger than this is none of ours.
_LEFTOVER = re.compile(r"\.new-[0-9a-f]{32}-(.+)", re.DOTALL)


def write_durably(path: Path, content: Content) -> str:
    """Replace one file:

    whoever reads it finds the old content or the new, after a power cut too; its sha256.
    """
    sweep(path.parent, lambda name: name == path.name)
    return write_files(path.parent, {path.name: content})[path.name]


def write_files(folder: Path, contents: Mapping[str, Content]) -> dict[str, str]:
    """Put files into a folder, each whole and all of them durable when this returns; name ->
    sha256.
    """
    digests = {}
    for name, content in contents.items():
        with told(folder / name):
            make_folder(folder)
            digests[name] = _place(folder / name, content)
    with told(folder):
        sync_folder(folder)
    return digests


def copy_files(source: Path, folder: Path, digests: Mapping[str, str]) -> None:
    """Make a new folder of copies, whole or not at all; of files whose sha256 is another one, no
    byte is copied.
    """
    sweep(folder.parent, lambda name: name == folder.name)
    beside = _beside(folder)
    try:
        with ExitStack() as held:
            known = {
                name: held.enter_context(reading(source / name, digests[name])) for name in digests
            }
            if (
                write_files(beside, {name: partial(_copy, file) for name, file in known.items()})
                != digests
            ):
                raise SaveError(f"{source} was changed while it was copied.")
        with told(folder):
            os.replace(beside, folder)
            sync_folder(folder.parent)
    finally:
        _discard(beside)


@contextmanager
def reading(path: Path, sha256: str | None = None) -> Iterator[BufferedReader]:
    """A regular file, opened; refused where it has another sha256 than the one that is known."""
    try:
        with open_plain(path) as file:
            if sha256 is not None and hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise SaveError(
                    f"{path} was changed after it was written. Use a copy of it that was not."
                )
            yield file
    except OSError as problem:
        raise SaveError(
            f"cannot read {path}: {problem.strerror}. Make it readable, or use a copy."
        ) from problem


def _copy(file: BufferedReader, to: Path) -> None:
    file.seek(0)
    with open(to, "xb") as copy:
        shutil.copyfileobj(file, copy)


def _beside(path: Path) -> Path:
    """A name next to a path that nobody can guess."""
    path = path.absolute()  # "." has no name
    return path.with_name(f".new-{secrets.token_hex(16)}-{path.name}")


def _place(path: Path, content: Content) -> str:
    """Write beside the file, make that durable, then move it into place."""
    beside, mode = _beside(path), 0
    temporary = beside if isinstance(content, bytes) else beside / path.name
    try:
        if isinstance(content, bytes):
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
            with os.fdopen(handle, "wb") as file:
                file.write(content)
        else:  # in a folder of its own: it may write beside what it is given
            os.mkdir(beside)
            mode = os.stat(beside).st_mode & 0o666
            content(temporary)
        with open_plain(temporary) as written:
            if mode:  # a library may have made it its owner's alone
                os.fchmod(written.fileno(), mode)
            os.fsync(written.fileno())
            found = hashlib.file_digest(written, "sha256").hexdigest()
        os.replace(temporary, path)
    finally:
        _discard(beside)
    return found


def _discard(path: Path) -> None:
    """Delete a temporary file, or the folder of one with all that is in it."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            remove([path / name for name in names_in(path)])
            os.rmdir(path)
        else:
            os.unlink(path)


def make_folder(folder: Path) -> None:
    """A folder and those above it, each durable in the one above."""
    places = [folder, *folder.parents]
    known = next((number for number, place in enumerate(places) if place.is_dir()), len(places) - 1)
    for place in reversed(places[: known + 1]):
        if not place.is_dir():
            try:
                os.mkdir(place)
            except FileExistsError:
                if not place.is_dir():  # another process may have been faster
                    raise
        elif names_in(place):
            continue
        sync_folder(
            place.parent
        )  # of an empty one too: whoever made it may have been killed before this


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where its file system knows how to and it may be read."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        return
    try:
        os.fsync(handle)
    except OSError as problem:
        if problem.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)


def sweep(folder: Path, is_own: Callable[[str], object]) -> None:
    """Remove what killed writes left behind of those files whose names are one's own."""
    for name in names_in(folder):
        if (leftover := _LEFTOVER.fullmatch(name)) and is_own(leftover[1]):
            _discard(folder / name)


def names_in(folder: Path) -> list[str]:
    """What is in a folder; nothing where it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def remove(paths: list[Path]) -> None:
    """Delete files; one too many harms nobody."""
    for path in paths:
        with suppress(OSError):
            os.unlink(path)


@contextmanager
def told(path: Path) -> Iterator[None]:
    """A disk that fails becomes one line that names the file."""
    try:
        yield
    except (OSError, SafetensorError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        way_out = "Free disk space and save again; resume a run with --resume."
        raise SaveError(
            f"cannot save {path}: {reason}. Earlier saves are untouched. {way_out}"
        ) from problem


def open_plain(path: Path) -> BufferedReader:
    """A regular file, opened for reading; a link, or whatever else a name can stand for, is
    refused.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file")
    return os.fdopen(handle, "rb")


def read_plain(path: Path) -> bytes:
    """What is in a regular file; one that is too large is refused."""
    with open_plain(path) as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return content


def digest(path: Path) -> str:
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
