"""Which seeds exist and what each costs before it is built.

The modules themselves are in `seeds`.
"""

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina import seeds
from esper.kasmina.copies import copying as copies
from esper.kasmina.copies.copying import Copy, Site
from esper.kasmina.pricing import BackwardFlops, count_backward, count_flops
from esper.leyline.errors import BlueprintError, BlueprintMismatchError, UnknownNameError
from esper.leyline.registry import enter
from esper.leyline.slots import KINDS

SHAM = "sham"  # The blueprint without parameters or effect.
COPY, COPY_ZERO = (
    "copy",
    "copy_zero",
)  # A copy of the slot's own module; the second is the identity at birth.
Shape = tuple[int, ...]
AnySeed = seeds.Seed | seeds.Sham | Copy
Builder = Callable[
    ..., nn.Module
]  # From the number of channels, and the `Site` if it asks for it, to a seed's body.


def channels_of(kind: str, shape: Shape) -> int:
    """Width of one example's features:

    first axis of an image, last axis of a sequence or vector.
    """
    return shape[0] if kind == "image" else shape[-1]


@dataclass(frozen=True)
class BlueprintTraits:
    """What a blueprint is like, as numbers that a policy can read about blueprints it has never
    met.
    """

    spatial: float = 0.0  # 1 if it mixes positions
    attention_like: float = 0.0  # 1 if its weights depend on its input
    normalising: float = 0.0  # 1 if it normalises its input
    depth: float = 1.0  # layers with weights, one behind the other


@dataclass(frozen=True)
class BlueprintCost:
    params: int
    flops: int  # multiply-adds count twice; one example, forward
    backward: BackwardFlops = field(default_factory=BackwardFlops)


@dataclass(frozen=True)
class Blueprint:
    """A named way to build the body of a seed for features of a given width."""

    kind: str
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
        given: dict[str, Any] = {"site": site} if self.inherits else {}
        try:
            body = self.build(channels, **given)
        except ValueError as problem:
            raise _misfit(self, shape, problem) from problem
        if not isinstance(body, nn.Module):
            raise BlueprintError(
                f"blueprint {self.name!r} built a {type(body).__name__}; it must "
                f"return an nn.Module."
            )
        is_image = self.kind == "image"
        gate = seeds.Gate(channels, is_image) if gated else None
        if isinstance(body, Copy):
            body.gate = gate
            return body
        return seeds.Seed(body, seeds.scale_of(channels, is_image, scale), gate)

    @lru_cache(maxsize=4096)  # noqa: B019  # blueprints live as long as the process
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
                raise _misfit(
                    self,
                    shape,
                    "it shares weights with the network, which only copy and copy_zero can",
                )
            alone = (
                deepcopy(seed).cpu().float()
            )  # what the seed shares with the network stays as it is
            return _measured(self, alone, shape)


def _misfit(blueprint: Blueprint, shape: Shape, problem: object) -> BlueprintMismatchError:
    what = (
        f"blueprint {blueprint.name!r} does not fit {blueprint.kind} features of "
        f"shape {tuple(shape)}: {problem}"
    )
    way_out = "Choose another blueprint for this slot; a seed must keep the shape of its input."
    return BlueprintMismatchError(f"{what}. {way_out}")


def _measured(blueprint: Blueprint, seed: AnySeed, shape: Shape) -> BlueprintCost:
    features = torch.zeros(1, *shape)
    outputs: list[Tensor] = []
    try:
        flops = count_flops(lambda: outputs.append(seed(features)))
    except (RuntimeError, ValueError, TypeError) as problem:
        raise _misfit(blueprint, shape, problem) from problem
    grown = outputs[0]
    if tuple(grown.shape[1:]) != shape:
        raise _misfit(blueprint, shape, f"it returns features of shape {tuple(grown.shape[1:])}")
    params = sum(p.numel() for p in seed.parameters())
    return BlueprintCost(params, flops, count_backward(seed, seed, features))


