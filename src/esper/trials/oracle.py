"""Every single placement, tried: the upper bound for the question where, what and when to plant one seed."""

import math
from itertools import product

from esper.kasmina.model import MorphogeneticModel
from esper.trials.searching import write_plan


def starts_of(epochs: int) -> list[int]:
    """Decisions at which the one seed is planted: the first, after a quarter and after half of the episode."""
    return sorted({0, epochs // 4, epochs // 2})


def placements_of(model: MorphogeneticModel, epochs: int) -> dict[str, str]:
    """A plan for every (slot, blueprint, start) whose seed fits and can be paid for; it is kept as soon as may be."""
    room = math.inf if model.budget is None else model.budget - model.host_params
    payable = {tuple(place) for (*place, _), price in model.costs.items() if price <= room}
    every = product(model.space.slots.slot_ids, model.space.blueprint_ids, starts_of(epochs))
    tried = [(slot, name, start) for slot, name, start in every if (slot, name) in payable]
    return {f"{slot} {name} @{start}": write_plan(((start, f"{slot}.{name}"),)) for slot, name, start in tried}
