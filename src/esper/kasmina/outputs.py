"""What networks give out, entry by entry, so that two of them can be compared."""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Output = Mapping[Hashable, list[Tensor]]
"""Tensors by the entry that they are in: a name, or a position."""


class Pair(NamedTuple):
    """Two tensors in the same place of two outputs."""

    ours: Tensor
    wanted: Tensor

    def is_equal(self) -> bool:
        """Whether both hold the same numbers, bit for bit; sparse ones too."""
        return torch.equal(self.ours.to_dense(), self.wanted.to_dense())


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a value, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def entries_of(output: Any) -> dict[Hashable, list[Tensor]]:
    """The tensors of an output by its entries; those without any are left out."""
    values: dict[Hashable, Any] = {0: output}
    if isinstance(output, Mapping):
        values = dict(output)
    elif is_dataclass(output):
        values = {field.name: getattr(output, field.name) for field in fields(output)}
    elif isinstance(output, list | tuple):
        values = dict(enumerate(output))
    tensors = {name: tensors_in(value) for name, value in values.items()}
    return {name: found for name, found in tensors.items() if found}


def pair_outputs(ours: Output, wanted: Output, *, may_grow: bool = False) -> Iterator[Pair]:
    """The tensors that two outputs have in the same places.

    An entry may hold something for each layer: then a longer network has more of it, and that entry
    is not compared. It has a name and more tensors, or `may_grow` allows it, larger tensors too.
    Raises ValueError for other outputs.
    """
    if ours.keys() != wanted.keys():
        raise ValueError(f"it has {sorted(map(str, ours))} instead of {sorted(map(str, wanted))}")
    is_compared = False
    for name, tensors in wanted.items():
        are_alike = all(a.shape == b.shape for a, b in zip(ours[name], tensors, strict=False))
        if len(ours[name]) == len(tensors) and (are_alike or not may_grow):
            is_compared = True
            yield from map(Pair, ours[name], tensors)
        elif not (may_grow or isinstance(name, str)):
            raise ValueError(
                f"entry {name} has {len(ours[name])} tensors instead of {len(tensors)}"
            )
    if not is_compared:
        raise ValueError("it has no tensors to compare")
