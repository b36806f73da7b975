"""Fits slots to a host, once, when it is wrapped: sites, shapes, prices, limits.

Nothing here changes the host. FLOPs are counted in `pricing`.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from torch import nn

from esper.kasmina.blueprints import ATTENTION, COPY, COPY_ZERO, REGISTRY, SHAM, BlueprintCost
from esper.kasmina.copies.copying import Site
from esper.kasmina.copies.eligibility import Inheritance, study_copies
from esper.kasmina.hosts import SegmentedHost
from esper.kasmina.pricing import BackwardFlops
from esper.kasmina.probing import Example, Place, find_places
from esper.kasmina.slot import SeedSlot, count_parameters, has_gate, has_slots
from esper.leyline.errors import (
    BlueprintMismatchError,
    HostError,
    SettingError,
    UnknownNameError,
    is_number,
    plain_number,
)
from esper.leyline.factored_actions import ActionSpace
from esper.leyline.legality import FlopsView
from esper.leyline.slots import SlotConfig

Prices = dict[tuple[str, str, str], int]
"""Parameters by slot, blueprint and blend."""


class KnownSlots(dict[str, SeedSlot]):
    """Empty slots of a host that need not be run on an example: a save has what it would show."""


@dataclass(frozen=True)
class Probed:
    """An example, and the places that it has shown in a host."""

    example: Example
    places: Sequence[Place]


ShapeSource = Example | Probed | KnownSlots | None
"""What says the shapes of a host's features; None asks the host for an example of its own."""


def usual_blueprints(places: Sequence[Place]) -> list[str]:
    """What is planted at these places where the caller does not say what.

    It is all but copies, and but what looks at other tokens where the model has a mask or a cache:
    seeds do not see those.
    """
    names = REGISTRY.defaults_for(str(place.kind) for place in places)
    if not any(place.kind == "sequence" and place.unseen for place in places):
        return list(names)
    return [
        name
        for name in names
        if not REGISTRY.has("sequence", name) or not REGISTRY.get("sequence", name).traits.spatial
    ]


def complete_slots(host: nn.Module, slots: SlotConfig | None) -> SlotConfig:
    """The slots with the module each sits on, asked of the host where the caller did not say."""
    if has_slots(host):
        raise HostError(
            f"this {type(host).__name__} already grows; use its garden, or grow garden.harvest()."
        )
    if slots is not None and slots.modules:
        return slots
    if not isinstance(host, SegmentedHost):
        raise HostError(
            f"{type(host).__name__} does not say where its slots are. Name them: "
            f"SlotConfig.for_modules(['layer1', 'layer2']), or use esper.grow(model, slots=[...], "
            f"example=batch)."
        )
    config = host.slot_config()
    return config if slots is None else config.choose(slots.slot_ids)


def build_slots(
    host: nn.Module,
    config: SlotConfig,
    example: ShapeSource,
    kinds: Mapping[str, str],
    blueprints: Collection[str],
) -> dict[str, SeedSlot]:
    """An empty slot for every site, shaped by one example forward.

    What copies would inherit is studied only if `blueprints` has one that copies.
    """
    if isinstance(example, KnownSlots):
        return example
    probed = example.places if isinstance(example, Probed) else None
    example = example_of(host, example)
    if probed is None:
        probed = find_places(host, example, kinds)
    places = {place.name: place for place in probed}
    names = {name for name, _ in host.named_modules() if name}
    slots: dict[str, SeedSlot] = {}
    for slot_id in config.slot_ids:
        name = config.modules[slot_id]
        if name not in names:
            advice = f"Slot {slot_id} needs the name of a sub-module."
            raise UnknownNameError("module", name, names, advice)
        slots[slot_id] = _build_slot(slot_id, name, places.get(name))
    wanted = {COPY, COPY_ZERO} & set(blueprints)
    can_copy = Inheritance(None)
    copied = {
        slot_id: config.modules[slot_id]
        for slot_id, slot in slots.items()
        if slot.inheritance == can_copy
    }
    if wanted and copied:
        studied = study_copies(host, copied, example, wanted, config.modules.values())
        for slot_id, inheritance in studied.items():
            slots[slot_id].inheritance = inheritance
    return slots


