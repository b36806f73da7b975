"""An optimiser's state on disk: plain facts, and tensors by parameter name.

What is read waits as an `OptimizerSnapshot` until an optimiser of the same kind is attached.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from pydantic import Field, TypeAdapter
from safetensors.torch import load
from torch import Tensor, nn

from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.optimiser import OptimizerLink
from esper.kasmina.packing import unpack
from esper.leyline.errors import OptimizerError, SaveError
from esper.storage.store import Plain, fitting, is_plain

Tensors = Mapping[str, Tensor]
_SEPARATOR = "|"
"""between a parameter's name and a key of its state"""

# Types of an optimiser's saved facts, so that a forged save is refused when it is read.
_FACTS: dict[str, TypeAdapter[Any]] = {
    "peak_rate": TypeAdapter(float),
    "was_high": TypeAdapter(bool),
    "steps": TypeAdapter(int),
    "seed_lr": TypeAdapter(Annotated[float, Field(gt=0.0)]),
    "scalars": TypeAdapter(dict[str, Plain]),
    "scheduler": TypeAdapter(Plain | None),
    "groups": TypeAdapter(list[Plain]),
}
_GROUP_FACTS: dict[str, TypeAdapter[Any]] = {
    "names": TypeAdapter(list[str]),
    "options": TypeAdapter(Plain),
    "tuples": TypeAdapter(list[str]),
    "tensors": TypeAdapter(dict[str, Plain]),
}


@dataclass(frozen=True)
class OptimizerSnapshot:
    """The saved state of one or several optimisers, waiting for theirs to be attached."""

    facts: Plain  # of the first optimiser; those of further ones are in "others"
    tensors: Tensors  # "parameter name|key of its state" -> value
    path: Path  # the file that errors name


class _Kind(NamedTuple):
    """What two optimisers must have in common for one to take the other's state."""

    name: str
    groups: int
    slot_groups: list[list[int]]  # each slot's group, after the host's group that it is like

    def __str__(self) -> str:
        pairs = [f"{number} like {like}" for like, number in self.slot_groups]
        return f"{self.name} with {self.groups} parameter groups, slots in {', '.join(pairs)}"


def _list_slot_groups(link: OptimizerLink) -> list[list[int]]:
    """Each group of a slot's, after the number of the host's group that it is like."""
    return [[like, number] for own in link.groups.values() for like, number in own.items()]


class _Match(NamedTuple):
    """An optimiser, and what was saved of it."""

    link: OptimizerLink
    facts: Plain


def describe_optimizers(
    model: MorphogeneticModel, link: OptimizerLink
) -> tuple[Plain, dict[str, Tensor]]:
    """Facts and tensors of all optimisers that follow a network."""
    tensors: dict[str, Tensor] = {}
    first, *others = [_describe_one(model, part, tensors) for part in link.all]
    return {**first, "others": others}, tensors


