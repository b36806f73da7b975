"""What every blueprint and every host promises, as checks that you can run on your own.

Nothing here is used while a network grows.
"""

import copy

import torch
from torch import nn

from esper.kasmina.blueprints import REGISTRY, SHAM, Blueprint, Shape
from esper.kasmina.copies.copying import Copy, Site
from esper.kasmina.hosts import SegmentedHost
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.newborns import probe_deviation, refuse_mispriced
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
    """Raise `BlueprintError` unless a blueprint keeps every promise of a seed.

    A seed keeps the shape of its input, is the identity at birth, costs what it was priced at,
    treats every example alone, draws no random numbers and can learn. Run it on each blueprint of
    your own:

    >>> import esper
    >>> from torch import nn
    >>> @esper.blueprint("vector", "bn")
    ... def batch_norm(channels):
    ...     return nn.BatchNorm1d(channels)
    >>> try:
    ...     esper.check_blueprint("vector", "bn")
    ... except esper.EsperError as problem:
    ...     print(problem)
    vector blueprint 'bn' mixes the examples of a batch; use GroupNorm or LayerNorm, not BatchNorm.

    Args:
        kind: what features it works on: image, sequence or vector.
        name: the name under which it is registered.
        shape: one example's features; a small typical shape if you do not say.
        module: what a blueprint with a parameter `site` inherits from.
        causal: whether a sequence seed must not look at later tokens; False if it is for models
            that do.
    """
    what = f"{kind} blueprint {name!r}"
    blueprint = REGISTRY.get(kind, name)
    shape = tuple(shape or TYPICAL_SHAPES[kind])
    if blueprint.inherits and module is None:
        raise BlueprintError(
            f"{what} inherits from a module of the network and cannot be checked alone. Pass "
            f"module=..., one that keeps the shape of its input, or check a whole network with "
            f"check_host."
        )
    site = None if module is None else Site(module, nn.ModuleList([module]))
    try:
        with own_randomness(0):
            _check_seed(blueprint, shape, site, causal, what)
    except BlueprintError:
        raise
    except (RuntimeError, ValueError, TypeError) as problem:
        raise BlueprintError(
            f"{what} does not work on features of shape {shape}: {problem}"
        ) from problem


def _check_seed(
    blueprint: Blueprint, shape: Shape, site: Site | None, causal: bool, what: str
) -> None:
    """Build a seed and try all that it promises; `what` names it in errors."""
    features = torch.randn(4, *shape)
    target = torch.randn(4, *shape)
    seed = blueprint.build_seed(shape, site=site)
    is_copy = isinstance(seed, Copy)
    if probe_deviation(seed, features, blueprint.name) != 0.0 and not is_copy:
        raise BlueprintError(f"{what} is not the identity at birth; its body must be finite.")
    is_causal = causal and blueprint.kind == "sequence" and not is_copy
    _check_outputs(_awake(seed), features, what, is_causal)
    if blueprint.inherits and site is not None:
        cost = blueprint.cost_at(shape, False, site)
    else:
        cost = blueprint.cost(shape)
    refuse_mispriced(seed, blueprint.name, cost.params)
    if blueprint.name != SHAM:
        _check_alive(seed, features, target, what)


def _awake(seed: nn.Module) -> nn.Module:
    """A copy whose every weight has an effect.

    A weight that is zero at birth would hide what the seed does later.
    """
    woken = copy.deepcopy(seed)
    with torch.no_grad():
        for name, parameter in woken.named_parameters():
            if name == "scale":
                parameter.fill_(1.0)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return woken


