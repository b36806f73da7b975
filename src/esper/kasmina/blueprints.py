"""Which seeds there are, and what each costs before it is built.

The modules themselves are in `seeds`, the numbers of built-in blueprints in
`leyline.factored_actions`.
"""

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from inspect import signature

import torch
from torch import Tensor, nn

from esper.kasmina import seeds
from esper.kasmina.copies import copying
from esper.kasmina.copies.copying import Copy, Site
from esper.kasmina.pricing import BackwardFlops, count_backward, count_flops
from esper.leyline.errors import BlueprintError, BlueprintMismatchError, UnknownNameError
from esper.leyline.factored_actions import (
    CNN_BLUEPRINTS,
    COPY_BLUEPRINTS,
    TRANSFORMER_BLUEPRINTS,
    VECTOR_BLUEPRINTS,
)
from esper.leyline.registry import enter
from esper.leyline.slots import KINDS

SHAM = "sham"
"""The blueprint without parameters or effect."""
ATTENTION = "attention"
"""The blueprint that looks at other positions than the one it changes."""
COPY = "copy"
"""A copy of the slot's own module."""
COPY_ZERO = "copy_zero"
"""A copy of the slot's own module that is the identity at birth."""
Shape = tuple[int, ...]
AnySeed = seeds.Seed | seeds.Sham | Copy
Builder = Callable[..., nn.Module]
"""From the number of channels, and the `Site` if it asks for one, to a seed's body."""


def channels_of(kind: str, shape: Shape) -> int:
    """Width of one example's features: an image's first axis, any other's last axis."""
    return shape[0] if kind == "image" else shape[-1]


@dataclass(frozen=True)
class BlueprintTraits:
    """What a blueprint is like, as numbers that a policy can read.

    A policy knows blueprints that it has never met by these.
    """

    spatial: float = 0.0
    """1 if it mixes positions"""
    attention_like: float = 0.0
    """1 if its weights depend on its input"""
    normalising: float = 0.0
    """1 if it normalises its input"""
    depth: float = 1.0
    """layers with weights, one behind the other"""


@dataclass(frozen=True)
class BlueprintCost:
    """What a seed costs in one slot."""

    params: int
    flops: int
    """of one example forward; a multiplication and an addition count twice"""
    backward: BackwardFlops = field(default_factory=BackwardFlops)


