"""A deeper network from a trained one, at once:

copies of its layers among them. No garden, no policy.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from esper.kasmina.blueprints import COPY_ZERO
from esper.kasmina.copies.copying import Site, zeroed_copy
from esper.kasmina.copies.eligibility import runs_in_order, study_copies
from esper.kasmina.copies.membership import Member, follow_flags, restack
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.probing import Example, find_wrapper, refuse_parts
from esper.kasmina.seeds import Fossils
from esper.kasmina.slot import has_slots
from esper.leyline.errors import HostError, OptimizerError, SettingError, UnknownNameError


def deepen(
    model: nn.Module,
    to: int,
    *,
    layers: str | None = None,
    identity: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    example: Example | None = None,
) -> nn.Module:
    """Make a model of `to` layers in place: its own layers and copies of them, each right behind
    its original.

    Refused with the model as before if it, its configuration or the optimiser cannot follow.

    Args: layers: name of the nn.ModuleList or nn.Sequential, if the model has several:
        "model.layers". identity: copies that change nothing at first: the last layer of each
        residual branch is zero. Needs `example`. optimizer: takes the new parameters into the
        groups of their originals; all other state stays. example: one batch, as the model takes it;
        with it, it is proven first that the layers run in order.
    """
    _refuse_unfit(model, optimizer, identity, example)
    path = _find_layers(model, layers)
    members = {
        name: part for name, part in model.get_submodule(path)._modules.items() if part is not None
    }
    old = list(members.values())
    if isinstance(to, bool) or not isinstance(to, int) or to <= len(old):
        has = f"{path or 'the model'} has {len(old)} layers"
        raise SettingError(f"to is {to!r}, and {has}; it must be a larger number.")
    names = [f"{path}.{key}".lstrip(".") for key in members]
    for name, member in zip(names, old, strict=True):
        if (reason := refuse_parts(member)) is not None:
            raise HostError(f"no copy can follow {name}: {reason}.")
    zeroed = [{}] * len(old) if example is None else _study(model, names, identity, example)
    layout: list[Member] = []
    for place in range(to):
        source = (
            len(old) - 1 - (to - 1 - place) * len(old) // to
        )  # later layers first: their copies are worth more
        is_first = not layout or layout[-1].source != source
        module = old[source] if is_first else _copy(old[source], model, zeroed[source])
        layout.append(Member(source, module))
    try:
        restack(model, path, layout)
    except ValueError as problem:
        raise HostError(f"this model cannot have {to} layers: {problem}.") from problem
    if optimizer is not None:
        _extend(optimizer, layout, old)
    return model


def _study(
    model: nn.Module, names: list[str], identity: bool, example: Example
) -> list[Mapping[str, float]]:
    """What to zero in a copy of each layer; a layer that no copy can follow is refused."""
    reasons: dict[str, str | None] = runs_in_order(model, example, names)
    if not any(reasons.values()):
        found = study_copies(
            model, {name: name for name in names}, example, {COPY_ZERO} if identity else set()
        )
        reasons = {
            name: told.problem or (told.zero_problem if identity else None)
            for name, told in found.items()
        }
    for name, reason in reasons.items():
        if reason is not None:
            raise HostError(
                f"no copy{' that changes nothing' if identity else ''} can follow {name}: {reason}."
            )
    return [found[name].zeroed for name in names]


def _copy(original: nn.Module, model: nn.Module, zeroed: Mapping[str, float]) -> nn.Module:
    """A copy in the mode of its original; what is frozen there is frozen here."""
    copied = zeroed_copy(0, Site(original, model, zeroed=zeroed)).body
    for own, parameter in zip(copied.parameters(), original.parameters(), strict=True):
        own.requires_grad_(parameter.requires_grad)
    follow_flags(original, copied)
    return copied


def _refuse_unfit(
    model: nn.Module, optimizer: Any, identity: bool, example: Example | None
) -> None:
    if isinstance(model, MorphogeneticModel) or has_slots(model):
        raise HostError(
            "this model is growing in a garden; deepen garden.harvest(), or the "
            "model before esper.grow."
        )
    if (wrapper := find_wrapper(model)) is not None:
        raise HostError(
            f"this model holds a {wrapper}; deepen the plain model, then wrap, shard or compile it."
        )
    if identity and example is None:
        raise SettingError(
            "identity=True finds by trying which layers to zero; pass example=, one batch."
        )
    makes_state_early = isinstance(optimizer, torch.optim.Adagrad | torch.optim.LBFGS)
    if optimizer is not None and (
        makes_state_early or not isinstance(optimizer, torch.optim.Optimizer)
    ):
        way_out = "Use SGD, Adam, AdamW or another, or build it after esper.deepen."
        raise OptimizerError(
            f"{type(optimizer).__name__} cannot take up new parameters one by one. {way_out}"
        )


def _find_layers(model: nn.Module, name: str | None) -> str:
    """The list to deepen: the one that is named, or the only one with members of one class."""
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)}
    if name is not None:
        if name not in lists or not len(lists[name]):
            raise UnknownNameError("list of layers", name, [n for n, m in lists.items() if len(m)])
        return name
    own = {
        n: m
        for n, m in lists.items()
        if not isinstance(m, Fossils) and any(True for _ in m.parameters())
    }
    alike = {n: len(m) for n, m in own.items() if len({type(each) for each in m}) == 1}
    outer = [
        n for n in alike if not any(n.startswith(f"{o}." if o else "") for o in alike if o != n)
    ]
    found = [n for n in outer if alike[n] > 1] or outer
    if len(found) != 1:
        shown = ", ".join(f"{n!r} ({alike[n]})" for n in found) or "none"
        way_out = "One is needed: name an nn.ModuleList or nn.Sequential with layers='...'."
        raise HostError(
            f"lists with layers of one class in this {type(model).__name__}: {shown}. {way_out}"
        )
    return found[0]


def _extend(optimizer: torch.optim.Optimizer, layout: list[Member], old: list[nn.Module]) -> None:
    """Copies join the groups of their originals, without history."""
    owner = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for source, copied in layout:
        for parameter, original in zip(copied.parameters(), old[source].parameters(), strict=True):
            if (group := owner.get(id(original))) is not None and id(parameter) not in owner:
                group["params"].append(parameter)
                group.pop("param_names", None)  # names given at construction cannot be kept true
