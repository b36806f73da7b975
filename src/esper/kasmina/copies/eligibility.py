"""What can be copied where, and which zeroed layers make a copy the identity:

found by trying. No host is changed.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from esper.kasmina.blueprints import COPY_ZERO
from esper.kasmina.copies.copying import Copy, copy_module, shared_names, silence
from esper.kasmina.copies.membership import locate, members_of, restack, source_name
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
    """What one slot's module hands down."""

    problem: str | None = None  # why it cannot be copied; None if it can
    zero_problem: str | None = (
        "it was not looked for"  # why no copy of it is the identity; None if one is
    )
    zeroed: Mapping[str, float] = field(
        default_factory=dict
    )  # layers to zero for that, and the value of their weights
    flops: int = 0  # of one example forward through the copy
    deviation: float = 0.0  # how far it moves its own output
    is_native: bool = False  # whether a copy can stand behind it in the list that both are in
    entry: int = 0  # as in `BackwardFlops`
    mixing: int = 0


Run = Callable[[nn.Module], Tensor]
Zeroed = dict[str, float]
Reasons = dict[str, str | None]


def study_copies(
    host: nn.Module,
    modules: Mapping[str, str],
    example: Example,
    names: Collection[str],
    sites: Collection[str] = (),
) -> dict[str, Inheritance]:
    """What the module of each slot (slot id -> name) hands down to `names`, blueprints; `sites`
    carry slots too.
    """
    sources = {slot_id: source_name(host, name) for slot_id, name in modules.items()}
    calls = record_calls(host, example, {*modules.values(), *sources.values()})
    count, known = max(batch_size(example), 1), dict[Any, Zeroed]()
    found: dict[str, Inheritance] = {}
    with undisturbed(host):
        for slot_id, name in modules.items():
            call = calls[name][-1]
            inner = next(
                (other for other in (*modules.values(), *sites) if other.startswith(f"{name}.")),
                None,
            )
            problem = refuse_copy(host, sources[slot_id], calls[sources[slot_id]], call[2])
            problem = problem or (inner and f"{inner} inside it carries a slot of its own")
            handed = (
                Inheritance(problem) if problem else _study(host, sources[slot_id], call, count)
            )
            if COPY_ZERO in names and handed.problem is None:
                handed = _study_zero(host, sources[slot_id], call, handed, known)
            found[slot_id] = handed
    copied = {
        slot_id: modules[slot_id] for slot_id, handed in found.items() if handed.problem is None
    }
    reasons = runs_in_order(host, example, list(copied.values()))
    return found | {
        s: replace(found[s], is_native=reasons[name] is None) for s, name in copied.items()
    }


def _study(host: nn.Module, source: str, call: Call, count: int) -> Inheritance:
    """Run the module on its own output, as a copy would be."""
    args, kwargs, features = call
    copied = Copy(host.get_submodule(source))
    given = features.clone()
    outputs: list[Tensor] = []
    try:
        flops = count_flops(lambda: outputs.append(copied(given, *args[1:], **kwargs)))
    except Exception as problem:  # whatever a user's module does with features that it never saw
        return Inheritance(
            f"it does not run on its own output: {type(problem).__name__}: {problem}"
        )
    grown = outputs[0]
    if not torch.equal(given, features):
        return Inheritance(
            "it changes its input in place, so what it was given is lost when it returns"
        )
    if grown.shape != features.shape:
        return Inheritance(f"run on its own output it gives shape {tuple(grown.shape)}")
    deviation = float((grown - features).abs().max())
    if not math.isfinite(deviation):
        return Inheritance("run on its own output it gives NaN or Inf")
    backward = count_backward(copied, lambda inputs: copied(inputs, *args[1:], **kwargs), features)
    return Inheritance(
        flops=flops // count,
        deviation=deviation,
        entry=backward.entry // count,
        mixing=backward.mixing // count,
    )


def _study_zero(
    host: nn.Module, source: str, call: Call, so_far: Inheritance, known: dict[Any, Zeroed]
) -> Inheritance:
    """Look for the layers to zero, once for all modules that are built alike."""
    args, kwargs, features = call
    module = host.get_submodule(source)
    build = (
        type(module),
        tuple((name, type(part), *part._parameters) for name, part in module.named_modules()),
    )
    try:

        def run(copied: nn.Module) -> Tensor:
            return Copy(copied)(features, *args[1:], **kwargs)

        body, _ = copy_module(
            module, module
        )  # nothing of it is the host's, so that it may be changed
        for layer, value in known.get(build, {}).items():
            silence(body.get_submodule(layer), value)
        if build not in known or not torch.equal(
            run(body), features
        ):  # built alike, and yet not the same
            known[build] = find_zeroed(copy_module(module, module)[0], run, features)
        shared = shared_names(module, host)
        if any(name.startswith(f"{layer}.") for name in shared for layer in known[build]):
            raise ValueError(
                f"layers to zero share weights with the rest of the network: {', '.join(shared)}"
            )
    except ValueError as problem:
        return replace(so_far, zero_problem=str(problem))
    return replace(so_far, zero_problem=None, zeroed=known[build])


