"""Runs blocks through torch.compile.

Every shape of block is compiled once, whichever host, copy or structure it is part of.
"""

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.slot import has_slots
from esper.leyline.errors import NotCompiledError, UnknownNameError

BACKEND = "inductor"
_CHOICES = ("auto", "on", "off")
# FLOPs of a step's forward pass from which on `auto` compiles: a smaller host waits for launches,
# not for memory.
_WORTH = 4e9
# By shape of block and call, for all populations of the process.
_compiled: dict[Any, Callable[..., Any]] = {}


class CompiledSoFar(NamedTuple):
    """What this process has compiled."""

    shapes: int
    seconds: float


def is_compiled(wanted: str, devices: Sequence[torch.device], step_flops: int) -> bool:
    """Say whether hosts run compiled.

    `auto` compiles large hosts on GPUs, unless only kernels are allowed that give the same result
    twice.
    """
    if wanted not in _CHOICES:
        raise UnknownNameError("compile", wanted, _CHOICES)
    if wanted != "auto":
        return wanted == "on"
    is_worth_it = step_flops >= _WORTH and not torch.are_deterministic_algorithms_enabled()
    return is_worth_it and all(device.type == "cuda" for device in devices)


def compile_blocks(network: MorphogeneticModel) -> None:
    """Let all blocks of a network, seeds' bodies too, run compiled.

    A deep copy runs uncompiled until this is called for it too.
    """
    blocks = [*_blocks_without_slots(network.host)]
    for slot_id in network.slot_config.slot_ids:
        slot = network.slot(slot_id)
        for seed in (*slot.fossils, slot.seed):
            pieces = (getattr(seed, "body", None), getattr(seed, "join", None))
            blocks += [piece for piece in pieces if isinstance(piece, nn.Module)]
    for block in blocks:
        if block._compiled_call_impl is None:
            shape = (type(block), repr(block))
            block._compiled_call_impl = partial(_call, weakref.ref(block), shape)


def forget_compiled() -> None:
    """Have torch compile again.

    It counts structures, and after eight of them would run all others uncompiled.
    """
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def compiled_so_far() -> CompiledSoFar:
    """Return how many shapes were compiled, and how long torch took, backward passes included."""
    if not _compiled:
        return CompiledSoFar(shapes=0, seconds=0.0)
    # takes seconds to import, so only processes that compile do it
    from torch._dynamo.utils import calculate_time_spent

    seconds = calculate_time_spent()["total_wall_time"]
    return CompiledSoFar(shapes=len(_compiled), seconds=seconds)


@contextmanager
def nothing_new() -> Iterator[None]:
    """Allow only calls of what has been compiled, as in a captured graph.

    Whatever torch would have to compile first is an error.
    """
    with torch.compiler.set_stance("fail_on_recompile"):
        try:
            yield
        except RuntimeError as problem:
            if "fail_on_recompile" not in str(problem):
                raise
            raise NotCompiledError(
                "graphs cannot compile, and a part of this host is compiled at every call, or "
                "set_stance forbids it. Choose compile off, or executor eager."
            ) from None


def lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Store weights of convolutions with channels last, as tensor cores read them.

    Their optimiser state is stored alike.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.dim() == 4:
                _lay_out_parameter(optimizer, parameter)


def score(function: Callable[..., Any], outputs: Tensor, targets: Tensor) -> Any:
    """Return a task's score of its outputs in float32, as one kernel or two instead of a dozen."""
    return _compile((function,), _score, "score", function, (outputs, targets), {})


def _blocks_without_slots(module: nn.Module) -> Iterator[nn.Module]:
    """The largest parts of a host that hold no slot."""
    # a slot may change; a list is never called
    if has_slots(module) or type(module).forward is nn.Module.forward:
        for child in module.children():
            yield from _blocks_without_slots(child)
    elif next(module.parameters(), None) is not None:
        yield module


def _lay_out_parameter(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    state = optimizer.state[parameter]
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            state[key] = value.contiguous(memory_format=torch.channels_last)


def _call(block: weakref.ref[nn.Module], shape: tuple[type, str], *args: Any, **kwargs: Any) -> Any:
    module = block()
    assert module is not None  # it is being called
    if torch.is_grad_enabled() and not module.training:
        # the greedy score, once per epoch: not worth a compilation
        return module._call_impl(*args, **kwargs)
    name = f"run_{module._get_name()}"
    return _compile((*shape, module.training), _run, name, module, args, kwargs)


def _compile(
    shape: tuple[Any, ...], body: Any, name: str, owner: Any, args: Any, kwargs: Any
) -> Any:
    """Call `body`, compiled for this shape, these arguments and this kind of precision."""
    inputs = [
        (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
        for value in (*args, *kwargs.values())
        if isinstance(value, Tensor)
    ]
    precisions = [
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        for kind in ("cpu", "cuda")
    ]
    key = (BACKEND, *shape, torch.is_grad_enabled(), *precisions, *inputs, *kwargs)
    if key not in _compiled:
        # code of its own: torch counts compilations by code object and gives up after eight
        function = FunctionType(body.__code__.replace(co_name=name), globals())
        _compiled[key] = torch.compile(function, backend=BACKEND, dynamic=False)
    return _compiled[key](owner, args, kwargs)


def _run(module: Any, args: Any, kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


def _score(function: Any, args: Any, kwargs: Any) -> Any:
    outputs = args[0]
    targets = args[1]
    return function(outputs.float(), targets)
