"""Copies of what `torch.distributed.fsdp.fully_shard` shards: sharded alike, and never gathered.

Each process copies its own shards.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import distributed, nn

from esper.kasmina.copies.copying import copy_module
from esper.leyline.errors import HostError

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
)
_GROUP_SETTINGS = (
    "reduce_grads",
    "all_reduce_grads",
    "reshard_after_backward",
    "reduce_scatter_max_input_buffers",
    "gradient_divide_factor",
    "reduce_scatter_unused_params",
    "force_sum_reduction_for_comms",
    "unshard_async_op",
    "unshard_in_backward",
    "_all_gather_comm",
    "_reduce_scatter_comm",
)
"""what the methods of an FSDPModule set after `fully_shard`"""


def state_of(module: nn.Module) -> Any:
    """How `fully_shard` shards a module; None if it does not."""
    if not distributed.is_available():
        return None
    from torch.distributed.fsdp import FSDPModule

    return module._get_fsdp_state() if isinstance(module, FSDPModule) else None


def is_sharded(module: nn.Module) -> bool:
    """Whether a module has parameters that are sharded, by itself or by one around it."""
    return any(type(parameter.data).__name__ == "DTensor" for parameter in module.parameters())


def refuse_unsharded_alone(name: str, layer: nn.Module) -> None:
    """Refuse a layer whose parameters are sharded together with others."""
    inside: set[int] = set()
    for module in layer.modules():
        for group in getattr(state_of(module), "_fsdp_param_groups", ()):
            inside.update(id(entry.sharded_param) for entry in group.fsdp_params)
    _reshard(layer)
    for inner, parameter in layer.named_parameters():
        if type(parameter.data).__name__ == "DTensor" and id(parameter) not in inside:
            raise HostError(
                f"{name}.{inner} is sharded with other modules; call fully_shard on each layer, "
                f"then on the model."
            )


def copy_sharded(original: nn.Module, network: nn.Module) -> nn.Module:
    """A copy of a layer, or of a whole network, that is sharded as its original is."""
    _reshard(original)
    parameters = dict(original.named_parameters(remove_duplicate=False))
    replaced: dict[int, Any] = {}
    for parameter in parameters.values():
        if type(parameter.data).__name__ == "DTensor":
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            replaced[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
    with _plain(original):
        copied, _ = copy_module(original, network, replaced=replaced)
    _shard_alike(original, copied)
    modules = dict(copied.named_modules(remove_duplicate=False))
    fresh: dict[int, nn.Parameter] = {}
    for name, parameter in parameters.items():
        if id(parameter) not in replaced:
            continue
        if id(parameter) not in fresh:
            shards = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            fresh[id(parameter)] = shards
        path, _, field = name.rpartition(".")
        setattr(modules[path], field, fresh[id(parameter)])
    for module in modules.values():
        for group in getattr(state_of(module), "_fsdp_param_groups", ()):
            for entry in group.fsdp_params:
                entry.reset_sharded_param()
    return copied


def join_root(network: nn.Module, layer: nn.Module) -> None:
    """Let a new layer belong to the module that was sharded last, as if it had always been there.

    Before the first forward there is nothing to do: that finds it.
    """
    roots = [state_of(module) for module in network.modules()]
    root = next((state for state in roots if state is not None and state._is_root), None)
    if root is None or root._modules[0] is layer:
        return
    if not any(part is layer for part in root._modules[0].modules()):
        return  # every layer is a root of its own
    for module in layer.modules():
        state = state_of(module)
        if state is None:
            continue
        state._is_root = False
        state._state_ctx = root._state_ctx
        state._comm_ctx = root._comm_ctx
        for number, group in enumerate(state._fsdp_param_groups):
            group.comm_ctx = root._comm_ctx
            group._param_group_index = number
            group._num_param_groups = len(state._fsdp_param_groups)
    states: list[Any] = []
    for module in root._modules[0].modules():
        state = state_of(module)
        if state is not None and state not in states:
            states.append(state)
    root._state_ctx.all_states[:] = states
    root._init_fqns()
    for state in states:
        for group in state._fsdp_param_groups:
            group.lazy_init()


def _reshard(module: nn.Module) -> None:
    """Free weights that are gathered: what is copied is shards."""
    for part in module.modules():
        if state_of(part) is not None:
            part.reshard()  # type: ignore[operator]


@contextmanager
def _plain(original: nn.Module) -> Iterator[None]:
    """Inside, modules are of their own classes, and nothing says that they are sharded."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

    with ExitStack() as undo:
        for module in original.modules():
            state = state_of(module)
            fields = vars(module)
            undo.callback(_restore, module, type(module), dict(fields))
            for name in (REGISTRY_KEY, STATE_KEY):
                fields.pop(name, None)
            for name in _HOOKS:
                hooks = fields[name]
                kept = type(hooks)()
                for key, hook in hooks.items():
                    if not _is_of_fsdp(hook) and key in _kept_keys(fields, name):
                        kept[key] = hook
                fields[name] = kept
            if state is not None:
                sharded_class: Any = type(module)
                module.__class__ = sharded_class.__mro__[sharded_class._orig_cls_mro_index]
        yield


