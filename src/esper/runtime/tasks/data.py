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
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from esper.leyline.errors import DataError
from esper.leyline.extras import needs
from esper.runtime.splits import SealedSplit, Split, Splits, TensorSplit, TokenSplit, carve

# What a batch of CIFAR-10 may name: module and object.
_PICKLE_ALLOWED = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
}
# First four bytes of files of images and of labels.
_IDX_IMAGES = 2051
_IDX_LABELS = 2049


def load_digits(root: Path | None = None) -> Splits:
    """Load 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn.

    A fifth of them is the test split.
    """
    with needs("demo", "the task digits"):
        from sklearn.datasets import load_digits as load
    raw = load()
    images = torch.tensor(raw.images, dtype=torch.uint8)[:, None]
    labels = torch.tensor(raw.target, dtype=torch.long)
    whole = TensorSplit(images, labels, scale=1 / 16, shift=-0.5)
    seen, test = carve(whole, share=0.2, seed=21)
    return _carved_splits(seen, test)


def load_blobs(root: Path | None = None) -> Splits:
    """Make points in a square, labelled by the sign of x * y.

    No linear map can tell the classes apart, a small MLP can.
    """
    points = torch.rand(1536, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    whole = TensorSplit(points, (points.prod(1) > 0).long())
    seen, test = carve(whole, share=0.25)
    return _carved_splits(seen, test, share=0.25)


def load_python_text(root: Path | None = None, context: int = 64, size: int = 1_500_000) -> Splits:
    """Load the source of this Python's standard library as bytes: a text that is always there."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    text = bytearray().join(sources)[:size]
    corpus = f"{len(text):,} bytes, sha256 {hashlib.sha256(text).hexdigest()[:16]}"
    return replace(_text_splits(torch.frombuffer(text, dtype=torch.uint8), context), corpus=corpus)


def load_code(root: Path | None = None, context: int = 256, size: int = 2**26) -> Splits:
    """Load Python sources of this installation as bytes, at most `size` of them.

    They are those of its standard library and packages, in an order that their paths decide.
    """
    texts = _read_sources(size)
    digest = hashlib.sha256()
    parts = [bytearray() for _ in range(3)]  # training, validation, test
    for key, text in texts.items():
        digest.update(key)
        # a text's own digest decides: 90 % are for training, and no text is in two splits
        parts[max(0, key[0] % 20 - 17)] += text
    train, validation, test = [_token_split(part or bytearray(1), context) for part in parts]
    total = sum(len(text) for text in texts.values())
    corpus = f"{total:,} bytes in {len(texts):,} files, sha256 {digest.hexdigest()[:16]}"
    return Splits(train, validation, SealedSplit(test), corpus)


def _read_sources(size: int) -> dict[bytes, bytes]:
    """Texts of Python files by their digest, at most `size` bytes; each content once."""
    texts: dict[bytes, bytes] = {}
    room = size
    for path in _find_sources():
        try:
            text = path.read_bytes()[:room]
        except OSError:  # a broken link, or another user's file
            continue
        key = hashlib.sha256(text).digest()
        if text and key not in texts:
            texts[key] = text
            room -= len(text)
        if not room:
            break
    return texts


def _find_sources() -> list[Path]:
    """Every Python file of the standard library and the installed packages.

    Their order mixes the folders: it is that of digests of the paths inside them.
    """
    installed = sysconfig.get_paths()
    inner_paths: dict[str, str] = {}  # path inside its folder, by whole path
    for root in dict.fromkeys(installed[name] for name in ("stdlib", "purelib", "platlib")):
        for folder, subfolders, names in os.walk(root):
            # what lies inside the standard library belongs to another installation, or is walked by
            # itself
            skipped = ("site-packages", "dist-packages", "__pycache__")
            subfolders[:] = [name for name in subfolders if name not in skipped]
            for name in names:
                if name.endswith(".py"):
                    path = os.path.join(folder, name)
                    inner_paths.setdefault(path, os.path.relpath(path, root))

    def order(path: str) -> tuple[bytes, str]:
        return hashlib.sha256(inner_paths[path].encode()).digest(), path

    return [Path(path) for path in sorted(inner_paths, key=order)]


def _token_split(text: bytearray, context: int) -> TokenSplit:
    return TokenSplit(torch.frombuffer(text, dtype=torch.uint8), context)


def load_shakespeare(root: Path | None, context: int = 64) -> Splits:
    """Load tinyshakespeare from `root`/shakespeare/input.txt."""
    return _text_splits(_read_tokens(root, "shakespeare/input.txt", "shakespeare"), context)


def load_tinystories(root: Path | None, context: int = 64) -> Splits:
    """Load TinyStories from `root`/TinyStories.

    The official validation file is the test split here.
    """
    seen = _read_tokens(root, "TinyStories/TinyStories-train.txt", "tinystories")
    test = _read_tokens(root, "TinyStories/TinyStories-valid.txt", "tinystories")
    cut = int(len(seen) * 0.95)
    validation = TokenSplit(seen[cut:], context)
    train = TokenSplit(seen[:cut], context)
    return Splits(train, validation, SealedSplit(TokenSplit(test, context)))


def _read_tokens(root: Path | None, name: str, data_set: str) -> torch.Tensor:
    return torch.from_numpy(np.fromfile(_require(root, name, data_set), np.uint8))


def _text_splits(tokens: torch.Tensor, context: int) -> Splits:
    """A text cut into 85 % train, 7.5 % validation and 7.5 % test, in this order."""
    first = int(len(tokens) * 0.85)
    second = int(len(tokens) * 0.925)
    return Splits(
        train=TokenSplit(tokens[:first], context),
        validation=TokenSplit(tokens[first:second], context),
        test=SealedSplit(TokenSplit(tokens[second:], context)),
    )


def _carved_splits(seen: TensorSplit, test: TensorSplit, share: float = 0.15) -> Splits:
    """Splits whose validation examples are carved off the training data."""
    train, validation = carve(seen, share)
    return Splits(train, validation, SealedSplit(test))


def load_fashion_mnist(root: Path | None) -> Splits:
    """Load Fashion-MNIST from its official files under `root`/FashionMNIST/raw."""
    seen = _read_clothes(root, "train", 60_000)
    test = _read_clothes(root, "t10k", 10_000)
    return _carved_splits(seen, test)


def _read_clothes(root: Path | None, part: str, count: int) -> TensorSplit:
    """Images and labels of one part of Fashion-MNIST."""
    images = _read_idx(root, f"{part}-images-idx3-ubyte.gz", _IDX_IMAGES, count * 784)
    labels = _read_idx(root, f"{part}-labels-idx1-ubyte.gz", _IDX_LABELS, count)
    _check_labels(labels, f"{part} labels")
    return TensorSplit(
        torch.from_numpy(images.reshape(count, 1, 28, 28)),
        torch.from_numpy(labels).long(),
        scale=1 / 255 / 0.353,
        shift=-0.286 / 0.353,
    )


def load_half_size(root: Path | None, *, load: Callable[[Path | None], Splits]) -> Splits:
    """Load images of half the height and width of what `load` reads: means of 2 x 2 pixels."""
    splits = load(root)
    return replace(
        splits,
        train=_halve(splits.train),
        validation=_halve(splits.validation),
        test=SealedSplit(_halve(splits.test.open_for_final_report())),
    )


def _halve(split: Split) -> TensorSplit:
    assert isinstance(split, TensorSplit)
    parts = [
        torch.nn.functional.avg_pool2d(images.float(), 2).round().to(torch.uint8)
        for images in split.inputs.split(4096)
    ]
    return replace(split, inputs=torch.cat(parts))


def load_cifar10(root: Path | None) -> Splits:
    """Load CIFAR-10 from its official Python batches under `root`/cifar-10-batches-py."""
    seen = _read_batches(root, [f"data_batch_{number}" for number in range(1, 6)])
    test = _read_batches(root, ["test_batch"])
    return _carved_splits(seen, test)


def _read_batches(root: Path | None, names: Sequence[str]) -> TensorSplit:
    """Images and labels of these batches of CIFAR-10, one after the other."""
    images = []
    labels = []
    for name in names:
        path = _require(root, f"cifar-10-batches-py/{name}", "cifar10")
        batch_images, batch_labels = _read_batch(path)
        images.append(batch_images)
        labels.append(batch_labels)
    return TensorSplit(
        torch.from_numpy(np.concatenate(images)),
        torch.from_numpy(np.concatenate(labels)),
        scale=1 / 255 / 0.25,
        shift=-0.475 / 0.25,
    )


class _ArraysOnly(pickle.Unpickler):
    """Reads numpy arrays and plain containers; any other object in the file is refused."""

    def find_class(self, module: str, name: str) -> Any:
        """Return an object that the file names, if it is one of those that arrays need."""
        if (module, name) not in _PICKLE_ALLOWED:
            raise pickle.UnpicklingError(f"it wants to load {module}.{name}")
        return super().find_class(module, name)


def _read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images [count, 3, 32, 32] and labels of one batch of CIFAR-10."""
    try:
        with path.open("rb") as file:
            batch = _ArraysOnly(file, encoding="bytes").load()
        images = batch[b"data"]
        labels = np.asarray(batch[b"labels"], np.int64)
    except Exception as problem:  # damaged bytes can make an unpickler fail in any way
        raise DataError(
            f"{path} is not an official CIFAR-10 batch ({problem}); download it again."
        ) from problem
    is_bytes = isinstance(images, np.ndarray) and images.dtype == np.uint8
    if not is_bytes or images.shape[1:] != (3072,) or not len(images):
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
            f"{what}: labels run from {labels.min()} to {labels.max()}, but there are 10 classes; "
            "download it again."
        )


def _require(root: Path | None, name: str, data_set: str) -> Path:
    """The path of a file of a data set; a missing one is an error that says how to get it."""
    if root is not None and (root / name).is_file():
        return root / name
    problem = "no data folder was named" if root is None else f"{root / name} is not there"
    raise DataError(
        f"{problem}. Name the folder DATA of DATA/{name} with --data-root or ESPER_DATA, in Python "
        f"with data_root, or run: esper data fetch {data_set} --data-root DATA."
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
    header = 16 if magic == _IDX_IMAGES else 8
    if len(raw) != header + size or struct.unpack(">i", raw[:4])[0] != magic:
        raise DataError(
            f"{path} holds {len(raw):,} bytes that are not the official file; download it again."
        )
    return np.frombuffer(raw, np.uint8, offset=header).copy()
