"""What can be done to a network: op + slot + blueprint + blend, as indices and tables.

Nothing here applies an action; whether one is possible is said by `legality`.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NoReturn, Self, SupportsIndex

from esper.leyline.errors import SettingError, UnknownNameError
from esper.leyline.slots import SlotConfig


class LifecycleOp(IntEnum):
    """What to do this epoch. Stages advance by themselves, so there is no op for it."""

    WAIT = 0
    GERMINATE = 1
    CULL = 2
    FOSSILIZE = 3


class BlendAction(IntEnum):
    """How a seed's share of the output rises from 0 to 1."""

    LINEAR = 0
    SIGMOID = 1
    GATED = 2

    def to_algorithm_id(self) -> str:
        """The blend's name in settings and logs."""
        return self.name.lower()


class BlueprintAction(IntEnum):
    """The built-in blueprints, numbered. NOOP means "none" and is never legal to germinate.

    `kasmina.blueprints` says how each is built, and refuses to load if it builds others.
    """

    NOOP = 0
    CONV_LIGHT = 1
    ATTENTION = 2
    NORM = 3
    DEPTHWISE = 4
    BOTTLENECK = 5
    CONV_SMALL = 6
    CONV_HEAVY = 7
    INVERTED_BOTTLENECK = 8
    LORA = 9
    MLP_SMALL = 10
    MLP = 11
    COPY = 12
    COPY_ZERO = 13
    MLP_TINY = 14

    def to_blueprint_id(self) -> str | None:
        """The blueprint's name in the registry; None for NOOP."""
        return None if self is BlueprintAction.NOOP else self.name.lower()


OP_NAMES: tuple[str, ...] = tuple(op.name for op in LifecycleOp)
BLEND_IDS: tuple[str, ...] = tuple(blend.to_algorithm_id() for blend in BlendAction)
BLUEPRINT_IDS: tuple[str | None, ...] = tuple(
    blueprint.to_blueprint_id() for blueprint in BlueprintAction
)
NUM_OPS = len(OP_NAMES)
NUM_BLENDS = len(BLEND_IDS)
NUM_BLUEPRINTS = len(BLUEPRINT_IDS)

# plain numbers for loops that compare many, bound by name to their place in the table
OP_WAIT = OP_NAMES.index("WAIT")
OP_GERMINATE = OP_NAMES.index("GERMINATE")
OP_CULL = OP_NAMES.index("CULL")
OP_FOSSILIZE = OP_NAMES.index("FOSSILIZE")
_OPS = tuple(LifecycleOp)  # indexed several times as fast as `LifecycleOp(index)`


def require_op_numbers(constants: Mapping[str, Any]) -> None:
    """Refuse constants of which one is not the number that its op has.

    >>> require_op_numbers({"OP_WAIT": 0, "OP_GERMINATE": 1, "OP_CULL": 2, "OP_FOSSILIZE": 3})
    """
    for op in LifecycleOp:
        number = constants.get(f"OP_{op.name}")
        if number != op.value:
            raise SettingError(
                f"OP_{op.name} is {number}, but {op.name} has the number {op.value}; what names "
                f"ops by numbers would mean another op. Give it the number that the op has."
            )


require_op_numbers(globals())

Choice = tuple[int, int, int, int]
"""One decision as indices: op, slot, blueprint, blend."""
ChoiceNames = tuple[str, str, str | None, str]
"""One decision as names, in the same order."""

COPY_BLUEPRINTS = frozenset({BlueprintAction.COPY, BlueprintAction.COPY_ZERO})
"""Copies of what stands in the slot, for features of any kind."""
VECTOR_BLUEPRINTS = frozenset(
    {
        BlueprintAction.LORA,
        BlueprintAction.MLP_TINY,
        BlueprintAction.MLP_SMALL,
        BlueprintAction.MLP,
    }
)
"""The built-in blueprints for vectors, without copies."""
CNN_BLUEPRINTS = (
    frozenset(BlueprintAction) - COPY_BLUEPRINTS - VECTOR_BLUEPRINTS - {BlueprintAction.NOOP}
)
"""The built-in blueprints for images, without copies."""
TRANSFORMER_BLUEPRINTS = frozenset(
    {
        BlueprintAction.LORA,
        BlueprintAction.MLP_SMALL,
        BlueprintAction.MLP,
        BlueprintAction.ATTENTION,
        BlueprintAction.NORM,
    }
)
"""The built-in blueprints for sequences, without copies."""


