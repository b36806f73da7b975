"""Every case of the earlier choices at once: which masks hold there, how it is reached, where a head has a choice."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from esper.tamiyo.heads import HeadSpec


def mask_cases(spec: HeadSpec, place: int, mask: Tensor | None) -> Tensor | None:
    """A head's mask [R, size] or [R, rows, size] with an axis for every earlier choice."""
    if mask is None:
        return None
    head, cases = spec.heads[place], len(spec.earlier(place))
    if mask.dim() == 2:
        return mask.reshape(len(mask), *(1,) * cases, head.size)
    axis = spec.names.index(str(head.mask_by))
    rows = mask[:, list(spec.uses(head))] if axis == 0 else mask
    shape = [1] * cases
    shape[axis] = rows.shape[1]
    return rows.reshape(len(mask), *shape, head.size)


def reach_cases(spec: HeadSpec, place: int, reach: Tensor, chances: Sequence[Tensor]) -> Tensor:
    """How the earlier choices lead to each case, [R, cases ...], from what each head gives its entries.

    Args:
        reach: [R], one for every row; a number or a truth, as are the chances.
        chances: of every earlier head, [R, its cases ..., its size].
    """
    uses = spec.uses(spec.heads[place])
    for axis, given in enumerate(chances[: len(spec.earlier(place))]):
        known = spec.uses(spec.heads[axis])
        reach = reach.unsqueeze(-1) * given[:, [known.index(use) for use in uses]]
    return reach


def openings(spec: HeadSpec, masks: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """Where each head has, in some case that masks allow, more than one valid choice: [heads, N, T], like [N, T]."""
    rows = like.numel()
    allowed: list[Tensor] = []
    found = []
    for place, head in enumerate(spec.heads):
        given = masks.get(head.name)
        mask = mask_cases(spec, place, None if given is None else given.flatten(0, 1))
        mask = torch.ones(head.size, dtype=torch.bool, device=like.device) if mask is None else mask
        reach = reach_cases(spec, place, torch.ones(rows, dtype=torch.bool, device=like.device), allowed)
        allowed.append(mask.expand(*reach.shape, head.size))
        is_open = reach & (mask.sum(-1) > 1)
        found.append(is_open.view(rows, -1).any(1).view(like.shape))
    return torch.stack(found)
