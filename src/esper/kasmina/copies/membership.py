"""New members in the list that their originals stand in; counts and configuration follow.

Needs torch alone.
"""

import copy
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import nn

_COUNT = re.compile(
    r"((num|n|number_of)_)?((text|hidden|encoder|decoder|transformer)_)*(layers?|blocks?|depth)"
)
"""fields that say how long a list is"""
_PER_MEMBER = re.compile(r"layer|block|type")  # lists with one entry per member
_NUMBER = re.compile(
    r"_?((layer|block)_?(idx|index|id|number|num)|idx|index)"
)  # says which member this is
_FLAGS = ("training", "gradient_checkpointing", "_gradient_checkpointing_func")
_ABSENT = "nothing"

Layout = Sequence[
    tuple[int, nn.Module]
]  # Members in order, each with the place that it, or its original, had before.
Graft = Callable[[nn.Module, Sequence[nn.Module]], None]
Choices = Sequence[
    tuple[Any, Sequence[tuple[str, ...]]]
]  # Configurations, each with sets of fields that may count.
Differences = set[
    tuple[str, Any, Any]
]  # What, in this network, in the one that its configuration builds.


def source_name(model: nn.Module, name: str) -> str:
    """The module that a copy at this place copies:

    itself, unless the model says that the place belongs to another.
    """
    said = getattr(model, "copied_module", None)
    return name if said is None else said(name)


def members_of(module: nn.Module) -> list[nn.Module]:
    """All members of a list; `children()` names one that stands there twice only once."""
    return [member for member in module._modules.values() if member is not None]


def locate(host: nn.Module, name: str) -> tuple[str, int]:
    """The list in which a copy at `name` would stand, and the place of its original there."""
    path, _, key = source_name(host, name).rpartition(".")
    members = host.get_submodule(path)
    if not isinstance(members, nn.ModuleList | nn.Sequential):
        raise ValueError(
            f"{name} stands in a {type(members).__name__}, not in an nn.ModuleList or nn.Sequential"
        )
    return path, list(members._modules).index(key)


