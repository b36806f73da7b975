"""A deeper network from a trained one, at once, with copies of its layers; no garden, no policy."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from esper.kasmina.blueprints import COPY_ZERO
from esper.kasmina.copies.copying import Site, zeroed_copy
from esper.kasmina.copies.eligibility import runs_in_order, study_copies
from esper.kasmina.copies.membership import Member, follow_flags, restack
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.plain import grafts_of
from esper.kasmina.probing import Example, find_wrapper, refuse_parts
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
    """Make a model of `to` layers, in place: its own layers and copies of them.

    Each copy stands right behind its original. If the model, its configuration or the optimiser
    cannot follow, it is refused with the model as before.

    Args:
        model: a network whose layers stand in an `nn.ModuleList` or `nn.Sequential`.
        to: how many layers it shall have; more than now.
        layers: name of that list, if the model has several: "model.layers".
        identity: whether copies change nothing at first: the last layer of each residual branch
            is zero. Needs `example`.
        optimizer: takes the new parameters into the groups of their originals; all other state
            stays.
        example: one batch, as the model takes it. With it, it is proven first that the layers run
            in order.

    Returns:
        The model that you passed.

    Raises:
        HostError: the model cannot have copies of its layers.
        OptimizerError: the optimiser cannot take up new parameters one by one.
        SettingError: `to` is not larger than the number of layers, or `example` is missing.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import esper
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> deeper = esper.deepen(model, 3, optimizer=optimizer)
        >>> deeper is model, len(model), len(optimizer.param_groups[0]["params"])
        (True, 3, 6)
        >>> torch.equal(model[2].weight, model[1].weight)
        True
    """
    _refuse_unfit(model, optimizer, identity, example)
    path = _find_layers(model, layers)
    members: dict[str, nn.Module] = {}
    for key, module in model.get_submodule(path)._modules.items():
        if module is not None:
            members[f"{path}.{key}".lstrip(".")] = module
    old = list(members.values())
    if isinstance(to, bool) or not isinstance(to, int) or to <= len(old):
        raise SettingError(
            f"to is {to!r}, and {path or 'the model'} has {len(old)} layers; it must be a larger "
            f"number."
        )
    for name, member in members.items():
        reason = refuse_parts(member)
        if reason is not None:
            raise HostError(f"no copy can follow {name}: {reason}.")
    zeroed: list[Mapping[str, float]] = [{}] * len(old)
    if example is not None:
        zeroed = _study(model, list(members), identity, example)
    layout: list[Member] = []
    for position in range(to):
        # later layers first: their copies are worth more
        source = len(old) - 1 - (to - 1 - position) * len(old) // to
        is_original = not layout or layout[-1].source != source
        module = old[source] if is_original else _copy(old[source], model, zeroed[source])
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
    for name, reason in runs_in_order(model, example, names).items():
        if reason is not None:
            raise HostError(f"{_no_copy(identity)} can follow {name}: {reason}.")
    wanted = {COPY_ZERO} if identity else set()
    studied = study_copies(model, {name: name for name in names}, example, wanted)
    for name, inheritance in studied.items():
        reason = inheritance.problem
        if reason is None and identity:
            reason = inheritance.zero_problem
        if reason is not None:
            raise HostError(f"{_no_copy(identity)} can follow {name}: {reason}.")
    return [studied[name].zeroed for name in names]


def _no_copy(identity: bool) -> str:
    return "no copy that changes nothing" if identity else "no copy"


def _copy(original: nn.Module, model: nn.Module, zeroed: Mapping[str, float]) -> nn.Module:
    """A copy in the mode of its original; what is frozen there is frozen here."""
    copied = zeroed_copy(0, Site(original, model, zeroed=zeroed)).body
    for new, parameter in zip(copied.parameters(), original.parameters(), strict=True):
        new.requires_grad_(parameter.requires_grad)
    follow_flags(original, copied)
    return copied


def _refuse_unfit(
    model: nn.Module, optimizer: Any, identity: bool, example: Example | None
) -> None:
    """Refuse what cannot be deepened, before anything is copied."""
    if isinstance(model, MorphogeneticModel) or has_slots(model):
        raise HostError(
            "this model is growing in a garden; deepen garden.harvest(), or the "
            "model before esper.grow."
        )
    wrapper = find_wrapper(model)
    if wrapper is not None:
        raise HostError(
            f"this model holds a {wrapper}; deepen the plain model, then wrap, shard or compile it."
        )
    if identity and example is None:
        raise SettingError(
            "identity=True finds by trying which layers to zero; pass example=, one batch."
        )
    if optimizer is None:
        return
    # some make the state of a parameter when they are built, and would have none for a new one
    makes_state_early = isinstance(optimizer, torch.optim.Adagrad | torch.optim.LBFGS)
    if makes_state_early or not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(
            f"{type(optimizer).__name__} cannot take up new parameters one by one. Use SGD, Adam, "
            f"AdamW or another, or build it after esper.deepen."
        )


def _find_layers(model: nn.Module, name: str | None) -> str:
    """The list to deepen: the one that is named, or the only one with members of one class."""
    lists: dict[str, nn.ModuleList | nn.Sequential] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            lists[path] = module
    if name is not None:
        filled = [path for path, members in lists.items() if len(members)]
        if name not in filled:
            raise UnknownNameError("list of layers", name, filled)
        return name
    for graft in grafts_of(model):
        lists = {path: members for path, members in lists.items() if not _is_at(path, graft)}
    lengths = {path: len(members) for path, members in lists.items() if _is_stack(members)}
    outer = [path for path in lengths if not _is_inside(path, lengths)]
    candidates = [path for path in outer if lengths[path] > 1] or outer
    if len(candidates) != 1:
        shown = ", ".join(f"{path!r} ({lengths[path]})" for path in candidates) or "none"
        raise HostError(
            f"lists with layers of one class in this {type(model).__name__}: {shown}. One is "
            f"needed: name an nn.ModuleList or nn.Sequential with layers='...'."
        )
    return candidates[0]


def _is_stack(members: nn.ModuleList | nn.Sequential) -> bool:
    """Whether a list holds layers of one class, with parameters."""
    if not any(True for _ in members.parameters()):
        return False
    return len({type(member) for member in members}) == 1


def _is_at(path: str, other: str) -> bool:
    """Whether a module is another one, or in it."""
    return f"{path}.".startswith(f"{other}.")


def _is_inside(path: str, others: Iterable[str]) -> bool:
    """Whether one of the other lists holds this one; the model itself has the path ''."""
    return any(path.startswith(f"{other}." if other else "") for other in others if other != path)


def _extend(optimizer: torch.optim.Optimizer, layout: list[Member], old: list[nn.Module]) -> None:
    """Let copies join the groups of their originals, without history."""
    groups: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            groups[id(parameter)] = group
    for member in layout:
        originals = old[member.source].parameters()
        for parameter, original in zip(member.module.parameters(), originals, strict=True):
            if id(original) in groups and id(parameter) not in groups:
                group = groups[id(original)]
                group["params"].append(parameter)
                # names that were passed at construction cannot be kept true
                group.pop("param_names", None)
