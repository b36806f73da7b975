"""Copies many tensors at once."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# Tensors to copy into and tensors to copy, by kind of tensor.
Pairs = dict[Any, tuple[list[Tensor], list[Tensor]]]


def pair_tensors(into: Iterable[Tensor], of: Iterable[Tensor]) -> Pairs:
    """Pair tensors to copy into with those to copy, by kind.

    Torch would copy mixed ones one by one.
    """
    pairs: Pairs = {}
    for kept, live in zip(into, of, strict=True):
        kind = (kept.device, kept.dtype, live.device)
        targets, sources = pairs.setdefault(kind, ([], []))
        targets.append(kept)
        sources.append(live)
    return pairs


@torch.no_grad()
def copy_pairs(pairs: Pairs) -> None:
    """Copy all pairs, those of one kind at once."""
    for into, of in pairs.values():
        torch._foreach_copy_(into, of)
