"""What grew as modules of torch alone, run by the module that it grew on.

Needs torch alone: exports carry this file along. A class of Esper's becomes a
`torch.fx.GraphModule`, which carries its source: it is pickled, and loaded where Esper is not
installed.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Proxy
from torch.fx.proxy import GraphAppendingTracer

CHILD = "grown"
"""Name of the child that holds a module's fossils in a harvested network."""
AROUND = "grown_around"
"""Name of the child that holds the fossils of a list or dict of modules that it stands in.

A class that is a list or dict calls all its members, so fossils cannot be one of them.
"""
RECORDERS = "transformers.utils.output_capturing"
"""Where the hooks come from that a model of transformers gives itself when it first runs."""
_HOOK_ARGUMENTS = ["module", "args", "kwargs", "output"]


# -- one module ------------------------------------------------------------------------------------


class Recordable(nn.Module):
    """A module of Esper's whose `forward` is the same few steps at every call.

    So it can be written down as a graph.
    """

    is_inlined = False
    """whether its steps are written into the graph of the module that calls it"""

    def plain(self, gets_call: bool = False) -> nn.Module:
        """The same as a module of torch alone, around the same parameters.

        `gets_call` says whether it is called with the arguments of the module before it as well:
        features, args, kwargs.
        """
        replace_inside(self)
        return record(self, ["features"], lambda own, features: own(features))


def replace_inside(module: nn.Module) -> None:
    """Make every recordable part of a module plain; what is inlined stays until its caller is."""
    for name, part in module.named_children():
        if isinstance(part, Recordable) and not part.is_inlined:
            module._modules[name] = part.plain()
        else:
            replace_inside(part)


def record(
    module: nn.Module, arguments: Sequence[str], steps: Callable[..., Any], name: str = ""
) -> GraphModule:
    """A graph module that does these steps with a module's parts and parameters.

    `steps` gets the module and the arguments, which stand for the values that come at each call.
    Nothing is run, and no other thread notices.
    """
    graph = Graph()
    tracer = GraphAppendingTracer(graph)
    proxies = [Proxy(graph.placeholder(argument), tracer) for argument in arguments]
    result = steps(_Recorded(module, "", tracer), *proxies)
    graph.output(tracer.create_arg(result))
    return GraphModule(module, graph, name or type(module).__name__)


class _Recorded:
    """A module whose calls and tensors are written into a graph."""

    def __init__(self, module: nn.Module, path: str, tracer: GraphAppendingTracer):
        self._module = module
        self._path = path
        self._tracer = tracer

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        path = f"{self._path}.{name}".lstrip(".")
        if isinstance(value, nn.Module):
            return _Recorded(value, path, self._tracer)
        if isinstance(value, Tensor):
            return Proxy(self._tracer.graph.get_attr(path), self._tracer)
        return partial(value.__func__, self) if inspect.ismethod(value) else value

    def __call__(self, *args: Any) -> Any:
        is_own = not self._path or getattr(self._module, "is_inlined", False)
        if is_own:
            return type(self._module).forward(self, *args)
        return self._tracer.create_proxy("call_module", self._path, args, {})


# -- on the module before it -----------------------------------------------------------------------


def graft_fossils(site: nn.Module, fossils: Sequence[Any], place: int | None = None) -> None:
    """Make fossils the last thing that `site` does, behind those that it has already.

    They become its child, or that of its last member if it is a list or dict. A plain
    `nn.Sequential` runs them as its last member; all other modules run them from a hook. Children
    and parameter names of the site's own stay as they are. `place` is the key of a forward hook of
    the site's that goes: the fossils run where it ran.
    """
    path, name = _place_in(site)
    owner = site.get_submodule(path)
    holder = getattr(owner, name, None)
    if holder is None:
        is_member = type(site).forward is nn.Sequential.forward and _is_first(site, place)
        holder = nn.Sequential() if is_member else nn.Identity()
        owner.add_module(name, holder)
    elif not is_graft(holder):
        raise ValueError(
            f"{type(owner).__name__} already has an attribute {name!r}; rename it before grafting"
        )
    is_member = isinstance(holder, nn.Sequential)
    if is_member and not _is_first(site, place):
        raise ValueError(
            f"a hook of yours on this {type(site).__name__} runs between what grew earlier and "
            f"what grew now; remove it"
        )
    for fossil in fossils:
        if any(hasattr(part, "grown_unseen") for part in fossil.modules()):
            vars(site)["grown_unseen"] = None  # a call may hold what attention does not see
        holder.add_module(str(len(holder._modules)), fossil.plain(gets_call=not is_member))
    if is_member:
        _remove_hook(site, place)
    else:
        _run_from_hook(site, [*path.split("."), name] if path else [name], holder, place)