def _describe_one(
    model: MorphogeneticModel, link: OptimizerLink, tensors: dict[str, Tensor]
) -> Plain:
    """Group settings, the scheduler's numbers, the highest rate so far.

    Tensors of its state go into `tensors`, by parameter name.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kind = type(link.optimizer).__name__
    _refuse_late_groups(link, kind)
    scalars: dict[str, Plain] = {}
    for parameter, state in link.optimizer.state.items():
        if not isinstance(parameter, Tensor):
            raise _unsavable(kind, f"state[{parameter!r}], which is of no parameter")
        name = names.get(id(parameter))
        if name is None:
            continue  # not a parameter of this network: its owner saves it
        scalars[name] = {}
        for key, value in state.items():
            place = f"state {key!r} of {name}, a {type(value).__name__}"
            if not isinstance(key, str) or _SEPARATOR in key:
                raise _unsavable(kind, place)
            if _is_dense(value):
                tensors[f"{name}{_SEPARATOR}{key}"] = value.detach().contiguous()
            elif is_plain(value):
                scalars[name][key] = value
            else:
                raise _unsavable(kind, place)
    groups = [_describe_group(kind, group, names) for group in link.optimizer.param_groups]
    return {
        "kind": kind,
        "slots": _list_slot_groups(link),
        "scalars": scalars,
        "groups": groups,
        "scheduler": _describe_scheduler(link.scheduler),
        "peak_rate": link.peak_rate,
        "was_high": link.was_high,
        "steps": link.steps,
        "seed_lr": link.seed_lr,
    }


def _refuse_late_groups(link: OptimizerLink, kind: str) -> None:
    """Refuse groups that would not be where they are in an optimiser that is built anew."""
    count = len(link.optimizer.param_groups)
    if count != link.group_count or link.shares_optimizer():
        raise SaveError(
            f"{kind} has {count} parameter groups, and at garden.attach it had {link.group_count}, "
            f"or another garden follows it too. A resumed one would have them elsewhere. Add all "
            f"groups before you attach, and give every garden an optimiser of its own."
        )


def _is_dense(value: Any) -> bool:
    """Whether a value is a plain tensor with data, neither sparse nor of a class of its own."""
    is_plain_class = type(value) in (Tensor, nn.Parameter)
    return is_plain_class and value.layout is torch.strided and not value.is_meta


def _unsavable(kind: str, place: str) -> SaveError:
    """The refusal of what would come back as something else."""
    return SaveError(
        f"{kind} has {place}: it would not come back from a save as it is. Under keys of text, "
        f"a parameter's state may hold dense tensors, numbers, text, None, lists and dicts of "
        f"these, and a group's options the same without tensors of several numbers."
    )


def _describe_group(kind: str, group: dict[str, Any], names: Mapping[int, str]) -> Plain:
    """Names of a group's parameters, and its settings as plain numbers."""
    options: Plain = {}
    for key, value in group.items():
        if key == "params":
            continue
        if isinstance(value, Tensor | np.generic) and math.prod(value.shape) == 1:
            options[key] = value.item()
        else:
            options[key] = list(value) if type(value) is tuple else value
        if not is_plain({key: options[key]}):
            raise _unsavable(kind, f"the option {key!r}, a {type(value).__name__}")
    tensors = [key for key, value in group.items() if isinstance(value, Tensor)]
    return {
        "names": [names[id(parameter)] for parameter in group["params"] if id(parameter) in names],
        "options": options,
        "tuples": [key for key, value in group.items() if type(value) is tuple],
        "tensors": {key: _describe_number(group[key]) for key in tensors},
    }


def _describe_number(value: Tensor) -> Plain:
    """What a tensor of one number is built from again; its value is among the options."""
    dtype = str(value.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(value.shape), "is_on_cpu": value.device.type == "cpu"}


def _describe_scheduler(scheduler: Any) -> Plain | None:
    """A scheduler's numbers; its functions are the user's own and are made again by their code."""
    if scheduler is None:
        return None
    state = scheduler.state_dict()
    return {key: value for key, value in state.items() if is_plain(value, exact=False)}


def read_snapshot(
    facts: Plain | None, contents: Mapping[str, bytes], path: Path
) -> OptimizerSnapshot | None:
    """What was saved of the optimisers; facts of other types than those saved are refused.

    Errors name `path`.
    """
    if facts is None:
        return None
    for optimizer in (facts, *facts["others"]):
        _check_facts(optimizer, _FACTS)
        for group in optimizer["groups"]:
            _check_facts(group, _GROUP_FACTS)
    return OptimizerSnapshot(facts, unpack(load(contents["optimizer"])), path)


def _check_facts(facts: Plain, adapters: Mapping[str, TypeAdapter[Any]]) -> None:
    for name, adapter in adapters.items():
        adapter.validate_python(facts[name], strict=True)


def restore_optimizer(
    model: MorphogeneticModel, link: OptimizerLink, snapshot: OptimizerSnapshot
) -> None:
    """Put a snapshot into freshly attached optimisers of the same kinds."""
    with fitting(snapshot.path):
        for match in match_optimizers(link, snapshot):
            _restore_one(model, match.link, match.facts, snapshot.tensors)