def attentive_slots(
    slots: Mapping[str, SeedSlot], config: SlotConfig, names: Collection[str]
) -> dict[str, SeedSlot]:
    """Slots in which attention to other tokens may grow, by the module they sit on."""
    if ATTENTION not in names:
        return {}
    sequences = (slot for slot in slots.values() if slot.kind == "sequence")
    return {config.modules[slot.slot_id]: slot for slot in sequences}


def example_of(host: nn.Module, example: Example | Probed | None) -> Example:
    """The example, or one that the host has of its own."""
    if isinstance(example, Probed):
        return example.example
    if example is not None:
        return example
    if not isinstance(host, SegmentedHost):
        raise HostError(
            f"the shapes inside {type(host).__name__} are not known; pass one batch, example=batch."
        )
    return host.example()


def _build_slot(slot_id: str, name: str, place: Place | None) -> SeedSlot:
    """An empty slot on the module `name`, which gave out what `place` says."""
    problem = "it does not run on the example batch" if place is None else place.problem
    if place is None or place.kind is None or place.like is None or problem is not None:
        raise HostError(
            f"slot {slot_id} cannot sit on {name!r}: {problem}. Choose another module for it."
        )
    inheritance = Inheritance(place.copy_problem)
    return SeedSlot(slot_id, place.kind, place.shape, place.like, inheritance)


def price(slot: SeedSlot, name: str, gated: bool, site: Site) -> BlueprintCost:
    """What a seed costs in this slot now; `BlueprintMismatchError` where it does not fit."""
    blueprint = REGISTRY.get(slot.kind, name)
    if not blueprint.inherits:
        return blueprint.cost(slot.feature_shape, gated)
    if name not in (COPY, COPY_ZERO):
        return blueprint.cost_at(slot.feature_shape, gated, site)
    inheritance = slot.inheritance
    problem = inheritance.problem
    if problem is None and name == COPY_ZERO:
        problem = inheritance.zero_problem
    if problem is not None:
        raise BlueprintMismatchError(f"{name} does not fit slot {slot.slot_id}: {problem}.")
    params = site.own_parameters()
    flops = inheritance.flops
    entry = inheritance.entry
    if gated:
        # a linear layer from the channels to one number, for each example or each token
        positions = 1 if slot.kind == "image" else math.prod(slot.feature_shape[:-1])
        gate_flops = 2 * slot.channels * positions
        params += slot.channels + 1
        flops += gate_flops
        entry += gate_flops
    backward = BackwardFlops(entry=entry, mixing=inheritance.mixing)
    return BlueprintCost(params=params, flops=flops, backward=backward)


def price_list(slots: Sequence[SeedSlot], space: ActionSpace, sites: Mapping[str, Site]) -> Prices:
    """All that fits; what does not is left out."""
    kinds = sorted({slot.kind for slot in slots})
    names = [name for name in space.blueprint_ids if name is not None]
    for name in names:
        if not any(REGISTRY.has(kind, name) for kind in kinds):
            what = f"{' or '.join(kinds)} blueprint"
            raise UnknownNameError(what, name, REGISTRY.names_for(kinds))
    problems: set[str] = set()
    costs: Prices = {}
    for name, slot, blend in product(names, slots, space.blends):
        if not REGISTRY.has(slot.kind, name):
            continue
        gated = blend == "gated"
        try:
            cost = price(slot, name, gated, sites[slot.slot_id])
        except BlueprintMismatchError as problem:
            problems.add(str(problem))
            continue
        slot.prices[name, gated] = cost
        costs[slot.slot_id, name, blend] = cost.params
    if not costs:
        shown = " ".join(sorted(problems)[:3])
        raise BlueprintMismatchError(
            f"none of {', '.join(names)} fits any slot; choose other blueprints. {shown}"
        )
    return costs


def price_copies(
    slots: Sequence[SeedSlot], costs: Prices, site_of: Callable[[str], Site]
) -> Prices:
    """The part of a price list that follows the host: what copies cost now."""
    now: Prices = {}
    for slot in slots:
        site = site_of(slot.slot_id)
        size = count_parameters(site.module)
        if size == slot.copied_params:
            continue  # what it shares with the network takes a walk through all of it to find out
        slot.copied_params = size
        for slot_id, name, blend in costs:
            if slot_id != slot.slot_id or name not in (COPY, COPY_ZERO):
                continue
            gated = blend == "gated"
            cost = price(slot, name, gated, site)
            slot.prices[name, gated] = cost
            now[slot_id, name, blend] = cost.params
    return now


