"""A garden in plain data: what may grow where, in which order, and how.

Two gardens with one description grow alike. Processes compare theirs, and a save has it.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from torch import nn

from esper.kasmina.blueprints import REGISTRY
from esper.kasmina.model import MorphogeneticModel
from esper.leyline.errors import plain_number
from esper.storage.store import Plain

_ABSENT = "absent"


class Difference(NamedTuple):
    """Where two descriptions differ, and what each has there."""

    place: str
    one: Any
    other: Any


def describe_host(host: nn.Module) -> Plain:
    """Shapes and types of all that processes share before they grow."""
    tensors = dict(host.named_parameters()) | dict(host.named_buffers())
    shapes = {name: [list(value.shape), str(value.dtype)] for name, value in tensors.items()}
    return {"host": shapes}


def describe_garden(
    model: MorphogeneticModel, policy_name: str, higher_is_better: bool | None
) -> Plain:
    """Slots, blueprints and their sizes, settings, limits and policy, as JSON gives them back."""
    settings = asdict(model.settings)
    # the first pattern that fits decides, so their order counts
    settings["kinds"] = list((settings["kinds"] or {}).items())
    description = {
        "slots": dict(model.slot_config.modules),
        "features": {slot.slot_id: slot.kind for slot in model.ordered_slots},
        "blueprints": model.space.blueprint_ids[1:],
        "parameters": _describe_sizes(model),
        "settings": settings,
        "max_seeds": model.max_seeds,
        "budget": model.budget,
        "budget_flops": None if model.flops_limit is None else model.flops_limit.budget,
        "policy": policy_name,
        "higher_is_better": higher_is_better,
    }
    return json.loads(json.dumps(description, default=_to_plain))


def describe_growth(model: MorphogeneticModel) -> Plain:
    """What has grown in each slot."""
    grown = {}
    for slot in model.ordered_slots:
        state = slot.state
        grown[slot.slot_id] = [*slot.fossil_names, state.blueprint_id, state.stage.name]
    return {"grown": grown, "births": model.births}


def _describe_sizes(model: MorphogeneticModel) -> Plain:
    """Parameters of every seed without a gate, by slot and blueprint.

    Copies are not listed: they are as large as what they copy.
    """
    sizes: Plain = {slot.slot_id: {} for slot in model.ordered_slots}
    for slot_id, name, blend in model.costs:
        slot = model.slot(slot_id)
        if not REGISTRY.get(slot.kind, name).inherits:
            gate = slot.channels + 1 if blend == "gated" else 0
            sizes[slot_id][name] = model.costs[slot_id, name, blend] - gate
    return sizes


def _to_plain(value: Any) -> Any:
    """A number of numpy or torch as one of Python, all else as its text."""
    number = plain_number(value)
    return str(value) if number is value else number


def find_differences(one: Any, other: Any, place: str = "") -> Iterator[Difference]:
    """Where two descriptions differ, in their own order."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        if one != other:
            yield Difference(place, one, other)
        return
    for name in {**one, **other}:
        inner = f"{place}.{name}" if place else name
        yield from find_differences(one.get(name, _ABSENT), other.get(name, _ABSENT), inner)