def _kept_keys(fields: Mapping[str, Any], name: str) -> set[Any]:
    """Keys of hooks that stay; some tables only say by key how a hook is called."""
    for main in ("_forward_pre_hooks", "_forward_hooks"):
        if name.startswith(f"{main}_"):
            return {key for key, hook in fields[main].items() if not _is_of_fsdp(hook)}
    return set(fields[name])


def _is_of_fsdp(hook: Any) -> bool:
    """Whether a hook is one that `fully_shard` registers."""
    inner = getattr(hook, "hook", hook)
    inner = getattr(inner, "__wrapped__", inner)
    module = getattr(inner, "__module__", None) or ""
    return module.startswith("torch.distributed.fsdp")


def _restore(module: nn.Module, module_class: type, fields: dict[str, Any]) -> None:
    module.__class__ = module_class
    vars(module).clear()
    vars(module).update(fields)


def _shard_alike(original: nn.Module, copied: nn.Module) -> None:
    """Call `fully_shard` on the parts of a copy as it was called on its original's, inner first."""
    twins = dict(
        zip(original.modules(), copied.modules(), strict=True),
    )
    done: list[Any] = []
    for module in reversed(list(original.modules())):
        state = state_of(module)
        if state is None or state in done:
            continue
        done.append(state)
        _shard_one(state, [twins[part] for part in state._modules], twins)


def _shard_one(state: Any, modules: list[nn.Module], twins: Mapping[nn.Module, nn.Module]) -> None:
    """Shard modules of a copy as one call of `fully_shard` did with their originals."""
    from torch.distributed.fsdp import fully_shard

    groups = state._fsdp_param_groups
    if len(groups) != 1:
        raise HostError(
            "a layer is sharded over several meshes, which copies cannot follow; shard it over one."
        )
    group = groups[0]
    placements: dict[int, Any] = {}
    managed: set[int] = set()
    for entry in group.fsdp_params:
        twin = twins[entry._module_info.module]
        parameter = getattr(twin, entry._module_info.param_name)
        placements[id(parameter)] = entry.fsdp_placement
        managed.add(id(parameter))
    ignored: set[nn.Parameter] = set()
    for module in modules:
        for parameter in module.parameters():
            is_elsewhere = type(parameter.data).__name__ == "DTensor"
            if id(parameter) not in managed and not is_elsewhere:
                ignored.add(parameter)
    place: Callable[[nn.Parameter], Any] = lambda parameter: placements[id(parameter)]  # noqa: E731
    fully_shard(
        modules if len(modules) > 1 else modules[0],
        mesh=group.mesh_info.mesh,
        reshard_after_forward=_reshard_after_forward(state, group),
        shard_placement_fn=place,
        mp_policy=state._mp_policy,
        offload_policy=group.offload_policy,
        ignored_params=ignored or None,
    )
    follower = state_of(modules[0])
    for follower_group in follower._fsdp_param_groups:
        for name in _GROUP_SETTINGS:
            setattr(follower_group, name, copy.copy(getattr(group, name)))


def _reshard_after_forward(state: Any, group: Any) -> bool | int | None:
    """The argument of `fully_shard` that a module was sharded with."""
    if state._auto_reshard_after_forward:
        return None
    after = group.post_forward_mesh_info
    if after is None:
        return False
    return True if after is group.mesh_info else int(after.shard_mesh_size)
