"""New members in the list that their originals stand in; counts and configuration follow.

Needs torch alone: exports carry this file along. Whether a copy may stand there is tried in
`order`.
"""

import itertools
from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from torch import nn

from esper.kasmina.copies.configuration import (
    FLAGS,
    NUMBER,
    compare,
    plain_fields,
    set_field,
)
from esper.kasmina.copies.copying import switch_caches_off
from esper.kasmina.copies.counting import Growth, count_options, fit_configurations, follow_counts


class Member(NamedTuple):
    """One entry of a list as it is to be."""

    source: int
    """position that the member, or the original of a copy, had before"""
    module: nn.Module


Layout = Sequence[Member]
Graft = Callable[[nn.Module, Sequence[nn.Module]], None]


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
        for flag in FLAGS:
            if flag in flags:
                vars(part)[flag] = flags[flag]


def _fits() -> None:
    """Nothing speaks against a network."""


def restack(
    host: nn.Module, path: str, layout: Layout, accept: Callable[[], str | None] = _fits
) -> ExitStack:
    """Give the list at `path` these members; all that counts them follows.

    `accept` says why the network that results is not right, None if it is. Close the result to
    undo everything. Raises ValueError, with the host as before, if nothing fits.
    """
    around = _modules_around(host, path)
    members = around[0]
    owner = around[1] if len(around) > 1 else None
    old = members_of(members)
    sources = [member.source for member in layout]
    configs = configs_around(host, path)
    keeper = keeper_of(host, path)
    with ExitStack() as undo:
        known = None if keeper is None else compare(keeper, members)
        _set_members(members, owner, layout, undo)
        counting: list[Any] = [] if owner is None else [owner]
        if keeper is None:
            counting += configs[:1]
        for thing in counting:
            options = count_options(thing, path, len(old))
            follow_counts(options[0] if options else [], len(old), sources, undo)
        if keeper is None or known is None:
            _renumber(old, layout, undo)
            problem = accept()
            if problem is not None:
                raise ValueError(problem)
        else:
            growth = Growth(keeper, members, path, len(old), sources, known)
            undo.push(fit_configurations(growth, configs, accept))
        return undo.pop_all()


def configs_around(host: nn.Module, path: str) -> list[Any]:
    """The configurations of the modules around a list, the innermost first."""
    around = _modules_around(host, path)
    configs = {id(module.config): module.config for module in around if hasattr(module, "config")}
    return list(configs.values())


def keeper_of(host: nn.Module, path: str) -> Any:
    """The outermost model around a list that saves itself by its configuration; None without one.

    A model of adapters saves those alone, so it is the model inside that counts.
    """
    around = _modules_around(host, path)
    keepers = [module for module in around if hasattr(module, "save_pretrained")]
    if not keepers:
        return None
    inside = getattr(keepers[-1], "get_base_model", None)
    return keepers[-1] if inside is None else inside()


ADAPTERS_ALONE = (
    "save_pretrained of a model with adapters writes those alone and would lose the copied layers. "
    "Merge the adapters (merge_and_unload), then save."
)


def saves_adapters_alone(host: nn.Module) -> bool:
    """Whether a model writes its adapters only, as with PEFT."""
    return any(hasattr(module, "peft_config") for module in host.modules())


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


def _renumber(old: Sequence[nn.Module], layout: Layout, undo: ExitStack) -> None:
    """Number the members again in a network that has no configuration to read numbers from."""
    for name, part in old[0].named_modules():
        for field in [field for field in vars(part) if NUMBER.fullmatch(field)]:
            first = vars(part)[field]
            numbers = [plain_fields(member, name).get(field) for member in old]
            if first not in (0, 1) or numbers != [first + index for index in range(len(old))]:
                continue
            for position, member in enumerate(layout):
                if field in plain_fields(member.module, name):
                    set_field(member.module.get_submodule(name), field, first + position, undo)
