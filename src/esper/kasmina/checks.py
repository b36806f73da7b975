"""Conformance: what every blueprint and every host promises, as checks that anybody can run on their own."""

import copy

import torch
from torch import nn

from esper.kasmina.blueprints import REGISTRY, SHAM
from esper.kasmina.hosts import SegmentedHost
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.probing import Example, call_with, undisturbed
from esper.leyline.errors import BlueprintError, HostError
from esper.leyline.slots import SlotConfig

TYPICAL_SHAPES = {"image": (8, 6, 6), "sequence": (5, 16), "vector": (16,)}
_STEPS_TO_WAKE = 3


def check_blueprint(kind: str, name: str, shape: tuple[int, ...] | None = None) -> None:
    """Raise `BlueprintError` unless the seed keeps shapes, is the identity at birth, is priced right and can learn."""
    shape = shape or TYPICAL_SHAPES[kind]
    blueprint = REGISTRY.get(kind, name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        features = torch.randn(4, *shape)
        target = torch.randn(4, *shape)
        seed = blueprint.build_seed(shape)
        parameters = dict(seed.named_parameters())
        born = seed(features).detach()
        if born.shape != features.shape:
            raise BlueprintError(f"{kind} blueprint {name!r} changes the shape {shape} into {tuple(born.shape[1:])}.")
        if not torch.equal(born, features):
            raise BlueprintError(f"{kind} blueprint {name!r} is not the identity at birth; its body must be finite.")
        _check_independence(seed, features, f"{kind} blueprint {name!r}")
        counted = sum(parameter.numel() for parameter in parameters.values())
        if blueprint.cost(shape).params != counted:
            raise BlueprintError(
                f"{kind} blueprint {name!r} is priced at {blueprint.cost(shape).params} parameters but has {counted}; "
                "its function must build the same modules every time."
            )
        if name != SHAM:
            _check_alive(seed, features, target, f"{kind} blueprint {name!r}")


def _check_independence(seed: nn.Module, features: torch.Tensor, what: str) -> None:
    """A seed that mixes examples would make evidence depend on who else is in the batch."""
    scaled = copy.deepcopy(seed)
    for name, parameter in scaled.named_parameters():
        if name == "scale":
            nn.init.ones_(parameter)
    with torch.no_grad():
        together, alone = scaled(features)[:1], scaled(features[:1])
    if not torch.allclose(together, alone, atol=1e-5):
        raise BlueprintError(f"{what} mixes the examples of a batch; use GroupNorm or LayerNorm, not BatchNorm.")


def _check_alive(seed: nn.Module, features: torch.Tensor, target: torch.Tensor, what: str) -> None:
    optimizer = torch.optim.SGD(seed.parameters(), lr=0.1)
    woken: set[str] = set()
    for step in range(_STEPS_TO_WAKE):
        optimizer.zero_grad()
        (seed(features) - target).square().sum().backward()
        woken |= {name for name, p in seed.named_parameters() if p.grad is not None and bool(p.grad.abs().sum() > 0)}
        optimizer.step()
        if step == 0 and torch.equal(seed(features), features):
            raise BlueprintError(f"{what} does not change in its first optimiser step: its gradient is zero.")
    asleep = sorted({name for name, _ in seed.named_parameters()} - woken)
    if asleep:
        raise BlueprintError(f"{what} has parameters without a gradient after {_STEPS_TO_WAKE} steps: {asleep}.")


def check_host(host: nn.Module, slots: SlotConfig | None = None, example: Example | None = None) -> None:
    """Raise `HostError` unless the host can be wrapped unchanged and its segments, if any, equal its forward pass."""
    twin = copy.deepcopy(host)
    model = MorphogeneticModel(twin, slots, example=example)
    if example is None:
        assert isinstance(twin, SegmentedHost)  # wrapping it without an example has just worked
        example = twin.example()
    with undisturbed(host), undisturbed(model):
        plain, wrapped = call_with(host, example), call_with(model, example)
        if not torch.equal(plain, wrapped):
            raise HostError(
                f"{type(host).__name__} gives another output once wrapped; its forward must be deterministic."
            )
        if not isinstance(twin, SegmentedHost):
            return
        assert isinstance(example, torch.Tensor)
        for slot_id in model.slot_config.slot_ids:
            features = twin.forward_to_segment(slot_id, example)
            if not torch.equal(twin.forward_from_segment(slot_id, features), plain):
                raise HostError(f"{type(host).__name__} gives another output when its pass is split at slot {slot_id}.")
