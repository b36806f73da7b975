"""Data sets, split once and for all: train, validation (carved from train), test. No policy sees the test split."""

import gzip
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from esper.leyline.errors import DataError

_SPLIT_SEED = 20
_VALIDATION_SHARE = 0.15


@dataclass(frozen=True)
class Split:
    """Images [B, C, H, W] as floats and labels [B]."""

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels) or not len(self.labels):
            raise DataError(
                f"{len(self.images)} images and {len(self.labels)} labels; there must be as many, at least 1."
            )

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> "Split":
        return Split(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True)
class DataSet:
    """Three disjoint splits of one set."""

    name: str
    train: Split
    validation: Split
    test: Split

    def to(self, device: torch.device | str) -> "DataSet":
        return DataSet(self.name, self.train.to(device), self.validation.to(device), self.test.to(device))


def _order(count: int) -> Tensor:
    """The same permutation on every machine and in every run."""
    return torch.from_numpy(np.random.default_rng(_SPLIT_SEED).permutation(count))


def _carve(images: Tensor, labels: Tensor) -> tuple[Split, Split]:
    """Train and validation from the training data."""
    order = _order(len(labels))
    cut = int(len(labels) * _VALIDATION_SHARE)
    held_out, kept = order[:cut], order[cut:]
    return Split(images[kept], labels[kept]), Split(images[held_out], labels[held_out])


def load_digits() -> DataSet:
    """1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn; a fifth of them is the test split."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as problem:
        raise DataError("the digits come with scikit-learn. Install it: pip install 'esper-lite[demo]'.") from problem
    raw = load()
    images = torch.tensor(raw.images, dtype=torch.float32)[:, None] / 16.0 - 0.5
    labels = torch.tensor(raw.target, dtype=torch.long)
    order = _order(len(labels))
    cut = len(labels) // 5
    train, validation = _carve(images[order[cut:]], labels[order[cut:]])
    return DataSet("digits", train, validation, Split(images[order[:cut]], labels[order[:cut]]))


def load_fashion_mnist(root: Path) -> DataSet:
    """Fashion-MNIST from its official files under `root`/FashionMNIST/raw."""
    folder = root / "FashionMNIST" / "raw"
    parts = {}
    for part, count in (("train", 60_000), ("t10k", 10_000)):
        images = _read_idx(folder / f"{part}-images-idx3-ubyte.gz", 2051, count * 784).reshape(count, 1, 28, 28)
        labels = _read_idx(folder / f"{part}-labels-idx1-ubyte.gz", 2049, count)
        parts[part] = (torch.from_numpy(images).float() / 255.0 - 0.286) / 0.353, torch.from_numpy(labels).long()
    train, validation = _carve(*parts["train"])
    return DataSet("fashion_mnist", train, validation, Split(*parts["t10k"]))


def _read_idx(path: Path, magic: int, size: int) -> np.ndarray:
    """The bytes of one gzipped IDX file, checked against what it must hold."""
    if not path.is_file():
        raise DataError(
            f"{path} is not there. Put the official Fashion-MNIST file {path.name} into {path.parent}, "
            "or name the right data folder."
        )
    try:
        raw = gzip.decompress(path.read_bytes())
    except (EOFError, OSError) as problem:
        raise DataError(f"{path} is not a complete gzip file ({problem}); download it again.") from problem
    header = 16 if magic == 2051 else 8
    if len(raw) != header + size or struct.unpack(">i", raw[:4])[0] != magic:
        raise DataError(f"{path} holds {len(raw):,} bytes that are not the official file; download it again.")
    return np.frombuffer(raw, np.uint8, offset=header).copy()
