"""The grown network as a plain module, without slots.

It is proven on a few rows to compute what the growing one does without its unfinished seeds.
"""

import copy
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from esper.kasmina import seeds
from esper.kasmina.copies import membership
from esper.kasmina.copies.copying import Copy, detached_memo
from esper.kasmina.hosts import SegmentedHost
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

    In all others fossils run from a hook on the module before them, as they grew. A copy becomes a
    member only if a batch shows that the network still computes the same.
    """
    wanted = [slot.slot_id for slot in model.ordered_slots if _has_members(slot)]
    is_known = isinstance(model.host, SegmentedHost) and not wanted
    trials = [] if is_known else record_trials(model, model.ordered_slots, model.sample)
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
    network = _build(model, members)
    problem = find_difference(network, trials)
    if problem is not None:
        raise HostError(
            f"the harvested network would not compute what the growing one does: {problem}. If you "
            f"replaced a module after esper.grow, put the old one back."
        )
    return Harvest(network, members, trials)


def _build(model: MorphogeneticModel, members: Collection[str]) -> nn.Module:
    """The grown network, with the copies of these slots in the lists of their originals."""
    grown = copy.deepcopy(model, detached_memo(model))
    remove_slots(grown.host, runs=False)
    # sites are looked up before any list grows: its members' names change then
    sites = {slot_id: grown.site(slot_id) for slot_id in grown.slot_config.slot_ids}
    for slot_id, site in sites.items():
        _build_in_fossils(grown.host, grown.slot(slot_id), site, slot_id in members)
    watch_calls(grown.host)
    return grown.host


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
    try:
        membership.place_fossils(host, site, fossils, partial(_graft, site, slot_hook))
    except ValueError as problem:
        raise HostError(f"slot {slot.slot_id} cannot be harvested: {problem}.") from problem
    if _is_of_slot(hooks[slot_hook]):
        del hooks[slot_hook]
        del site._forward_hooks_with_kwargs[slot_hook]


def _is_of_slot(hook: object) -> bool:
    return isinstance(getattr(hook, "__self__", None), SeedSlot)


def _graft(
    site: nn.Module, slot_hook: int, carrier: nn.Module, fossils: Sequence[nn.Module]
) -> None:
    """Let `carrier` run fossils after itself: the site, or a copy that became a member."""
    earlier = getattr(carrier, seeds.CHILD, None)
    if isinstance(earlier, seeds.Fossils):  # a harvested network that grew again
        earlier.extend(fossils)
    elif earlier is not None or carrier is not site:
        seeds.graft_fossils(carrier, seeds.Fossils(*fossils))
    else:
        site.add_module(seeds.CHILD, seeds.Fossils(*fossils))
        # where the slot's hook was among the hooks
        site._forward_hooks[slot_hook] = seeds.run_grown


def _warn_of_lost_fossils(host: nn.Module, problems: Sequence[str]) -> None:
    """Warn if the host has `save_pretrained` and fossils that it would drop.

    `problems` say why copies did not become members.
    """
    modules = list(host.named_modules())
    grafted = [name for name, module in modules if isinstance(module, seeds.Fossils)]
    has_own_saving = any(hasattr(module, "save_pretrained") for _, module in modules)
    if grafted and has_own_saving:
        reason = f" Copies could not become layers: {problems[-1]}" if problems else ""
        warnings.warn(
            f"save_pretrained would drop the fossils in {', '.join(grafted)}: its configuration "
            f"does not know them. Keep this network with garden.export(folder) or torch.save."
            f"{reason}",
            stacklevel=5,
        )
