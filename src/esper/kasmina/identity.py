"""Which layers of a block to zero so that it becomes the identity: found by trying, proven to the bit."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.copies import silence

Run = Callable[[nn.Module], Tensor]


def find_zeroed(body: nn.Module, run: Run, features: Tensor) -> dict[str, float]:
    """The last layer of each residual branch, and the value of its weights at which it gives zeros.

    `run` calls a module on `features`, as the network does. Works on `body` in place, which becomes the identity.
    Raises ValueError with the reason if no such layers exist.
    """
    layers = _layers_in_order(body, run)
    if not _is_identity(body, run, features, layers):
        raise ValueError("its output is not its input when all its layers give zeros: nothing goes around them")
    needed = list(layers)
    for name in layers:  # the earliest first, so that the last layer of each branch is left
        fewer = [other for other in needed if other != name]
        if _is_identity(body, run, features, fewer):
            needed = fewer
    values = {name: _find_silence(body, run, name) for name in needed}
    if not torch.equal(run(body), features):
        raise ValueError(f"with {', '.join(needed)} zeroed its output still differs from its input")
    return values


def _layers_in_order(body: nn.Module, run: Run) -> list[str]:
    """Modules with weights of their own, in the order in which they finish; attention counts as one."""
    seen: dict[str, None] = {}
    attentions = [name for name, module in body.named_modules() if isinstance(module, nn.MultiheadAttention)]
    with ExitStack() as stack:
        for name, module in body.named_modules():
            is_inside = any(name.startswith(f"{outer}.") for outer in attentions)
            if name and not is_inside and (module._parameters or isinstance(module, nn.MultiheadAttention)):
                stack.enter_context(module.register_forward_hook(lambda *_, name=name: seen.setdefault(name)))
        run(body)
    return list(seen)


def _is_identity(body: nn.Module, run: Run, features: Tensor, zeroed: Sequence[str]) -> bool:
    with ExitStack() as stack:
        for name in zeroed:
            stack.enter_context(body.get_submodule(name).register_forward_hook(lambda _m, _i, output: _zeros(output)))
        return torch.equal(run(body), features)


def _find_silence(body: nn.Module, run: Run, name: str) -> float:
    """0 for most layers, -1 for norms that multiply by one plus their weight; the layer is left like that."""
    layer = body.get_submodule(name)
    loudest: list[float] = []
    with layer.register_forward_hook(lambda _m, _i, output: loudest.append(float(_first(output).abs().max()))):
        for value in (0.0, -1.0):
            silence(layer, value)
            loudest.clear()
            run(body)
            if not any(loudest):
                return value
    raise ValueError(f"no value of the weights of {name} ({type(layer).__name__}) makes it give zeros")


def _first(output: Any) -> Tensor:
    found = output[0] if isinstance(output, tuple) else output
    assert isinstance(found, Tensor)
    return found


def _zeros(output: Any) -> Any:
    zeros = torch.zeros_like(_first(output))
    return (zeros, *output[1:]) if isinstance(output, tuple) else zeros