@dataclass(frozen=True)
class Blueprint:
    """A named way to build the body of a seed for features of a given width."""

    kind: str
    """image, sequence or vector"""
    name: str
    build: Builder
    traits: BlueprintTraits

    @property
    def inherits(self) -> bool:
        """Whether it asks for the site, so that what it builds depends on the network."""
        return "site" in signature(self.build).parameters

    def build_seed(
        self, shape: Shape, *, scale: float = 0.0, gated: bool = False, site: Site | None = None
    ) -> AnySeed:
        """A newborn seed; refuses features it cannot work on.

        With scale 0 it is the identity, unless it is a copy.
        """
        if self.name == SHAM:
            return seeds.Sham()
        channels = channels_of(self.kind, shape)
        if self.inherits and site is None:
            raise BlueprintError(
                f"blueprint {self.name!r} inherits from a module; it is built in a network only."
            )
        try:
            body = self.build(channels, site=site) if self.inherits else self.build(channels)
        except ValueError as problem:
            raise _misfit(self, shape, problem) from problem
        if not isinstance(body, nn.Module):
            raise BlueprintError(
                f"blueprint {self.name!r} built a {type(body).__name__}; it must return an "
                f"nn.Module."
            )
        is_image = self.kind == "image"
        gate = seeds.Gate(channels, is_image) if gated else None
        if isinstance(body, Copy):
            body.gate = gate
            return body
        return seeds.Seed(body, seeds.scale_of(channels, is_image, scale), gate)

    # blueprints stay as long as the process
    @lru_cache(maxsize=4096)  # noqa: B019
    def cost(self, shape: Shape, gated: bool = False) -> BlueprintCost:
        """Parameters and FLOPs at a slot with these features, without allocating either."""
        with torch.random.fork_rng(devices=[]), torch.device("meta"), torch.no_grad():
            return _measured(self, self.build_seed(shape, gated=gated), shape)

    def cost_at(self, shape: Shape, gated: bool, site: Site) -> BlueprintCost:
        """The same for a blueprint that asks for the site: it is built and run once."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            seed = self.build_seed(shape, gated=gated, site=site)
            known = {id(parameter) for parameter in site.network.parameters()}
            if any(id(parameter) in known for parameter in seed.parameters()):
                problem = "it shares weights with the network, which only copy and copy_zero can"
                raise _misfit(self, shape, problem)
            # a deep copy, since what the seed shares with the network stays as it is
            alone = deepcopy(seed).cpu().float()
            return _measured(self, alone, shape)


def _misfit(blueprint: Blueprint, shape: Shape, problem: object) -> BlueprintMismatchError:
    return BlueprintMismatchError(
        f"blueprint {blueprint.name!r} does not fit {blueprint.kind} features of shape "
        f"{tuple(shape)}: {problem}. Choose another blueprint for this slot; a seed must keep the "
        f"shape of its input."
    )


def _measured(blueprint: Blueprint, seed: AnySeed, shape: Shape) -> BlueprintCost:
    """What a seed costs, counted on features of zeros; one that changes their shape is refused."""
    features = torch.zeros(1, *shape)
    outputs: list[Tensor] = []
    try:
        flops = count_flops(lambda: outputs.append(seed(features)))
    except (RuntimeError, ValueError, TypeError) as problem:
        raise _misfit(blueprint, shape, problem) from problem
    grown = outputs[0]
    if tuple(grown.shape[1:]) != shape:
        raise _misfit(blueprint, shape, f"it returns features of shape {tuple(grown.shape[1:])}")
    params = sum(parameter.numel() for parameter in seed.parameters())
    backward = count_backward(seed, seed, features)
    return BlueprintCost(params=params, flops=flops, backward=backward)


class BlueprintRegistry:
    """Blueprints by (kind, name).

    The package's own is `REGISTRY`; `@blueprint(kind, name)` adds to it.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Blueprint] = {}

    def register(
        self, kind: str, name: str, *, replace: bool = False, **traits: float
    ) -> Callable[[Builder], Builder]:
        """Enter a blueprint of your own; a decorator.

        The function takes the number of channels and returns the body of a seed. With a second
        parameter named `site` it also gets the `Site`: `site.module` is what stands there, and
        `site.copy()` copies it. Esper adds the residual connection and the scale that makes the
        seed the identity at birth.

        >>> import esper
        >>> from torch import nn
        >>> @esper.blueprint("vector", "tanh_layer", depth=1.0)
        ... def tanh_layer(channels):
        ...     return nn.Sequential(nn.Linear(channels, channels), nn.Tanh())
        >>> esper.check_blueprint("vector", "tanh_layer")

        Args:
            kind: what features it works on: image, sequence or vector.
            name: an identifier that no blueprint of this kind has.
            replace: take the place of a blueprint with the same name.
            traits: the fields of `BlueprintTraits`, for policies that read them.
        """
        if kind not in KINDS.values():
            raise UnknownNameError("kind of blueprint", kind, KINDS.values())
        if replace and name in (SHAM, COPY, COPY_ZERO):
            raise BlueprintError(
                f"blueprint {name!r} is part of how growing works; it cannot be replaced."
            )
        if not name.isidentifier():
            raise BlueprintError(
                f"blueprint name {name!r} is not a plain identifier; write it like 'my_conv'."
            )

        def enter_under(build: Builder) -> Builder:
            made = Blueprint(kind=kind, name=name, build=build, traits=BlueprintTraits(**traits))
            enter(self._known, f"{kind} blueprint {name!r}", (kind, name), made, replace)
            return build

        return enter_under

    def get(self, kind: str, name: str) -> Blueprint:
        """The blueprint of this name; an unknown one is refused with the nearest."""
        if (kind, name) not in self._known:
            raise UnknownNameError(f"{kind} blueprint", name, self.names(kind))
        return self._known[kind, name]

    def has(self, kind: str, name: str) -> bool:
        """Whether there is a blueprint of this name for this kind of features."""
        return (kind, name) in self._known

    def names(self, kind: str) -> tuple[str, ...]:
        """Every blueprint of this kind that adds capacity, in the order of registration."""
        return tuple(
            name for known_kind, name in self._known if known_kind == kind and name != SHAM
        )

    def names_for(self, kinds: Iterable[str]) -> tuple[str, ...]:
        """The union over kinds, each name once."""
        union: dict[str, None] = {}
        for kind in kinds:
            union |= dict.fromkeys(self.names(kind))
        return tuple(union)

    def defaults_for(self, kinds: Iterable[str]) -> tuple[str, ...]:
        """What is planted where the caller does not say what.

        It is all but copies, each of which adds a whole block.
        """
        return tuple(name for name in self.names_for(kinds) if name not in (COPY, COPY_ZERO))


