"""Clips the gradients of a host and of its live seeds, each by its own norm."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from esper.kasmina.slot import SeedSlot


def newest_modules(slots: Sequence[SeedSlot]) -> list[nn.Module | None]:
    """Return the module that each slot got last: its seed, else its last fossil, else None."""
    newest: list[nn.Module | None] = []
    for slot in slots:
        if slot.seed is not None:
            newest.append(slot.seed)
        elif len(slot.fossils) > 0:
            newest.append(slot.fossils[-1])
        else:
            newest.append(None)
    return newest


def gradient_groups(model: nn.Module, slots: Sequence[SeedSlot]) -> list[list[Tensor]]:
    """Return 1 + S groups of gradients: those of each slot's newest module, behind all others.

    A parameter without a gradient is in no group, so a group may be empty.
    """
    slot_groups: list[list[Tensor]] = []  # S lists
    for module in newest_modules(slots):
        parameters = [] if module is None else module.parameters()
        slot_groups.append([p.grad for p in parameters if p.grad is not None])
    in_slots: set[int] = set()
    for group in slot_groups:
        in_slots.update(id(gradient) for gradient in group)
    host_group = [
        parameter.grad
        for parameter in model.parameters()
        if parameter.grad is not None and id(parameter.grad) not in in_slots
    ]
    return [host_group, *slot_groups]


def clip_groups(
    groups: Sequence[list[Tensor]], is_seed: Tensor, zero: Tensor, most: float
) -> list[Tensor]:
    """Clip the host and each seed to the norm `most`; returns their norms of before, 1 + S.

    Does what `MorphogeneticModel.clip_gradients` does, but looks up on the device whether a slot's
    newest module is a seed (`is_seed`, S booleans). A captured step so stays right when that
    module, clipped by itself while it is a seed, becomes part of the host. The norm of a slot
    without a seed is 0. `zero` is a 0 on the device: torch would copy a plain 0.0 there, and a
    graph would copy from where it then was.
    """
    gradients = [gradient for group in groups for gradient in group]
    lengths = [len(group) for group in groups]
    gradient_norms = torch.stack(torch._foreach_norm(gradients))  # [gradients]
    norms_by_group = gradient_norms.split(lengths)  # 1 + S tensors
    group_norms = torch.stack([torch.linalg.vector_norm(norms) for norms in norms_by_group])
    host_group_norm, slot_norms = group_norms.tensor_split([1])  # [1] and [S]
    kept_norms = torch.where(is_seed, zero, slot_norms)  # [S], those that are the host's
    host_norm = torch.linalg.vector_norm(torch.cat([host_group_norm, kept_norms]))  # []
    seed_norms = torch.where(is_seed, slot_norms, zero)  # [S]
    norms = [host_norm, *seed_norms]  # 1 + S
    factors = (most / (torch.stack(norms) + 1e-6)).clamp(max=1.0)  # [1 + S], as torch clips
    host_factor = factors[0]  # []
    slot_factors = torch.where(is_seed, factors[1:], host_factor)  # [S]
    for group, factor in zip(groups, [host_factor, *slot_factors], strict=True):
        if group:
            torch._foreach_mul_(group, factor)
    return norms
