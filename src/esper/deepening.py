"""A deeper network from a trained one, at once: copies of its layers among them. No garden, no policy."""

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.copies import Copy, copy_module
from esper.kasmina.identity import find_zeroed
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.natives import follow_flags, restack
from esper.kasmina.order import runs_in_order
from esper.kasmina.probing import Example, call_with, undisturbed
from esper.kasmina.seeds import Fossils
from esper.kasmina.slot import has_slots
from esper.leyline.errors import HostError, OptimizerError, SettingError, UnknownNameError

_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule")


def deepen(
    model: nn.Module,
    to: int,
    *,
    layers: str | None = None,
    identity: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    example: Example | None = None,
) -> nn.Module:
    """Make a model of `to` layers in place: its own layers and copies of them, each right behind its original.

    Refused with the model as before if it, its configuration or the optimiser cannot follow.

    Args:
        layers: name of the nn.ModuleList or nn.Sequential, if the model has several: "model.layers".
        identity: copies that change nothing at first: the last layer of each residual branch is zero. Needs `example`.
        optimizer: takes the new parameters into the groups of their originals; all other state stays.
        example: one batch, as the model takes it; with it, it is proven first that the layers run in order.
    """
    _refuse_unfit(model, optimizer, identity, example)
    path = _find_layers(model, layers)
    members = dict(model.get_submodule(path).named_children())
    old = list(members.values())
    if isinstance(to, bool) or not isinstance(to, int) or to <= len(old):
        raise SettingError(
            f"to is {to!r}, and {path or 'the model'} has {len(old)} layers; it must be a larger number."
        )
    if example is not None:
        for name, reason in runs_in_order(model, example, [f"{path}.{key}".lstrip(".") for key in members]).items():
            if reason is not None:
                raise HostError(f"{name} cannot be followed by a copy: {reason}.")
    layout: list[tuple[int, nn.Module]] = []
    for place in range(to):
        source = place * len(old) // to
        is_first = not layout or layout[-1][0] != source
        layout.append((source, old[source] if is_first else copy_module(old[source], model)[0]))
    if identity:
        _silence(model, layout, old, example)
    for source, copied in layout:
        for own, parameter in zip(copied.parameters(), old[source].parameters(), strict=True):
            own.requires_grad_(parameter.requires_grad)
        follow_flags(old[source], copied)
    try:
        undo = restack(model, path, layout)
    except ValueError as problem:
        raise HostError(f"this model cannot have {to} layers: {problem}.") from problem
    if example is not None:
        _try_out(model, example, undo)
    if optimizer is not None:
        _extend(optimizer, layout, old)
    return model


def _refuse_unfit(model: nn.Module, optimizer: Any, identity: bool, example: Example | None) -> None:
    if isinstance(model, MorphogeneticModel) or has_slots(model):
        raise HostError("this model is growing in a garden; deepen garden.harvest(), or the model before esper.grow.")
    wrapper = next((type(m).__name__ for m in model.modules() if type(m).__name__ in _WRAPPERS), None)
    parameter = next((p for p in model.parameters() if type(p) is not nn.Parameter or type(p.data) is not Tensor), 0)
    if wrapper is not None or not isinstance(parameter, int):
        what = wrapper or f"a {type(parameter.data).__name__}"  # type: ignore[union-attr]
        raise HostError(f"this model holds {what}; deepen the plain model first, then wrap, shard or compile it.")
    if identity and example is None:
        raise SettingError(
            "identity=True finds by trying which layers to zero; pass example=, one batch for the model."
        )
    makes_state_early = isinstance(optimizer, torch.optim.Adagrad | torch.optim.LBFGS)
    if optimizer is not None and (makes_state_early or not isinstance(optimizer, torch.optim.Optimizer)):
        way_out = "Use SGD, Adam, AdamW or another, or build it after esper.deepen."
        raise OptimizerError(f"{type(optimizer).__name__} cannot take up new parameters one by one. {way_out}")


def _find_layers(model: nn.Module, name: str | None) -> str:
    """The list to deepen: the one that is named, or the only one with members of one class."""
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)}
    if name is not None:
        if name not in lists or not len(lists[name]):
            raise UnknownNameError("list of layers", name, [n for n, m in lists.items() if len(m)])
        return name
    alike = {
        n: len(m)
        for n, m in lists.items()
        if not isinstance(m, Fossils) and len({type(each) for each in m}) == 1 and any(True for _ in m.parameters())
    }
    outer = {
        n: size for n, size in alike.items() if not any(n.startswith(f"{o}." if o else "") for o in alike if o != n)
    }
    found = [n for n, size in outer.items() if size > 1] or list(outer)
    if len(found) != 1:
        shown = ", ".join(f"{n!r} ({alike[n]})" for n in found) or "none"
        raise HostError(
            f"lists with layers of one class in this {type(model).__name__}: {shown}. One is needed: "
            "name an nn.ModuleList or nn.Sequential with layers='...'."
        )
    return found[0]


def _silence(model: nn.Module, layout: list[tuple[int, nn.Module]], old: list[nn.Module], example: Any) -> None:
    """Zero the last layer of each residual branch of every copy."""
    calls: dict[nn.Module, Any] = {}
    shared = {id(parameter) for parameter in model.parameters()}
    with ExitStack() as stack, undisturbed(model):
        for original in old:
            handle = original.register_forward_hook(lambda m, *call: calls.update({m: call}), with_kwargs=True)
            stack.callback(handle.remove)
        call_with(model, example)
        for source, copied in layout:
            if copied is old[source]:
                continue
            try:
                if any(id(parameter) in shared for parameter in copied.parameters()):
                    raise ValueError("it shares weights with the rest of the network")
                find_zeroed(copied.eval(), partial(_rerun, calls[old[source]]), calls[old[source]][2])
            except ValueError as problem:
                raise HostError(f"no copy of layer {source} can be the identity: {problem}.") from problem


def _rerun(call: Any, body: nn.Module) -> Tensor:
    args, kwargs, features = call
    grown: Tensor = Copy(body)(features, *args[1:], **kwargs)
    return grown


def _try_out(model: nn.Module, example: Example, undo: ExitStack) -> None:
    try:
        with undisturbed(model):
            call_with(model, example)
    except Exception as problem:  # whatever a layer does with features that it never saw
        undo.close()
        raise HostError(
            f"the deeper model does not run on the example: {type(problem).__name__}: {problem}"
        ) from problem


def _extend(optimizer: torch.optim.Optimizer, layout: list[tuple[int, nn.Module]], old: list[nn.Module]) -> None:
    """Copies join the groups of their originals, without history."""
    owner = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for source, copied in layout:
        for parameter, original in zip(copied.parameters(), old[source].parameters(), strict=True):
            group = owner.get(id(original))
            if group is not None and id(parameter) not in owner:
                group["params"].append(parameter)
                group.pop("param_names", None)  # names given at construction cannot be kept true
