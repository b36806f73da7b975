"""What a policy has to choose: names, sizes, and which choices depend on which.

A *case* of a head is one combination of the choices that it sees.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from esper.leyline.errors import SettingError
from esper.leyline.factored_actions import NUM_OPS, OP_CULL, OP_FOSSILIZE, OP_GERMINATE

SLOT_OPS = (OP_GERMINATE, OP_CULL, OP_FOSSILIZE)
"""Ops that need a slot."""


@dataclass(frozen=True)
class Head:
    """One choice among `size` things."""

    name: str
    size: int
    mask_by: str | None = None  # an earlier head whose choice selects the row of this head's mask
    # choices of the first head for which this one matters; None = always
    used_by: tuple[int, ...] | None = None


@dataclass(frozen=True)
class HeadSpec:
    """All choices of one decision, in order.

    Chained heads see those made before them; others are independent.
    """

    heads: tuple[Head, ...]
    chained: bool = False

    def __post_init__(self) -> None:
        names = self.names
        if len(set(names)) != len(names) or not names:
            raise SettingError(f"head names {names} must be at least one and all different.")
        for index, head in enumerate(self.heads):
            depends = head.mask_by is not None or head.used_by is not None
            if depends and not self.chained:
                raise SettingError(
                    f"head {head.name!r} depends on earlier choices, so the heads must be chained."
                )
            if head.mask_by is not None and head.mask_by not in names[:index]:
                raise SettingError(
                    f"head {head.name!r} is masked by {head.mask_by!r}, which is not "
                    "an earlier head."
                )
            self._check_use(index, head)

    def _check_use(self, index: int, head: Head) -> None:
        """Refuse a head that is used where a head before it is not."""
        first = self.heads[0]
        if head.used_by is not None:
            is_known = set(head.used_by) <= set(range(first.size))
            if index == 0 or not head.used_by or not is_known:
                raise SettingError(
                    f"head {head.name!r} is used by {head.used_by}: name one or more of the "
                    f"{first.size} choices of {first.name!r}, the first head, which is itself "
                    "always used; None means all of them."
                )
        uses = self.uses(head)
        for earlier in self.heads[:index]:
            earlier_uses = self.uses(earlier)
            if not set(uses) <= set(earlier_uses):
                raise SettingError(
                    f"head {head.name!r} is used by {uses}, but {earlier.name!r} before it by "
                    f"{earlier_uses} only; put {head.name!r} first, or use it in fewer cases."
                )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the heads, in order."""
        return tuple(head.name for head in self.heads)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many choices each head has, in order."""
        return tuple(head.size for head in self.heads)

    def uses(self, head: Head) -> tuple[int, ...]:
        """Choices of the first head for which `head` matters."""
        return tuple(range(self.heads[0].size)) if head.used_by is None else head.used_by

    def earlier(self, index: int) -> tuple[Head, ...]:
        """The heads before this one whose choices it sees."""
        return self.heads[:index] if self.chained else ()

    @classmethod
    def independent(cls, sizes: Sequence[int]) -> Self:
        """One head per number of a foreign environment's action."""
        return cls(tuple(Head(f"action_{index}", int(size)) for index, size in enumerate(sizes)))

    @classmethod
    def growth(cls, num_slots: int, num_blueprints: int, num_blends: int) -> Self:
        """op -> slot -> blueprint -> blend; only germinating needs a blueprint and a blend."""
        op = Head("op", NUM_OPS)
        slot = Head("slot", num_slots, mask_by="op", used_by=SLOT_OPS)
        blueprint = Head("blueprint", num_blueprints, mask_by="slot", used_by=(OP_GERMINATE,))
        blend = Head("blend", num_blends, used_by=(OP_GERMINATE,))
        return cls((op, slot, blueprint, blend), chained=True)


def rows_of(uses: Sequence[int]) -> slice | list[int]:
    """How to take these rows of a tensor; a slice is several times as fast as a list."""
    is_run = list(uses) == list(range(uses[0], uses[-1] + 1))
    return slice(uses[0], uses[-1] + 1) if is_run else list(uses)


def count_cases(spec: HeadSpec, index: int) -> int:
    """In how many cases a head is asked: combinations of the earlier choices that it sees."""
    uses = spec.uses(spec.heads[index])
    sizes = [earlier.size for earlier in spec.earlier(index)]
    return math.prod([len(uses), *sizes[1:]] if sizes else [])


def mask_cases(spec: HeadSpec, index: int, mask: Tensor | None) -> Tensor | None:
    """A head's mask [R, size] or [R, rows, size] with an axis for every earlier choice."""
    if mask is None:
        return None
    head = spec.heads[index]
    case_shape = [1] * len(spec.earlier(index))
    if mask.dim() == 3:
        axis = spec.names.index(str(head.mask_by))
        if axis == 0:
            mask = mask[:, rows_of(spec.uses(head))]
        case_shape[axis] = mask.shape[1]
    return mask.reshape(len(mask), *case_shape, head.size)


def reach_cases(spec: HeadSpec, index: int, reach: Tensor, chances: Sequence[Tensor]) -> Tensor:
    """How earlier choices lead to each case of a head, [R, cases ...].

    It is `reach` [R] times the chances of each earlier head, [R, its cases ..., size].
    """
    uses = spec.uses(spec.heads[index])
    for axis, chance in enumerate(chances[: len(spec.earlier(index))]):
        earlier_uses = spec.uses(spec.heads[axis])
        rows = rows_of([earlier_uses.index(use) for use in uses])
        reach = reach.unsqueeze(-1) * chance[:, rows]
    return reach


def openings(spec: HeadSpec, masks: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """Where each head has, in some case that masks allow, more than one valid choice.

    Returns [heads, N, T]; `like` is [N, T], and the masks have these axes in front.
    """
    rows = like.numel()
    allowed: list[Tensor] = []
    open_heads = []
    for index, head in enumerate(spec.heads):
        by_step = masks.get(head.name)
        mask = mask_cases(spec, index, None if by_step is None else by_step.flatten(0, 1))
        if mask is None:
            mask = torch.ones(head.size, dtype=torch.bool, device=like.device)
        everywhere = torch.ones(rows, dtype=torch.bool, device=like.device)
        reach = reach_cases(spec, index, everywhere, allowed)
        allowed.append(mask.expand(*reach.shape, head.size))
        has_choice = reach & (mask.sum(-1) > 1)
        open_heads.append(has_choice.view(rows, -1).any(1).view(like.shape))
    return torch.stack(open_heads)
