"""The state of a network as tensors that safetensors takes, and back.

Needs torch and safetensors alone: exports carry this file along. safetensors knows dense tensors
of most types, each with memory of its own. All others are written as several such tensors, and
what is no tensor as a note of plain data. Nothing is pickled.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_PART = re.compile(r"(.*):(\w+)\.(\w+)", re.DOTALL)
_EXTRA = "_extra_state"
_PACKED_LISTS = (list, tuple)
_PACKED_MAPPINGS = (dict, OrderedDict)


class PackedState(NamedTuple):
    """What `state_dict` gives, in two parts that can be written to files."""

    tensors: dict[str, Tensor]
    notes: dict[str, Any]
    """of entries that are no tensors: what they are, as JSON"""


def pack_state(network: nn.Module) -> PackedState:
    """The state of a network, in memory of its own where safetensors asks for that.

    Raises ValueError if a module has an extra state that is not plain data.
    """
    tensors: dict[str, Tensor] = {}
    notes: dict[str, Any] = {}
    views: set[Any] = set()
    for name, value in network.state_dict().items():
        if isinstance(value, Tensor):
            view = _view_of(value)
            if view is None or view not in views:  # of those that are tied, the first
                tensors[name] = value
            views.add(view)
        elif is_extra(name):
            held: dict[str, Tensor] = {}
            notes[name] = _note_of(value, _holder_of(held, name), partial(_refuse, name))
            tensors |= held
        else:
            notes[name] = _note_of(value, _describe_tensor, _describe_type)
    return PackedState(pack(tensors), notes)


def load_state(network: nn.Module, packed: Mapping[str, Tensor], notes: Mapping[str, Any]) -> None:
    """Put a packed state into a network that is built as the one it is of.

    Of tensors that are tied one is enough. Raises ValueError if anything does not fit.
    """
    tensors = unpack(packed)
    state = network.state_dict()
    for name, note in notes.items():
        if is_extra(name):
            tensors[name] = _value_of(note, tensors)
        elif note != _note_of(state.get(name), _describe_tensor, _describe_type):
            raise ValueError(f"{name} is another one in this {type(network).__name__}")
    missing, unexpected = network.load_state_dict(tensors, strict=False)
    read = {_memory_of(state[name]) for name in tensors if name in state}
    lost = [name for name in missing if _memory_of(state[name]) not in read]
    if lost or unexpected:
        raise ValueError(f"missing weights: {lost or 'none'}; unknown: {unexpected or 'none'}")


def is_extra(name: str) -> bool:
    """Whether an entry of a state dict is what a module's `get_extra_state` gave."""
    return name.rpartition(".")[2] == _EXTRA


def _memory_of(value: Any) -> int:
    """Where a dense tensor lies; anything else counts as itself."""
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided
    return value.untyped_storage().data_ptr() if is_dense else id(value)


# -- tensors ---------------------------------------------------------------------------------------


