"""A second run from the middle of one: the same network and optimisers once more."""

import copy
from collections.abc import Iterable
from typing import Any, overload

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from esper.garden.joining import Optimizers
from esper.garden.sharded_copies import copy_sharded, is_sharded
from esper.garden.shared_code import follow_compiled
from esper.garden.wrapping import rebuild_reducer, unwrap
from esper.kasmina.copies.copying import copy_module
from esper.leyline.errors import HostError, OptimizerError

_OF_ONE = ("step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""fields of an optimiser that schedulers and hooks of the first run hold"""


@overload
def fork(
    model: nn.Module, optimizers: torch.optim.Optimizer
) -> tuple[nn.Module, torch.optim.Optimizer]: ...


@overload
def fork(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> tuple[nn.Module, list[torch.optim.Optimizer]]: ...


@torch.inference_mode(mode=False)  # what is made here is trained later
def fork(model: nn.Module, optimizers: Optimizers) -> tuple[nn.Module, Any]:
    """The model and its optimisers once more: trained alike, they go on alike, bit for bit.

    Weights, buffers, gradients, modes, optimiser state and compiled code are those of the first;
    nothing is shared. Let the rate of the fork fall and take that size home, while the first run
    continues. Learning-rate schedulers, hooks of the optimisers and random states stay with the
    first; a `DepthSchedule` too.

    Args:
        model: a network, plain or in DDP, compiled, or sharded with `fully_shard`.
        optimizers: one optimiser or a list.

    Returns:
        The second model, and one optimiser or a list, as you passed.

    Raises:
        HostError: the model grows in a garden, or something in it cannot be copied.
        OptimizerError: an optimiser trains parameters that the model does not have.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import esper
        >>> model = nn.Linear(4, 4)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> small, small_optimizer = esper.fork(model, optimizer)
        >>> small_optimizer.param_groups[0]["lr"] = 0.0
        >>> torch.equal(small.weight, model.weight), optimizer.param_groups[0]["lr"]
        (True, 0.001)
    """
    is_one = isinstance(optimizers, torch.optim.Optimizer)
    listed: Any = [optimizers] if is_one else list(optimizers)  # type: ignore[arg-type]
    network = unwrap(model).network
    known = {id(parameter) for parameter in network.parameters()}
    for optimizer in listed:
        for group in optimizer.param_groups:
            if any(id(parameter) not in known for parameter in group["params"]):
                raise OptimizerError(
                    f"this {type(optimizer).__name__} trains parameters that the model does not "
                    f"have; pass the model that they belong to."
                )
    copied = _copy_network(network)
    memo: dict[int, Any] = {}
    twins = dict(copied.named_parameters(remove_duplicate=False))
    for name, parameter in network.named_parameters(remove_duplicate=False):
        twin = twins[name]
        twin.requires_grad_(parameter.requires_grad)
        if parameter.grad is not None and twin.grad is None:
            twin.grad = parameter.grad.detach().clone()
        memo[id(parameter)] = twin
    forked = [_copy_optimizer(optimizer, memo) for optimizer in listed]
    return _wrap_alike(model, copied), forked[0] if is_one else forked


def _copy_network(network: nn.Module) -> nn.Module:
    """A deep copy of a network, in all modes of the first."""
    try:
        if is_sharded(network):
            copied = copy_sharded(network, network)
        else:
            copied, _ = copy_module(network, network)
    except HostError:
        raise
    except Exception as problem:  # whatever a user's module does when it is copied
        raise HostError(
            f"this {type(network).__name__} cannot be copied: {problem}. Save it and load it into "
            f"a second one."
        ) from problem
    for first, second in zip(network.modules(), copied.modules(), strict=True):
        for flag in ("training", "gradient_checkpointing"):
            if flag in vars(first):
                vars(second)[flag] = vars(first)[flag]
    follow_compiled(network, copied)
    return copied


def _copy_optimizer(optimizer: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of an optimiser that trains the parameters in `memo` instead."""
    copied = copy.deepcopy(optimizer, memo)
    # what an optimiser keeps beside its state and groups
    for name, value in vars(optimizer).items():
        if name not in vars(copied) and name not in _OF_ONE:
            vars(copied)[name] = copy.deepcopy(value, memo)
    return copied


def _wrap_alike(model: Any, network: nn.Module) -> Any:
    """What is around a model, around another network."""
    if isinstance(model, DistributedDataParallel):
        inner = _wrap_alike(model.module, network)
        state: Any = model
        wrapped = object.__new__(type(model))
        fields = {name: value for name, value in vars(model).items() if name != "_modules"}
        for name in ("reducer", "logger"):
            fields.pop(name)
        vars(wrapped).update(fields)
        for name, value in fields.items():
            if isinstance(value, dict | list | set):
                vars(wrapped)[name] = copy.copy(value)
        vars(wrapped)["_modules"] = {"module": inner}
        vars(wrapped)["_comm_hooks"] = list(state._comm_hooks)
        rebuild_reducer(wrapped)
        return wrapped
    if type(model).__name__ == "OptimizedModule":
        return type(model)(_wrap_alike(model._orig_mod, network), model.dynamo_ctx)
    return network