def holder_of(site: nn.Module) -> nn.Module:
    """The module that holds what was grafted on `site`."""
    path, name = _place_in(site)
    return site.get_submodule(path).get_submodule(name)


def _place_in(site: nn.Module) -> tuple[str, str]:
    """Whose child the fossils of a module are, from that module on, and under which name."""
    path: list[str] = []
    owner = site
    while isinstance(owner, nn.ModuleDict | nn.ModuleList) and owner._modules:
        key, member = list(owner._modules.items())[-1]
        if member is None:
            break
        path.append(key)
        owner = member
    return ".".join(path), AROUND if path else CHILD


def _is_first(site: nn.Module, place: int | None) -> bool:
    """Whether no hook sees a module's output before what runs at `place`, or at the end."""
    earlier: list[Any] = []
    for key, hook in site._forward_hooks.items():
        if key == place:
            break
        if not _is_recorder(hook):
            earlier.append(hook)
    return not earlier


def is_graft(holder: object) -> bool:
    """Whether a child of that name holds fossils."""
    if not isinstance(holder, nn.Sequential | nn.Identity):
        return False
    members = list(holder._modules.values())
    return bool(members) and all(isinstance(m, GraphModule | nn.Identity) for m in members)


def grafts_of(network: nn.Module) -> Iterator[str]:
    """Names of the modules that hold fossils."""
    for name, module in network.named_modules():
        if name.rpartition(".")[2] in (CHILD, AROUND) and is_graft(module):
            yield name


def _run_from_hook(
    site: nn.Module, path: Sequence[str], holder: nn.Module, place: int | None
) -> None:
    """Let a module run its fossils from a forward hook, in place of the one that ran some."""
    gets_call = {name: _gets_call(member) for name, member in holder._modules.items()}

    def run(_: object, module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        part = module
        for name in path:
            part = getattr(part, name)
        for name, takes_more in gets_call.items():
            fossil = getattr(part, name)
            output = fossil(output, args, kwargs) if takes_more else fossil(output)
        return output

    hook = record(nn.Module(), _HOOK_ARGUMENTS, run, "RunGrown")
    hooks = site._forward_hooks
    earlier = next((key for key, other in hooks.items() if _runs_fossils(other)), None)
    if earlier is not None:
        _remove_hook(site, place)
        place = earlier
    if place is None:
        hook_before_recorders(site, hook)
    else:
        hooks[place] = hook


def _gets_call(member: object) -> bool:
    """Whether a fossil takes the arguments of the module before it as well."""
    return len(_arguments_of(member)) > 1


def _runs_fossils(hook: object) -> bool:
    return _arguments_of(hook) == _HOOK_ARGUMENTS


def _arguments_of(module: object) -> list[str]:
    """What a graph module is called with; its name is lost in a deep copy, and this is not."""
    if not isinstance(module, GraphModule):
        return []
    return [node.target for node in module.graph.nodes if node.op == "placeholder"]


def _remove_hook(site: nn.Module, place: int | None) -> None:
    site._forward_hooks.pop(place, None)  # type: ignore[arg-type]
    site._forward_hooks_with_kwargs.pop(place, None)  # type: ignore[arg-type]


def hook_before_recorders(module: nn.Module, hook: Any) -> None:
    """Let a module end with a forward hook; what records its output comes after.

    The recorders of transformers come with a model's first run. By the order of registration they
    would see the output with what grew in a fresh model, and without it in one that has run.
    """
    module.register_forward_hook(hook, with_kwargs=True)
    hooks = module._forward_hooks
    for key in [key for key, other in hooks.items() if _is_recorder(other)]:
        hooks[key] = hooks.pop(key)


def _is_recorder(hook: object) -> bool:
    return getattr(hook, "__module__", "") == RECORDERS
