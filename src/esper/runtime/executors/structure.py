"""What a host's structure is to each user of it: captured graphs, rollbacks, kernels, compilers."""

from collections.abc import Hashable

from torch import nn

from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.slot import SeedSlot, has_gate
from esper.runtime.host import HostRun

Key = tuple[Hashable, ...]


def graph_key(run: HostRun) -> Key:
    """Return what is equal exactly where one captured graph is right.

    It names the modules, each with the number of its optimiser state. Keeping a seed leaves it as
    it is.
    """
    return (run.model, *(_wiring(run, slot) for slot in run.slots))


def good_state_key(run: HostRun) -> Key:
    """Return what is equal where a rollback goes back to tensors that were copied before.

    Beside the modules it says what they are: host, fossil or seed.
    """
    return (graph_key(run), *(slot.seed for slot in run.slots))


def kernel_parts(run: HostRun) -> set[Hashable]:
    """Return what decides which kernels a host runs, piece by piece.

    Pieces are the host itself and what sits in each slot.
    """
    parts: set[Hashable] = {run.task.name}
    for number, slot in enumerate(run.slots):
        for blueprint, fossil in zip(slot.fossil_names, slot.fossils, strict=True):
            parts.add((number, blueprint, has_gate(fossil)))
        if slot.seed is not None and slot.is_in_output:
            # it runs what a fossil runs, and is blended in
            parts.add((number, slot.state.blueprint_id, has_gate(slot.seed)))
            parts.add((number, "blended"))
    return parts


def compiled_key(network: MorphogeneticModel) -> list[object]:
    """Return what a network that the user compiled was compiled for."""
    key: list[object] = []
    for slot_id in network.slot_config.slot_ids:
        slot = network.slot(slot_id)
        key += [slot.seed, *slot.fossils, slot.is_in_output]
    return key


def _wiring(run: HostRun, slot: SeedSlot) -> Key:
    """One slot's part of a graph's key."""
    is_wired = slot.seed is None or slot.is_in_output
    modules: list[nn.Module] = [*slot.fossils]
    if slot.seed is not None:
        modules.append(slot.seed)
    return (is_wired, *((module, run.primings.get(module)) for module in modules))
