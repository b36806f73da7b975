"""Fitting slots to a host, once, when it is wrapped:

sites, shapes, prices, limits. Nothing here changes the host.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import COPY, COPY_ZERO, REGISTRY, AnySeed, BlueprintCost
from esper.kasmina.copies.copying import Copy, Site
from esper.kasmina.copies.eligibility import Inheritance, study_copies
from esper.kasmina.hosts import SegmentedHost
from esper.kasmina.pricing import BackwardFlops
from esper.kasmina.probing import Example, find_places, find_wrapper
from esper.kasmina.slot import SeedSlot, count_parameters, has_slots
from esper.leyline.errors import (
    BlueprintError,
    BlueprintMismatchError,
    HostError,
    SettingError,
    UnknownNameError,
)
from esper.leyline.factored_actions import ActionSpace
from esper.leyline.gates import GateEvidence, shape_gate
from esper.leyline.slots import SlotConfig

Prices = dict[tuple[str, str, str], int]  # Parameters by slot, blueprint and blend.


class KnownSlots(dict[str, SeedSlot]):
    """Empty slots of a host that need not be run on an example:

    somebody saved what it would tell.
    """


Given = Example | KnownSlots | None


def complete_slots(host: nn.Module, slots: SlotConfig | None) -> SlotConfig:
    """The slots with the module each sits on, asked of the host where the caller did not say."""
    if has_slots(host):
        raise HostError(
            f"this {type(host).__name__} already grows; use its garden, or grow garden.harvest()."
        )
    if slots is not None and slots.modules:
        return slots
    if not isinstance(host, SegmentedHost):
        ways = (
            "SlotConfig.for_modules(['layer1', 'layer2']), or use esper.grow(model, "
            "slots=[...], example=batch)."
        )
        raise HostError(
            f"{type(host).__name__} does not say where its slots are. Name them: {ways}"
        )
    own = host.slot_config()
    return own if slots is None else own.choose(slots.slot_ids)


def build_slots(
    host: nn.Module,
    config: SlotConfig,
    example: Given,
    kinds: Mapping[str, str],
    blueprints: Collection[str],
) -> dict[str, SeedSlot]:
    """An empty slot for every site, shaped by one example forward; `blueprints` say whether copies
    are asked for.
    """
    if isinstance(example, KnownSlots):
        return example
    if example is None:
        if not isinstance(host, SegmentedHost):
            raise HostError(
                f"the shapes inside {type(host).__name__} are not known; pass one "
                f"batch, example=batch."
            )
        example = host.example()
    places = {place.name: place for place in find_places(host, example, kinds)}
    names = {name for name, _ in host.named_modules() if name}
    slots: dict[str, SeedSlot] = {}
    for slot_id in config.slot_ids:
        if (name := config.modules[slot_id]) not in names:
            raise UnknownNameError(
                "module", name, names, f"Slot {slot_id} needs the name of a sub-module."
            )
        place = places.get(name)
        problem = "it does not run on the example batch" if place is None else place.problem
        if place is None or place.kind is None or place.like is None or problem is not None:
            raise HostError(
                f"slot {slot_id} cannot sit on {name!r}: {problem}. Choose another module for it."
            )
        slots[slot_id] = SeedSlot(
            slot_id, place.kind, place.shape, place.like, Inheritance(place.copy_problem)
        )
    wanted = {COPY, COPY_ZERO} & set(blueprints)
    copied = {
        s: config.modules[s] for s, slot in slots.items() if slot.inheritance == Inheritance(None)
    }
    if wanted and copied:
        for slot_id, inheritance in study_copies(
            host, copied, example, wanted, config.modules.values()
        ).items():
            slots[slot_id].inheritance = inheritance
    return slots


def price(slot: SeedSlot, name: str, gated: bool, site: Site) -> BlueprintCost:
    """What a seed costs in this slot now; `BlueprintMismatchError` where it does not fit."""
    blueprint = REGISTRY.get(slot.kind, name)
    if not blueprint.inherits:
        return blueprint.cost(slot.feature_shape, gated)
    if name not in (COPY, COPY_ZERO):
        return blueprint.cost_at(slot.feature_shape, gated, site)
    handed = slot.inheritance
    if (
        problem := handed.problem or (handed.zero_problem if name == COPY_ZERO else None)
    ) is not None:
        raise BlueprintMismatchError(f"{name} does not fit slot {slot.slot_id}: {problem}.")
    positions = 1 if slot.kind == "image" else math.prod(slot.feature_shape[:-1])
    gate = (
        BlueprintCost(slot.channels + 1, 2 * slot.channels * positions)
        if gated
        else BlueprintCost(0, 0)
    )
    backward = BackwardFlops(entry=handed.entry + gate.flops, mixing=handed.mixing)
    params = site.own_parameters() + gate.params
    return BlueprintCost(params, handed.flops + gate.flops, backward)


def price_list(slots: Sequence[SeedSlot], space: ActionSpace, sites: Mapping[str, Site]) -> Prices:
    """All that fits; what does not is left out."""
    kinds, names = (
        sorted({slot.kind for slot in slots}),
        [name for name in space.blueprint_ids if name is not None],
    )
    problems: set[str] = set()
    for name in names:
        if not any(REGISTRY.has(kind, name) for kind in kinds):
            raise UnknownNameError(
                f"{' or '.join(kinds)} blueprint", name, REGISTRY.names_for(kinds)
            )
    costs: Prices = {}
    for name, slot, blend in product(names, slots, space.blends):
        if REGISTRY.has(slot.kind, name):
            try:
                cost = price(slot, name, blend == "gated", sites[slot.slot_id])
            except BlueprintMismatchError as problem:
                problems.add(str(problem))
            else:
                slot.prices[name, blend == "gated"] = cost
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
        own = [
            (name, blend)
            for of, name, blend in costs
            if of == slot.slot_id and name in (COPY, COPY_ZERO)
        ]
        site = site_of(slot.slot_id)
        if (size := count_parameters(site.module)) == slot.copied_params:
            continue  # what it shares with the network takes a walk through all of it to find out
        slot.copied_params = size
        for name, blend in own:
            slot.prices[name, blend == "gated"] = cost = price(slot, name, blend == "gated", site)
            now[slot.slot_id, name, blend] = cost.params
    return now


def refuse_wrapped(model: nn.Module) -> None:
    """Seeds come and go, and no wrapper's buckets or shards would follow."""
    if (wrapper := find_wrapper(model)) not in (None, "OptimizedModule"):
        way_out = "Grow the plain model and train DistributedDataParallel(garden.model)"
        what = f"this model holds a {wrapper}, which would not know of seeds that are planted later"
        raise HostError(f"{what}. {way_out}; what has to be sharded is garden.harvest().")


