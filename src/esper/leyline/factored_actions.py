"""What can be done to a network:

op + slot + blueprint + blend. Indices and tables; nothing here applies an action.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from esper.leyline.errors import SettingError, UnknownNameError
from esper.leyline.slots import SlotConfig


class LifecycleOp(IntEnum):
    """What to do this epoch. Stages advance by themselves, so there is no op for it."""

    WAIT, GERMINATE, CULL, FOSSILIZE = range(4)


class BlendAction(IntEnum):
    """How a seed's share of the output rises from 0 to 1."""

    LINEAR, SIGMOID, GATED = range(3)

    def to_algorithm_id(self) -> str:
        return self.name.lower()


class BlueprintAction(IntEnum):
    """The built-in blueprints, numbered. NOOP means "none" and is never legal to germinate."""

    NOOP, CONV_LIGHT, ATTENTION, NORM, DEPTHWISE, BOTTLENECK = range(6)
    CONV_SMALL, CONV_HEAVY, INVERTED_BOTTLENECK, LORA, MLP_SMALL, MLP = range(6, 12)

    def to_blueprint_id(self) -> str | None:
        return None if self is BlueprintAction.NOOP else self.name.lower()


OP_NAMES: tuple[str, ...] = tuple(op.name for op in LifecycleOp)
BLEND_IDS: tuple[str, ...] = tuple(blend.to_algorithm_id() for blend in BlendAction)
BLUEPRINT_IDS: tuple[str | None, ...] = tuple(
    blueprint.to_blueprint_id() for blueprint in BlueprintAction
)
OP_WAIT, OP_GERMINATE, OP_CULL, OP_FOSSILIZE = (int(op) for op in LifecycleOp)
Choice = tuple[int, int, int, int]  # One decision as indices: op, slot, blueprint, blend.
NUM_OPS = len(OP_NAMES)
NUM_BLENDS = len(BLEND_IDS)
NUM_BLUEPRINTS = len(BLUEPRINT_IDS)

_FOR_TOKENS_ONLY = {BlueprintAction.LORA, BlueprintAction.MLP_SMALL, BlueprintAction.MLP}
CNN_BLUEPRINTS = frozenset(BlueprintAction) - _FOR_TOKENS_ONLY - {BlueprintAction.NOOP}
TRANSFORMER_BLUEPRINTS = frozenset(
    {*_FOR_TOKENS_ONLY, BlueprintAction.ATTENTION, BlueprintAction.NORM}
)


@dataclass(frozen=True)
class ActionSpace:
    """The actions of one run.

    Arrays of actions are always in the order op, slot, blueprint, blend.
    """

    slots: SlotConfig
    blueprint_ids: tuple[str | None, ...] = BLUEPRINT_IDS
    blends: tuple[str, ...] = BLEND_IDS

    def __post_init__(self) -> None:
        if (
            len(self.blueprint_ids) < 2
            or self.blueprint_ids[0] is not None
            or None in self.blueprint_ids[1:]
        ):
            rule = (
                "must be None, then one name or more; build the space with "
                "ActionSpace.of(slots, blueprints)."
            )
            raise SettingError(f"blueprint_ids {self.blueprint_ids} {rule}")
        for what, names in (("blueprint", self.blueprint_ids), ("blend", self.blends)):
            if len(set(names)) != len(names):
                raise SettingError(f"{what} ids {names} repeat a name; list each one once.")
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
        if blueprint_id not in self.blueprint_ids:
            raise UnknownNameError(
                "blueprint", blueprint_id, (name for name in self.blueprint_ids if name)
            )
        return self.blueprint_ids.index(blueprint_id)

    def blend_index(self, blend_id: str) -> int:
        if blend_id not in self.blends:
            raise UnknownNameError("blend", blend_id, self.blends)
        return self.blends.index(blend_id)


DEFAULT_SPACE = ActionSpace(SlotConfig.default())


@dataclass(frozen=True, slots=True)
class FactoredAction:
    """One decision in words, for logs, tests and people. The hot loop uses the indices."""

    op: LifecycleOp
    slot_idx: int
    blueprint_id: str | None
    blend_algorithm_id: str
    slot_id: str

    @classmethod
    def from_indices(
        cls,
        *,
        slot_idx: int,
        blueprint_idx: int,
        blend_idx: int,
        op_idx: int,
        space: ActionSpace = DEFAULT_SPACE,
    ) -> Self:
        """Look the four indices up in `space`; an index outside it is refused by head."""
        _, slot_id, blueprint_id, blend_id = look_up(
            space, op_idx, slot_idx, blueprint_idx, blend_idx
        )
        return cls(LifecycleOp(op_idx), int(slot_idx), blueprint_id, blend_id, slot_id)

    @property
    def is_germinate(self) -> bool:
        return self.op is LifecycleOp.GERMINATE

    @property
    def is_cull(self) -> bool:
        return self.op is LifecycleOp.CULL

    @property
    def is_fossilize(self) -> bool:
        return self.op is LifecycleOp.FOSSILIZE


def look_up(
    space: ActionSpace, op: int, slot: int, blueprint: int, blend: int
) -> tuple[str, str, str | None, str]:
    """Names of op, slot, blueprint and blend, from the tables alone; an index outside the space is
    refused by head.
    """
    given = {"op": op, "slot": slot, "blueprint": blueprint, "blend": blend}
    for (head, index), size in zip(given.items(), space.sizes, strict=True):
        if not 0 <= index < size:
            raise SettingError(
                f"{head} index {index} is outside this run's space; it has indices 0 to {size - 1}."
            )
    assert OP_NAMES[op] == LifecycleOp(op).name, OP_NAMES[op]  # the tables say what the enums say
    return (
        OP_NAMES[op],
        space.slots.slot_ids[slot],
        space.blueprint_ids[blueprint],
        space.blends[blend],
    )
