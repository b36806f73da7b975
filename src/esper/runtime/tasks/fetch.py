"""Downloads of official data sets into the layouts that `data` reads.

Reading and splitting them happens there.
"""

import gzip
import os
import sys
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from esper.leyline.errors import DataError, UnknownNameError
from esper.leyline.extras import needs

_TIMEOUT = 30.0  # Seconds without a byte until a server is gone.
_RETRIES = 2  # Further attempts, each from the start.


@dataclass(frozen=True)
class RemoteFile:
    """One official file: where it is, where it goes under the data root, and how to know it."""

    url: str
    path: str
    checksum: str | None = None  # algorithm:hex digits; None where none is published
    # of an archive: checksums by path under the data root
    members: Mapping[str, str] = field(default_factory=dict)


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


def _fashion(name: str, checksum: str) -> RemoteFile:
    folder = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
    return RemoteFile(f"{folder}/{name}", f"FashionMNIST/raw/{name}", checksum)


def _stories(name: str) -> RemoteFile:
    folder = "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main"
    return RemoteFile(f"{folder}/{name}", f"TinyStories/{name}")


_SHAKESPEARE = RemoteFile(
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "shakespeare/input.txt",
    "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)
_FASHION = (
    _fashion("train-images-idx3-ubyte.gz", "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
    _fashion("train-labels-idx1-ubyte.gz", "md5:25c81989df183df01b3e8a0aad5dffbe"),
    _fashion("t10k-images-idx3-ubyte.gz", "md5:bef4ecab320f06d8554ea6380940ec79"),
    _fashion("t10k-labels-idx1-ubyte.gz", "md5:bb300cfdad3c16e7a12a480ee83cd310"),
)
# Files by the name of their task.
SOURCES: dict[str, tuple[RemoteFile, ...]] = {
    "cifar10": (_CIFAR10,),
    "cifar10_deep": (_CIFAR10,),
    "cifar10_resnet": (_CIFAR10,),
    "cifar10_varied": (_CIFAR10,),
    "fashion_mnist": _FASHION,
    "fashion_varied": _FASHION,
    "shakespeare": (_SHAKESPEARE,),
    "tinystories": (_stories("TinyStories-train.txt"), _stories("TinyStories-valid.txt")),
}


def fetch(
    name: str, root: Path | None, *, sources: Mapping[str, tuple[RemoteFile, ...]] = SOURCES
) -> list[str]:
    """Bring a data set into `root`; returns one line about each file."""
    if name not in sources:
        from esper.runtime.tasks.registry import (
            TASKS,  # and with them torch, which no download needs
        )

        if name not in TASKS:
            raise UnknownNameError("data set", name, {*sources, *TASKS})
        return [f"{name} needs no fetching. Its source: {TASKS[name].source}."]
    if root is None:
        raise DataError(
            f"no data folder was named for {name}. Name one with --data-root or ESPER_DATA."
        )
    with needs("data", "fetching"):
        import pooch
        from requests import RequestException
    pooch.get_logger().setLevel("ERROR")
    try:
        notes: list[str] = []
        for file in sources[name]:
            notes += _bring(file, root)
        return notes
    except RequestException as problem:
        missing = [file for file in sources[name] if not _exists(file, root)]
        copies = "; ".join(f"{file.url} to {root / file.path}" for file in missing)
        raise DataError(
            f"{name} was not fetched: {problem}. Run the command again when there is a network, or "
            f"after a copy by hand: {copies}."
        ) from problem
    except OSError as problem:
        raise DataError(
            f"cannot read or write {problem.filename or root}: {problem.strerror or problem}. Free "
            "disk space or name another folder with --data-root."
        ) from problem


def is_fetched(name: str, root: Path | None) -> bool:
    """Say whether every file of the data set is there; their content is not read.

    A data set without files is always there.
    """
    files = SOURCES.get(name, ())
    if not files:
        return True
    return root is not None and all(_exists(file, root) for file in files)


def _exists(file: RemoteFile, root: Path) -> bool:
    """Whether a file is there; of an archive, all that is in it."""
    return all((root / path).is_file() for path in file.members or (file.path,))


def _bring(file: RemoteFile, root: Path) -> list[str]:
    """Bring one file, and what is in it if it is an archive.

    What already exists is checked, and never overwritten.
    """
    notes = []
    for path, checksum in file.members.items():
        if (root / path).exists():
            notes.append(_keep(root / path, checksum))
    if notes and len(notes) == len(file.members):
        return notes
    target = root / file.path
    existed = target.exists()
    notes.append(_keep(target, file.checksum) if existed else _download(file, target))
    if file.members:
        notes.append(_unpack(target, root, file.members))
        if not existed:
            target.unlink()
    return notes


def _keep(path: Path, checksum: str | None) -> str:
    """Check a file that is there, and say so; a wrong one is an error."""
    if checksum and not _is_right(path, checksum):
        raise DataError(
            f"{path} already exists, but its checksum is not the official {checksum}. "
            "Move it away first."
        )
    return f"{path} already exists; {_known_by(checksum)}."


def _is_right(path: Path, checksum: str) -> bool:
    from pooch import file_hash

    algorithm, _, digits = checksum.partition(":")
    return file_hash(path, algorithm) == digits


def _known_by(checksum: str | None) -> str:
    if checksum:
        return "its checksum is right"
    return "no checksum is published, so its content is unverified"


def _download(file: RemoteFile, target: Path) -> str:
    """Download into a temporary file, check it, rename it.

    A file under its own name is therefore complete.
    """
    import pooch

    plain = {"Accept-Encoding": "identity"}  # the size that the server announces is the file's
    download = pooch.HTTPDownloader(
        sys.stderr.isatty(), chunk_size=1 << 18, timeout=_TIMEOUT, headers=plain
    )
    folder = pooch.create(
        target.parent.absolute(), base_url="", retry_if_failed=_RETRIES, allow_updates=False
    )
    folder.registry[target.name] = file.checksum
    folder.urls[target.name] = file.url
    try:
        folder.fetch(target.name, downloader=download)
    except ValueError as problem:
        raise DataError(
            f"{file.url}: {problem} Run the command again, or put the file at {target}."
        ) from problem
    target.chmod(target.parent.stat().st_mode & 0o666)  # a temporary file is its owner's alone
    return f"{target} fetched: {target.stat().st_size:,} bytes, {_known_by(file.checksum)}."


def _unpack(archive: Path, root: Path, members: Mapping[str, str]) -> str:
    """Unpack aside, check, then move file by file.

    What is under its own name is therefore complete and right.
    """
    with TemporaryDirectory(dir=root, prefix=".unpack-") as aside:
        try:
            with tarfile.open(archive) as tar:
                # the filter refuses what would be written, or linked to, outside
                tar.extractall(aside, filter="data")
        except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as problem:
            raise DataError(
                f"{archive} was refused, and nothing of it is kept: {problem}."
            ) from problem
        for path, checksum in members.items():
            unpacked = Path(aside) / path
            if not unpacked.is_file() or not _is_right(unpacked, checksum):
                raise DataError(
                    f"{archive} does not hold the official {path}; move it away and run the "
                    "command again."
                )
        for path in members:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(Path(aside) / path, root / path)
    return f"{len(members)} files unpacked from {archive.name}, their checksums are right."
