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
from torch.utils._pytree import tree_leaves, tree_map_only

from esper.kasmina.blueprints import COPY_ZERO
from esper.kasmina.copies.copying import Copy, copy_module, shared_names, silence
from esper.kasmina.copies.membership import Member, locate, members_of, restack, source_name
from esper.kasmina.pricing import count_backward, count_flops
from esper.kasmina.probing import (
    Call,
    Example,
    batch_size,
    call_with,
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
Reasons = dict[str, str | None]
"""Module -> why something is not possible with it; None if it is."""


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
    features = call.output
    module = host.get_submodule(source)
    parts = [(name, type(part), *part._parameters) for name, part in module.named_modules()]
    build = (type(module), tuple(parts))

    def run(copied: nn.Module) -> Tensor:
        return Copy(copied)(features, *call.args[1:], **call.kwargs)

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
        loudest.append(float(_tensors(output)[0].abs().max()))

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


# -- members of a list -----------------------------------------------------------------------------


class Tap(nn.Module):
    """Stands where a copy would stand, and gives back its first argument.

    In all else it is what its original is.
    """

    def __init__(self, original: nn.Module):
        super().__init__()
        vars(self)["stands_for"] = original  # not a child: the network must not count it twice
        self.seen: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Note the first argument and give it back."""
        first = (*args, *kwargs.values())[0]
        self.seen.append(first)
        return first

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the original."""
        return vars(self)["stands_for"].state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["stands_for"], name)


def runs_in_order(host: nn.Module, example: Example, names: Sequence[str]) -> Reasons:
    """Why a copy of each named module cannot stand behind it in its list; None if it can.

    The host is as before.
    """
    reasons: Reasons = {}
    # by list and by parent: a site and its block are two ways to the same position
    lists: dict[tuple[str, str], dict[int, str]] = {}
    for name in names:
        try:
            path, position = locate(host, name)
        except ValueError as problem:
            reasons[name] = str(problem)
            continue
        parent, _, _ = name.rpartition(".")
        lists.setdefault((path, parent), {})[position] = name
    if lists:
        with undisturbed(host):
            plain = _tensors(call_with(host, example))
            for (path, _), sites in lists.items():
                reasons |= _try_taps(host, example, path, sites, plain)
    return {name: reasons[name] for name in names}


def _try_taps(
    host: nn.Module, example: Example, path: str, sites: Mapping[int, str], plain: list[Tensor]
) -> Reasons:
    """Run the host once with a tap behind some members of the list at `path`.

    `sites` are the modules in question, by the position of their member; `plain` is what the host
    gives without taps.
    """
    members = members_of(host.get_submodule(path))
    taps = {position: Tap(members[position]) for position in sites}
    layout: list[Member] = []
    for position, module in enumerate(members):
        layout.append(Member(position, module))
        if position in taps:
            layout.append(Member(position, taps[position]))
    # a member that is left out need not show in the output: dropout, or a branch that begins at 0
    members_run: set[int] = set()
    site_outputs: dict[int, list[Any]] = {position: [] for position in sites}

    def note_run(position: int, *_: Any) -> None:
        members_run.add(position)

    def note_output(position: int, _module: nn.Module, _inputs: Any, output: Any) -> None:
        site_outputs[position].append(output)

    with ExitStack() as stack:
        for position, module in enumerate(members):
            stack.enter_context(module.register_forward_hook(partial(note_run, position)))
        for position, name in sites.items():
            site = host.get_submodule(name)
            stack.enter_context(site.register_forward_hook(partial(note_output, position)))
        try:
            stack.enter_context(restack(host, path, layout))
            with torch.no_grad():
                output = _tensors(call_with(host.eval(), example))
        except Exception as problem:  # whatever a user's network does with a longer list
            reason = f"one more member does not work: {type(problem).__name__}: {problem}"
            return dict.fromkeys(sites.values(), reason)
    if len(members_run) < len(members) or not _are_equal(plain, output):
        reason = f"what the network does with {path} depends on how long it is"
        return dict.fromkeys(sites.values(), reason)
    return {
        name: _judge_tap(site_outputs[position], taps[position].seen)
        for position, name in sites.items()
    }


def _are_equal(plain: list[Tensor], tapped: list[Tensor]) -> bool:
    """Whether a host gives the same with taps; of outputs with an entry per layer, the first."""
    pairs = list(zip(plain, tapped, strict=False))
    if len(plain) != len(tapped):
        pairs = pairs[:1]
    return bool(pairs) and all(torch.equal(before, after) for before, after in pairs)


def _judge_tap(outputs: list[Any], seen: list[Any]) -> str | None:
    """Why a tap did not see what its site gave out, once and as it was; None if it did."""
    if len(seen) != 1 or len(outputs) != 1:
        return f"it runs {len(outputs)} times, and a member behind it would run {len(seen)} times"
    if seen[0] is not outputs[0]:
        return "a member behind it would not get its output as it is"
    return None


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
