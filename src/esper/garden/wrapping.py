"""What stands around a network that trains, and how DDP follows a network that gets layers."""

import gc
import sys
from dataclasses import dataclass
from typing import Any

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from esper.leyline.errors import HostError

_COMPILED = "OptimizedModule"  # by name: importing dynamo takes seconds
_UNFIT = {
    "FullyShardedDataParallel": "shard it with torch.distributed.fsdp.fully_shard, layer by layer",
    "DataParallel": "use DistributedDataParallel",
    "MorphogeneticModel": "deepen garden.harvest(), or the model before esper.grow",
}


@dataclass(frozen=True)
class Wrapped:
    """A network and what is around it, the outermost first."""

    network: nn.Module
    ddps: tuple[DistributedDataParallel, ...] = ()
    compiled: tuple[Any, ...] = ()
    """what `torch.compile(model)` gave"""


def unwrap(model: nn.Module) -> Wrapped:
    """The network inside DDP and `torch.compile`; what no copy of a layer can follow is refused."""
    ddps: list[DistributedDataParallel] = []
    compiled: list[Any] = []
    network: Any = model
    while True:
        if isinstance(network, DistributedDataParallel):
            ddps.append(network)
            network = network.module
        elif type(network).__name__ == _COMPILED:
            compiled.append(network)
            network = network._orig_mod
        else:
            break
    for module in network.modules():
        way_out = _UNFIT.get(type(module).__name__)
        if way_out is not None:
            raise HostError(f"this model holds a {type(module).__name__}; {way_out}.")
    return Wrapped(network, tuple(ddps), tuple(compiled))


def captures_graphs(compiled: Any) -> bool:
    """Whether a compiled model captures CUDA graphs, as with mode="reduce-overhead"."""
    read_config = getattr(compiled, "get_compiler_config", None)
    config = None if read_config is None else read_config()
    return bool((config or {}).get("triton.cudagraphs", False))


def find_ddps(wrapped: Wrapped, layers: nn.Module) -> list[DistributedDataParallel]:
    """Every DDP around a list of layers, also those that a framework made later."""
    ddps = list(wrapped.ddps)
    is_alone = not distributed.is_available() or not distributed.is_initialized()
    if ddps or is_alone:
        return ddps
    for thing in gc.get_objects():
        # the type is asked: some objects compute their __class__
        is_ddp = issubclass(type(thing), DistributedDataParallel)
        if is_ddp and any(part is layers for part in thing.module.modules()):
            ddps.append(thing)
    return ddps


def refuse_unfit_ddp(ddp: DistributedDataParallel) -> None:
    """Refuse a DDP with state by parameter that is made once, when it is built."""
    state: Any = ddp
    if state.mixed_precision is not None:
        raise HostError(
            "this DistributedDataParallel has mixed_precision=, which new layers cannot follow; "
            "use torch.autocast."
        )
    if state._delay_all_reduce_params or state._use_python_reducer:
        raise HostError(
            "this DistributedDataParallel delays or traces its reductions, which new layers cannot "
            "follow; build it without delay_all_reduce_named_params and leave optimize_ddp alone."
        )


def rebuild_reducer(ddp: DistributedDataParallel) -> None:
    """Let a DDP reduce the gradients of all parameters that its network has now.

    That is what DDP does itself when it is unpickled. Call it between two steps, on all ranks.
    """
    state: Any = ddp
    ignored = state.parameters_to_ignore
    state._module_parameters = [
        parameter for name, parameter in ddp.module.named_parameters() if name not in ignored
    ]
    # a parameter whose gradient two of them reduce would be reduced twice
    if vars(ddp).get("reducer") is not None:
        state._remove_autograd_hooks()
    state.logger = None
    state.reducer = None
    parameters, is_sparse = state._build_params_for_reducer()
    names = state._build_debug_param_to_name_mapping(parameters)
    state._ddp_init_helper(parameters, is_sparse, names, state.static_graph)
    if state.static_graph:
        state._static_graph_delay_allreduce_enqueued = False
        state.reducer._set_static_graph()
        state.logger._set_static_graph()
    register: Any = vars(distributed)["_register_comm_hook"]
    for hook, hook_state in state._comm_hooks:
        state.logger._set_comm_hook_name(hook.__qualname__)
        register(state.reducer, hook_state, hook)


def seconds_compiling() -> float:
    """How long torch has compiled in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0.0
    return float(dynamo.calculate_time_spent().get("total_wall_time", 0.0))
