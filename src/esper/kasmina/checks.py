"""Conformance:

what every blueprint and every host promises, as checks that anybody can run on their own.
"""

import copy

import torch
from torch import nn

from esper.kasmina.blueprints import REGISTRY, SHAM, Shape
from esper.kasmina.copies.copying import Copy, Site
from esper.kasmina.fitting import probe_deviation, refuse_mispriced
from esper.kasmina.hosts import SegmentedHost
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.probing import Example, call_with, undisturbed
from esper.kasmina.randomness import own_randomness
from esper.leyline.errors import BlueprintError, HostError
from esper.leyline.settings import GrowthSettings
from esper.leyline.slots import SlotConfig

TYPICAL_SHAPES = {"image": (8, 6, 6), "sequence": (5, 16), "vector": (16,)}
_STEPS_TO_WAKE = 3


def check_blueprint(
    kind: str,
    name: str,
    shape: Shape | None = None,
    *,
    module: nn.Module | None = None,
    causal: bool = True,
) -> None:
    """Raise `BlueprintError` unless the seed keeps shapes, is the identity at birth, is priced
    right and can learn.

    Args: module: what a blueprint with a parameter `site` inherits from. causal: whether a sequence
        seed must not look at later tokens; False if it is for models that do.
    """
    what = f"{kind} blueprint {name!r}"
    blueprint = REGISTRY.get(kind, name)
    shape = tuple(shape or TYPICAL_SHAPES[kind])
    if blueprint.inherits and module is None:
        way_out = (
            "Pass module=..., one that keeps the shape of its input, or check a "
            "whole network with check_host."
        )
        raise BlueprintError(
            f"{what} inherits from a module of the network and cannot be checked alone. {way_out}"
        )
    site = None if module is None else Site(module, nn.ModuleList([module]))
    try:
        with own_randomness(0):
            features, target = torch.randn(4, *shape), torch.randn(4, *shape)
            seed = blueprint.build_seed(shape, site=site)
            if probe_deviation(seed, features, name) != 0.0 and not isinstance(seed, Copy):
                raise BlueprintError(
                    f"{what} is not the identity at birth; its body must be finite."
                )
            is_causal = causal and kind == "sequence" and not isinstance(seed, Copy)
            _check_outputs(_awake(seed), features, what, is_causal)
            cost = (
                blueprint.cost_at(shape, False, site)
                if blueprint.inherits and site
                else blueprint.cost(shape)
            )
            refuse_mispriced(seed, name, cost.params)
            if name != SHAM:
                _check_alive(seed, features, target, what)
    except (RuntimeError, ValueError, TypeError) as problem:
        if isinstance(problem, BlueprintError):
            raise
        raise BlueprintError(
            f"{what} does not work on features of shape {shape}: {problem}"
        ) from problem


def _awake(seed: nn.Module) -> nn.Module:
    """A copy whose every weight has an effect:

    one that is zero at birth would hide what the seed does later.
    """
    woken = copy.deepcopy(seed)
    with torch.no_grad():
        for name, parameter in woken.named_parameters():
            parameter.fill_(1.0) if name == "scale" else parameter.add_(
                0.3 * torch.randn_like(parameter)
            )
    return woken


@torch.no_grad()
def _check_outputs(seed: nn.Module, features: torch.Tensor, what: str, is_causal: bool) -> None:
    """Outputs depend on nothing but the example, and if it is causal on nothing later in it."""
    whole = seed(features)
    if not torch.equal(whole, seed(features)):
        reason = (
            "two passes over the same features differ, and its draws would shift those of the host"
        )
        raise BlueprintError(f"{what} is random: {reason}. Leave dropout and noise out of seeds.")
    try:
        is_alike = torch.allclose(whole[:1], seed(features[:1]), atol=1e-5)
    except ValueError:  # batch norm in training mode refuses a single example
        is_alike = False
    if not is_alike:  # evidence would depend on who else is in the batch
        raise BlueprintError(
            f"{what} mixes the examples of a batch; use GroupNorm or LayerNorm, not BatchNorm."
        )
    for token in range(1, features.shape[1] if is_causal else 0):
        changed = features.clone()
        changed[:, token:] += torch.randn_like(changed[:, token:])
        if not torch.allclose(seed(changed)[:, :token], whole[:, :token], rtol=1e-4, atol=1e-4):
            reason = f"its output at token {token - 1} changes with token {token}"
            raise BlueprintError(
                f"{what} looks at later tokens: {reason}. Mask them, or pass causal=False."
            )


def _check_alive(seed: nn.Module, features: torch.Tensor, target: torch.Tensor, what: str) -> None:
    optimizer = torch.optim.SGD(seed.parameters(), lr=0.1)
    woken: set[str] = set()
    for step in range(_STEPS_TO_WAKE):
        optimizer.zero_grad()
        (seed(features) - target).square().sum().backward()
        woken |= {
            name
            for name, p in seed.named_parameters()
            if p.grad is not None and bool(p.grad.abs().sum() > 0)
        }
        optimizer.step()
        if step == 0 and torch.equal(seed(features), features):
            raise BlueprintError(
                f"{what} does not change in its first optimiser step: its gradient is zero."
            )
    if asleep := sorted({name for name, _ in seed.named_parameters()} - woken):
        raise BlueprintError(
            f"{what} has parameters without a gradient after {_STEPS_TO_WAKE} steps: {asleep}."
        )


def check_host(
    host: nn.Module, slots: SlotConfig | None = None, example: Example | None = None
) -> None:
    """Raise `HostError` unless the host can be wrapped unchanged and its segments, if any, equal
    its forward pass.
    """
    twin = copy.deepcopy(host)
    model = MorphogeneticModel(
        twin, slots, example=example, settings=GrowthSettings(scale_at_birth=1.0)
    )
    if example is None:
        assert isinstance(twin, SegmentedHost)  # wrapping it without an example has just worked
        example = twin.example()
    with undisturbed(host), undisturbed(model):
        plain, wrapped = call_with(host, example), call_with(model, example)
        if not torch.equal(plain, wrapped):
            raise HostError(
                f"{type(host).__name__} changes its output once wrapped; it must be deterministic."
            )
        model.attach(torch.optim.SGD(model.parameters(), lr=0.0))
        for slot_id, name in {slot_id: name for slot_id, name, _ in reversed(model.costs)}.items():
            model.germinate_seed(
                slot_id, name
            )  # with an effect, so that a pass that skips a slot shows
        model.tick()
        plain = call_with(model, example)
        if not isinstance(twin, SegmentedHost):
            return
        assert isinstance(example, torch.Tensor)
        for slot_id in model.slot_config.slot_ids:
            if not torch.equal(
                twin.forward_from_segment(slot_id, twin.forward_to_segment(slot_id, example)), plain
            ):
                raise HostError(
                    f"{type(host).__name__} changes its output when its pass is split at {slot_id}."
                )
