"""Slot ids and their order.

Whoever needs "the slots, in order" asks here; nobody sorts ids elsewhere.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

from esper.leyline.errors import SlotIdError, UnknownNameError

# Rank of a slot's features, batch included -> kind of blueprint.
KINDS = {4: "image", 3: "sequence", 2: "vector"}
_SLOT_ID = re.compile(r"r(0|[1-9][0-9]*)c(0|[1-9][0-9]*)")


def slot_position(slot_id: str) -> tuple[int, int]:
    """Row and column of a canonical id; anything else is refused."""
    match = _SLOT_ID.fullmatch(slot_id) if isinstance(slot_id, str) else None
    if match is None:
        rule = (
            "r<row>c<column> without leading zeros; write 'r0c0', 'r0c1', 'r0c2' "
            "instead of early, mid, late."
        )
        raise SlotIdError(f"slot id {slot_id!r} is not canonical. A slot id is {rule}")
    return int(match[1]), int(match[2])


def is_slot_id(text: str) -> bool:
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
        if repeated := sorted({a for a, b in pairwise(ordered) if a == b}):
            raise SlotIdError(
                f"slot ids {', '.join(repeated)} appear twice. Each slot has one id; "
                f"remove the repeat."
            )
        if self.modules and set(self.modules) != set(ordered):
            raise SlotIdError(
                f"modules for {sorted(self.modules)}, slots {list(ordered)}; name one "
                f"per slot, or none."
            )
        object.__setattr__(self, "slot_ids", ordered)

    @classmethod
    def default(cls) -> Self:
        """One row of three slots: what the built-in three-block hosts have."""
        return cls.for_grid(1, 3)

    @classmethod
    def for_grid(cls, rows: int, columns: int) -> Self:
        if rows < 1 or columns < 1:
            raise SlotIdError(
                f"a grid of {rows} x {columns} has no slots. Both numbers must be at least 1."
            )
        return cls(tuple(f"r{row}c{column}" for row in range(rows) for column in range(columns)))

    @classmethod
    def for_modules(cls, names: Iterable[str]) -> Self:
        """One row, one slot after each named module, in the order given."""
        modules = {f"r0c{column}": name for column, name in enumerate(names)}
        return cls(tuple(modules), modules)

    @property
    def num_slots(self) -> int:
        return len(self.slot_ids)

    def index_for_slot_id(self, slot_id: str) -> int:
        if slot_id not in self.slot_ids:
            raise UnknownNameError("slot", slot_id, self.slot_ids)
        return self.slot_ids.index(slot_id)

    def choose(self, slot_ids: Iterable[str]) -> Self:
        """Some of these slots, with their modules; an unknown id is refused."""
        chosen = {
            self.slot_ids[self.index_for_slot_id(slot_id)]: self.modules[slot_id]
            for slot_id in slot_ids
        }
        return type(self)(tuple(chosen), chosen)