REGISTRY = BlueprintRegistry()
blueprint = REGISTRY.register


def _build_sham(channels: int) -> nn.Module:
    return seeds.Sham()


def _enter_built_in() -> None:
    """Enter the blueprints of the package, each with its traits.

    Their order is that of the default spaces of actions.
    """
    conv = {"spatial": 1.0, "normalising": 1.0}
    norm = {"normalising": 1.0}
    perceptron = {"normalising": 1.0, "depth": 2.0}

    def enter_one(kind: str, name: str, build: Builder, **traits: float) -> None:
        made = Blueprint(kind=kind, name=name, build=build, traits=BlueprintTraits(**traits))
        enter(REGISTRY._known, f"{kind} blueprint {name!r}", (kind, name), made)

    enter_one("image", "conv_light", seeds.conv_light, **conv)
    enter_one("image", ATTENTION, seeds.SqueezeExcite, attention_like=1.0, depth=2.0)
    enter_one("image", "norm", seeds.group_norm, **norm)
    enter_one("image", "depthwise", seeds.depthwise, **conv, depth=2.0)
    enter_one("image", "bottleneck", seeds.bottleneck, **conv, depth=3.0)
    enter_one("image", "conv_small", seeds.conv_small, **norm)
    enter_one("image", "conv_heavy", seeds.conv_heavy, **conv, depth=2.0)
    enter_one("image", "inverted_bottleneck", seeds.inverted_bottleneck, **conv, depth=3.0)
    enter_one("sequence", "lora", seeds.lora, depth=2.0)
    enter_one("sequence", "mlp", seeds.mlp, **perceptron)
    enter_one("sequence", "mlp_small", seeds.mlp_small, **perceptron)
    enter_one("sequence", ATTENTION, seeds.attention, **perceptron, spatial=1.0, attention_like=1.0)
    enter_one("sequence", "norm", seeds.token_norm, **norm)
    enter_one("vector", "lora", seeds.lora, depth=2.0)
    enter_one("vector", "mlp", seeds.mlp, **perceptron)
    enter_one("vector", "mlp_small", seeds.mlp_small, **perceptron)
    enter_one("vector", "mlp_tiny", seeds.mlp_tiny, **perceptron)
    for kind in KINDS.values():
        enter_one(kind, COPY, copying.plain_copy, depth=2.0)
    for kind in KINDS.values():
        enter_one(kind, COPY_ZERO, copying.zeroed_copy, depth=2.0)
    for kind in KINDS.values():
        enter_one(kind, SHAM, _build_sham, depth=0.0)


def _require_numbers() -> None:
    """Stop the import if `BlueprintAction` numbers other blueprints than are built in."""
    copies = {action.to_blueprint_id() for action in COPY_BLUEPRINTS}
    assert copies == {COPY, COPY_ZERO}, copies
    numbered = {
        "image": CNN_BLUEPRINTS,
        "sequence": TRANSFORMER_BLUEPRINTS,
        "vector": VECTOR_BLUEPRINTS,
    }
    for kind, actions in numbered.items():
        names = {action.to_blueprint_id() for action in actions | COPY_BLUEPRINTS}
        assert names == set(REGISTRY.names(kind)), kind


_enter_built_in()
_require_numbers()