def total_budget(budget: float | int | None, model: nn.Module) -> int | None:
    """A budget as a number of parameters: a float is a multiple of what the model has."""
    if budget is None:
        return None
    budget = plain_number(budget)
    size = count_parameters(model)
    if isinstance(budget, int) and not isinstance(budget, bool):
        if budget <= size:
            likely = max(budget, 1) + 0.5 if budget < 2 else float(budget)
            raise SettingError(
                f"budget={budget} is a number of parameters, but the model already has {size:,}. "
                f"For a multiple of its size write a float: budget={likely}."
            )
        return budget
    if not isinstance(budget, float) or not 1.0 < budget < math.inf:
        raise SettingError(
            f"budget {budget!r} leaves no room to grow. A float multiplies the model's parameters, "
            f"above 1.0 (1.5: half as many again); an int counts them all."
        )
    return int(budget * size)


@dataclass(frozen=True)
class FlopsLimit:
    """Most FLOPs of one example forward through a network, and what its bare host takes."""

    host: int
    budget: int


def limit_flops(
    budget: float | int, host: int | None, slots: Sequence[SeedSlot], costs: Prices
) -> FlopsLimit:
    """A limit on FLOPs: a float is a multiple of what the bare host takes, an int is their number.

    One under which nothing could ever grow is refused.
    """
    if host is None:
        raise SettingError(
            "budget_flops needs the FLOPs of this model, and torch cannot count them. Limit its "
            "parameters instead: budget=..."
        )
    is_number = isinstance(budget, int | float) and not isinstance(budget, bool)
    total = budget * host if isinstance(budget, float) else budget
    if not is_number or not host < total < math.inf:
        raise SettingError(
            f"budget_flops={budget!r} leaves no room to grow: the model takes {host:,} FLOPs an "
            f"example. A float multiplies that, above 1.0 (1.5: half as many again); an int counts "
            f"them all."
        )
    limit = FlopsLimit(host=host, budget=int(total))
    view = view_flops(limit, slots, costs)
    assert view is not None
    (slot_id, name, _), cheapest = min(view.costs.items(), key=lambda item: item[1])
    if host + cheapest > limit.budget:
        raise SettingError(
            f"budget_flops of {limit.budget:,} leaves {limit.budget - host:,} above the host's "
            f"{host:,}, and the cheapest seed ({name} in {slot_id}) takes {cheapest:,}. Raise it "
            f"to at least {host + cheapest:,}."
        )
    return limit


def view_flops(
    limit: FlopsLimit | None, slots: Sequence[SeedSlot], costs: Prices
) -> FlopsView | None:
    """What of a limit is used, and what each seed that fits would take; None without a limit."""
    if limit is None:
        return None
    by_id = {slot.slot_id: slot for slot in slots}
    used = limit.host
    for slot in slots:
        for name, fossil in zip(slot.fossil_names, slot.fossils, strict=True):
            used += slot.prices[name, has_gate(fossil)].flops
        if slot.seed is not None:
            used += slot.prices[str(slot.state.blueprint_id), has_gate(slot.seed)].flops
    flops: Prices = {}
    for slot_id, name, blend in costs:
        flops[slot_id, name, blend] = by_id[slot_id].prices[name, blend == "gated"].flops
    return FlopsView(used=used, budget=limit.budget, costs=flops)


def refuse_limits(
    max_seeds: int | None, budget: int | None, host_params: int, costs: Prices
) -> None:
    """Refuse limits under which nothing could ever grow: a mistake, not a setting."""
    if max_seeds is not None and not is_number(max_seeds, 1, is_whole=True):
        raise SettingError(
            f"max_seeds must be whole and at least 1, or None for no limit; got {max_seeds!r}."
        )
    if budget is None:
        return
    # a sham is free, and nothing grows by it
    growing = {key: price for key, price in costs.items() if key[1] != SHAM}
    (slot_id, name, _), smallest = min((growing or costs).items(), key=lambda item: item[1])
    least = host_params + smallest
    if budget < least:
        times = math.ceil(100 * least / max(1, host_params)) / 100
        raise SettingError(
            f"a budget of {budget:,} parameters leaves {budget - host_params:,} above the host's "
            f"{host_params:,}, and the smallest seed ({name} in {slot_id}) needs {smallest:,}. "
            f"Raise the budget to at least {least:,} ({times:g} times the host), "
            f"or allow smaller blueprints."
        )