@dataclass(frozen=True)
class ActionSpace:
    """The actions of one run.

    Arrays of actions are always in the order op, slot, blueprint, blend.
    """

    slots: SlotConfig
    blueprint_ids: tuple[str | None, ...] = BLUEPRINT_IDS
    """None, which stands for "no blueprint", then the names that may be planted"""
    blends: tuple[str, ...] = BLEND_IDS

    def __post_init__(self) -> None:
        none, *names = self.blueprint_ids or ("",)
        if none is not None or not names or None in names:
            raise SettingError(
                f"blueprint_ids {self.blueprint_ids} must be None, then one name or more; build "
                f"the space with ActionSpace.of(slots, blueprints)."
            )
        for what, ids in {"blueprint": self.blueprint_ids, "blend": self.blends}.items():
            if len(set(ids)) != len(ids):
                raise SettingError(f"{what} ids {ids} repeat a name; list each one once.")
        for blend in self.blends:
            if blend not in BLEND_IDS:
                raise UnknownNameError("blend", blend, BLEND_IDS)
        if not self.blends:
            raise SettingError(f"no blends given; name at least one of {', '.join(BLEND_IDS)}.")

    @classmethod
    def of(
        cls, slots: SlotConfig, blueprints: tuple[str, ...], blends: tuple[str, ...] = BLEND_IDS
    ) -> Self:
        """The space of a run that may plant `blueprints`, numbered from 1 in the order given."""
        return cls(slots, (None, *blueprints), blends)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Number of choices per head: op, slot, blueprint, blend."""
        return NUM_OPS, self.slots.num_slots, len(self.blueprint_ids), len(self.blends)

    def blueprint_index(self, blueprint_id: str | None) -> int:
        """The number of a blueprint in this run; an unknown name gets the nearest one."""
        if blueprint_id not in self.blueprint_ids:
            known = [name for name in self.blueprint_ids if name]
            raise UnknownNameError("blueprint", blueprint_id, known)
        return self.blueprint_ids.index(blueprint_id)

    def blend_index(self, blend_id: str) -> int:
        """The number of a blend in this run; an unknown name gets the nearest one."""
        if blend_id not in self.blends:
            raise UnknownNameError("blend", blend_id, self.blends)
        return self.blends.index(blend_id)


DEFAULT_SPACE = ActionSpace(SlotConfig.default())
"""Three slots, all built-in blueprints, all blends."""


@dataclass(frozen=True, slots=True)
class FactoredAction:
    """One decision in words, such as one that is refused. The hot loop uses the indices."""

    op: LifecycleOp
    slot_idx: int
    blueprint_id: str | None
    blend_algorithm_id: str
    slot_id: str

    @classmethod
    def from_indices(
        cls,
        slot_idx: SupportsIndex,
        blueprint_idx: SupportsIndex,
        blend_idx: SupportsIndex,
        op_idx: SupportsIndex,
        *,
        space: ActionSpace = DEFAULT_SPACE,
    ) -> Self:
        """Look the four indices up in `space`; an index outside it is refused by head.

        Tensors of one entry are indices too: what a policy chose for one host can be passed on.

        >>> FactoredAction.from_indices(0, 3, 1, 1).blueprint_id
        'norm'
        """
        op = operator.index(op_idx)
        slot = operator.index(slot_idx)
        blueprint = operator.index(blueprint_idx)
        blend = operator.index(blend_idx)
        names = look_up(space, op, slot, blueprint, blend)
        _, slot_id, blueprint_id, blend_id = names
        return cls(
            op=LifecycleOp(op),
            slot_idx=slot,
            blueprint_id=blueprint_id,
            blend_algorithm_id=blend_id,
            slot_id=slot_id,
        )


def look_up(space: ActionSpace, op: int, slot: int, blueprint: int, blend: int) -> ChoiceNames:
    """Names of op, slot, blueprint and blend, from the tables alone.

    An index outside the space is refused by head.
    """
    if op < 0 or slot < 0 or blueprint < 0 or blend < 0:  # a tuple would count from its end
        _refuse_index(space, op, slot, blueprint, blend)
    try:
        names = (
            OP_NAMES[op],
            space.slots.slot_ids[slot],
            space.blueprint_ids[blueprint],
            space.blends[blend],
        )
    except IndexError:
        _refuse_index(space, op, slot, blueprint, blend)
    assert names[0] == _OPS[op].name, names[0]  # the tables say what the enums say
    return names


def _refuse_index(space: ActionSpace, *choice: int) -> NoReturn:
    """Name the first head whose index is outside the space."""
    heads = ("op", "slot", "blueprint", "blend")
    for head, index, size in zip(heads, choice, space.sizes, strict=True):
        if not 0 <= index < size:
            raise SettingError(
                f"{head} index {index} is outside this run's space; it has indices 0 to {size - 1}."
            )
    raise AssertionError(f"no index of {choice} is outside {space.sizes}")
