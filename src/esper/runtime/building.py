"""The newborn host of a seed: the task's network, with slots at the modules that the task names."""

import torch
from torch import Tensor, nn

from esper.kasmina.effects import choose_effective
from esper.kasmina.hosts import SegmentedHost
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.probing import find_names, find_places
from esper.kasmina.randomness import mix_seed, own_randomness
from esper.kasmina.slot import count_parameters
from esper.leyline.errors import UnknownNameError
from esper.leyline.settings import GrowthSettings
from esper.leyline.slots import SlotConfig, is_slot_id
from esper.runtime.tasks.task import Task


def build_network(
    task: Task, seed: int, example: Tensor, device: torch.device | str = "cpu"
) -> MorphogeneticModel:
    """Build the newborn host of a seed, with its slots; `example` is a batch of its inputs."""
    with own_randomness(seed):
        host = task.build_host().to(device)
    settings = GrowthSettings(
        lengths=task.lengths,
        scale_at_birth=task.scale_at_birth,
        blends=task.blends,
        epochs=task.epochs,
        seed=mix_seed(seed, 1),
        prunes=task.prunes,
    )
    return MorphogeneticModel(
        host,
        name_slots(host, task.slots, example),
        example=example,
        max_seeds=task.max_seeds,
        budget=int(task.budget * count_parameters(host)),
        blueprints=task.blueprints,
        settings=settings,
    )


def draws_random_numbers(host: nn.Module) -> bool:
    """Say whether a host has dropout."""
    for module in host.modules():
        is_layer = isinstance(module, nn.modules.dropout._DropoutNd)
        # attention and recurrent layers have a dropout of their own
        share = getattr(module, "p" if is_layer else "dropout", 0)
        if isinstance(share, int | float) and share > 0:
            return True
    return False


def name_slots(
    host: nn.Module, patterns: tuple[str, ...] | None, example: Tensor
) -> SlotConfig | None:
    """Return slots for the modules, or for the slots that the host declares, that patterns mean.

    None leaves it to the host.
    """
    if patterns is None:
        return None
    declared = host.slot_config() if isinstance(host, SegmentedHost) else None
    if declared is not None and any(is_slot_id(name) for name in patterns):
        return declared.choose(patterns)
    sites = find_places(host, example)
    module_names = [name for name, _ in host.named_modules()]
    for pattern in patterns:
        if not find_names(pattern, module_names):
            known = [site.name for site in sites if site.problem is None]
            if declared is not None:
                known += declared.slot_ids
            raise UnknownNameError("slot or module", pattern, known)
    chosen = choose_effective(host, example, sites, patterns)
    return SlotConfig.for_modules(site.name for site in chosen)
