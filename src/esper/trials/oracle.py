"""Every single placement, tried: the upper bound for the question where, what and when to plant one seed."""

from collections.abc import Callable
from dataclasses import dataclass

from esper.kasmina.model import MorphogeneticModel
from esper.leyline.factored_actions import OP_FOSSILIZE, Choice
from esper.tamiyo.masks import Masks
from esper.tamiyo.policies import WAIT, Reports, RulePolicy
from esper.tamiyo.rules import HostFacts, Memory


@dataclass(frozen=True)
class OnePlanting:
    """Plants one seed at one decision and keeps it as soon as that is legal."""

    facts: HostFacts
    slot: int
    blueprint: int
    start: int

    def choose(self, masks: Masks, reports: Reports, memory: Memory) -> tuple[Choice, Memory]:
        if memory["epoch"] == self.start and masks["blueprint"][self.slot, self.blueprint]:
            return self.facts.plant(self.slot, self.blueprint), memory
        if masks["slot"][OP_FOSSILIZE, self.slot] and masks["op"][OP_FOSSILIZE]:
            return (OP_FOSSILIZE, self.slot, 0, 0), memory
        return WAIT, memory


def starts_of(epochs: int) -> list[int]:
    """Decisions at which the one seed is planted: the first, after a quarter and after half of the episode."""
    return sorted({0, epochs // 4, epochs // 2})


def placements_of(model: MorphogeneticModel, epochs: int) -> dict[str, Callable[[HostFacts], RulePolicy]]:
    """A policy for every (slot, blueprint, start) whose seed fits and can be paid for."""
    room = model.budget - model.host_params if model.budget is not None else None
    space, found = model.space, {}
    for index, slot in enumerate(space.slots.slot_ids):
        for number, name in enumerate(space.blueprint_ids):
            prices = [price for (*place, _), price in model.costs.items() if place == [slot, name]]
            if not prices or (room is not None and min(prices) > room):
                continue
            for start in starts_of(epochs):
                found[f"{slot} {name} @{start}"] = _policy(index, number, start)
    return found


def _policy(slot: int, blueprint: int, start: int) -> Callable[[HostFacts], RulePolicy]:
    return lambda facts: RulePolicy(OnePlanting(facts, slot, blueprint, start))
