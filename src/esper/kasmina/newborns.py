"""Builds newborn seeds, and refuses those that could never learn. Nothing is planted here."""

from collections.abc import Container

from torch import Tensor, nn

from esper.kasmina.blueprints import REGISTRY, AnySeed
from esper.kasmina.copies.copying import Copy, Site
from esper.kasmina.slot import SeedSlot, remove_slots
from esper.leyline.errors import OptimizerError
from esper.leyline.gates import optimizer_gate


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
