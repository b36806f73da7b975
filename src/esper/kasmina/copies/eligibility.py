"""What can be copied where, and which zeroed layers make a copy the identity: found by trying.

No host is changed. How a copy is made is in `copying`.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from esper.kasmina.blueprints import COPY_ZERO
from esper.kasmina.copies.copying import Copy, copy_module, shared_names, silence
from esper.kasmina.copies.membership import source_name
from esper.kasmina.copies.order import runs_in_order
from esper.kasmina.outputs import tensors_in
from esper.kasmina.pricing import count_backward, count_flops
from esper.kasmina.probing import (
    Call,
    Example,
    batch_size,
    record_calls,
    refuse_copy,
    undisturbed,
)


@dataclass(frozen=True)
class Inheritance:
    """What one slot's module hands down to a copy."""

    problem: str | None = None
    """why it cannot be copied; None if it can"""
    zero_problem: str | None = "copy_zero was not among the blueprints when the host was wrapped"
    """why no copy of it is the identity; None if one is"""
    zeroed: Mapping[str, float] = field(default_factory=dict)
    """layers to zero for that, and the value of their weights"""
    flops: int = 0
    """of one example forward through the copy"""
    deviation: float = 0.0
    """how far the module moves its own output"""
    is_native: bool = False
    """whether a copy can stand behind it in the list that both are in"""
    entry: int = 0
    """as in `BackwardFlops`"""
    mixing: int = 0
    """as in `BackwardFlops`"""


Run = Callable[[nn.Module], Tensor]
"""Calls a module as the network calls the original."""
Zeroed = dict[str, float]
"""Layer -> value of its weights at which it gives zeros."""


def study_copies(
    host: nn.Module,
    modules: Mapping[str, str],
    example: Example,
    names: Collection[str],
    sites: Collection[str] = (),
) -> dict[str, Inheritance]:
    """What the module of each slot (slot id -> module) hands down to a copy.

    Layers to zero are looked for only if `names`, the blueprints, have copy_zero. `sites` are the
    modules that carry other slots.
    """
    sources = {slot_id: source_name(host, name) for slot_id, name in modules.items()}
    calls = record_calls(host, example, {*modules.values(), *sources.values()})
    examples = max(batch_size(example), 1)
    carriers = [*modules.values(), *sites]
    known: dict[Any, Zeroed] = {}
    studied: dict[str, Inheritance] = {}
    with undisturbed(host):
        for slot_id, name in modules.items():
            source = sources[slot_id]
            call = calls[name][-1]
            problem = refuse_copy(host, source, calls[source], call.output)
            if problem is None:
                problem = _refuse_nested(name, carriers)
            if problem is not None:
                studied[slot_id] = Inheritance(problem)
                continue
            inheritance = _study(host, source, call, examples)
            if COPY_ZERO in names and inheritance.problem is None:
                inheritance = _study_zero(host, source, call, inheritance, known)
            studied[slot_id] = inheritance
    copied = [slot_id for slot_id in modules if studied[slot_id].problem is None]
    reasons = runs_in_order(host, example, [modules[slot_id] for slot_id in copied])
    for slot_id in copied:
        is_native = reasons[modules[slot_id]] is None
        studied[slot_id] = replace(studied[slot_id], is_native=is_native)
    return studied


def _refuse_nested(name: str, carriers: Iterable[str]) -> str | None:
    """A module with a slot inside it cannot be copied: the copy would have that slot too."""
    for carrier in carriers:
        if carrier.startswith(f"{name}."):
            return f"{carrier} inside it carries a slot of its own"
    return None


def study_zeros(host: nn.Module, names: Sequence[str], example: Example) -> dict[str, Inheritance]:
    """What to zero in copies of these modules, so that they hand on what they get."""
    calls = record_calls(host, example, names)
    known: dict[Any, Zeroed] = {}
    studied: dict[str, Inheritance] = {}
    with undisturbed(host):
        for name in names:
            studied[name] = _study_zero(host, name, calls[name][-1], Inheritance(), known)
    return studied


def _study(host: nn.Module, source: str, call: Call, examples: int) -> Inheritance:
    """Run the module on its own output, as a copy would be."""
    features = call.output
    copied = Copy(host.get_submodule(source))

    def run(inputs: Tensor) -> Tensor:
        return copied(inputs, *call.args[1:], **call.kwargs)

    inputs = features.clone()
    outputs: list[Tensor] = []
    try:
        flops = count_flops(lambda: outputs.append(run(inputs)))
    except Exception as problem:  # whatever a user's module does with features that it never saw
        kind = type(problem).__name__
        return Inheritance(f"it does not run on its own output: {kind}: {problem}")
    grown = outputs[0]
    if not torch.equal(inputs, features):
        return Inheritance("it changes its input in place, so that its input is lost afterwards")
    if grown.shape != features.shape:
        return Inheritance(f"run on its own output it gives shape {tuple(grown.shape)}")
    deviation = float((grown - features).abs().max())
    if not math.isfinite(deviation):
        return Inheritance("run on its own output it gives NaN or Inf")
    backward = count_backward(copied, run, features)
    return Inheritance(
        flops=flops // examples,
        deviation=deviation,
        entry=backward.entry // examples,
        mixing=backward.mixing // examples,
    )


# -- layers to zero --------------------------------------------------------------------------------


