"""What a policy has to choose:

names, sizes, which choices depend on which, and all cases of the earlier ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from esper.leyline.errors import SettingError
from esper.leyline.factored_actions import NUM_OPS, OP_CULL, OP_FOSSILIZE, OP_GERMINATE


@dataclass(frozen=True)
class Head:
    """One choice among `size` things."""

    name: str
    size: int
    mask_by: str | None = None  # an earlier head whose choice selects the row of this head's mask
    used_by: tuple[int, ...] | None = (
        None  # choices of the first head for which this one matters; None = always
    )


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
        for place, head in enumerate(self.heads):
            if (head.mask_by, head.used_by) != (None, None) and not self.chained:
                raise SettingError(
                    f"head {head.name!r} depends on earlier choices, so the heads must be chained."
                )
            if head.mask_by is not None and head.mask_by not in names[:place]:
                raise SettingError(
                    f"head {head.name!r} is masked by {head.mask_by!r}, which is not "
                    f"an earlier head."
                )
            first, used = self.heads[0], head.used_by
            if used is not None and not (place and used and set(used) <= set(range(first.size))):
                raise SettingError(
                    f"head {head.name!r} is used by {used}: name one or more of the "
                    f"{first.size} choices of "
                    f"{first.name!r}, the first head, which is itself always used; "
                    f"None means all of them."
                )
            for earlier in self.heads[:place]:
                if not set(own := self.uses(head)) <= set(known := self.uses(earlier)):
                    found = (
                        f"head {head.name!r} is used by {own}, but {earlier.name!r} "
                        f"before it by {known} only"
                    )
                    raise SettingError(
                        f"{found}; put {head.name!r} first, or use it in fewer cases."
                    )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(head.name for head in self.heads)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(head.size for head in self.heads)

    def uses(self, head: Head) -> tuple[int, ...]:
        """Choices of the first head for which `head` matters."""
        return tuple(range(self.heads[0].size)) if head.used_by is None else head.used_by

    def earlier(self, place: int) -> tuple[Head, ...]:
        """The heads before this one whose choices it sees."""
        return self.heads[:place] if self.chained else ()

    @classmethod
    def independent(cls, sizes: Sequence[int]) -> Self:
        """One head per number of a foreign environment's action."""
        return cls(tuple(Head(f"action_{index}", int(size)) for index, size in enumerate(sizes)))

    @classmethod
    def growth(cls, num_slots: int, num_blueprints: int, num_blends: int) -> Self:
        """op -> slot -> blueprint -> blend; only germinating needs a blueprint and a blend."""
        slot = Head("slot", num_slots, "op", (OP_GERMINATE, OP_CULL, OP_FOSSILIZE))
        blueprint = Head("blueprint", num_blueprints, "slot", (OP_GERMINATE,))
        blend = Head("blend", num_blends, None, (OP_GERMINATE,))
        return cls((Head("op", NUM_OPS), slot, blueprint, blend), chained=True)


def mask_cases(spec: HeadSpec, place: int, mask: Tensor | None) -> Tensor | None:
    """A head's mask [R, size] or [R, rows, size] with an axis for every earlier choice."""
    if mask is None:
        return None
    head, cases = spec.heads[place], len(spec.earlier(place))
    if mask.dim() == 2:
        return mask.reshape(len(mask), *(1,) * cases, head.size)
    axis = spec.names.index(str(head.mask_by))
    rows = mask[:, list(spec.uses(head))] if axis == 0 else mask
    return rows.reshape(
        len(mask), *(rows.shape[1] if case == axis else 1 for case in range(cases)), head.size
    )


def reach_cases(spec: HeadSpec, place: int, reach: Tensor, chances: Sequence[Tensor]) -> Tensor:
    """How earlier choices lead to each case, [R, cases ...]:

    `reach` [R] times each head's [R, its cases ..., size].
    """
    uses = spec.uses(spec.heads[place])
    for axis, given in enumerate(chances[: len(spec.earlier(place))]):
        known = spec.uses(spec.heads[axis])
        reach = reach.unsqueeze(-1) * given[:, [known.index(use) for use in uses]]
    return reach


def openings(spec: HeadSpec, masks: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """Where each head has, in some case that masks allow, more than one valid choice:

    [heads, N, T], like [N, T].
    """
    rows = like.numel()
    allowed: list[Tensor] = []
    found = []
    for place, head in enumerate(spec.heads):
        given = masks.get(head.name)
        mask = mask_cases(spec, place, None if given is None else given.flatten(0, 1))
        mask = torch.ones(head.size, dtype=torch.bool, device=like.device) if mask is None else mask
        reach = reach_cases(
            spec, place, torch.ones(rows, dtype=torch.bool, device=like.device), allowed
        )
        allowed.append(mask.expand(*reach.shape, head.size))
        found.append((reach & (mask.sum(-1) > 1)).view(rows, -1).any(1).view(like.shape))
    return torch.stack(found)