@torch.no_grad()
def _check_outputs(seed: nn.Module, features: torch.Tensor, what: str, is_causal: bool) -> None:
    """Outputs depend on nothing but the example, and if it is causal on nothing later in it."""
    whole = seed(features)
    if not torch.equal(whole, seed(features)):
        raise BlueprintError(
            f"{what} is random: two passes over the same features differ, and its draws would "
            f"shift those of the host. Leave dropout and noise out of seeds."
        )
    try:
        is_alike = torch.allclose(whole[:1], seed(features[:1]), atol=1e-5)
    except ValueError:  # batch norm in training mode refuses a single example
        is_alike = False
    if not is_alike:  # evidence would depend on the other examples of the batch
        raise BlueprintError(
            f"{what} mixes the examples of a batch; use GroupNorm or LayerNorm, not BatchNorm."
        )
    for token in range(1, features.shape[1] if is_causal else 0):
        changed = features.clone()
        changed[:, token:] += torch.randn_like(changed[:, token:])
        if not torch.allclose(seed(changed)[:, :token], whole[:, :token], rtol=1e-4, atol=1e-4):
            raise BlueprintError(
                f"{what} looks at later tokens: its output at token {token - 1} changes with "
                f"token {token}. Mask them, or pass causal=False."
            )


def _check_alive(seed: nn.Module, features: torch.Tensor, target: torch.Tensor, what: str) -> None:
    """Every parameter gets a gradient within the first steps, and the first step has an effect."""
    optimizer = torch.optim.SGD(seed.parameters(), lr=0.1)
    woken: set[str] = set()
    for step in range(_STEPS_TO_WAKE):
        optimizer.zero_grad()
        (seed(features) - target).square().sum().backward()
        for name, parameter in seed.named_parameters():
            if parameter.grad is not None and bool(parameter.grad.abs().sum() > 0):
                woken.add(name)
        optimizer.step()
        if step == 0 and torch.equal(seed(features), features):
            raise BlueprintError(
                f"{what} does not change in its first optimiser step: its gradient is zero."
            )
    asleep = sorted({name for name, _ in seed.named_parameters()} - woken)
    if asleep:
        raise BlueprintError(
            f"{what} has parameters without a gradient after {_STEPS_TO_WAKE} steps: {asleep}."
        )


def check_host(
    host: nn.Module, slots: SlotConfig | None = None, example: Example | None = None
) -> None:
    """Raise `HostError` unless a host can be wrapped and gives the same output then.

    A host with segments must also give the same output when its pass is split at any slot. Nothing
    of the host changes.

    >>> import esper, torch
    >>> from torch import nn
    >>> from esper.leyline.slots import SlotConfig
    >>> host = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> esper.check_host(host, SlotConfig.for_modules(["1"]), example=torch.zeros(3, 4))

    Args:
        host: any module.
        slots: the modules that slots sit on; a host with segments knows its own.
        example: one batch, as the host takes it; a host with segments has one of its own.
    """
    twin = copy.deepcopy(host)
    # seeds with an effect, so that a pass that skips a slot shows
    settings = GrowthSettings(scale_at_birth=1.0)
    model = MorphogeneticModel(twin, slots, example=example, settings=settings)
    if example is None:
        assert isinstance(twin, SegmentedHost)  # wrapping it without an example has just worked
        example = twin.example()
    with undisturbed(host), undisturbed(model):
        plain = call_with(host, example)
        wrapped = call_with(model, example)
        if not torch.equal(plain, wrapped):
            raise HostError(
                f"{type(host).__name__} changes its output once wrapped; it must be deterministic."
            )
        model.attach(torch.optim.SGD(model.parameters(), lr=0.0))
        first_fitting: dict[str, str] = {}
        for slot_id, name, _ in reversed(model.costs):
            first_fitting[slot_id] = name
        for slot_id, name in first_fitting.items():
            model.germinate_seed(slot_id, name)
        model.tick()
        grown = call_with(model, example)
        if not isinstance(twin, SegmentedHost):
            return
        assert isinstance(example, torch.Tensor)
        for slot_id in model.slot_config.slot_ids:
            features = twin.forward_to_segment(slot_id, example)
            if not torch.equal(twin.forward_from_segment(slot_id, features), grown):
                raise HostError(
                    f"{type(host).__name__} changes its output when its pass is split at {slot_id}."
                )
