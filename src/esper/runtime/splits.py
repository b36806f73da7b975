"""Examples where a device can gather them, held once for all hosts.

The test split stays sealed until the end.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.leyline.errors import DataError, SaveError

PAD = 4  # Pixels by which a training image may shift.


def draw_offsets(count: int, generator: torch.Generator, out: Tensor | None = None) -> Tensor:
    """Draw shift down, shift right and mirror for each of `count` images, [3, count]."""
    if out is None:
        out = torch.empty(3, count, dtype=torch.long)
    out[:2].random_(0, 2 * PAD + 1, generator=generator)
    out[2:].random_(0, 2, generator=generator)
    return out


@dataclass(frozen=True)
class TensorSplit:
    """Examples and targets as tensors; inputs become `inputs * scale + shift` in floating point."""

    inputs: Tensor
    targets: Tensor
    scale: float = 1.0
    shift: float = 0.0
    # whether images carry a border of PAD pixels, to be cropped away with an offset
    padded: bool = False

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets) or not len(self.targets):
            raise DataError(
                f"got {len(self.inputs)} inputs and {len(self.targets)} targets; give one target "
                "per input, at least one."
            )

    def __len__(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device | str) -> "TensorSplit":
        """Return the same examples on a device."""
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device))

    def with_border(self) -> "TensorSplit":
        """Return the same images, ready to be shifted."""
        if self.inputs.dim() != 4:
            raise DataError(
                "augmentation shifts images [C, H, W], but one example has shape "
                f"{tuple(self.inputs.shape[1:])}. Switch augmentation off for this task."
            )
        return replace(self, inputs=torch.nn.functional.pad(self.inputs, (PAD,) * 4), padded=True)

    def gather(self, rows: Tensor, offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return a batch: inputs in floating point, targets as stored.

        `offsets` are those of `draw_offsets`, for images with a border.
        """
        picked = self._crop(rows, offsets) if self.padded else self.inputs[rows]
        targets = self.targets[rows]
        if picked.dtype in (torch.int16, torch.int32, torch.int64):
            return picked.long(), targets  # tokens or other indices: read as they are
        return torch.add(torch.mul(picked, self.scale), self.shift), targets

    def _crop(self, rows: Tensor, offsets: Tensor | None) -> Tensor:
        """The images of these rows, each shifted and mirrored as its offsets say."""
        assert offsets is not None
        count, channels, height, width = self.inputs.shape
        image, plane, line, pixel = self.inputs.stride()
        shifts = 2 * PAD + 1
        crops = (count, shifts, shifts, channels, height - 2 * PAD, width - 2 * PAD)
        strides = (image, line, pixel, plane, line, pixel)
        windows = self.inputs.as_strided(crops, strides)  # every crop of every image, as a view
        cropped = windows[rows, offsets[0], offsets[1]]  # [rows, C, H, W]
        is_mirrored = offsets[2, :, None, None, None] == 1
        return torch.where(is_mirrored, cropped.flip(-1), cropped)

    def first(self, count: int) -> "TensorSplit":
        """Return the first examples alone."""
        return replace(self, inputs=self.inputs[:count], targets=self.targets[:count])

    def example(self) -> Tensor:
        """Return two inputs as a host sees them."""
        rows = torch.zeros(2, dtype=torch.long, device=self.inputs.device)
        offsets = torch.zeros(3, 2, dtype=torch.long, device=rows.device)
        inputs, _ = self.gather(rows, offsets)
        return inputs


@dataclass(frozen=True)
class TokenSplit:
    """A text as one array of tokens.

    An example is a window of `context` tokens, and the token that follows each of them.
    """

    tokens: Tensor
    context: int

    def __post_init__(self) -> None:
        if len(self) < 1:
            raise DataError(
                f"{len(self.tokens)} tokens are fewer than {self.context + 1}; use a longer text."
            )

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.context)

    def to(self, device: torch.device | str) -> "TokenSplit":
        """Return the same text on a device."""
        return TokenSplit(self.tokens.to(device), self.context)

    def first(self, count: int) -> "TokenSplit":
        """Return the first windows alone."""
        return TokenSplit(self.tokens[: count * self.context + 1], self.context)

    def with_border(self) -> "TokenSplit":
        """Refuse: only images can be shifted."""
        raise DataError("text is not augmented; switch augmentation off for this task.")

    def gather(self, rows: Tensor, offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return a batch of tokens and of the tokens that follow, both [rows, context]."""
        steps = torch.arange(self.context + 1, device=rows.device)
        positions = rows[:, None] * self.context + steps  # [rows, context + 1]
        windows = self.tokens[positions].long()
        return windows[:, :-1], windows[:, 1:]

    def example(self) -> Tensor:
        """Return two inputs as a host sees them."""
        rows = torch.zeros(2, dtype=torch.long, device=self.tokens.device)
        inputs, _ = self.gather(rows)
        return inputs


Split = TensorSplit | TokenSplit


@dataclass
class SealedSplit:
    """The test split, which opens once, for the final report.

    Any other use of it is an error.
    """

    _split: Split = field(repr=False)

    def open_for_final_report(self) -> Split:
        """Return the split itself; only what ends an episode may call this."""
        return self._split

    def __getattr__(self, name: str) -> Any:
        raise DataError(
            f"the test split is sealed, but {name!r} was read from it. Use validation; "
            "final_scores() opens it."
        )


@dataclass(frozen=True)
class Splits:
    """Train, validation (carved from the training data) and the sealed test split."""

    train: Split
    validation: Split
    test: SealedSplit
    corpus: str | None = None
    """Digest and size of what was read, where that differs between machines.

    A run continues with the same one only.
    """

    def to(self, device: torch.device | str) -> "Splits":
        """Return the same splits on a device; moving the test split does not open it."""
        return Splits(
            train=self.train.to(device),
            validation=self.validation.to(device),
            test=SealedSplit(self.test.open_for_final_report().to(device)),
            corpus=self.corpus,
        )


def require_corpus(saved: str | None, present: str | None, folder: Path) -> None:
    """Refuse to continue a run on another corpus than the one that it began with."""
    if saved != present:
        raise SaveError(
            f"{folder} rests on another corpus: {saved}; here it is {present}. Choose another "
            "--out, or continue where the corpus is the same."
        )


def carve(
    split: TensorSplit, share: float = 0.15, seed: int = 20
) -> tuple[TensorSplit, TensorSplit]:
    """Carve a share off a split; returns what remains and the share.

    They are the same on every machine and in every run.
    """
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(seed))
    cut = int(len(split) * share)
    if not 0 < cut < len(split):
        raise DataError(
            f"{len(split)} training examples cannot be split {1 - share:.0%} / {share:.0%}; use "
            "more data."
        )
    return _pick(split, order[cut:]), _pick(split, order[:cut])


def _pick(split: TensorSplit, rows: Tensor) -> TensorSplit:
    return replace(split, inputs=split.inputs[rows], targets=split.targets[rows])
