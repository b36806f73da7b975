"""Files that survive a power cut.

Every write that matters goes through here; what a save is, the store knows.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from io import BufferedReader
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

from safetensors import SafetensorError

from esper.leyline.errors import SaveError

Content = bytes | Callable[[Path], None]
"""What a file is to hold, or a function that writes it to a path."""

MOST_BYTES = 2**27
"""A file that is read whole and is larger than this was not written by Esper."""

_HEAD = 4096  # bytes in which a text of Esper's says what it is
_FORMS = {
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFREG: "another file",
    stat.S_IFSOCK: "a socket",
}
_LEFTOVER = re.compile(r"\.new-[0-9a-f]{32}-(.+)", re.DOTALL)


def write_durably(path: Path, content: Content) -> str:
    """Replace one file and return its sha256.

    A reader finds the old content or the new one, after a power cut too.
    """
    sweep(path.parent, lambda name: name == path.name)
    return _write_all(path.parent, {path.name: content})[path.name]


def write_files(folder: Path, contents: Mapping[str, Content]) -> dict[str, str]:
    """Put files into a folder and return the sha256 of each name.

    Each file is whole, and all of them are durable when this returns. A name that leads out of the
    folder is refused before anything is written.
    """
    for name in contents:
        if not is_plain_name(name):
            raise SaveError(
                f"cannot save {str(name)!r} in {folder}: it is not a plain file name, and nothing "
                "was written. Use a save that Esper wrote."
            )
    return _write_all(folder, contents)


def _write_all(folder: Path, contents: Mapping[str, Content]) -> dict[str, str]:
    digests = {}
    for name, content in contents.items():
        with naming_failures(folder / name):
            make_folder(folder)
            digests[name] = _replace(folder / name, content)
    with naming_failures(folder):
        sync_folder(folder)
    return digests


def copy_files(source: Path, folder: Path, digests: Mapping[str, str]) -> None:
    """Make a new folder of copies, whole or not at all.

    If a file has another sha256 than `digests` says, nothing is copied.
    """
    sweep(folder.parent, lambda name: name == folder.name)
    beside = _beside(folder)
    try:
        with ExitStack() as opened:
            copies: dict[str, Content] = {}
            for name, sha256 in digests.items():
                original = opened.enter_context(reading(source / name, sha256))
                copies[name] = partial(_copy, original)
            if write_files(beside, copies) != digests:
                raise SaveError(f"{source} was changed while it was copied.")
        with naming_failures(folder):
            os.replace(beside, folder)
            sync_folder(folder.parent)
    finally:
        _discard(beside)


# -- what may be written ---------------------------------------------------------------------------


def is_plain_name(name: object) -> bool:
    """Whether this names a file in the folder that it is put into, and nowhere else.

    Whoever reads names from a manifest or a checkpoint asks this.
    """
    if not isinstance(name, str) or not name or name.startswith(".") or ".." in name:
        return False
    is_one_part = not any(letter in name for letter in "/\\\0") and not PureWindowsPath(name).drive
    return is_one_part and name.isprintable()


class FileKind(NamedTuple):
    """A kind of file that Esper writes where the user says."""

    words: str
    """what it is, as in "a report of esper report" """
    is_one: Callable[[BufferedReader], bool]
    """whether an opened file is one"""


def has_mark(mark: str) -> Callable[[BufferedReader], bool]:
    """What tells whether an opened text has a mark near its beginning."""
    return lambda file: mark.encode() in file.read(_HEAD)


def metadata_of(file: BufferedReader) -> dict[str, Any]:
    """What an opened safetensors file says of itself; nothing where it is no such file."""
    size = int.from_bytes(file.read(8), "little")
    if size > MOST_BYTES:
        return {}
    try:
        return dict(json.loads(file.read(size))["__metadata__"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return {}


def require_replaceable(path: Path, kind: FileKind | None = None) -> None:
    """Refuse a path where something stands that a write would destroy.

    A path that the user names has a `kind`: only a new path, or a regular file of that kind, is
    written to. A file with a name of Esper's in a folder of Esper's has none: any regular file is
    replaced, and so is a link, which is never written through.
    """
    try:
        form = stat.S_IFMT(os.lstat(path).st_mode)
    except OSError:  # it is new, or the write says what is wrong
        return
    if kind is None and form in (stat.S_IFREG, stat.S_IFLNK):
        return
    if kind is not None and form == stat.S_IFREG and _is_of(path, kind):
        return
    rule = "a regular file" if kind is None else kind.words
    raise SaveError(
        f"{path} is {_FORMS.get(form, 'no file')} and stays as it is: only {rule} is replaced. "
        "Move it away, or name another path."
    )


def _is_of(path: Path, kind: FileKind) -> bool:
    try:
        with open_plain(path) as file:
            return kind.is_one(file)
    except OSError:
        return False


# -- reading, copying, removing --------------------------------------------------------------------


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
    """A name next to a path that no other process can guess."""
    path = path.absolute()  # "." has no name
    return path.with_name(f".new-{secrets.token_hex(16)}-{path.name}")


def _replace(path: Path, content: Content) -> str:
    """Write beside the file, make that durable, then move it over the file; its sha256."""
    require_replaceable(path)
    beside = _beside(path)
    # a function gets a folder for itself, because it may write beside its path
    temporary = beside if isinstance(content, bytes) else beside / path.name
    mode = 0
    try:
        if isinstance(content, bytes):
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
            with os.fdopen(handle, "wb") as file:
                file.write(content)
        else:
            os.mkdir(beside)
            mode = os.stat(beside).st_mode & 0o666
            content(temporary)
        with open_plain(temporary) as written:
            if mode:  # a library may have made the file its owner's alone
                os.fchmod(written.fileno(), mode)
            os.fsync(written.fileno())
            sha256 = hashlib.file_digest(written, "sha256").hexdigest()
        os.replace(temporary, path)
    finally:
        _discard(beside)
    return sha256


def _discard(path: Path) -> None:
    """Delete a temporary file, or the folder of one with all that is in it."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            remove([path / name for name in names_in(path)])
            os.rmdir(path)
        else:
            os.unlink(path)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, each durable in the one above."""
    upwards = []
    for path in (folder, *folder.parents):
        upwards.append(path)
        if path.is_dir():
            break
    for path in reversed(upwards):
        if not path.is_dir():
            _make_one_folder(path)
        elif names_in(path):
            continue
        # an empty folder counts too: the process that made it may have been killed before this
        sync_folder(path.parent)


def _make_one_folder(folder: Path) -> None:
    try:
        os.mkdir(folder)
    except FileExistsError:
        if not folder.is_dir():  # another process may have been faster
            raise


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


def sweep(folder: Path, owns: Callable[[str], object]) -> None:
    """Remove what killed writes left behind of the files whose names the caller `owns`."""
    for name in names_in(folder):
        leftover = _LEFTOVER.fullmatch(name)
        if leftover and owns(leftover[1]):
            _discard(folder / name)


def names_in(folder: Path) -> list[str]:
    """What is in a folder; nothing where it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def remove(paths: list[Path]) -> None:
    """Delete files; one that cannot be deleted stays, which does no harm."""
    for path in paths:
        with suppress(OSError):
            os.unlink(path)


@contextmanager
def naming_failures(path: Path) -> Iterator[None]:
    """A disk that fails becomes one line that names the file."""
    try:
        yield
    except (OSError, SafetensorError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise SaveError(
            f"cannot save {path}: {reason}. Earlier saves are untouched. "
            "Free disk space and save again; resume a run with --resume."
        ) from problem


def open_plain(path: Path) -> BufferedReader:
    """Open a regular file for reading; a link, or anything else with a name, is refused."""
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
    """The sha256 of a regular file."""
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
