"""Downloads of official data sets into the layouts that `data` reads. Reading and splitting them happens there."""

import gzip
import hashlib
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from esper.leyline.errors import DataError, UnknownNameError
from esper.runtime.transfer import UnreachableError, transfer

Progress = Callable[[str, int, int | None], None]
"""(file, bytes that are here, bytes in all where the server says so)"""


@dataclass(frozen=True)
class RemoteFile:
    """One official file: where it is, where it goes under the data root, and how to know it."""

    url: str
    path: str
    checksum: str | None = None
    """algorithm:hex digits; None where none is published"""
    members: Mapping[str, str] = field(default_factory=dict)
    """for an archive: what must come out of it, path under the data root -> checksum"""


_CIFAR10 = RemoteFile(
    "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    "cifar-10-python.tar.gz",
    "md5:c58f30108f718f92721af3b95e74349a",
    members={
        "cifar-10-batches-py/data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
        "cifar-10-batches-py/data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
        "cifar-10-batches-py/data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
        "cifar-10-batches-py/data_batch_4": "md5:634d18415352ddfa80567beed471001a",
        "cifar-10-batches-py/data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
        "cifar-10-batches-py/test_batch": "md5:40351d587109b95175f43aff81a1287e",
        "cifar-10-batches-py/batches.meta": "md5:5ff9c542aee3614f3951f8cda6e48888",
    },
)
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_STORIES = "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main/"
_SHAKESPEARE = RemoteFile(
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "shakespeare/input.txt",
    "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)
SOURCES: dict[str, tuple[RemoteFile, ...]] = {
    "cifar10": (_CIFAR10,),
    "cifar10_deep": (_CIFAR10,),
    "fashion_mnist": tuple(
        RemoteFile(f"{_FASHION}{name}-ubyte.gz", f"FashionMNIST/raw/{name}-ubyte.gz", f"md5:{md5}")
        for name, md5 in (
            ("train-images-idx3", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            ("train-labels-idx1", "25c81989df183df01b3e8a0aad5dffbe"),
            ("t10k-images-idx3", "bef4ecab320f06d8554ea6380940ec79"),
            ("t10k-labels-idx1", "bb300cfdad3c16e7a12a480ee83cd310"),
        )
    ),
    "shakespeare": (_SHAKESPEARE,),
    "tinystories": tuple(
        RemoteFile(f"{_STORIES}TinyStories-{part}.txt", f"TinyStories/TinyStories-{part}.txt")
        for part in ("train", "valid")
    ),
}
ALWAYS_THERE = {
    "digits": "it comes with scikit-learn",
    "blobs": "it is generated",
    "python_text": "it is the source of this Python's standard library",
}


def fetch(
    name: str,
    root: Path | None,
    *,
    sources: Mapping[str, tuple[RemoteFile, ...]] = SOURCES,
    progress: Progress = lambda file, here, total: None,
) -> list[str]:
    """Bring a data set into `root`, resuming what an earlier call began; says of each file what became of it."""
    if name in ALWAYS_THERE:
        return [f"{name} needs no fetching: {ALWAYS_THERE[name]}."]
    if name not in sources:
        raise UnknownNameError("data set", name, {*sources, *ALWAYS_THERE})
    if root is None:
        raise DataError(f"no data folder was named for {name}. Name one with --data-root or ESPER_DATA.")
    try:
        with _disk_errors(root):
            return [note for file in sources[name] for note in _bring(file, root, progress)]
    except UnreachableError as problem:
        missing = [file for file in sources[name] if not _is_there(file, root)]
        places = "; ".join(f"{file.url} to {root / file.path}" for file in missing)
        unpacked = " (this command unpacks it)" if any(file.members for file in missing) else ""
        raise DataError(
            f"{name} was not fetched: {problem}. Run the command again when there is a network, or fetch elsewhere and "
            f"copy: {places}{unpacked}."
        ) from problem


def is_fetched(name: str, root: Path | None) -> bool:
    """Whether every file of the data set is in its place; the content is not read."""
    if name in ALWAYS_THERE:
        return True
    return name in SOURCES and root is not None and all(_is_there(file, root) for file in SOURCES[name])


def _is_there(file: RemoteFile, root: Path) -> bool:
    return all((root / path).is_file() for path in file.members or (file.path,))


@contextmanager
def _disk_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise DataError(
            f"cannot read or write {problem.filename or root}: {problem.strerror or problem}. Make room or name "
            "another folder with --data-root; the same command goes on from what has arrived."
        ) from problem


def _bring(file: RemoteFile, root: Path, progress: Progress) -> list[str]:
    """One file, and what is in it if it is an archive; whatever is there and right is not touched."""
    notes = [_keep(root / path, checksum) for path, checksum in file.members.items() if (root / path).exists()]
    if notes and len(notes) == len(file.members):
        return notes
    target = root / file.path
    was_there = target.exists()
    notes.append(_keep(target, file.checksum) if was_there else _download(file, target, progress))
    if file.members:
        notes.append(_unpack(target, root, file.members))
        if not was_there:
            target.unlink()
    return notes


def _keep(path: Path, checksum: str | None) -> str:
    """What is there stays, if it is what it should be; it is never overwritten."""
    if checksum is None:
        return f"{path} was there; no checksum is published, so its content is unverified."
    if (found := _digest(path, checksum)) != checksum:
        raise DataError(
            f"{path} is there, but its checksum is {found} and the official file's is {checksum}. "
            "Move it away to fetch the official one."
        )
    return f"{path} was there; its checksum is right."


def _digest(path: Path, like: str) -> str:
    algorithm = like.partition(":")[0]
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, lambda: hashlib.new(algorithm, usedforsecurity=False))
    return f"{algorithm}:{digest.hexdigest()}"


def _download(file: RemoteFile, target: Path, progress: Progress) -> str:
    """Into `target`.part, checked, then renamed: a file under its own name is complete."""
    part = target.with_name(target.name + ".part")
    total = transfer(file.url, part, lambda here, total: progress(target.name, here, total))
    if file.checksum is None:
        size = "the size that the server announced" if total is not None else "and the server announced no size"
        known_by = f"{size}; no checksum is published, so its content is unverified"
    elif (found := _digest(part, file.checksum)) == file.checksum:
        known_by = "its checksum is right"
    else:
        part.unlink()
        raise DataError(
            f"{file.url} sent a file with checksum {found}, but the official one's is {file.checksum}; it was removed. "
            f"Run the command again to start over, or put the official file at {target}."
        )
    part.replace(target)
    return f"{target} fetched: {target.stat().st_size:,} bytes, {known_by}."


def _unpack(archive: Path, root: Path, members: Mapping[str, str]) -> str:
    """Unpacked aside, checked, then moved file by file: what is in its place is complete and right."""
    with TemporaryDirectory(dir=root, prefix=".unpack-") as aside:
        try:
            with tarfile.open(archive) as tar:
                tar.extractall(aside, filter="data")
        except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as problem:
            raise DataError(f"{archive} was refused, and nothing of it is kept: {problem}.") from problem
        for path, checksum in members.items():
            unpacked = Path(aside) / path
            if not unpacked.is_file() or _digest(unpacked, checksum) != checksum:
                raise DataError(f"{archive} does not hold the official {path}; move it away and run the command again.")
        for path in members:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(Path(aside) / path, root / path)
    return f"{len(members)} files unpacked from {archive.name}, their checksums are right."
