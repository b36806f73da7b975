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
    """Shift down, shift right and mirror for each of `count` images, [3, count]."""
    out = torch.empty(3, count, dtype=torch.long) if out is None else out
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
    padded: bool = (
        False  # whether images carry a border of PAD pixels, to be cropped away with an offset
    )

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets) or not len(self.targets):
            raise DataError(
                f"{len(self.inputs)} inputs, {len(self.targets)} targets: give as "
                f"many, at least one."
            )

    def __len__(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device | str) -> "TensorSplit":
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device))

    def with_border(self) -> "TensorSplit":
        """The same images, ready to be shifted."""
        if self.inputs.dim() != 4:
            raise DataError(
                f"augmentation shifts images [C, H, W], but one example has shape "
                f"{self.inputs.shape[1:]}."
            )
        return replace(self, inputs=torch.nn.functional.pad(self.inputs, (PAD,) * 4), padded=True)

    def gather(self, rows: Tensor, offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """A batch: inputs in floating point, targets as stored."""
        picked = self._crop(rows, offsets) if self.padded else self.inputs[rows]
        if picked.dtype in (torch.int16, torch.int32, torch.int64):
            return picked.long(), self.targets[rows]  # tokens or other indices: read as they are
        return torch.add(torch.mul(picked, self.scale), self.shift), self.targets[rows]

    def _crop(self, rows: Tensor, offsets: Tensor | None) -> Tensor:
        assert offsets is not None
        count, channels, height, width = self.inputs.shape
        image, plane, line, pixel = self.inputs.stride()
        shifts = 2 * PAD + 1
        crops = count, shifts, shifts, channels, height - 2 * PAD, width - 2 * PAD
        windows = self.inputs.as_strided(
            crops, (image, line, pixel, plane, line, pixel)
        )  # every one, as a view
        cropped = windows[rows, offsets[0], offsets[1]]
        return torch.where(offsets[2, :, None, None, None] == 1, cropped.flip(-1), cropped)

    def first(self, count: int) -> "TensorSplit":
        return replace(self, inputs=self.inputs[:count], targets=self.targets[:count])

    def example(self) -> Tensor:
        """Two inputs as a host sees them."""
        rows = torch.zeros(2, dtype=torch.long, device=self.inputs.device)
        return self.gather(rows, torch.zeros(3, 2, dtype=torch.long, device=rows.device))[0]


@dataclass(frozen=True)
class TokenSplit:
    """A text as one array of tokens; an example is a window of `context` tokens and the token after
    each.
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
        return TokenSplit(self.tokens.to(device), self.context)

    def first(self, count: int) -> "TokenSplit":
        return TokenSplit(self.tokens[: count * self.context + 1], self.context)

    def with_border(self) -> "TokenSplit":
        raise DataError("text is not augmented; switch augmentation off for this task.")

    def gather(self, rows: Tensor, offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
        places = rows[:, None] * self.context + torch.arange(self.context + 1, device=rows.device)
        windows = self.tokens[places].long()
        return windows[:, :-1], windows[:, 1:]

    def example(self) -> Tensor:
        return self.gather(torch.zeros(2, dtype=torch.long, device=self.tokens.device))[0]


Split = TensorSplit | TokenSplit


@dataclass
class SealedSplit:
    """The test split.

    It opens once, for the final report; whoever touches it before gets an error.
    """

    _split: Split = field(repr=False)

    def open_for_final_report(self) -> Split:
        return self._split

    def __getattr__(self, name: str) -> Any:
        raise DataError(
            f"the test split is sealed: {name!r} was asked of it. Use validation; "
            f"final_scores() opens it."
        )


@dataclass(frozen=True)
class Splits:
    """Train, validation (carved from the training data) and the sealed test split."""

    train: Split
    validation: Split
    test: SealedSplit
    corpus: str | None = None
    """digest and size of what was read, where that differs between machines; a run goes on with the
    same one only
    """

    def to(self, device: torch.device | str) -> "Splits":
        """The same splits on a device; moving the test split does not open it."""
        sealed = SealedSplit(self.test.open_for_final_report().to(device))
        return Splits(self.train.to(device), self.validation.to(device), sealed, self.corpus)


def require_corpus(saved: str | None, own: str | None, place: Path) -> None:
    if saved != own:
        raise SaveError(
            f"{place} rests on another corpus: {saved}; here it is {own}. Choose "
            f"another --out or go back."
        )


def carve(
    split: TensorSplit, share: float = 0.15, seed: int = 20
) -> tuple[TensorSplit, TensorSplit]:
    """Train and validation from the training data, the same on every machine and in every run."""
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(seed))
    if not 0 < (cut := int(len(split) * share)) < len(split):
        raise DataError(
            f"{len(split)} training examples cannot be split {1 - share:.0%} / "
            f"{share:.0%}; use more data."
        )
    parts = order[cut:], order[:cut]
    kept, held_out = (
        replace(split, inputs=split.inputs[rows], targets=split.targets[rows]) for rows in parts
    )
    return kept, held_out
