"""Slot ids and their order: the only place that sorts them.

What is in a slot is said by `lifecycle` and `reports`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Self

from esper.leyline.errors import SlotIdError, UnknownNameError

KINDS = {4: "image", 3: "sequence", 2: "vector"}
"""Rank of a slot's features, batch included -> kind of blueprint."""
_SLOT_ID = re.compile(r"r(0|[1-9][0-9]*)c(0|[1-9][0-9]*)")


def slot_position(slot_id: str) -> tuple[int, int]:
    """Row and column of a canonical id; anything else is refused."""
    match = _SLOT_ID.fullmatch(slot_id) if isinstance(slot_id, str) else None
    if match is None:
        raise SlotIdError(
            f"slot id {slot_id!r} is not canonical. A slot id is r<row>c<column> without leading "
            f"zeros; write 'r0c0', 'r0c1', 'r0c2' instead of early, mid, late."
        )
    return int(match[1]), int(match[2])


def is_slot_id(text: str) -> bool:
    """Whether a text is a canonical slot id such as "r0c0"."""
    return _SLOT_ID.fullmatch(text) is not None


def ordered_slots(slot_ids: Iterable[str]) -> tuple[str, ...]:
    """The ids sorted by row, then column, as numbers: r0c10 comes after r0c2."""
    return tuple(sorted(slot_ids, key=slot_position))


@dataclass(frozen=True)
class SlotConfig:
    """Which slots a host has, in execution order, and the module whose output each one sits on."""

    slot_ids: tuple[str, ...]
    modules: Mapping[str, str] = field(default_factory=dict, hash=False)
    """slot id -> module name inside the host; empty where the host knows its own sites"""

    def __post_init__(self) -> None:
        if not self.slot_ids:
            raise SlotIdError(
                "no slots given. A host needs at least one slot; write slot_ids=('r0c0',)."
            )
        ordered = ordered_slots(self.slot_ids)
        repeated = sorted({left for left, right in pairwise(ordered) if left == right})
        if repeated:
            raise SlotIdError(
                f"slot ids {', '.join(repeated)} appear twice. Each slot has one id; remove the "
                f"repeat."
            )
        if self.modules and set(self.modules) != set(ordered):
            raise SlotIdError(
                f"got modules for {sorted(self.modules)} and slots {list(ordered)}; name one "
                f"module per slot, or none."
            )
        object.__setattr__(self, "slot_ids", ordered)

    @classmethod
    def default(cls) -> Self:
        """One row of three slots: what the built-in three-block hosts have."""
        return cls.for_grid(1, 3)

    @classmethod
    def for_grid(cls, rows: int, columns: int) -> Self:
        """Slots r0c0 to r<rows - 1>c<columns - 1>, row by row, without modules."""
        if rows < 1 or columns < 1:
            raise SlotIdError(
                f"a grid of {rows} x {columns} has no slots. Both numbers must be at least 1."
            )
        positions = product(range(rows), range(columns))
        return cls(tuple(f"r{row}c{column}" for row, column in positions))

    @classmethod
    def for_modules(cls, names: Iterable[str]) -> Self:
        """One row, one slot after each named module, in the order given."""
        modules = {f"r0c{column}": name for column, name in enumerate(names)}
        return cls(tuple(modules), modules)

    @property
    def num_slots(self) -> int:
        """How many slots there are."""
        return len(self.slot_ids)

    def index_for_slot_id(self, slot_id: str) -> int:
        """The slot's number in execution order; an unknown id is refused with the nearest one."""
        if slot_id not in self.slot_ids:
            raise UnknownNameError("slot", slot_id, self.slot_ids)
        return self.slot_ids.index(slot_id)

    def choose(self, slot_ids: Iterable[str]) -> Self:
        """Some of these slots, with their modules; an unknown id is refused."""
        chosen: dict[str, str] = {}
        for slot_id in slot_ids:
            index = self.index_for_slot_id(slot_id)
            chosen[self.slot_ids[index]] = self.modules[slot_id]
        return type(self)(tuple(chosen), chosen)