def pack(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors takes them: dense, of a type that it has, none in another's memory."""
    packed: dict[str, Tensor] = {}
    memories: set[int] = set()
    for name, tensor in tensors.items():
        for kind, part in _parts_of(tensor.detach()).items():
            memory = part.untyped_storage()
            is_alone = memory.nbytes() == part.nbytes and memory.data_ptr() not in memories
            memories.add(memory.data_ptr())
            if not part.is_contiguous() or not is_alone:
                part = part.clone(memory_format=torch.contiguous_format)
            packed[f"{name}:{kind}" if kind else name] = part
    return packed


def _view_of(tensor: Tensor) -> Any:
    """What two tensors have in common that are one; None if nothing can be said."""
    if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
        return None
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def unpack(packed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that `pack` was given."""
    tensors: dict[str, Tensor] = {}
    groups: dict[tuple[str, str], dict[str, Tensor]] = {}
    for name, tensor in packed.items():
        match = _PART.fullmatch(name)
        if match is None:
            tensors[name] = tensor
        else:
            groups.setdefault((match[1], match[2]), {})[match[3]] = tensor
    for (name, kind), parts in groups.items():
        tensors[name] = _join(kind, parts)
    return tensors


def _parts_of(tensor: Tensor) -> dict[str, Tensor]:
    """Dense tensors of which one can be made again, by what they are."""
    if tensor.layout is torch.sparse_coo:
        parts = {"indices": tensor._indices(), "values": tensor._values()}
        parts["size"] = torch.tensor(tensor.shape)
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = {"outer": tensor.crow_indices(), "inner": tensor.col_indices()}
        parts |= {"values": tensor.values(), "size": torch.tensor(tensor.shape)}
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = {"outer": tensor.ccol_indices(), "inner": tensor.row_indices()}
        parts |= {"values": tensor.values(), "size": torch.tensor(tensor.shape)}
    elif tensor.is_quantized:
        return _quantised_parts(tensor)
    elif tensor.is_complex() and tensor.dtype is not torch.complex64:
        return {f"{tensor.dtype}.values".removeprefix("torch."): torch.view_as_real(tensor)}
    else:
        return {"": tensor}
    kind = str(tensor.layout).removeprefix("torch.")
    packed: dict[str, Tensor] = {}
    for name, part in parts.items():
        for below, value in _parts_of(part).items():
            if below:
                raise ValueError(f"a {kind} tensor of {part.dtype} cannot be written")
            packed[f"{kind}.{name}"] = value
    return packed


def _quantised_parts(tensor: Tensor) -> dict[str, Tensor]:
    parts = {"values": tensor.int_repr()}
    if tensor.qscheme() is torch.per_tensor_affine:
        parts["scale"] = torch.tensor(tensor.q_scale(), dtype=torch.float64)
        parts["zero"] = torch.tensor(tensor.q_zero_point())
    elif tensor.qscheme() is torch.per_channel_affine:
        parts["scale"] = tensor.q_per_channel_scales()
        parts["zero"] = tensor.q_per_channel_zero_points()
        parts["axis"] = torch.tensor(tensor.q_per_channel_axis())
    else:
        raise ValueError(f"a tensor quantised by {tensor.qscheme()} cannot be written")
    kind = str(tensor.dtype).removeprefix("torch.")
    return {f"{kind}.{name}": part for name, part in parts.items()}


def _join(kind: str, parts: Mapping[str, Tensor]) -> Tensor:
    """The tensor that `_parts_of` took apart."""
    values = parts["values"]
    if kind.startswith("complex"):
        return torch.view_as_complex(values)
    if kind == "sparse_coo":
        return torch.sparse_coo_tensor(parts["indices"], values, parts["size"].tolist())
    if kind.startswith("sparse"):
        layout = getattr(torch, kind)
        size = parts["size"].tolist()
        return torch.sparse_compressed_tensor(
            parts["outer"], parts["inner"], values, size, layout=layout
        )
    if "axis" in parts:
        axis = int(parts["axis"])
        return torch._make_per_channel_quantized_tensor(values, parts["scale"], parts["zero"], axis)
    scale, zero = float(parts["scale"]), int(parts["zero"])
    return torch._make_per_tensor_quantized_tensor(values, scale, zero)


# -- what is no tensor -----------------------------------------------------------------------------


def _note_of(
    value: Any, tensor_note: Callable[[Tensor], Any], other: Callable[[Any], Any]
) -> list[Any]:
    """A value as JSON: its type and what is in it."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return ["plain", value]
    if kind is float:
        return ["float", repr(value)]
    if isinstance(value, Tensor):
        return ["tensor", tensor_note(value)]
    if kind in _PACKED_LISTS:
        return [kind.__name__, [_note_of(item, tensor_note, other) for item in value]]
    if kind in _PACKED_MAPPINGS:
        entries = []
        for key, item in value.items():
            pair = (_note_of(key, tensor_note, other), _note_of(item, tensor_note, other))
            entries.append(list(pair))
        return [kind.__name__, entries]
    return ["other", other(value)]


def _value_of(note: Any, tensors: dict[str, Tensor]) -> Any:
    """The value of a note; its tensors are taken out of `tensors`."""
    kind, content = note
    if kind == "float":
        return float(content)
    if kind == "tensor":
        return tensors.pop(content)
    for sequence in _PACKED_LISTS:
        if kind == sequence.__name__:
            return sequence(_value_of(item, tensors) for item in content)
    for mapping in _PACKED_MAPPINGS:
        if kind == mapping.__name__:
            pairs = [(_value_of(key, tensors), _value_of(item, tensors)) for key, item in content]
            return mapping(pairs)
    return content


def _holder_of(held: dict[str, Tensor], name: str) -> Callable[[Tensor], str]:
    """Keeps the tensors of a note under names of their own."""

    def hold(tensor: Tensor) -> str:
        key = f"{name}:{len(held)}"
        held[key] = tensor
        return key

    return hold


def _describe_tensor(tensor: Tensor) -> list[Any]:
    return [list(tensor.shape), str(tensor.dtype)]


def _describe_type(value: Any) -> str:
    """The name of a function or a class, else the class that a value is of."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', '')}.{named.__qualname__}"


def _refuse(name: str, value: Any) -> Any:
    raise ValueError(
        f"{name} holds a {type(value).__name__}; get_extra_state may return tensors, "
        f"numbers, text, lists, tuples and dicts"
    )
