"""Builds and judges newborn seeds, and refuses those that could never learn; plants nothing."""

from collections.abc import Container

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import COPY_ZERO, REGISTRY, AnySeed
from esper.kasmina.copies.copying import Copy, Site
from esper.kasmina.slot import SeedSlot, count_parameters, remove_slots
from esper.leyline.errors import BlueprintError, OptimizerError
from esper.leyline.gates import GateEvidence, optimizer_gate, shape_gate


def build_newborn(
    slot: SeedSlot,
    host: nn.Module,
    site: Site | None,
    blueprint_id: str,
    *,
    gated: bool,
    scale: float,
) -> AnySeed:
    """A seed for this slot, on its device; a blueprint that inherits reads the `site`."""
    blueprint = REGISTRY.get(slot.kind, blueprint_id)
    seed = blueprint.build_seed(slot.feature_shape, scale=scale, gated=gated, site=site)
    remove_slots(seed)
    # the weights' type: features are shorter where a model opens autocast itself
    weight = next(filter(Tensor.is_floating_point, host.parameters()), slot.alpha)
    longer = max(weight.dtype, slot.alpha.dtype, key=lambda dtype: dtype.itemsize)
    like = slot.alpha.to(longer)
    if not isinstance(seed, Copy):
        return seed.to(like)
    # a copy is as its original, which need not have the features' type; its gate has no original
    if seed.gate is not None:
        seed.gate.to(like)
    return seed


def refuse_mispriced(seed: AnySeed, blueprint_id: str, price: int) -> None:
    """Refuse a seed that is not what its blueprint was priced for: it could break the budget."""
    counted = count_parameters(seed)
    if counted != price:
        raise BlueprintError(
            f"blueprint {blueprint_id!r} was priced at {price:,} parameters and now built "
            f"{counted:,}. It must build the same modules every time; register it before wrapping."
        )


def probe_deviation(seed: AnySeed, features: Tensor, blueprint_id: str) -> float:
    """How far a newborn seed moves random features; a seed that changes their shape is refused."""
    with torch.no_grad():
        grown = seed(features)
    before = tuple(features.shape)
    after = tuple(grown.shape)
    if after != before:
        raise BlueprintError(
            f"{blueprint_id!r} turns shape {before} into {after}; a seed must keep it."
        )
    return float((grown - features).abs().max())


def judge_newborn(
    slot: SeedSlot, seed: AnySeed, probe: Tensor, blueprint_id: str, *, is_zero: bool
) -> GateEvidence:
    """G0 of a newborn seed, whose scale `is_zero` or not; a seed that fails is refused."""
    if isinstance(seed, Copy):
        # it was run on the example when the host was wrapped: it needs its original's arguments
        must_be_identity = blueprint_id == COPY_ZERO
        deviation = 0.0 if must_be_identity else slot.inheritance.deviation
    else:
        must_be_identity = is_zero
        deviation = probe_deviation(seed, probe, blueprint_id)
    evidence = shape_gate(deviation, must_be_identity)
    if not evidence.passed:
        raise BlueprintError(
            f"{blueprint_id!r} fails at birth: needed {evidence.needed}; {evidence.reason}."
        )
    return evidence


def require_optimizer(slot: SeedSlot, owned: Container[int]) -> None:
    """Judge whether optimisers have a live seed's parameters, whose ids are `owned`.

    A seed that no optimiser trains is refused.
    """
    assert slot.seed is not None
    orphans = sum(id(parameter) not in owned for parameter in slot.seed.parameters())
    slot.assign(slot.state.judged(optimizer_gate(orphans)))
    if orphans:
        raise OptimizerError(
            f"{orphans} parameters of the {slot.state.blueprint_id} seed in slot {slot.slot_id} "
            f"are in no optimiser, so it would never learn. Call attach(optimizer) before the "
            f"first epoch."
        )
