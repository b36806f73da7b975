"""Layers that are compiled one by one and share the code, so that a copy compiles nothing."""

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from esper.garden.deepening import find_layers
from esper.garden.shared_code import CompiledLayer
from esper.garden.wrapping import unwrap
from esper.kasmina.copies.membership import members_of
from esper.leyline.errors import HostError, SettingError

_GRAPHED_MODES = ("reduce-overhead", "max-autotune")
"""modes that capture CUDA graphs: these hold addresses of weights, and have not run here"""


def compile_layers(model: nn.Module, layers: str, **options: Any) -> nn.Module:
    """Compile the layers of a list one by one, in place; all run the same compiled code.

    A copy that `esper.deepen` or `esper.DepthSchedule` adds runs that code too: growing compiles
    nothing. `torch.compile(model)` compiles the whole model again at every growth. Layers that
    compute with a number of their own (`self.layer_idx`) get code each.

    Call it before or after DDP, and after `fully_shard`.

    Args:
        model: a network whose layers stand in an `nn.ModuleList` or `nn.Sequential`.
        layers: name of that list, as in "model.layers".
        options: those of `torch.compile`: `backend`, `mode`, `dynamic` and others.

    Returns:
        The model that you passed.

    Raises:
        HostError: the model is compiled as a whole, or a layer cannot be.
        SettingError: a mode that captures CUDA graphs.
        UnknownNameError: the model has no such list.

    Example:
        >>> from torch import nn
        >>> import esper
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> compiled = esper.compile_layers(model, "", backend="eager")
        >>> compiled is model
        True
    """
    mode = options.get("mode")
    graphs = (options.get("options") or {}).get("triton.cudagraphs", False)
    if mode in _GRAPHED_MODES or graphs:
        asked = f"mode={mode!r}" if mode in _GRAPHED_MODES else "triton.cudagraphs"
        raise SettingError(
            f"{asked} captures CUDA graphs, and growth with them has not run on a GPU yet; leave "
            f"it out, or take mode='default' or 'max-autotune-no-cudagraphs'."
        )
    wrapped = unwrap(model)
    if wrapped.compiled:
        raise HostError(
            "this model is compiled as a whole; pass the plain model, and compile_layers alone."
        )
    path = find_layers(wrapped.network, layers)
    members = members_of(wrapped.network.get_submodule(path))
    for number, layer in enumerate(members):
        is_compiled = type(layer).__name__ == "OptimizedModule"
        if is_compiled or "forward" in vars(layer):
            reason = "compiled already" if is_compiled else "replaced"
            name = f"{path}.{number}".lstrip(".")
            raise HostError(f"the forward of {name} is {reason}; pass plain layers.")
    run = torch.compile(_new_runner(), **options)
    for layer in members:
        layer._compiled_call_impl = CompiledLayer(layer, run)
    return model


def _new_runner() -> Callable[..., Any]:
    """A function with code of its own: torch counts compilations by code, over all models."""

    def run_layer(layer: Any, *args: Any, **kwargs: Any) -> Any:
        return type(layer).forward(layer, *args, **kwargs)

    code = run_layer.__code__.replace()
    return types.FunctionType(code, globals(), "run_layer")
