"""The grown network as a plain module, without slots and without a class of Esper's.

It is proven on a few rows to compute what the growing one does without its unfinished seeds.
"""

import copy
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from esper.kasmina import plain
from esper.kasmina.copies import membership
from esper.kasmina.copies.copying import Copy, detached_memo
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.proving import Trial, find_difference, record_trials
from esper.kasmina.slot import SeedSlot, has_gate, remove_slots
from esper.kasmina.unseen import watch_calls
from esper.leyline.errors import HostError


@dataclass(frozen=True)
class Harvest:
    """A grown network, and how it was put together."""

    network: nn.Module
    members: frozenset[str]
    """slots whose copies stand in the lists of their originals"""
    trials: Sequence[Trial]
    """what the growing network gave, and this one gives"""


def harvest(model: MorphogeneticModel) -> nn.Module:
    """A copy of the host with its fossils built in; every unfinished seed is left out.

    The model is not changed.
    """
    return prove_harvest(model).network


def prove_harvest(model: MorphogeneticModel) -> Harvest:
    """The harvest in which as many slots as can have their copies in the lists of the originals.

    In all others fossils run after the module before them, as they grew. A copy becomes a
    member only if a batch shows that the network still computes the same.
    """
    wanted = [slot.slot_id for slot in model.ordered_slots if _has_members(slot)]
    trials = record_trials(model, model.ordered_slots, model.sample)
    if wanted and not trials:
        warnings.warn(
            "no batch shows whether copies may stand in the lists of their originals, so they run "
            "after them instead. Call garden.model(batch) once, then harvest.",
            stacklevel=4,
        )
        wanted = []
    problems: list[str] = []
    proven = _prove_members(model, wanted, trials, problems)
    if proven is None:
        proven = _prove(model, frozenset(), trials)
    _warn_of_lost_fossils(proven.network, problems)
    if proven.members and membership.saves_adapters_alone(proven.network):
        warnings.warn(membership.ADAPTERS_ALONE, stacklevel=4)
    _warn_of_caches(model.host, proven.network)
    return proven


def _prove_members(
    model: MorphogeneticModel,
    wanted: Sequence[str],
    trials: Sequence[Trial],
    problems: list[str],
) -> Harvest | None:
    """The harvest with the copies of as many of these slots as members as can; None without any.

    All are tried at once, and one after another if that fails; `problems` notes why it does.
    """
    proven = None
    members: frozenset[str] = frozenset()
    one_by_one = [{slot_id} for slot_id in wanted] if len(wanted) > 1 else []
    for added in (set(wanted), *one_by_one):
        if added <= members:
            continue
        try:
            proven = _prove(model, members | added, trials)
            members = proven.members
        except HostError as problem:
            problems.append(str(problem))
    return proven


def _prove(model: MorphogeneticModel, members: frozenset[str], trials: Sequence[Trial]) -> Harvest:
    """Build the grown network, with the copies of these slots as members, and run it."""
    network, unequal = _build(model, members)
    problem = find_difference(network, trials)
    if unequal:
        problem = f"the fossils of slot {unequal[0]} differ"
    if problem is not None:
        raise HostError(
            f"the harvested network would not compute what the growing one does: {problem}. If you "
            f"replaced a module after esper.grow, put the old one back."
        )
    return Harvest(network, members, trials)


def _build(model: MorphogeneticModel, members: Collection[str]) -> tuple[nn.Module, list[str]]:
    """The grown network, with the copies of these slots in the lists of their originals.

    And the slots whose plain fossils do not compute what the grown ones do.
    """
    grown = copy.deepcopy(model, detached_memo(model))
    remove_slots(grown.host, runs=False)
    # sites are looked up before any list grows: its members' names change then
    sites = {slot_id: grown.site(slot_id) for slot_id in grown.slot_config.slot_ids}
    unequal: list[str] = []
    for slot_id, site in sites.items():
        slot = grown.slot(slot_id)
        _build_in_fossils(grown.host, slot, site, slot_id in members)
        if not _are_plain_alike(slot, site):
            unequal.append(slot_id)
    watch_calls(grown.host)
    return grown.host, unequal


