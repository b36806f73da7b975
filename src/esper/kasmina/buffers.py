"""Buffers that no state dict has: read to be saved, and written where they were."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from esper.kasmina.slot import SeedSlot


def read_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Values of the dense buffers that are not persistent, by name, in memory of their own.

    A buffer whose entries share memory is left out: nothing can be written to it entry by entry.
    """
    values: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, SeedSlot):
            continue  # its share follows its stage
        for name in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers.get(name)
            if buffer is not None and _is_dense(buffer):
                label = f"{prefix}.{name}" if prefix else name
                values[label] = buffer.detach().clone(memory_format=torch.contiguous_format)
    return values


def write_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Put values back; a buffer that is not there yet, or has another shape, is replaced."""
    owners = {label: model.get_submodule(label.rpartition(".")[0]) for label in values}
    like = next(model.parameters(), torch.empty(0))
    for label, value in values.items():
        name = label.rpartition(".")[2]
        module = owners[label]
        present = module._buffers.get(name)
        if present is None:
            vars(module).pop(name, None)  # a forward pass makes the buffer of it
            module._non_persistent_buffers_set.add(name)
            module._buffers[name] = value.to(like.device)
        elif _is_dense(present) and (present.shape, present.dtype) == (value.shape, value.dtype):
            with torch.no_grad():
                present.copy_(value)
        else:
            module._buffers[name] = value.to(present.device)


def _is_dense(buffer: Tensor) -> bool:
    """Whether every entry of a buffer has memory of its own."""
    if buffer.layout is not torch.strided or buffer.is_nested or buffer.is_quantized:
        return False
    return buffer.untyped_storage().nbytes() >= buffer.nbytes
