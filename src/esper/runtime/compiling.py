"""Blocks through torch.compile: every shape of block once, whichever host, copy or structure it is part of."""

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.slot import has_slots
from esper.leyline.errors import NotCompiledError, UnknownNameError

BACKEND = "inductor"
_WORTH = 4e9
"""FLOPs of a step's forward pass from which on `auto` compiles: a smaller host waits for launches, not for memory."""
_compiled: dict[
    Any, Callable[..., Any]
] = {}  # By shape of block and call, for all populations of the process.


def is_compiled(wanted: str, devices: Sequence[torch.device], step_flops: int) -> bool:
    """`auto` compiles large hosts on GPUs, unless only kernels are allowed that give the same result twice."""
    if wanted not in ("auto", "on", "off"):
        raise UnknownNameError("compile", wanted, ("auto", "on", "off"))
    is_worth_it = step_flops >= _WORTH and not torch.are_deterministic_algorithms_enabled()
    return wanted == "on" or (
        wanted == "auto" and is_worth_it and all(device.type == "cuda" for device in devices)
    )


def compile_blocks(network: MorphogeneticModel) -> None:
    """Let all blocks of a network, seeds' bodies too, run compiled; a deep copy does not until it is asked for too."""
    slots = [network.slot(slot_id) for slot_id in network.slot_config.slot_ids]
    seeds = [seed for slot in slots for seed in (*slot.fossils, slot.seed)]
    own = [getattr(seed, name, None) for seed in seeds for name in ("body", "join")]
    for block in (*_parts(network.host), *(part for part in own if isinstance(part, nn.Module))):
        if block._compiled_call_impl is None:
            block._compiled_call_impl = partial(
                _call, weakref.ref(block), (type(block), repr(block))
            )


def structure_of(network: MorphogeneticModel) -> list[object]:
    """What a compiled network was compiled for; another structure is another graph."""
    slots = [network.slot(slot_id) for slot_id in network.slot_config.slot_ids]
    return [part for slot in slots for part in (slot.seed, *slot.fossils, slot.is_in_output)]


def forget_compiled() -> None:
    """Have torch compile anew: it counts structures, and after eight of them would run all others uncompiled."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def compiled_so_far() -> tuple[int, float]:
    """Shapes that this process has compiled, and how long torch took, backward passes included."""
    if not _compiled:
        return 0, 0.0
    from torch._dynamo.utils import (
        calculate_time_spent,
    )  # seconds to import, which only those pay who compile

    return len(_compiled), calculate_time_spent()["total_wall_time"]


@contextmanager
def nothing_new() -> Iterator[None]:
    """Call what has been compiled; whatever torch would have to compile first is an error, as in a captured graph."""
    with torch.compiler.set_stance("fail_on_recompile"):
        try:
            yield
        except RuntimeError as problem:
            if "fail_on_recompile" not in str(problem):
                raise
            found = "graphs cannot compile, and a part of this host is compiled at every call, or set_stance forbids it"
            raise NotCompiledError(f"{found}. Choose compile off, or executor eager.") from None


def lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Weights of convolutions with channels last, as tensor cores read them, and their optimiser state alike."""
    for parameter in [
        p for group in optimizer.param_groups for p in group["params"] if p.dim() == 4
    ]:
        parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        state = optimizer.state[parameter]
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                state[key] = value.contiguous(memory_format=torch.channels_last)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The largest parts of a host that hold no slot."""
    if (
        has_slots(module) or type(module).forward is nn.Module.forward
    ):  # a slot may change; a list is never called
        for child in module.children():
            yield from _parts(child)
    elif next(module.parameters(), None) is not None:
        yield module


def _call(block: weakref.ref[nn.Module], shape: tuple[type, str], *args: Any, **kwargs: Any) -> Any:
    module = block()
    assert module is not None  # somebody is calling it
    if (
        torch.is_grad_enabled() and not module.training
    ):  # the greedy score, once per epoch: not worth a compilation
        return module._call_impl(*args, **kwargs)
    return _compile(
        (*shape, module.training), _run, f"run_{module._get_name()}", module, args, kwargs
    )


def score(function: Callable[..., Any], outputs: Tensor, targets: Tensor) -> Any:
    """A task's score of its outputs in float32, as one kernel or two instead of a dozen."""
    return _compile((function,), _score, "score", function, (outputs, targets), {})


def _compile(
    shape: tuple[Any, ...], body: Any, name: str, owner: Any, args: Any, kwargs: Any
) -> Any:
    """Call `body`, compiled for this shape, these arguments and this kind of precision."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    inputs = [
        (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
        for value in tensors
    ]
    amps = [
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        for kind in ("cpu", "cuda")
    ]
    key = BACKEND, *shape, torch.is_grad_enabled(), *amps, *inputs, *kwargs
    if key not in _compiled:
        # code of its own: torch counts compilations by code object and gives up after eight
        own = FunctionType(body.__code__.replace(co_name=name), globals())
        _compiled[key] = torch.compile(own, backend=BACKEND, dynamic=False)
    return _compiled[key](owner, args, kwargs)


def _run(module: Any, args: Any, kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


def _score(function: Any, args: Any, kwargs: Any) -> Any:
    return function(args[0].float(), args[1])
