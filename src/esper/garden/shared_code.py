"""Compiled code that several layers share: a copy runs what its original runs."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class CompiledLayer:
    """What a call of one layer runs: its class's forward, compiled once for all layers.

    Hooks run around it and are not compiled: FSDP gathers weights in them.
    """

    def __init__(self, layer: nn.Module, run: Callable[..., Any]):
        self.layer = layer
        self.run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer gives, hooks included."""
        layer = self.layer
        fields = vars(layer)
        if "forward" in fields:  # what stands in for the layer for a while
            return layer._call_impl(*args, **kwargs)
        is_hooked = any(fields[name] for name in _HOOKS) or _has_any_global_hook()
        if not is_hooked:
            return self.run(layer, *args, **kwargs)
        fields["forward"] = self._run
        try:
            return layer._call_impl(*args, **kwargs)
        finally:
            fields.pop("forward", None)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        # a trace guards on the layer's fields
        vars(self.layer).pop("forward", None)
        return self.run(self.layer, *args, **kwargs)


def follow_compiled(original: nn.Module, copied: nn.Module) -> None:
    """Let a copy run the compiled code of its original, part by part.

    A deep copy of a module is not compiled.
    """
    parts = dict(copied.named_modules(remove_duplicate=False))
    for name, part in original.named_modules(remove_duplicate=False):
        compiled = part._compiled_call_impl
        if isinstance(compiled, CompiledLayer):
            parts[name]._compiled_call_impl = CompiledLayer(parts[name], compiled.run)


def find_foreign_compilation(layer: nn.Module) -> str | None:
    """The part of a layer that `part.compile()` compiled, whose copies would not be; or None."""
    for name, part in layer.named_modules():
        compiled = part._compiled_call_impl
        if compiled is not None and not isinstance(compiled, CompiledLayer):
            return name or type(part).__name__
    return None
