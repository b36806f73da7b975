"""New members in the list that their originals stand in; counts and configuration follow.

Needs torch alone: exports carry this file along. Whether a copy may stand there is tried in
`eligibility`.
"""

import copy
import itertools
import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from esper.kasmina.copies.copying import switch_caches_off

# fields that say how long a list is
_COUNT = re.compile(
    r"((num|n|number_of)_)?((text|hidden|encoder|decoder|transformer)_)*(layers?|blocks?|depth)"
)
# fields that hold a list with one entry per member
_PER_MEMBER = re.compile(r"layer|block|type")
# fields that say which member this is
_NUMBER = re.compile(r"_?((layer|block)_?(idx|index|id|number|num)|idx|index)")
_FLAGS = ("training", "gradient_checkpointing", "_gradient_checkpointing_func")
_ABSENT = "nothing"


class Member(NamedTuple):
    """One entry of a list as it is to be."""

    source: int
    """position that the member, or the original of a copy, had before"""
    module: nn.Module


Layout = Sequence[Member]
Graft = Callable[[nn.Module, Sequence[nn.Module]], None]


class Difference(NamedTuple):
    """Where a network is not what its configuration builds."""

    what: str
    ours: Any
    rebuilt: Any


class Number(NamedTuple):
    """The value that a numbering field of a member's part has in the rebuilt network."""

    part: nn.Module
    field: str
    value: int


@dataclass(frozen=True)
class Comparison:
    """A network beside the one that its configuration builds."""

    differences: set[Difference]
    numbers: list[Number]


class CountingConfig(NamedTuple):
    """A configuration, and the sets of its fields that may count a list, the most likely first."""

    config: Any
    options: Sequence[tuple[str, ...]]


# -- which list, which member ----------------------------------------------------------------------


def source_name(model: nn.Module, name: str) -> str:
    """The module that a copy after `name` copies: itself, unless the model names another one."""
    copied_module = getattr(model, "copied_module", None)
    return name if copied_module is None else copied_module(name)


def members_of(module: nn.Module) -> list[nn.Module]:
    """All members of a list; `children()` names one that stands there twice only once."""
    return [member for member in module._modules.values() if member is not None]


def locate(host: nn.Module, name: str) -> tuple[str, int]:
    """The list in which a copy after `name` would stand, and its original's position there."""
    path, _, key = source_name(host, name).rpartition(".")
    members = host.get_submodule(path)
    if not isinstance(members, nn.ModuleList | nn.Sequential):
        raise ValueError(
            f"{name} stands in a {type(members).__name__}, not in an nn.ModuleList or nn.Sequential"
        )
    return path, list(members._modules).index(key)


# -- placing ---------------------------------------------------------------------------------------


