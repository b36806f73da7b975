"""Every single placement, tried: the upper bound for the question where, what and when to plant one seed."""

from collections.abc import Callable
from dataclasses import dataclass

from esper.kasmina.model import MorphogeneticModel
from esper.leyline.factored_actions import OP_FOSSILIZE
from esper.tamiyo.masks import Masks
from esper.tamiyo.policies import WAIT, Choice, Reports, RulePolicy
from esper.tamiyo.rules import Ground, Memory


@dataclass(frozen=True)
class OnePlanting:
    """Plants one seed at one decision and keeps it as soon as that is legal."""

    ground: Ground
    slot: int
    blueprint: int
    start: int

    def choose(self, masks: Masks, reports: Reports, memory: Memory) -> tuple[Choice, Memory]:
        if memory["epoch"] == self.start and masks["blueprint"][self.slot, self.blueprint]:
            return self.ground.plant(self.slot, self.blueprint), memory
        if masks["slot"][OP_FOSSILIZE, self.slot] and masks["op"][OP_FOSSILIZE]:
            return (OP_FOSSILIZE, self.slot, 0, 0), memory
        return WAIT, memory


def starts_of(life: int) -> list[int]:
    """Decisions at which the one seed is planted: the first, after a quarter and after half of the life."""
    return sorted({0, life // 4, life // 2})


def placements_of(model: MorphogeneticModel, life: int) -> dict[str, Callable[[Ground], RulePolicy]]:
    """A policy for every (slot, blueprint, start) whose seed fits and can be paid for."""
    room = model.budget - model.host_params if model.budget is not None else None
    space, found = model.space, {}
    for index, slot in enumerate(space.slots.slot_ids):
        for number, name in enumerate(space.blueprint_ids):
            price = model.costs.get((slot, str(name), "linear"))
            if price is None or (room is not None and price > room):
                continue
            for start in starts_of(life):
                found[f"{slot} {name} @{start}"] = _policy(index, number, start)
    return found


def _policy(slot: int, blueprint: int, start: int) -> Callable[[Ground], RulePolicy]:
    return lambda ground: RulePolicy(OnePlanting(ground, slot, blueprint, start))