def match_optimizers(link: OptimizerLink, snapshot: OptimizerSnapshot) -> list[_Match]:
    """Every optimiser with what was saved of it; those of other kinds are refused."""
    saved = [snapshot.facts, *snapshot.facts["others"]]
    saved_kinds = [_Kind(facts["kind"], len(facts["groups"]), facts["slots"]) for facts in saved]
    kinds = [
        _Kind(
            type(part.optimizer).__name__, len(part.optimizer.param_groups), _list_slot_groups(part)
        )
        for part in link.all
    ]
    if saved_kinds != kinds:
        raise OptimizerError(
            f"the save belongs to {' and '.join(map(str, saved_kinds))}, got "
            f"{' and '.join(map(str, kinds))}. Build each as before, groups in the same order."
        )
    return [_Match(part, facts) for part, facts in zip(link.all, saved, strict=True)]


def _restore_one(
    model: MorphogeneticModel, link: OptimizerLink, facts: Plain, tensors: Tensors
) -> None:
    """Put what was saved of one optimiser into it."""
    optimizer = link.optimizer
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        optimizer.state.pop(parameter, None)  # what was saved before its first step has none
    moved = _names_with_moved_steps(facts)
    tensors_by_name = _group_by_name(tensors)
    for name, scalars in facts["scalars"].items():
        parameter = parameters[name]
        state = dict(scalars)
        for key, value in tensors_by_name.get(name, {}).items():
            stays = key == "step" and name not in moved
            state[key] = value.clone() if stays else value.to(parameter.device)
        optimizer.state[parameter] = state
    for group, saved in zip(optimizer.param_groups, facts["groups"], strict=True):
        _restore_group(group, saved, parameters)
    if link.scheduler is not None and facts["scheduler"] is not None:
        link.scheduler.load_state_dict({**link.scheduler.state_dict(), **facts["scheduler"]})
    link.peak_rate = facts["peak_rate"]
    link.was_high = facts["was_high"]
    link.steps = facts["steps"]
    if not link.is_seed_lr_given:
        link.seed_lr = facts["seed_lr"]


def _names_with_moved_steps(facts: Plain) -> set[str]:
    """Parameters whose `step` torch keeps on their device: those of these kinds of optimiser."""
    names: set[str] = set()
    for group in facts["groups"]:
        options = group["options"]
        if options.get("capturable") or options.get("fused"):
            names.update(group["names"])
    return names


def _group_by_name(tensors: Tensors) -> dict[str, dict[str, Tensor]]:
    """The tensors of each parameter's state, by key."""
    by_name: dict[str, dict[str, Tensor]] = {}
    for label, value in tensors.items():
        name, _, key = label.rpartition(_SEPARATOR)
        by_name.setdefault(name, {})[key] = value
    return by_name


def _restore_group(
    group: dict[str, Any], saved: Plain, parameters: Mapping[str, nn.Parameter]
) -> None:
    """Give a group the settings and parameters that it had; parameters of others stay."""
    for key, value in saved["options"].items():
        present = group.get(key)
        plain = tuple(value) if key in saved["tuples"] else value
        if isinstance(present, float) and not isinstance(plain, int | float):
            raise TypeError(f"{key} is not a number")
        kind = saved["tensors"].get(key)
        if isinstance(present, Tensor):
            present.fill_(value)  # in place: your own loop may hold the tensor too
        elif kind is not None:  # set later, by hand or by a scheduler
            device = torch.device("cpu") if kind["is_on_cpu"] else _device_of(group)
            dtype = getattr(torch, kind["dtype"])
            group[key] = torch.full(kind["shape"], value, dtype=dtype, device=device)
        else:
            group[key] = plain
    known = {id(parameter) for parameter in parameters.values()}
    foreign = [parameter for parameter in group["params"] if id(parameter) not in known]
    group["params"][:] = [*(parameters[name] for name in saved["names"]), *foreign]


def _device_of(group: dict[str, Any]) -> torch.device:
    """Where the parameters of a group are; those of an empty one may come anywhere."""
    return next((parameter.device for parameter in group["params"]), torch.device("cpu"))