def _are_plain_alike(slot: SeedSlot, site: nn.Module) -> bool:
    """Whether what was grafted on a slot's module computes what grew in the slot.

    Copies need arguments that are not known here. They are compared where a batch is known.
    """
    if not slot.fossils or any(isinstance(fossil, Copy) for fossil in slot.fossils):
        return True
    twins = list(plain.holder_of(site).children())[-len(slot.fossils) :]
    features = torch.linspace(-1, 1, 2 * torch.Size(slot.feature_shape).numel())
    features = features.reshape(2, *slot.feature_shape).to(slot.alpha)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        pairs = zip(slot.fossils, twins, strict=True)
        return all(torch.equal(fossil(features), twin(features)) for fossil, twin in pairs)


def can_become_member(slot: SeedSlot, fossil: nn.Module) -> bool:
    """Whether a fossil may stand in the list of the slot's module, as far as the fossil goes.

    It may if it is a copy and nothing blends it.
    """
    return isinstance(fossil, Copy) and not has_gate(fossil) and slot.inheritance.is_native


def _has_members(slot: SeedSlot) -> bool:
    return any(can_become_member(slot, fossil) for fossil in slot.fossils)


def _build_in_fossils(host: nn.Module, slot: SeedSlot, site: nn.Module, as_members: bool) -> None:
    """Replace a slot's hook by its fossils.

    Copies become members of their original's list if they are to; the module before runs all other
    fossils from a hook.
    """
    hooks = site._forward_hooks
    slot_hook = next(key for key, hook in hooks.items() if _is_of_slot(hook))
    fossils = [(fossil, as_members and can_become_member(slot, fossil)) for fossil in slot.fossils]

    def graft(carrier: nn.Module, group: Sequence[nn.Module]) -> None:
        plain.graft_fossils(carrier, group, slot_hook if carrier is site else None)

    try:
        membership.place_fossils(host, site, fossils, graft)
    except ValueError as problem:
        raise HostError(f"slot {slot.slot_id} cannot be harvested: {problem}.") from problem
    if slot_hook in hooks and _is_of_slot(hooks[slot_hook]):
        del hooks[slot_hook]
        del site._forward_hooks_with_kwargs[slot_hook]


def _is_of_slot(hook: object) -> bool:
    return isinstance(getattr(hook, "__self__", None), SeedSlot)


def _warn_of_lost_fossils(host: nn.Module, problems: Sequence[str]) -> None:
    """Warn if the host has `save_pretrained` and fossils that it would drop.

    `problems` say why copies did not become members.
    """
    grafted = list(plain.grafts_of(host))
    has_own_saving = any(hasattr(module, "save_pretrained") for module in host.modules())
    if grafted and has_own_saving:
        reason = f" Copies could not become layers: {problems[-1]}" if problems else ""
        warnings.warn(
            f"save_pretrained would drop the fossils in {', '.join(grafted)}: its configuration "
            f"does not know them. Keep this network with garden.export(folder) or torch.save."
            f"{reason}",
            stacklevel=5,
        )


def _warn_of_caches(host: nn.Module, network: nn.Module) -> None:
    """Warn if configurations of the host say that it caches, and those of the network do not."""
    lost = sorted(_caching(host) - _caching(network))
    if lost:
        warnings.warn(
            f"copies that are no layers have no cache, so the configuration of {', '.join(lost)} "
            f"says use_cache=False in the harvested network.",
            stacklevel=5,
        )


def _caching(network: nn.Module) -> set[str]:
    """Classes of modules whose configuration says that they cache."""
    modules = network.modules()
    configs = [(type(module).__name__, getattr(module, "config", None)) for module in modules]
    return {name for name, config in configs if getattr(config, "use_cache", None)}
