"""A network beside the one that its configuration builds.

Needs torch alone: exports carry this file along.
"""

import copy
import re
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

# fields that say which member this is
NUMBER = re.compile(r"_?((layer|block)_?(idx|index|id|number|num)|idx|index)")
FLAGS = ("training", "gradient_checkpointing", "_gradient_checkpointing_func")
_ABSENT = "nothing"


class Difference(NamedTuple):
    """Where a network is not what its configuration builds."""

    what: str
    ours: Any
    rebuilt: Any


class FieldValue(NamedTuple):
    """A field of a module or a configuration, and the value that it is to have."""

    thing: Any
    field: str
    value: Any


@dataclass(frozen=True)
class Comparison:
    """A network beside the one that its configuration builds."""

    differences: list[Difference] = field(default_factory=list)
    """one for each member that differs"""
    numbers: list[FieldValue] = field(default_factory=list)
    """what members are numbered in the rebuilt network"""
    outside: list[FieldValue] = field(default_factory=list)
    """plain fields of modules around the list that are others in the rebuilt network"""
    parts: list[FieldValue] = field(default_factory=list)
    """dropouts of members that are others in the rebuilt network"""


# -- plain fields ----------------------------------------------------------------------------------


def set_field(thing: Any, name: str, value: Any, undo: ExitStack) -> None:
    """Set a field until `undo` is closed."""
    before = getattr(thing, name)
    setattr(thing, name, value)
    undo.callback(setattr, thing, name, before)


def plain_fields(member: nn.Module, name: str) -> dict[str, Any]:
    """Plain attributes of a part of a member, its class among them."""
    try:
        part = member.get_submodule(name)
    except AttributeError:
        return {}
    fields: dict[str, Any] = {}
    for key, value in vars(part).items():
        is_compared = key[0] != "_" or NUMBER.fullmatch(key)
        if is_compared and _is_plain(value) and key not in FLAGS:
            fields[key] = value
    fields["class"] = type(part).__name__
    return fields


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _is_plain_list(value: object) -> bool:
    return type(value) in (list, tuple) and all(map(_is_plain, value))  # type: ignore[call-overload]


# -- the network that a configuration builds -------------------------------------------------------


def rebuild(keeper: Any) -> nn.Module:
    """The model as its saved configuration builds it, without weights."""
    config: Any = getattr(keeper, "config", None)
    try:
        if hasattr(config, "save_pretrained"):
            with tempfile.TemporaryDirectory(prefix="esper-") as folder:
                config.save_pretrained(folder)
                config = type(config).from_pretrained(folder)
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            fresh: nn.Module = type(keeper)(copy.deepcopy(config))
    except Exception as problem:  # whatever a class does with a configuration
        raise ValueError(
            f"{type(keeper).__name__} cannot be built from its {type(config).__name__} alone, so "
            f"from_pretrained would not give it back ({type(problem).__name__}: {problem})"
        ) from problem
    return fresh


def compare(keeper: nn.Module, members: nn.Module) -> Comparison:
    """Compare a model with its rebuilt self; `members` is the list of it that grows."""
    fresh = rebuild(keeper)
    path = next(name for name, module in keeper.named_modules() if module is members)
    comparison = Comparison()
    _compare_shapes(_shapes_of(keeper), _shapes_of(fresh), path, comparison)
    children = list(members.children())
    try:
        twins = list(fresh.get_submodule(path).children())
    except AttributeError:  # the configuration builds no such list
        twins = []
    if len(twins) != len(children):
        difference = Difference(f"length of {path}", len(children), len(twins))
        comparison.differences.append(difference)
    for member, twin in zip(children, twins, strict=False):
        _compare_members(member, twin, path, comparison)
    _compare_outside(keeper, fresh, path, comparison)
    return comparison


def _shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of all that a module would save; of what is no tensor, an empty one."""
    state = module.state_dict()
    return {key: tuple(getattr(value, "shape", ())) for key, value in state.items()}


def _compare_shapes(
    ours: Mapping[str, Any], rebuilt: Mapping[str, Any], path: str, comparison: Comparison
) -> None:
    """Note keys with another shape, or on one side only; of members, without their number."""
    any_member = re.compile(rf"^{re.escape(path)}\.[^.]+")
    for key in sorted(ours.keys() | rebuilt.keys()):
        shape = ours.get(key, _ABSENT)
        rebuilt_shape = rebuilt.get(key, _ABSENT)
        if shape != rebuilt_shape:
            what = any_member.sub(f"{path}.*", key)
            comparison.differences.append(Difference(what, shape, rebuilt_shape))


def _compare_members(member: nn.Module, twin: nn.Module, path: str, comparison: Comparison) -> None:
    """Note the plain fields in which a member is not what its twin of the rebuilt network is."""
    # a stand-in has no attributes of its own
    original = vars(member).get("stands_for", member)
    followed: list[str] = []
    for name, part in twin.named_modules():
        if any(name == other or name.startswith(f"{other}.") for other in followed):
            continue
        fields = plain_fields(original, name)
        for key, value in plain_fields(twin, name).items():
            if fields.get(key, _ABSENT) == value:
                continue
            if NUMBER.fullmatch(key) and key in fields:
                if original is member:
                    number = FieldValue(member.get_submodule(name), key, value)
                    comparison.numbers.append(number)
            elif fields and name and _are_dropouts(original.get_submodule(name), part):
                followed.append(name)
                if original is member:
                    comparison.parts.append(FieldValue(member, name, part))
                break
            else:
                what = f"{path}.*.{name}.{key}"
                difference = Difference(what, fields.get(key, _ABSENT), value)
                comparison.differences.append(difference)


def _are_dropouts(*parts: nn.Module) -> bool:
    """Whether these modules hand on what they get in evaluation mode, and have no state."""
    features = torch.linspace(-9, 9, 24).reshape(2, 3, 4)
    for part in parts:
        if part.state_dict() or any(True for _ in part.buffers()):
            return False
        try:
            with torch.no_grad():
                output = copy.deepcopy(part).eval()(features)
        except Exception:  # it takes something else
            return False
        if output is not features and not (
            isinstance(output, torch.Tensor) and torch.equal(output, features)
        ):
            return False
    return True


def _compare_outside(
    keeper: nn.Module, fresh: nn.Module, path: str, comparison: Comparison
) -> None:
    """Note the plain fields of modules around the list that the rebuilt network has otherwise."""
    twins = dict(fresh.named_modules())
    for name, module in keeper.named_modules():
        if name not in twins or name.startswith(f"{path}."):
            continue
        rebuilt = vars(twins[name])
        for key, value in vars(module).items():
            is_compared = key[0] != "_" and key not in FLAGS and key in rebuilt
            if not is_compared or not (_is_plain(value) or _is_plain_list(value)):
                continue
            if type(rebuilt[key]) is type(value) and rebuilt[key] != value:
                comparison.outside.append(FieldValue(module, key, rebuilt[key]))


def build_of(member: nn.Module) -> list[Any]:
    """How a member is built: classes, plain fields and shapes, without its number."""
    parts: list[Any] = [sorted(_shapes_of(member).items())]
    for name, _ in member.named_modules():
        fields = plain_fields(member, name)
        parts.append((name, {k: v for k, v in fields.items() if not NUMBER.fullmatch(k)}))
    return parts