class BlueprintRegistry:
    """Blueprints by (kind, name).

    The package's own is `REGISTRY`; `@blueprint(kind, name)` adds to it.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Blueprint] = {}

    def register(
        self, kind: str, name: str, *, replace: bool = False, **traits: float
    ) -> Callable[[Builder], Builder]:
        """Decorator: the function takes the number of channels and returns the body of a seed.

        With a second parameter named `site` it also gets the `Site`: `site.module` stands there,
        `site.copy()` copies.
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
            made = Blueprint(kind, name, build, BlueprintTraits(**traits))
            enter(self._known, f"{kind} blueprint {name!r}", (kind, name), made, replace)
            return build

        return enter_under

    def get(self, kind: str, name: str) -> Blueprint:
        if (kind, name) not in self._known:
            raise UnknownNameError(f"{kind} blueprint", name, self.names(kind))
        return self._known[kind, name]

    def has(self, kind: str, name: str) -> bool:
        return (kind, name) in self._known

    def names(self, kind: str) -> tuple[str, ...]:
        """Every blueprint of this kind that adds capacity, in the order of registration."""
        return tuple(name for of, name in self._known if of == kind and name != SHAM)

    def names_for(self, kinds: Iterable[str]) -> tuple[str, ...]:
        """The union over kinds, each name once."""
        return tuple(
            dict.fromkeys(name for kind in dict.fromkeys(kinds) for name in self.names(kind))
        )

    def defaults_for(self, kinds: Iterable[str]) -> tuple[str, ...]:
        """What is planted where nobody says what:

        all but copies, each of which adds a whole block.
        """
        return tuple(name for name in self.names_for(kinds) if name not in (COPY, COPY_ZERO))


REGISTRY = BlueprintRegistry()
blueprint = REGISTRY.register

_CONV, _MLP = {"spatial": 1.0, "normalising": 1.0}, {"normalising": 1.0, "depth": 2.0}
_BUILT_IN: tuple[tuple[str, str, Builder, dict[str, float]], ...] = (
    ("image", "conv_light", seeds.conv_light, _CONV),
    ("image", "attention", seeds.SqueezeExcite, {"attention_like": 1.0, "depth": 2.0}),
    ("image", "norm", seeds.group_norm, {"normalising": 1.0}),
    ("image", "depthwise", seeds.depthwise, {**_CONV, "depth": 2.0}),
    ("image", "bottleneck", seeds.bottleneck, {**_CONV, "depth": 3.0}),
    ("image", "conv_small", seeds.conv_small, {"normalising": 1.0}),
    ("image", "conv_heavy", seeds.conv_heavy, {**_CONV, "depth": 2.0}),
    ("image", "inverted_bottleneck", seeds.inverted_bottleneck, {**_CONV, "depth": 3.0}),
    ("sequence", "lora", seeds.lora, {"depth": 2.0}),
    ("sequence", "mlp", seeds.mlp, _MLP),
    ("sequence", "mlp_small", seeds.mlp_small, _MLP),
    ("sequence", "attention", seeds.attention, {**_MLP, "spatial": 1.0, "attention_like": 1.0}),
    ("sequence", "norm", seeds.token_norm, {"normalising": 1.0}),
    ("vector", "lora", seeds.lora, {"depth": 2.0}),
    ("vector", "mlp", seeds.mlp, _MLP),
    *((kind, COPY, copies.plain_copy, {"depth": 2.0}) for kind in KINDS.values()),
    *((kind, COPY_ZERO, copies.zeroed_copy, {"depth": 2.0}) for kind in KINDS.values()),
    *((kind, SHAM, lambda channels: seeds.Sham(), {"depth": 0.0}) for kind in KINDS.values()),
)
for _kind, _name, _build, _traits in _BUILT_IN:
    enter(
        REGISTRY._known,
        _name,
        (_kind, _name),
        Blueprint(_kind, _name, _build, BlueprintTraits(**_traits)),
    )