def _study_zero(
    host: nn.Module, source: str, call: Call, so_far: Inheritance, known: dict[Any, Zeroed]
) -> Inheritance:
    """Look for the layers to zero, once for all modules that are built alike.

    `known` has what was found so far, by how the module is built.
    """
    try:
        features = _features_of(call)
    except ValueError as problem:
        return replace(so_far, zero_problem=str(problem))
    module = host.get_submodule(source)
    parts = [(name, type(part), *part._parameters) for name, part in module.named_modules()]
    build = (type(module), tuple(parts))

    def run(copied: nn.Module) -> Tensor:
        output = Copy(copied).call(features, call.args[1:], call.kwargs)
        return _features_of(Call((features,), {}, output))

    try:
        if build not in known or not _is_silenced(module, known[build], run, features):
            # nothing of this copy is the host's, so that it may be changed
            body, _ = copy_module(module, module)
            known[build] = find_zeroed(body, run, features)
    except ValueError as problem:
        return replace(so_far, zero_problem=str(problem))
    zeroed = known[build]
    shared = sorted(shared_names(module, host))
    prefixes = tuple(f"{layer}." for layer in zeroed)
    if any(name.startswith(prefixes) for name in shared):
        listed = ", ".join(shared)
        reason = f"layers to zero share weights with the rest of the network: {listed}"
        return replace(so_far, zero_problem=reason)
    return replace(so_far, zero_problem=None, zeroed=zeroed)


def _features_of(call: Call) -> Tensor:
    """What a module hands on of its output: the tensor that is shaped as the one it gets."""
    first = next(iter((*call.args, *call.kwargs.values())), None)
    tensors = tensors_in(call.output)
    for tensor in tensors:
        if isinstance(first, Tensor) and tensor.shape == first.shape:
            return tensor
    raise ValueError("nothing in its output has the shape of its input")


def _is_silenced(module: nn.Module, zeroed: Zeroed, run: Run, features: Tensor) -> bool:
    """Whether zeroing these layers makes a copy of the module the identity.

    Modules that are built alike may still not do the same.
    """
    body, _ = copy_module(module, module)
    for layer, value in zeroed.items():
        silence(body.get_submodule(layer), value)
    return torch.equal(run(body), features)


def find_zeroed(body: nn.Module, run: Run, features: Tensor) -> Zeroed:
    """The last layer of each residual branch, and its weights' value that gives zeros.

    `run` calls a module on `features`, as the network does. Works on `body` in place, which becomes
    the identity. Raises ValueError if there are no such layers.
    """
    layers = _layers_in_order(body, run)
    for parameter in filter(Tensor.is_floating_point, body.parameters()):
        # a branch that begins at zero would look silent, and does not stay so
        parameter.detach().add_(0.01)
    innermost = [name for name in layers if not _holds_another(name, layers)]
    if _is_identity(body, run, features, innermost):
        layers = innermost
    if not _is_identity(body, run, features, layers):
        raise ValueError(
            "its output is not its input when all its layers give zeros: nothing goes around them"
        )
    needed = list(layers)
    for name in layers:  # the earliest first, so that the last layer of each branch is left
        fewer = [layer for layer in needed if layer != name]
        if _is_identity(body, run, features, fewer):
            needed = fewer
    values = {name: _find_silence(body, run, name) for name in needed}
    if not torch.equal(run(body), features):
        raise ValueError(f"with {', '.join(needed)} zeroed its output still differs from its input")
    return values


def _holds_another(name: str, layers: Sequence[str]) -> bool:
    return any(layer.startswith(f"{name}.") for layer in layers)


def _layers_in_order(body: nn.Module, run: Run) -> list[str]:
    """Modules with weights of their own, in the order in which they finish.

    Attention counts as one.
    """
    finished: dict[str, None] = {}

    def note(name: str, *_: Any) -> None:
        finished.setdefault(name)

    attentions: list[str] = []
    with ExitStack() as hooks:
        for name, module in body.named_modules():
            if any(name.startswith(f"{attention}.") for attention in attentions):
                continue
            is_attention = isinstance(module, nn.MultiheadAttention)
            if is_attention:
                attentions.append(name)
            if name and (module._parameters or is_attention):
                hooks.enter_context(module.register_forward_hook(partial(note, name)))
        run(body)
    return list(finished)


def _is_identity(body: nn.Module, run: Run, features: Tensor, zeroed: Sequence[str]) -> bool:
    """Whether the body gives back its input when the outputs of these layers are zeros."""

    def give_zeros(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        return tree_map_only(Tensor, torch.zeros_like, output)

    with ExitStack() as hooks:
        for name in zeroed:
            layer = body.get_submodule(name)
            hooks.enter_context(layer.register_forward_hook(give_zeros))
        return torch.equal(run(body), features)


def _find_silence(body: nn.Module, run: Run, name: str) -> float:
    """The value of a layer's weights at which it gives zeros; the layer is left like that.

    It is 0 for most layers, and -1 for norms that multiply by one plus their weight.
    """
    layer = body.get_submodule(name)
    loudest: list[float] = []

    def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
        loudest.append(float(tensors_in(output)[0].abs().max()))

    with layer.register_forward_hook(note):
        for value in (0.0, -1.0):
            silence(layer, value)
            loudest.clear()
            run(body)
            if not any(loudest):
                return value
    raise ValueError(
        f"no value of the weights of {name} ({type(layer).__name__}) makes it give zeros"
    )