def find_zeroed(body: nn.Module, run: Run, features: Tensor) -> Zeroed:
    """The last layer of each residual branch, and its weights' value that gives zeros; ValueError
    if there is none.

    `run` calls a module on `features`, as the network does. Works on `body` in place, which becomes
    the identity.
    """
    layers = _layers_in_order(body, run)
    for parameter in filter(Tensor.is_floating_point, body.parameters()):
        parameter.detach().add_(
            0.01
        )  # a branch that begins at zero would look silent, and does not stay so
    if not _is_identity(body, run, features, layers):
        raise ValueError(
            "its output is not its input when all its layers give zeros: nothing goes around them"
        )
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
    """Modules with weights of their own, in the order in which they finish; attention counts as
    one.
    """
    seen: dict[str, None] = {}
    attentions = [
        name for name, module in body.named_modules() if isinstance(module, nn.MultiheadAttention)
    ]
    with ExitStack() as stack:
        for name, module in body.named_modules():
            is_inside = any(name.startswith(f"{outer}.") for outer in attentions)
            if (
                name
                and not is_inside
                and (module._parameters or isinstance(module, nn.MultiheadAttention))
            ):
                stack.enter_context(
                    module.register_forward_hook(lambda *_, name=name: seen.setdefault(name))
                )
        run(body)
    return list(seen)


def _is_identity(body: nn.Module, run: Run, features: Tensor, zeroed: Sequence[str]) -> bool:
    with ExitStack() as stack:
        for name in zeroed:
            layer = body.get_submodule(name)
            stack.enter_context(
                layer.register_forward_hook(
                    lambda *c: tree_map_only(Tensor, torch.zeros_like, c[2])
                )
            )
        return torch.equal(run(body), features)


def _find_silence(body: nn.Module, run: Run, name: str) -> float:
    """0 for most layers, -1 for norms that multiply by one plus their weight; the layer is left
    like that.
    """
    layer = body.get_submodule(name)
    loudest: list[float] = []
    with layer.register_forward_hook(
        lambda _m, _i, output: loudest.append(float(_tensors(output)[0].abs().max()))
    ):
        for value in (0.0, -1.0):
            silence(layer, value)
            loudest.clear()
            run(body)
            if not any(loudest):
                return value
    raise ValueError(
        f"no value of the weights of {name} ({type(layer).__name__}) makes it give zeros"
    )


class Tap(nn.Module):
    """Stands where a copy would stand:

    gives back its first argument, and is in all else what its original is.
    """

    def __init__(self, original: nn.Module):
        super().__init__()
        vars(self)["stands_for"] = original  # not a child: the network must not count it twice
        self.seen: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append((*args, *kwargs.values())[0])
        return self.seen[-1]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["stands_for"].state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["stands_for"], name)


def runs_in_order(host: nn.Module, example: Example, names: Sequence[str]) -> Reasons:
    """Why a copy of each named module cannot stand behind it in its list; None if it can.

    The host is as before.
    """
    reasons: Reasons = {}
    lists: dict[
        tuple[str, str], dict[int, str]
    ] = {}  # a site and its block are two ways to the same place
    for name in names:
        try:
            path, place = locate(host, name)
            lists.setdefault((path, name.rpartition(".")[0]), {})[place] = name
        except ValueError as problem:
            reasons[name] = str(problem)
    if lists:
        with undisturbed(host):
            plain = _tensors(call_with(host, example))
            for (path, _), places in lists.items():
                reasons |= _try_taps(host, example, path, places, plain)
    return {name: reasons[name] for name in names}


def _try_taps(
    host: nn.Module, example: Example, path: str, places: dict[int, str], plain: list[Tensor]
) -> Reasons:
    members = list(enumerate(members_of(host.get_submodule(path))))
    taps = {place: Tap(module) for place, module in members if place in places}
    layout = [
        (place, each)
        for place, module in members
        for each in (module, taps.get(place))
        if each is not None
    ]
    outputs: dict[int, list[Any]] = {place: [] for place in places}
    ran = set[
        int
    ]()  # one who is left out need not show in the output: dropout, or a branch that begins at zero
    with ExitStack() as stack:
        for place, module in members:
            stack.enter_context(
                module.register_forward_hook(lambda *_, place=place: ran.add(place))
            )
        for place, name in places.items():
            site, note = host.get_submodule(name), outputs[place].append
            stack.enter_context(
                site.register_forward_hook(lambda _m, _i, output, note=note: note(output))
            )
        try:
            stack.enter_context(restack(host, path, layout))
            with torch.no_grad():
                output = _tensors(call_with(host.eval(), example))
        except Exception as problem:  # whatever a user's network does with a longer list
            return dict.fromkeys(
                places.values(),
                f"one more member does not work: {type(problem).__name__}: {problem}",
            )
    pairs = list(zip(plain, output, strict=False)) if len(ran) == len(members) else []
    # of outputs with an entry for every layer only the first can be compared
    if not pairs or not all(
        torch.equal(*pair) for pair in (pairs if len(plain) == len(output) else pairs[:1])
    ):
        return dict.fromkeys(
            places.values(), f"what the network does with {path} depends on how long it is"
        )
    return {name: _judge(outputs[place], taps[place].seen) for place, name in places.items()}


def _judge(outputs: list[Any], seen: list[Any]) -> str | None:
    if len(seen) != 1 or len(outputs) != 1:
        return f"it runs {len(outputs)} times, and a member behind it would run {len(seen)} times"
    return None if seen[0] is outputs[0] else "a member behind it would not get its output as it is"


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
