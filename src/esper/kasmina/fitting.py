"""Fitting slots to a host, once, when it is wrapped: sites, shapes, prices, limits. Nothing here changes the host."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import REGISTRY
from esper.kasmina.hosts import SegmentedHost
from esper.kasmina.probing import Example, find_places
from esper.kasmina.seeds import Seed, Sham
from esper.kasmina.slot import SeedSlot, count_parameters, has_slots
from esper.leyline.errors import BlueprintError, BlueprintMismatchError, HostError, SettingError, UnknownNameError
from esper.leyline.factored_actions import ActionSpace
from esper.leyline.slots import SlotConfig


@dataclass(frozen=True)
class KnownShapes:
    """Slot id -> (kind, shape of one example's features, dtype), where they are known without running the host."""

    slots: Mapping[str, tuple[str, tuple[int, ...], str]]


def complete_slots(host: nn.Module, slots: SlotConfig | None) -> SlotConfig:
    """The slots with the module each sits on, asked of the host where the caller did not say."""
    if has_slots(host):
        raise HostError(f"this {type(host).__name__} already grows; use its garden, or grow garden.harvest().")
    if slots is not None and slots.modules:
        return slots
    if not isinstance(host, SegmentedHost):
        raise HostError(
            f"{type(host).__name__} does not say where its slots are. Name them: "
            "SlotConfig.for_modules(['layer1', 'layer2']), or use esper.grow(model, slots=[...], example=batch)."
        )
    own = host.slot_config()
    return own if slots is None else own.choose(slots.slot_ids)


def build_slots(
    host: nn.Module, config: SlotConfig, example: Example | KnownShapes | None, kinds: Mapping[str, str]
) -> dict[str, SeedSlot]:
    """An empty slot for every site, shaped by one example forward."""
    if isinstance(example, KnownShapes):
        device = next((parameter.device for parameter in host.parameters()), torch.device("cpu"))
        return {
            slot_id: SeedSlot(slot_id, kind, shape, torch.empty(0, device=device, dtype=getattr(torch, dtype)))
            for slot_id, (kind, shape, dtype) in example.slots.items()
        }
    if example is None:
        if not isinstance(host, SegmentedHost):
            raise HostError(f"the shapes inside {type(host).__name__} are not known; pass one batch, example=batch.")
        example = host.example()
    places = {place.name: place for place in find_places(host, example, kinds)}
    names = {name for name, _ in host.named_modules() if name}
    slots = {}
    for slot_id in config.slot_ids:
        name = config.modules[slot_id]
        if name not in names:
            raise UnknownNameError("module", name, names, f"Slot {slot_id} needs the name of a sub-module.")
        place = places.get(name)
        problem = "it does not run on the example batch" if place is None else place.problem
        if place is None or place.kind is None or place.like is None or problem is not None:
            raise HostError(f"slot {slot_id} cannot sit on {name!r}: {problem}. Choose another module for it.")
        slots[slot_id] = SeedSlot(slot_id, place.kind, place.shape, place.like)
    return slots


def price_list(slots: Sequence[SeedSlot], space: ActionSpace) -> dict[tuple[str, str, str], int]:
    """Parameters of every (slot, blueprint, blend) that fits; what does not fit is left out."""
    kinds, names = sorted({slot.kind for slot in slots}), [name for name in space.blueprint_ids if name is not None]
    for name in names:
        if not any(REGISTRY.has(kind, name) for kind in kinds):
            raise UnknownNameError(f"{' or '.join(kinds)} blueprint", name, REGISTRY.names_for(kinds))
    costs: dict[tuple[str, str, str], int] = {}
    for name, slot, blend in product(names, slots, space.blends):
        if REGISTRY.has(slot.kind, name):
            with suppress(BlueprintMismatchError):
                cost = REGISTRY.get(slot.kind, name).cost(slot.feature_shape, blend == "gated")
                costs[slot.slot_id, name, blend] = cost.params
    if not costs:
        raise BlueprintMismatchError(f"none of the blueprints {', '.join(names)} fits any slot; choose other ones.")
    return costs


def refuse_limits(
    max_seeds: int | None, budget: int | None, host_params: int, costs: Mapping[tuple[str, str, str], int]
) -> None:
    """Limits under which nothing could ever grow are a mistake, not a setting."""
    if max_seeds is not None and max_seeds < 1:
        raise SettingError(f"max_seeds must be at least 1 or None for no limit, got {max_seeds}.")
    if budget is None:
        return
    cheapest = min(costs, key=lambda key: costs[key])
    if budget < host_params + costs[cheapest]:
        raise SettingError(
            f"a budget of {budget:,} parameters leaves {budget - host_params:,} above the host's {host_params:,}, and "
            f"the smallest seed ({cheapest[1]} in {cheapest[0]}) needs {costs[cheapest]:,}. Raise the budget to at "
            f"least {host_params + costs[cheapest]:,}."
        )


def refuse_mispriced(seed: Seed | Sham, blueprint_id: str, price: int) -> None:
    """A blueprint that builds something else than it was priced for could break the budget."""
    counted = count_parameters(seed)
    if counted != price:
        raise BlueprintError(
            f"blueprint {blueprint_id!r} was priced at {price:,} parameters and now built {counted:,}. It must "
            "build the same modules every time; register it before wrapping."
        )


def probe_deviation(seed: Seed | Sham, features: Tensor, blueprint_id: str) -> float:
    """How far a newborn seed moves random features; a seed that changes their shape is refused."""
    with torch.no_grad():
        grown = seed(features)
    if grown.shape != features.shape:
        raise BlueprintError(
            f"{blueprint_id!r} turns shape {tuple(features.shape)} into {tuple(grown.shape)}; a seed must keep it."
        )
    return float((grown - features).abs().max())
