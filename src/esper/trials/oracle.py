"""Every single placement, tried: the upper bound for the question where, what and when to plant one seed."""

from esper.kasmina.model import MorphogeneticModel
from esper.trials.searching import write_plan


def starts_of(epochs: int) -> list[int]:
    """Decisions at which the one seed is planted: the first, after a quarter and after half of the episode."""
    return sorted({0, epochs // 4, epochs // 2})


def placements_of(model: MorphogeneticModel, epochs: int) -> dict[str, str]:
    """A plan for every (slot, blueprint, start) whose seed fits and can be paid for; it is kept as soon as may be."""
    room = model.budget - model.host_params if model.budget is not None else None
    space, found = model.space, {}
    for slot in space.slots.slot_ids:
        for name in space.blueprint_ids:
            prices = [price for (*place, _), price in model.costs.items() if place == [slot, name]]
            if not prices or (room is not None and min(prices) > room):
                continue
            for start in starts_of(epochs):
                found[f"{slot} {name} @{start}"] = write_plan(((start, f"{slot}.{name}"),))
    return found
