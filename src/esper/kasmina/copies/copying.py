"""A seed that inherits is a copy of a module, run on that module's output.

Needs torch alone: exports carry this file along.
"""

import copy
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

# what every module has of its own: parameters, children, hooks ...
_REGISTRIES = frozenset(vars(nn.Module()))
_CACHES = re.compile("cache|past")


class Copy(nn.Module):
    """A copy of the module before it, blended like every seed.

    It is called with the output of its original and with all other arguments of that call.
    Parameters that the original shares with the rest of the network stay the network's: they are
    not this seed's own.
    """

    def __init__(
        self, body: nn.Module, shared: frozenset[str] = frozenset(), gate: nn.Module | None = None
    ):
        super().__init__()
        self.body = body
        self.shared = frozenset(f"body.{name}" for name in shared)
        self.gate = gate
        self.first = next(iter(inspect.signature(body.forward).parameters), "")
        """name under which the original may get its features"""

    def forward(self, features: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
        """The copy at full strength."""
        # the gate first, as in `blend`: gradients are then added in the same order
        weight = None if self.gate is None else self.gate(features).to(features.dtype)
        grown = self._grown(features, args, kwargs)
        return grown if weight is None else torch.lerp(features, grown, weight)

    def blend(self, features: Tensor, alpha: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
        """A share `alpha` of the copy; exactly the input at 0 and exactly `forward` at 1."""
        weight = alpha if self.gate is None else alpha * self.gate(features)
        return torch.lerp(features, self._grown(features, args, kwargs), weight.to(features.dtype))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The copy's own parameters, without those that it shares with the network."""
        start = f"{prefix}." if prefix else ""
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            if name.removeprefix(start) not in self.shared:
                yield name, parameter

    def _grown(self, features: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """What the body gives for these features, in their type."""
        grown = self.call(features, args, kwargs)
        # the original's output is one tensor, or it would carry no slot
        assert isinstance(grown, Tensor)
        return grown.to(features.dtype)

    def call(self, features: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """All that the body gives out for these features and the other arguments of a call."""
        positional = [_uncached(value, "", features) for value in args]
        keywords = {
            name: _uncached(value, name, features)
            for name, value in kwargs.items()
            if name != self.first
        }
        if "use_cache" in keywords:
            keywords["use_cache"] = False
        return self.body(features, *positional, **keywords)


def _uncached(value: Any, name: str, features: Tensor) -> Any:
    """An argument of the original as its copy gets it.

    A key-value cache is left out: it has no room for this layer.
    """
    is_plain = value is None or isinstance(value, Tensor | bool | int | float | str)
    if is_plain:
        return value
    is_cache = hasattr(value, "get_seq_length") or _CACHES.search(name)
    if not is_cache:
        return value
    tokens = features.shape[-2]
    try:
        cached = value.get_seq_length()
    except (AttributeError, ValueError):
        cached = tokens + 1  # another kind of memory, which does not say how much it holds
    if cached > tokens:
        raise RuntimeError(
            f"a copied layer has no cache, and this call brings {tokens} tokens and a cache that "
            "may hold more. Call with use_cache=False while copies grow, or generate with "
            "garden.harvest()."
        )
    return None


def copy_module(
    source: nn.Module, network: nn.Module, held: Sequence[object] = ()
) -> tuple[nn.Module, frozenset[str]]:
    """A deep copy of a part of `network`, ready to learn, and the names of its shared parameters.

    What the part shares with the rest of the network, or has in `held`, the copy shares too: tied
    weights, a configuration, a table.
    """
    memo = detached_memo(source)
    memo |= {id(thing): thing for thing in held}
    memo |= _things_around(source, network)
    copied = copy.deepcopy(source, memo)
    shared = shared_names(source, network)
    is_frozen = not any(parameter.requires_grad for parameter in source.parameters())
    for name, parameter in copied.named_parameters(remove_duplicate=False):
        if is_frozen and name not in shared and parameter.is_floating_point():
            parameter.requires_grad_(True)  # a seed learns even where its host does not
    for module in copied.modules():
        if id(module) not in memo and getattr(module, "gradient_checkpointing", False):
            # it runs inside the original's call, which is checkpointed already
            vars(module)["gradient_checkpointing"] = False
    return copied, shared


def shared_names(source: nn.Module, network: nn.Module) -> frozenset[str]:
    """Names of a part's parameters that the rest of the network holds too."""
    around = _things_around(source, network)
    held = set(around)
    for part in source.modules():
        if id(part) in around:
            held.update(id(parameter) for parameter in part.parameters())
    named = source.named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in named if id(parameter) in held)


def detached_memo(module: nn.Module) -> dict[int, Any]:
    """A memo for `deepcopy`: what a forward pass left in attributes, without its graph.

    Tensors with a graph cannot be copied.
    """
    memo: dict[int, Any] = {}
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    return memo


def _things_around(source: nn.Module, network: nn.Module) -> dict[int, Any]:
    """All that the network's modules outside `source` hold, by identity."""
    inside = {id(module) for module in source.modules()}
    around: dict[int, Any] = {}
    for module in network.modules():
        if id(module) in inside:
            continue
        things: list[Any] = []
        things += module._parameters.values()
        things += module._buffers.values()
        things += module._modules.values()
        things += [value for name, value in vars(module).items() if name not in _REGISTRIES]
        for thing in things:
            if thing is not None and thing is not source:
                around[id(thing)] = thing
    return around


@dataclass(frozen=True)
class Site:
    """A slot's position in a network, for a blueprint that asks for it: `def mine(channels, site)`.

    `module` is what a copy that is planted here now would copy.
    """

    module: nn.Module
    network: nn.Module
    held: tuple[object, ...] = ()
    """what copies share besides: the network's slots"""
    zeroed: Mapping[str, float] = field(default_factory=dict)
    """layers of the module whose weights at this value make it the identity"""

    def copy(self) -> nn.Module:
        """A deep copy of the module; what it shares with the network stays shared."""
        copied, _ = copy_module(self.module, self.network, self.held)
        return copied

    def own_parameters(self) -> int:
        """How many parameters a copy would have of its own."""
        shared = shared_names(self.module, self.network)
        named = self.module.named_parameters()
        return sum(parameter.numel() for name, parameter in named if name not in shared)


def copied_next(source: nn.Module, fossils: Sequence[nn.Module] | nn.ModuleList) -> nn.Module:
    """The module that the next copy inherits from: the newest fossil's body, or the `source`.

    Only a fossil that is a copy itself has such a body.
    """
    newest = fossils[-1] if len(fossils) else None
    return newest.body if isinstance(newest, Copy) else source


def plain_copy(channels: int, site: Site) -> Copy:
    """A copy of the site's module as it is."""
    body, shared = copy_module(site.module, site.network, site.held)
    return Copy(body, shared)


def zeroed_copy(channels: int, site: Site) -> Copy:
    """A copy that is the identity at birth: each of its residual branches gives zeros.

    The last layer of a branch does that.
    """
    seed = plain_copy(channels, site)
    for name, value in site.zeroed.items():
        silence(seed.body.get_submodule(name), value)
    return seed


def silence(layer: nn.Module, value: float) -> None:
    """Set a layer's weights to `value` and its biases to 0."""
    target = layer.out_proj if isinstance(layer, nn.MultiheadAttention) else layer
    for name, parameter in target.named_parameters(recurse=False):
        parameter.detach().fill_(0.0 if "bias" in name else value)
