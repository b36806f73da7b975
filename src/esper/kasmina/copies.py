"""Seeds that inherit: a copy of a module, run on its output. Needs torch alone: exports carry this file along."""

import copy
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_REGISTRIES = frozenset(
    vars(nn.Module())
)  # what every module has of its own: parameters, children, hooks ...
_CACHES = re.compile("cache|past")


class Copy(nn.Module):
    """A copy of the module before it, called with whatever else that module was called with; blended like every seed.

    Parameters that the original shares with the rest of the network stay the network's: they are not this seed's own.
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
        rest = {
            name: _uncached(value, name, features)
            for name, value in kwargs.items()
            if name != self.first
        }
        if "use_cache" in rest:
            rest["use_cache"] = False
        grown = self.body(features, *(_uncached(value, "", features) for value in args), **rest)
        assert isinstance(
            grown, Tensor
        )  # the original's output is one tensor, or it would carry no slot
        return grown.to(features.dtype)


def _uncached(value: Any, name: str, features: Tensor) -> Any:
    """An argument of the original as its copy gets it: never a key-value cache, which has no place for this layer."""
    is_plain = value is None or isinstance(value, Tensor | bool | int | float | str)
    if is_plain or not (hasattr(value, "get_seq_length") or _CACHES.search(name)):
        return value
    try:
        cached = value.get_seq_length()
    except (
        AttributeError,
        ValueError,
    ):  # another kind of memory, of which nobody can say how much it holds
        cached = features.shape[1] + 1
    if cached > features.shape[1]:
        raise RuntimeError(
            f"a copied layer has no cache, and this call brings {features.shape[1]} tokens and a cache that may hold "
            "more. Call with use_cache=False while copies grow, or generate with garden.harvest()."
        )
    return None


def copy_module(
    source: nn.Module, network: nn.Module, held: Sequence[object] = ()
) -> tuple[nn.Module, frozenset[str]]:
    """A deep copy of a part of `network`, ready to learn, and the names of the parameters it shares with the network.

    What the part shares with the rest, or has in `held`, the copy shares too: tied weights, a configuration, a table.
    """
    memo = (
        detached_memo(source)
        | {id(thing): thing for thing in held}
        | _things_around(source, network)
    )
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
    """Parameters of a part that the rest of the network holds too."""
    around = _things_around(source, network)
    parts = [part for part in source.modules() if id(part) in around]
    held = {id(parameter) for part in parts for parameter in part.parameters()} | around.keys()
    return frozenset(
        name for name, p in source.named_parameters(remove_duplicate=False) if id(p) in held
    )


def detached_memo(module: nn.Module) -> dict[int, Any]:
    """For `deepcopy`: what a forward pass left behind in attributes, without its graph, which cannot be copied."""
    values = [value for part in module.modules() for value in vars(part).values()]
    return {
        id(value): value.detach().clone()
        for value in values
        if isinstance(value, Tensor) and not value.is_leaf
    }


def _things_around(source: nn.Module, network: nn.Module) -> dict[int, Any]:
    """All that the network's modules outside `source` hold, by identity."""
    own = {id(module) for module in source.modules()}
    found: dict[int, Any] = {}
    for module in network.modules():
        if id(module) not in own:
            things = [
                *module._parameters.values(),
                *module._buffers.values(),
                *module._modules.values(),
            ]
            things += [value for name, value in vars(module).items() if name not in _REGISTRIES]
            found |= {
                id(thing): thing for thing in things if thing is not None and thing is not source
            }
    return found


@dataclass(frozen=True)
class Site:
    """A place in a network as a blueprint sees it that asks for one: `def mine(channels, site)`."""

    module: nn.Module  # what a copy planted here now would copy
    network: nn.Module
    held: tuple[object, ...] = ()
    zeroed: Mapping[str, float] = field(default_factory=dict)
    """layers of the module whose weights at this value make it the identity"""

    def copy(self) -> nn.Module:
        """A deep copy of the module; what it shares with the network stays shared."""
        return copy_module(self.module, self.network, self.held)[0]

    def own_parameters(self) -> int:
        """How many parameters a copy would have of its own."""
        shared = shared_names(self.module, self.network)
        return sum(p.numel() for name, p in self.module.named_parameters() if name not in shared)


def plain_copy(channels: int, site: Site) -> Copy:
    return Copy(*copy_module(site.module, site.network, site.held))


def zeroed_copy(channels: int, site: Site) -> Copy:
    """A copy that is the identity at birth: the last layer of each of its residual branches gives zeros."""
    seed = plain_copy(channels, site)
    for name, value in site.zeroed.items():
        silence(seed.body.get_submodule(name), value)
    return seed


def silence(layer: nn.Module, value: float) -> None:
    """Set a layer's weights to `value` and its biases to 0."""
    layer = layer.out_proj if isinstance(layer, nn.MultiheadAttention) else layer
    for name, parameter in layer.named_parameters(recurse=False):
        parameter.detach().fill_(0.0 if "bias" in name else value)