def insert_copies(host: nn.Module, name: str, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Put copies of a member right behind it.

    Returns for each copy the module that is to it what `name` is to its original. Raises
    ValueError, with the host as before, if its configuration cannot follow.
    """
    path, index = locate(host, name)
    members = members_of(host.get_submodule(path))
    old = [Member(position, member) for position, member in enumerate(members)]
    for module in modules:
        follow_flags(old[index].module, module)
    copies = [Member(index, module) for module in modules]
    behind = index + 1
    restack(host, path, [*old[:behind], *copies, *old[behind:]])
    parent, _, _ = name.rpartition(".")
    carriers = members_of(host.get_submodule(parent))
    return carriers[behind : behind + len(modules)]


def place_fossils(
    host: nn.Module, site: nn.Module, fossils: Sequence[tuple[Any, bool]], graft: Graft
) -> None:
    """Build a module's fossils into its host.

    Each fossil says whether it becomes a member. A member stands behind the one before it; `graft`
    puts every other fossil on the module that it comes after.
    """
    bodies: list[nn.Module] = []
    groups: list[list[nn.Module]] = [[]]
    for fossil, becomes_member in fossils:
        if becomes_member:
            bodies.append(fossil.body)
            groups.append([])
        else:
            groups[-1].append(fossil)
    carriers = [site]
    if bodies:
        name = next(name for name, module in host.named_modules() if module is site)
        carriers += insert_copies(host, name, bodies)
    for carrier, group in zip(carriers, groups, strict=True):
        has_caches = any(getattr(fossil, "caches", None) for fossil in group)
        if group:
            graft(carrier, group)
        if has_caches:
            switch_caches_off(host, carrier)


def follow_flags(original: nn.Module, copied: nn.Module) -> None:
    """A member is in the mode of its original, and checkpointed if that is."""
    originals = dict(original.named_modules())
    for name, part in copied.named_modules():
        if name not in originals:
            continue
        flags = vars(originals[name])
        for flag in _FLAGS:
            if flag in flags:
                vars(part)[flag] = flags[flag]


def restack(host: nn.Module, path: str, layout: Layout) -> ExitStack:
    """Give the list at `path` these members; all that counts them follows.

    Close the result to undo everything.
    """
    around = _modules_around(host, path)
    members = around[0]
    owner = around[1] if len(around) > 1 else None
    old = members_of(members)
    configs = [module.config for module in around if hasattr(module, "config")]
    # the outermost model that saves itself by its configuration
    keepers = [module for module in around if hasattr(module, "save_pretrained")]
    keeper = keepers[-1] if keepers else None
    with ExitStack() as undo:
        known = set() if keeper is None else _compare(keeper, members).differences
        _set_members(members, owner, layout, undo)
        counting: list[Any] = [] if owner is None else [owner]
        if keeper is None:
            counting += configs[:1]
        for thing in counting:
            options = _count_options(thing, path, len(old))
            _follow(thing, options[0] if options else (), len(old), layout, undo)
        if keeper is None:
            _renumber(old, layout, undo)
        else:
            distinct = {id(config): config for config in configs}.values()
            choices = [
                CountingConfig(config, [*_count_options(config, path, len(old)), ()])
                for config in distinct
            ]
            fields_set = _find_configuration(keeper, members, choices, known, len(old), layout)
            undo.callback(fields_set.close)
        return undo.pop_all()


def _modules_around(host: nn.Module, path: str) -> list[nn.Module]:
    """The module at `path`, the one that holds it, and so on up to the host."""
    modules = [host.get_submodule(path)]
    while path:
        path, _, _ = path.rpartition(".")
        modules.append(host.get_submodule(path))
    return modules


def _set_members(
    members: nn.Module, owner: nn.Module | None, layout: Layout, undo: ExitStack
) -> None:
    """Put the layout's modules into the list.

    An owner with `insert_block` has more than one list to keep in step, and does it itself.
    """
    old_keys = {
        (position, id(module)): key
        for position, (key, module) in enumerate(members._modules.items())
    }
    children = [] if owner is None else list(owner.children())
    for module in (members, *children):
        undo.callback(_restore, module._modules, dict(module._modules))
    insert = getattr(owner, "insert_block", None)
    if insert is not None:
        for position, member in enumerate(layout):
            if (member.source, id(member.module)) not in old_keys:
                insert(position, member.module)
        return
    keys = list(members._modules)
    are_numbers = keys == [str(position) for position in range(len(keys))]
    named: dict[str, nn.Module | None] = {}
    for position, member in enumerate(layout):
        old_key = old_keys.get((member.source, id(member.module)))
        if are_numbers:
            key = str(position)
        elif old_key is not None:
            key = old_key
        else:
            key = _free_key(keys[member.source], {*keys, *named})
        named[key] = member.module
    _restore(members._modules, named)


def _free_key(original: str, taken: Container[str]) -> str:
    """The first of original_copy1, original_copy2 ... that no member has."""
    keys = (f"{original}_copy{count}" for count in itertools.count(1))
    return next(key for key in keys if key not in taken)


def _restore(modules: dict[str, nn.Module | None], before: dict[str, nn.Module | None]) -> None:
    modules.clear()
    modules.update(before)


# -- what counts members ---------------------------------------------------------------------------


def _set(thing: Any, field: str, value: Any, undo: ExitStack) -> None:
    before = getattr(thing, field)
    setattr(thing, field, value)
    undo.callback(setattr, thing, field, before)


def _count_options(thing: Any, path: str, count: int) -> list[tuple[str, ...]]:
    """Sets of fields that may count a list of this length, the most likely first."""
    named = [field for field in dir(thing) if _COUNT.fullmatch(field)]
    fields = [field for field in named if _is_count(getattr(thing, field, None), count)]
    sides = [side for side in ("encoder", "decoder") if side in path]
    same_side = [field for field in fields if _names_side(field, sides)]
    no_side = [field for field in fields if "coder" not in field]
    one_by_one = [[field] for field in fields]
    options = [tuple(group) for group in (same_side, no_side, fields, *one_by_one) if group]
    return list(dict.fromkeys(options))


def _names_side(field: str, sides: Sequence[str]) -> bool:
    return any(side in field for side in sides)


def _is_count(value: object, count: int) -> bool:
    return type(value) is int and value == count  # True counts nothing


def _follow(
    thing: Any, counts: Sequence[str], old_count: int, layout: Layout, undo: ExitStack
) -> None:
    """Set the fields that count members, and the lists that have an entry for each."""
    if not counts:
        return
    wanted: dict[str, Any] = {field: len(layout) for field in counts}
    for field, value in getattr(thing, "__dict__", {}).items():
        is_list = type(value) in (list, tuple) and len(value) == old_count
        if is_list and _PER_MEMBER.search(field):
            wanted[field] = type(value)(value[member.source] for member in layout)
    for field, value in wanted.items():
        with suppress(AttributeError, TypeError, ValueError):  # a frozen one stays as it is
            _set(thing, field, value, undo)


def _renumber(old: Sequence[nn.Module], layout: Layout, undo: ExitStack) -> None:
    """Number the members again in a network that has no configuration to read numbers from."""
    for name, part in old[0].named_modules():
        for field in [field for field in vars(part) if _NUMBER.fullmatch(field)]:
            first = vars(part)[field]
            numbers = [_plain_fields(member, name).get(field) for member in old]
            if first not in (0, 1) or numbers != [first + index for index in range(len(old))]:
                continue
            for position, member in enumerate(layout):
                if field in _plain_fields(member.module, name):
                    _set(member.module.get_submodule(name), field, first + position, undo)


def _plain_fields(member: nn.Module, name: str) -> dict[str, Any]:
    """Plain attributes of a part of a member, its class among them."""
    try:
        part = member.get_submodule(name)
    except AttributeError:
        return {}
    fields: dict[str, Any] = {}
    for field, value in vars(part).items():
        is_compared = field[0] != "_" or _NUMBER.fullmatch(field)
        is_plain = value is None or isinstance(value, bool | int | float | str)
        if is_compared and is_plain and field not in _FLAGS:
            fields[field] = value
    fields["class"] = type(part).__name__
    return fields


# -- what the configuration builds -----------------------------------------------------------------


def _rebuild(keeper: Any) -> nn.Module:
    """The model as its saved configuration builds it, without weights."""
    config: Any = getattr(keeper, "config", None)
    try:
        if hasattr(config, "to_json_string"):
            config = type(config).from_dict(json.loads(config.to_json_string()))
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            fresh: nn.Module = type(keeper)(copy.deepcopy(config))
    except Exception as problem:  # whatever a class does with a configuration
        raise ValueError(
            f"{type(keeper).__name__} cannot be built from its {type(config).__name__} alone, so "
            f"from_pretrained would not give it back ({type(problem).__name__}: {problem})"
        ) from problem
    return fresh


def _compare(keeper: nn.Module, members: nn.Module) -> Comparison:
    """Compare a model with its rebuilt self; `members` is the list of it that grows."""
    fresh = _rebuild(keeper)
    path = next(name for name, module in keeper.named_modules() if module is members)
    differences = _compare_shapes(_shapes_of(keeper), _shapes_of(fresh), path)
    comparison = Comparison(differences=differences, numbers=[])
    children = list(members.children())
    twins = list(fresh.get_submodule(path).children())
    if len(twins) != len(children):
        comparison.differences.add(Difference(f"length of {path}", len(children), len(twins)))
    for member, twin in zip(children, twins, strict=False):
        _compare_members(member, twin, path, comparison)
    return comparison


def _shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of all that a module would save; of what is no tensor, an empty one."""
    state = module.state_dict()
    return {key: tuple(getattr(value, "shape", ())) for key, value in state.items()}


def _compare_shapes(
    ours: Mapping[str, Any], rebuilt: Mapping[str, Any], path: str
) -> set[Difference]:
    """Keys with another shape, or on one side only; all members of the list count as one."""
    any_member = re.compile(rf"^{re.escape(path)}\.[^.]+")
    differences: set[Difference] = set()
    for key in ours.keys() | rebuilt.keys():
        shape = ours.get(key, _ABSENT)
        rebuilt_shape = rebuilt.get(key, _ABSENT)
        if shape != rebuilt_shape:
            what = any_member.sub(f"{path}.*", key)
            differences.add(Difference(what, shape, rebuilt_shape))
    return differences


def _compare_members(member: nn.Module, twin: nn.Module, path: str, comparison: Comparison) -> None:
    """Note the plain fields in which a member is not what its twin of the rebuilt network is."""
    # a stand-in has no attributes of its own
    original = vars(member).get("stands_for", member)
    for name, _ in twin.named_modules():
        fields = _plain_fields(original, name)
        for field, value in _plain_fields(twin, name).items():
            if fields.get(field, _ABSENT) == value:
                continue
            if not _NUMBER.fullmatch(field) or field not in fields:
                what = f"{path}.*.{name}.{field}"
                comparison.differences.add(Difference(what, fields.get(field, _ABSENT), value))
            elif original is member:
                comparison.numbers.append(Number(member.get_submodule(name), field, value))


def _find_configuration(
    keeper: Any,
    members: nn.Module,
    choices: Sequence[CountingConfig],
    known: set[Difference],
    old_count: int,
    layout: Layout,
) -> ExitStack:
    """Set the fields with which the configuration builds the longer network.

    Nothing that was equal before may differ then; `known` are the differences from before.
    """
    problems: list[str] = []
    for chosen in itertools.product(*(choice.options for choice in choices)):
        with ExitStack() as undo:
            for choice, counts in zip(choices, chosen, strict=True):
                _follow(choice.config, counts, old_count, layout, undo)
            try:
                comparison = _compare(keeper, members)
            except (ValueError, AttributeError) as problem:
                problems.append(str(problem))
                continue
            new = sorted(comparison.differences - known, key=str)
            if not new:
                for number in comparison.numbers:
                    _set(number.part, number.field, number.value, undo)
                return undo.pop_all()
            problems.append(_describe(new, list(itertools.chain(*chosen))))
    kind = type(keeper.config).__name__
    if not any(choice.options[0] for choice in choices):
        raise ValueError(
            f"no field of {kind} counts a list of {old_count} layers; the field that counts its "
            f"layers would have to be set to {len(layout)}"
        )
    raise ValueError(
        f"{kind} does not build the longer network ({problems[0]}); the field that counts its "
        f"layers would have to be set to {len(layout)}"
    )


def _describe(differences: Sequence[Difference], fields: Sequence[str]) -> str:
    """The first differences that remain with these fields set, in words."""
    listed = [
        f"{difference.what} is {difference.ours}, rebuilt {difference.rebuilt}"
        for difference in differences[:3]
    ]
    return f"with {', '.join(fields) or 'no field'} set: {'; '.join(listed)}"
