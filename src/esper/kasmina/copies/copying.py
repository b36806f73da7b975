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

from esper.kasmina.plain import Recordable, record

# what every module has of its own: parameters, children, hooks ...
_REGISTRIES = frozenset(vars(nn.Module()))
_CACHES = re.compile("cache|past")
_NO_CACHES = ("use_cache", "cache_position")
# names under which a layer may get one that it does not name itself
_UNNAMED_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params", "cache")


class Copy(Recordable):
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
        parameters = inspect.signature(body.forward).parameters
        self.names = tuple(parameters)
        """of the arguments that the original gets, its features first"""
        kinds = [parameter.kind for parameter in parameters.values()]
        self.takes_more = inspect.Parameter.VAR_KEYWORD in kinds
        """whether it gets arguments of any name"""

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

    def plain(self, gets_call: bool = False) -> nn.Module:
        """The same as modules of torch and of the network's own, around the same parameters.

        It takes no cache at all: an empty one cannot be told from one that holds something.
        """
        gate: Any = self.gate
        if gate is not None:
            self.gate = gate.plain()
        arguments = ["features"]
        if gets_call:
            arguments += ["args", "kwargs"]
            self.body.register_forward_pre_hook(_spread_call(self), with_kwargs=True, prepend=True)

        def run(own: Any, features: Any, *call: Any) -> Any:
            weight = None if self.gate is None else own.gate(features).to(features.dtype)
            grown = own.body(features, *call).to(features.dtype)
            return grown if weight is None else torch.lerp(features, grown, weight)

        return record(self, arguments, run)

    @property
    def caches(self) -> dict[str, int | None]:
        """Names under which the original may get a cache, with their positions if they have one."""
        caches: dict[str, int | None] = {}
        for position, name in enumerate(self.names):
            if position and _CACHES.search(name) and name not in _NO_CACHES:
                caches[name] = position
        if self.takes_more:
            caches = dict.fromkeys(_UNNAMED_CACHES) | caches
        return caches

    def _grown(self, features: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """What the body gives for these features, in their type."""
        grown = self.call(features, args, kwargs)
        # the original's output is one tensor, or it would carry no slot
        assert isinstance(grown, Tensor)
        return grown.to(features.dtype)

    def call(self, features: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """All that the body gives out for these features and the other arguments of a call."""
        # of more arguments than names, the last go to one that takes all others
        names = (*self.names[1:], *[""] * len(args))
        positional = [
            _uncached(value, name, features) for name, value in zip(names, args, strict=False)
        ]
        keywords = {
            name: _uncached(value, name, features)
            for name, value in kwargs.items()
            if name not in self.names[:1]
        }
        return self.body(features, *positional, **keywords)


def _spread_call(copied: Copy) -> nn.Module:
    """A hook that runs before a copy's body, which is called with features, args and kwargs.

    It spreads them: features, then all but the first of args, and kwargs.
    """
    caches = copied.caches
    problem = "a copied layer has no cache; call with use_cache=False"

    def spread(_: object, module: object, args: Any, kwargs: object) -> Any:
        features, positional, keywords = args[0], args[1][1:], args[2].copy()
        for name in copied.names[:1]:
            keywords.pop(name, None)
        # not (x, *y): a graph has no stars
        by_name = (keywords.pop("use_cache", "absent"),) + positional[:0]  # noqa: RUF005
        either = positional[:0] + ({}, {"use_cache": False})  # noqa: RUF005
        keywords = keywords | either[_count_flags(by_name)]
        if "use_cache" in copied.names:
            place = copied.names.index("use_cache") - 1
            switched_off = (False,) * _count_flags(positional[place : place + 1])
            positional = positional[:place] + switched_off + positional[place + 1 :]
        padded = positional + (None,) * len(copied.names)
        for name, position in caches.items():
            # `==` and not `is`: only it is written into the graph
            torch._assert(keywords.get(name) == None, problem)  # noqa: E711
            if position is not None:
                torch._assert(padded[position - 1] == None, problem)  # noqa: E711
        return (features,) + positional, keywords  # noqa: RUF005

    return record(nn.Module(), ["module", "args", "kwargs"], spread, "SpreadCall")


def _count_flags(values: Any) -> Any:
    """How many of some values are True, False or None; there is no `if` in a graph."""
    return values.count(True) + values.count(False) + values.count(None)


def switch_caches_off(host: nn.Module, site: nn.Module) -> None:
    """Let the configurations around a module say that nothing is cached."""
    for module in host.modules():
        if not any(part is site for part in module.modules()):
            continue
        for name in ("config", "generation_config"):
            config: Any = getattr(module, name, None)
            if getattr(config, "use_cache", None):
                config.use_cache = False


def _uncached(value: Any, name: str, features: Tensor) -> Any:
    """An argument of the original as its copy gets it.

    A key-value cache is left out: it has no room for this layer. Nor does a copy keep a state of
    its own from call to call: nobody would reset it.
    """
    if name == "use_cache":
        return False
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
    source: nn.Module,
    network: nn.Module,
    held: Sequence[object] = (),
    replaced: Mapping[int, object] | None = None,
) -> tuple[nn.Module, frozenset[str]]:
    """A deep copy of a part of `network`, ready to learn, and the names of its shared parameters.

    What the part shares with the rest of the network, or has in `held`, the copy shares too: tied
    weights, a configuration, a table. `replaced` says by identity what the copy has instead.
    """
    memo = detached_memo(source)
    memo |= replaced or {}
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
    """A memo for `deepcopy`: what it cannot copy, or would take apart.

    What a forward pass left in attributes is without its graph: tensors with a graph cannot be
    copied. Parameters that are views of one memory stay so.
    """
    memo: dict[int, Any] = {}
    memories: dict[int, list[nn.Parameter]] = {}
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
        for buffer in part._buffers.values():
            if buffer is not None and buffer.layout not in (torch.strided, torch.sparse_coo):
                memo[id(buffer)] = buffer.clone()
    for parameter in module.parameters():
        is_plain = type(parameter) is nn.Parameter and type(parameter.data) is Tensor
        if is_plain and parameter.layout is torch.strided and not parameter.is_quantized:
            memory = parameter.untyped_storage().data_ptr()
            memories.setdefault(memory, []).append(parameter)
    memories.pop(0, None)  # there is no memory where nothing is, or on the meta device
    for views in memories.values():
        if len(views) > 1:
            memo |= _copied_views(views)
    return memo


def _copied_views(views: Sequence[nn.Parameter]) -> dict[int, Any]:
    """Copies of parameters, by identity, that share a memory as the parameters do."""
    memory = views[0].untyped_storage().clone()
    copied: dict[int, Any] = {}
    for view in views:
        empty = torch.empty(0, dtype=view.dtype, device=view.device)
        twin = empty.set_(memory, view.storage_offset(), view.shape, view.stride())
        copied[id(view)] = nn.Parameter(twin, view.requires_grad)
    return copied


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
