"""The grown network as a plain module, without slots."""

import copy
import warnings
from collections.abc import Sequence
from functools import partial

from torch import nn

from esper.kasmina import seeds
from esper.kasmina.copies import membership
from esper.kasmina.copies.copying import Copy, detached_memo
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.slot import SeedSlot, has_gate, remove_slots
from esper.leyline.errors import HostError


def harvest(model: MorphogeneticModel) -> nn.Module:
    """A copy of the host with its fossils built in; every unfinished seed is left out.

    The model is not changed.
    """
    grown = copy.deepcopy(model, detached_memo(model))
    remove_slots(grown.host, runs=False)
    # sites are looked up before any list grows: its members' names change then
    sites = {slot_id: grown.site(slot_id) for slot_id in grown.slot_config.slot_ids}
    for slot_id, site in sites.items():
        _build_in_fossils(grown.host, grown.slot(slot_id), site)
    _warn_of_lost_fossils(grown.host)
    return grown.host


def becomes_member(slot: SeedSlot, fossil: nn.Module) -> bool:
    """Whether a fossil can stand in the list of the slot's module.

    It can if it is a copy and nothing blends it.
    """
    return isinstance(fossil, Copy) and not has_gate(fossil) and slot.inheritance.is_native


def _build_in_fossils(host: nn.Module, slot: SeedSlot, site: nn.Module) -> None:
    """Replace a slot's hook by its fossils.

    Copies become members of their original's list if they can; the module before runs all other
    fossils from a hook.
    """
    hooks = site._forward_hooks
    slot_hook = next(key for key, hook in hooks.items() if _is_of_slot(hook))
    fossils = [(fossil, becomes_member(slot, fossil)) for fossil in slot.fossils]
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


def _warn_of_lost_fossils(host: nn.Module) -> None:
    """Warn if the host has `save_pretrained` and fossils that it would drop."""
    modules = list(host.named_modules())
    grafted = [name for name, module in modules if isinstance(module, seeds.Fossils)]
    has_own_saving = any(hasattr(module, "save_pretrained") for _, module in modules)
    if grafted and has_own_saving:
        warnings.warn(
            f"save_pretrained would drop the fossils in {', '.join(grafted)}: its configuration "
            f"does not know them. Keep this network with garden.export(folder) or torch.save.",
            stacklevel=4,
        )