def total_budget(budget: float | int | None, model: nn.Module) -> int | None:
    """A budget as a number of parameters: a float is a multiple of what the model has."""
    own = count_parameters(model)
    if budget is None:
        return None
    if isinstance(budget, int) and not isinstance(budget, bool):
        if budget <= own:
            way_out = (
                f"write a float: budget={max(budget, 1) + 0.5 if budget < 2 else float(budget)}."
            )
            problem = f"is a number of parameters, but the model already has {own:,}"
            raise SettingError(f"budget={budget} {problem}. For a multiple of its size {way_out}")
        return budget
    if not isinstance(budget, float) or not 1.0 < budget < math.inf:
        rule = (
            "A float multiplies the model's parameters, above 1.0 (1.5: half as many "
            "again); an int counts them all."
        )
        raise SettingError(f"budget {budget!r} leaves no room to grow. {rule}")
    return int(budget * own)


def refuse_limits(
    max_seeds: int | None, budget: int | None, host_params: int, costs: Prices
) -> None:
    """Limits under which nothing could ever grow are a mistake, not a setting."""
    if max_seeds is not None and (isinstance(max_seeds, str) or max_seeds < 1 or max_seeds % 1):
        raise SettingError(
            f"max_seeds must be whole and at least 1, or None for no limit; got {max_seeds!r}."
        )
    if budget is None:
        return
    cheapest = min(costs, key=lambda key: costs[key])
    if budget < (least := host_params + costs[cheapest]):
        room = f"leaves {budget - host_params:,} above the host's {host_params:,}"
        needed = f"the smallest seed ({cheapest[1]} in {cheapest[0]}) needs {costs[cheapest]:,}"
        way_out = f"Raise the budget to at least {least:,}."
        raise SettingError(f"a budget of {budget:,} parameters {room}, and {needed}. {way_out}")


def refuse_mispriced(seed: AnySeed, blueprint_id: str, price: int) -> None:
    """A blueprint that builds something else than it was priced for could break the budget."""
    if (counted := count_parameters(seed)) != price:
        rule = "It must build the same modules every time; register it before wrapping."
        what = (
            f"blueprint {blueprint_id!r} was priced at {price:,} parameters and now "
            f"built {counted:,}"
        )
        raise BlueprintError(f"{what}. {rule}")


def probe_deviation(seed: AnySeed, features: Tensor, blueprint_id: str) -> float:
    """How far a newborn seed moves random features; a seed that changes their shape is refused."""
    with torch.no_grad():
        grown = seed(features)
    before, after = tuple(features.shape), tuple(grown.shape)
    if after != before:
        raise BlueprintError(
            f"{blueprint_id!r} turns shape {before} into {after}; a seed must keep it."
        )
    return float((grown - features).abs().max())


def judge_newborn(
    slot: SeedSlot, seed: AnySeed, probe: Tensor, blueprint_id: str, *, is_zero: bool
) -> GateEvidence:
    """G0 of a newborn seed, whose scale `is_zero` or not; a seed that fails is refused."""
    if isinstance(
        seed, Copy
    ):  # run on the example when the host was wrapped: it needs its original's arguments
        is_identity = blueprint_id == COPY_ZERO
        evidence = shape_gate(0.0 if is_identity else slot.inheritance.deviation, is_identity)
    else:
        evidence = shape_gate(probe_deviation(seed, probe, blueprint_id), must_be_identity=is_zero)
    if not evidence.passed:
        raise BlueprintError(
            f"{blueprint_id!r} fails at birth: needed {evidence.needed}; {evidence.reason}."
        )
    return evidence
