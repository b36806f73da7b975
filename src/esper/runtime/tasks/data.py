"""Readers of official on-disk layouts, and the data sets that are always there.

Nothing is downloaded here.
"""

import gzip
import hashlib
import os
import pickle
import struct
import sysconfig
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from esper.leyline.errors import DataError
from esper.runtime.splits import SealedSplit, Splits, TensorSplit, TokenSplit, carve

_PICKLE_ALLOWED = {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}
_PICKLE_ALLOWED |= {(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")}


def load_digits(root: Path | None = None) -> Splits:
    """1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn; a fifth of them is the
    test split.
    """
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as problem:
        raise DataError(
            "the digits come with scikit-learn. Install it: pip install 'esper-lite[demo]'."
        ) from problem
    raw = load()
    images = torch.tensor(raw.images, dtype=torch.uint8)[:, None]
    whole = TensorSplit(
        images, torch.tensor(raw.target, dtype=torch.long), scale=1 / 16, shift=-0.5
    )
    rest, test = carve(whole, share=0.2, seed=21)
    return Splits(*carve(rest), SealedSplit(test))


def load_blobs(root: Path | None = None) -> Splits:
    """Points in a square, labelled by the sign of x * y:

    no linear map can tell the classes apart, a small MLP can.
    """
    points = torch.rand(1536, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    rest, test = carve(TensorSplit(points, (points.prod(1) > 0).long()), share=0.25)
    return Splits(*carve(rest, share=0.25), SealedSplit(test))


def load_python_text(root: Path | None = None, context: int = 64, size: int = 1_500_000) -> Splits:
    """The source of this Python's standard library as bytes: a text that is always there."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray().join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:size]
    corpus = f"{len(text):,} bytes, sha256 {hashlib.sha256(text).hexdigest()[:16]}"
    return replace(_text_splits(torch.frombuffer(text, dtype=torch.uint8), context), corpus=corpus)


def load_code(root: Path | None = None, context: int = 256, size: int = 2**26) -> Splits:
    """Python sources of this installation, bytes: its standard library and packages, at most `size`
    of them.

    Files come in an order that their paths decide.
    """
    texts: dict[bytes, bytes] = {}  # each content once
    room = size
    for path in _find_sources():
        try:
            text = path.read_bytes()[:room]
        except OSError:  # a broken link, or somebody else's file
            continue
        if text and (key := hashlib.sha256(text).digest()) not in texts:
            texts[key] = text
            room -= len(text)
        if not room:
            break
    whole, parts = hashlib.sha256(), [bytearray() for _ in range(3)]
    for (
        key,
        text,
    ) in (
        texts.items()
    ):  # its digest decides: 90 % training, validation or test; no text is in two splits
        whole.update(key)
        parts[max(0, key[0] % 20 - 17)] += text
    splits = [
        TokenSplit(torch.frombuffer(part or bytearray(1), dtype=torch.uint8), context)
        for part in parts
    ]
    corpus = (
        f"{sum(map(len, texts.values())):,} bytes in {len(texts):,} files, sha256 "
        f"{whole.hexdigest()[:16]}"
    )
    return Splits(splits[0], splits[1], SealedSplit(splits[2]), corpus)


def _find_sources() -> list[Path]:
    """Every Python file of the standard library and the installed packages, in an order that mixes
    them.
    """
    paths, found = sysconfig.get_paths(), dict[str, str]()
    for folder in dict.fromkeys(paths[name] for name in ("stdlib", "purelib", "platlib")):
        for place, folders, names in os.walk(folder):
            # what lies inside the standard library belongs to another installation, or is walked by
            # itself
            folders[:] = [
                name
                for name in folders
                if name not in ("site-packages", "dist-packages", "__pycache__")
            ]
            for path in (os.path.join(place, name) for name in names if name.endswith(".py")):
                found.setdefault(path, os.path.relpath(path, folder))
    return [
        Path(path)
        for path in sorted(found, key=lambda p: (hashlib.sha256(found[p].encode()).digest(), p))
    ]


def load_shakespeare(root: Path | None, context: int = 64) -> Splits:
    """tinyshakespeare from `root`/shakespeare/input.txt."""
    return _text_splits(_read_tokens(root, "shakespeare/input.txt", "shakespeare"), context)


def load_tinystories(root: Path | None, context: int = 64) -> Splits:
    """TinyStories from `root`/TinyStories; the official validation file is the test split here."""
    train = _read_tokens(root, "TinyStories/TinyStories-train.txt", "tinystories")
    test = _read_tokens(root, "TinyStories/TinyStories-valid.txt", "tinystories")
    cut = int(len(train) * 0.95)
    held_out = TokenSplit(train[cut:], context)
    return Splits(
        TokenSplit(train[:cut], context), held_out, SealedSplit(TokenSplit(test, context))
    )


def _read_tokens(root: Path | None, name: str, data_set: str) -> torch.Tensor:
    return torch.from_numpy(np.fromfile(_require(root, name, data_set), np.uint8))


def _text_splits(tokens: torch.Tensor, context: int) -> Splits:
    """A text cut into 85 % train, 7.5 % validation and 7.5 % test, in this order."""
    first, second = int(len(tokens) * 0.85), int(len(tokens) * 0.925)
    parts = [
        TokenSplit(part, context)
        for part in (tokens[:first], tokens[first:second], tokens[second:])
    ]
    return Splits(parts[0], parts[1], SealedSplit(parts[2]))


def load_fashion_mnist(root: Path | None) -> Splits:
    """Fashion-MNIST from its official files under `root`/FashionMNIST/raw."""
    parts = {}
    for part, count in (("train", 60_000), ("t10k", 10_000)):
        images = _read_idx(root, f"{part}-images-idx3-ubyte.gz", 2051, count * 784).reshape(
            count, 1, 28, 28
        )
        labels = _read_idx(root, f"{part}-labels-idx1-ubyte.gz", 2049, count)
        _check_labels(labels, f"{part} labels")
        targets = torch.from_numpy(labels).long()
        parts[part] = TensorSplit(
            torch.from_numpy(images), targets, scale=1 / 255 / 0.353, shift=-0.286 / 0.353
        )
    return Splits(*carve(parts["train"]), SealedSplit(parts["t10k"]))


def load_cifar10(root: Path | None) -> Splits:
    """CIFAR-10 from its official Python batches under `root`/cifar-10-batches-py."""
    train = _read_batches(root, *(f"data_batch_{number}" for number in range(1, 6)))
    return Splits(*carve(train), SealedSplit(_read_batches(root, "test_batch")))


def _read_batches(root: Path | None, *names: str) -> TensorSplit:
    batches = [
        _read_batch(_require(root, f"cifar-10-batches-py/{name}", "cifar10")) for name in names
    ]
    images, labels = (
        torch.from_numpy(np.concatenate(parts)) for parts in zip(*batches, strict=True)
    )
    return TensorSplit(images, labels, scale=1 / 255 / 0.25, shift=-0.475 / 0.25)


class _ArraysOnly(pickle.Unpickler):
    """Reads numpy arrays and plain containers; any other object in the file is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _PICKLE_ALLOWED:
            raise pickle.UnpicklingError(f"it wants to load {module}.{name}")
        return super().find_class(module, name)


def _read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with path.open("rb") as file:
            batch = _ArraysOnly(file, encoding="bytes").load()
        images, labels = batch[b"data"], np.asarray(batch[b"labels"], np.int64)
    except Exception as problem:  # damaged bytes can make an unpickler fail in any way
        raise DataError(
            f"{path} is not an official CIFAR-10 batch ({problem}); download it again."
        ) from problem
    if (
        not isinstance(images, np.ndarray)
        or images.dtype != np.uint8
        or images.shape[1:] != (3072,)
        or not len(images)
    ):
        raise DataError(f"{path} does not hold images as rows of 3,072 bytes; download it again.")
    if len(images) != len(labels):
        raise DataError(
            f"{path} holds {len(images)} images and {len(labels)} labels; download it again."
        )
    _check_labels(labels, str(path))
    return images.reshape(-1, 3, 32, 32), labels


def _check_labels(labels: np.ndarray, what: str) -> None:
    if labels.min() < 0 or labels.max() > 9:
        raise DataError(
            f"{what}: labels run from {labels.min()} to {labels.max()}, but there are 10 classes."
        )


def _require(root: Path | None, name: str, data_set: str) -> Path:
    """The path of a file of a data set; a missing one is an error that says how to get it."""
    if root is not None and (root / name).is_file():
        return root / name
    where = "no data folder was named" if root is None else f"{root / name} is not there"
    command = f"esper data fetch {data_set} --data-root DATA"
    raise DataError(
        f"{where}. Name the folder DATA of DATA/{name} with --data-root or "
        f"ESPER_DATA, or run: {command}."
    )


def _read_idx(root: Path | None, name: str, magic: int, size: int) -> np.ndarray:
    """The bytes of one gzipped IDX file, checked against what it must hold."""
    path = _require(root, f"FashionMNIST/raw/{name}", "fashion_mnist")
    try:
        raw = gzip.decompress(path.read_bytes())
    except (EOFError, OSError, zlib.error) as problem:
        raise DataError(
            f"{path} is not a complete gzip file ({problem}); download it again."
        ) from problem
    header = 16 if magic == 2051 else 8
    if len(raw) != header + size or struct.unpack(">i", raw[:4])[0] != magic:
        raise DataError(
            f"{path} holds {len(raw):,} bytes that are not the official file; download it again."
        )
    return np.frombuffer(raw, np.uint8, offset=header).copy()