def insert_copies(host: nn.Module, name: str, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Put copies of a member right behind it. Returns for each the module that is to it what `name`
    is to its original.

    ValueError, with the host as before, if its configuration cannot follow.
    """
    path, index = locate(host, name)
    old = list(enumerate(members_of(host.get_submodule(path))))
    for module in modules:
        follow_flags(old[index][1], module)
    restack(
        host, path, [*old[: index + 1], *((index, module) for module in modules), *old[index + 1 :]]
    )
    return members_of(host.get_submodule(name.rpartition(".")[0]))[
        index + 1 : index + 1 + len(modules)
    ]


def place_fossils(
    host: nn.Module, site: nn.Module, fossils: Sequence[tuple[Any, bool]], graft: Graft
) -> None:
    """Build a module's fossils into its host:

    members behind the one before, or grafted on the one they come after.
    """
    bodies, groups = [], list[list[nn.Module]]([[]])
    for fossil, is_native in fossils:
        if is_native:
            bodies.append(fossil.body)
            groups.append([])
        else:
            groups[-1].append(fossil)
    carriers = [site]
    if bodies:
        name = next(name for name, module in host.named_modules() if module is site)
        carriers += insert_copies(host, name, bodies)
    for carrier, group in zip(carriers, groups, strict=True):
        if group:
            graft(carrier, group)


def follow_flags(original: nn.Module, copied: nn.Module) -> None:
    """A member is in the mode of its original, and checkpointed if that is."""
    parts = dict(original.named_modules())
    for name, part in copied.named_modules():
        own = vars(parts[name]) if name in parts else {}
        vars(part).update({flag: own[flag] for flag in _FLAGS if flag in own})


def restack(host: nn.Module, path: str, layout: Layout) -> ExitStack:
    """Give a list these members; all that counts them follows.

    Close the result to undo everything.
    """
    steps = [path.rsplit(".", back)[0] for back in range(1, path.count(".") + 1)]
    around = [
        host.get_submodule(step) for step in dict.fromkeys([path, *steps, ""])
    ]  # from the inside out
    members, old = around[0], members_of(around[0])
    keeper = next(
        (module for module in reversed(around) if hasattr(module, "save_pretrained")), None
    )
    with ExitStack() as undo:
        known = set() if keeper is None else _compare(keeper, members)[0]
        _place(members, around[1] if len(around) > 1 else None, layout, undo)
        configs = [module.config for module in around if hasattr(module, "config")]
        for counting in [*around[1:2], *(configs[:1] if keeper is None else [])]:
            _follow(counting, next(_choices(counting, path, len(old)), ()), len(old), layout, undo)
        if keeper is None:
            _renumber(old, layout, undo)
        else:
            distinct = {id(config): config for config in configs}.values()
            choices = [(config, [*_choices(config, path, len(old)), ()]) for config in distinct]
            undo.callback(
                _find_configuration(keeper, members, choices, known, len(old), layout).close
            )
        return undo.pop_all()


def _place(members: nn.Module, owner: nn.Module | None, layout: Layout, undo: ExitStack) -> None:
    old = {(place, id(module)): key for place, (key, module) in enumerate(members._modules.items())}
    for each in (members, *(() if owner is None else owner.children())):
        undo.callback(_restore, each._modules, dict(each._modules))
    if (
        insert := getattr(owner, "insert_block", None)
    ) is not None:  # an owner with more than one list to keep in step
        for place, (source, module) in enumerate(layout):
            if (source, id(module)) not in old:
                insert(place, module)
        return
    keys = list(members._modules)
    are_numbers = keys == [str(place) for place in range(len(keys))]
    named: dict[str, nn.Module | None] = {}
    for place, (source, module) in enumerate(layout):
        tries = (f"{keys[source]}_copy{count}" for count in itertools.count(1))
        free = (key for key in tries if key not in keys and key not in named)
        named[str(place) if are_numbers else old.get((source, id(module))) or next(free)] = module
    _restore(members._modules, named)


def _restore(modules: dict[str, nn.Module | None], before: dict[str, nn.Module | None]) -> None:
    modules.clear()
    modules.update(before)


def _set(thing: Any, field: str, value: Any, undo: ExitStack) -> None:
    before = getattr(thing, field)
    setattr(thing, field, value)
    undo.callback(setattr, thing, field, before)


def _choices(thing: Any, path: str, count: int) -> Iterator[tuple[str, ...]]:
    """Sets of fields that may count a list of this length, the most likely first."""
    named = [field for field in dir(thing) if _COUNT.fullmatch(field)]
    fields = [
        field
        for field in named
        if type(value := getattr(thing, field, None)) is int and value == count
    ]
    sides = [side for side in ("encoder", "decoder") if side in path]
    same = tuple(field for field in fields if any(side in field for side in sides))
    plain = tuple(field for field in fields if "coder" not in field)
    yield from dict.fromkeys(
        group for group in (same, plain, tuple(fields), *((f,) for f in fields)) if group
    )


def _follow(thing: Any, counts: Sequence[str], old: int, layout: Layout, undo: ExitStack) -> None:
    """Set the fields that count members, and the lists that have an entry for each."""
    wanted: list[tuple[str, Any]] = [(field, len(layout)) for field in counts]
    for field, value in getattr(thing, "__dict__", {}).items():
        if (
            counts
            and type(value) in (list, tuple)
            and len(value) == old
            and _PER_MEMBER.search(field)
        ):
            wanted.append((field, type(value)(value[source] for source, _ in layout)))
    for field, value in wanted:
        with suppress(AttributeError, TypeError, ValueError):  # a frozen one stays as it is
            _set(thing, field, value, undo)


def _renumber(old: Sequence[nn.Module], layout: Layout, undo: ExitStack) -> None:
    """Attributes that number the members, in a network without a configuration to read them
    from.
    """
    for name, part in old[0].named_modules():
        for field in [field for field in vars(part) if _NUMBER.fullmatch(field)]:
            first, numbers = vars(part)[field], [_fields(member, name).get(field) for member in old]
            if first not in (0, 1) or numbers != [first + place for place in range(len(old))]:
                continue
            for place, (_, module) in enumerate(layout):
                if field in _fields(module, name):
                    _set(module.get_submodule(name), field, first + place, undo)


def _fields(member: nn.Module, name: str) -> dict[str, Any]:
    """Plain attributes of a part of a member, its class among them."""
    try:
        part = member.get_submodule(name)
    except AttributeError:
        return {}
    told = {
        k: v
        for k, v in vars(part).items()
        if (k[0] != "_" or _NUMBER.fullmatch(k)) and k not in _FLAGS
    }
    plain = {k: v for k, v in told.items() if v is None or isinstance(v, bool | int | float | str)}
    return {**plain, "class": type(part).__name__}


def _rebuild(keeper: Any) -> nn.Module:
    """The model as its saved configuration builds it, without weights."""
    config: Any = getattr(keeper, "config", None)
    try:
        if hasattr(config, "to_json_string"):
            config = type(config).from_dict(json.loads(config.to_json_string()))
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            fresh: nn.Module = type(keeper)(copy.deepcopy(config))
    except Exception as problem:  # whatever a class does with a configuration
        what = f"{type(keeper).__name__} cannot be built from its {type(config).__name__} alone"
        why = f"{type(problem).__name__}: {problem}"
        raise ValueError(f"{what}, so from_pretrained would not give it back ({why})") from problem
    return fresh


def _compare(
    keeper: nn.Module, members: nn.Module
) -> tuple[Differences, list[tuple[nn.Module, str, int]]]:
    """Where a model differs from its rebuilt self, and the numbers that its members would have
    there.
    """
    fresh = _rebuild(keeper)
    path = next(name for name, module in keeper.named_modules() if module is members)
    any_member = re.compile(rf"^{re.escape(path)}\.[^.]+")
    mine, theirs = (
        {k: tuple(getattr(v, "shape", ())) for k, v in m.state_dict().items()}
        for m in (keeper, fresh)
    )
    pairs = [
        (key, mine.get(key, _ABSENT), theirs.get(key, _ABSENT))
        for key in mine.keys() | theirs.keys()
    ]
    found: Differences = {
        (any_member.sub(f"{path}.*", key), own, other) for key, own, other in pairs if own != other
    }
    numbers: list[tuple[nn.Module, str, int]] = []
    twins = list(fresh.get_submodule(path).children())
    if len(twins) != len(list(members.children())):
        found.add((f"length of {path}", len(list(members.children())), len(twins)))
    for member, twin in zip(members.children(), twins, strict=False):
        original = vars(member).get("stands_for", member)  # a stand-in has no attributes of its own
        for name, _ in twin.named_modules():
            own = _fields(original, name)
            for field, value in _fields(twin, name).items():
                if own.get(field, _ABSENT) == value:
                    continue
                if not _NUMBER.fullmatch(field) or field not in own:
                    found.add((f"{path}.*.{name}.{field}", own.get(field, _ABSENT), value))
                elif original is member:
                    numbers.append((member.get_submodule(name), field, value))
    return found, numbers


def _find_configuration(
    keeper: Any, members: nn.Module, choices: Choices, known: Differences, old: int, layout: Layout
) -> ExitStack:
    """Set the fields with which the configuration builds the longer network; nothing that was equal
    may differ.
    """
    kind, problems = type(keeper.config).__name__, list[str]()
    for chosen in itertools.product(*(options for _, options in choices)):
        with ExitStack() as undo:
            for (config, _), counts in zip(choices, chosen, strict=True):
                _follow(config, counts, old, layout, undo)
            try:
                found, numbers = _compare(keeper, members)
            except (ValueError, AttributeError) as problem:
                problems.append(str(problem))
                continue
            if not (new := sorted(found - known, key=str)):
                for part, field, value in numbers:
                    _set(part, field, value, undo)
                return undo.pop_all()
            told = "; ".join(
                f"{what} is {ours}, rebuilt {theirs}" for what, ours, theirs in new[:3]
            )
            problems.append(f"with {', '.join(sum(chosen, ())) or 'no field'} set: {told}")
    if not any(options[0] for _, options in choices):
        why = f"no field of {kind} counts a list of {old} layers"
    else:
        why = f"{kind} does not build the longer network ({problems[0]})"
    raise ValueError(
        f"{why}; the field that counts its layers would have to be set to {len(layout)}"
    )
