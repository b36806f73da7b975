"""The maths of one PPO step:

surrogate, value loss, divergence. Numbers in, numbers out; nothing is recorded here.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from esper.tamiyo.heads import HeadSpec
from esper.tamiyo.network import PerHead


@dataclass(frozen=True)
class PolicyLoss:
    """Loss of the policy with what it was made of; tensors [heads, R, T]."""

    total: Tensor
    per_head: Tensor  # [heads]
    log_ratios: Tensor  # without gradient; 0 where a head is not used
    kl: Tensor  # joint divergence over valid steps, by the k3 estimator


@dataclass(frozen=True)
class HeadSteps:
    """What some rows' decisions were like; nothing in it depends on the network.

    Sums are divided by counts, at least 1: those of all processes, where several share a minibatch.
    """

    is_relevant: Tensor  # [heads, R, T]: where each took part
    is_open: Tensor  # [heads, R, T]: where each had a choice
    relevant: Tensor  # [heads]: steps that each took part in
    valid: Tensor
    open: Tensor  # [heads]: valid steps at which each had a choice

    @classmethod
    def of(cls, is_relevant: Tensor, is_open: Tensor, by_row: Tensor) -> Self:
        heads = len(by_row) // 2
        relevant, steps, chosen = by_row.sum(1).clamp(min=1).split([heads, 1, heads])
        return cls(is_relevant, is_open, relevant, steps[0], chosen)


def counts_by_row(is_relevant: Tensor, valid: Tensor, is_open: Tensor) -> Tensor:
    """The counts of every row by itself, [2 heads + 1, R]."""
    return torch.cat([is_relevant.sum(2), valid.sum(1)[None], (is_open & valid).sum(2)])


def relevant_steps(spec: HeadSpec, choices: PerHead, valid: Tensor) -> Tensor:
    """Where each head took part in the decision: [heads, R, T]."""
    first = choices[spec.names[0]]
    uses = (torch.tensor(spec.uses(head), device=first.device) for head in spec.heads)
    return torch.stack([valid & torch.isin(first, own) for own in uses])


def policy_loss(
    new: Tensor,
    old: Tensor,
    advantages: Tensor,
    steps: HeadSteps,
    valid: Tensor,
    clip: float,
    mode: str,
) -> PolicyLoss:
    """Clipped surrogate, to be minimised:

    the heads' means where they took part, summed, or that of whole decisions.
    """
    log_ratios = torch.where(steps.is_relevant, new - old, 0.0)
    joint = log_ratios.sum(0)
    if mode == "joint":
        per_head = (_surrogate(joint, advantages, clip) * valid).sum()[None] / steps.valid
    else:
        surrogate = torch.where(steps.is_relevant, _surrogate(log_ratios, advantages, clip), 0.0)
        per_head = surrogate.sum((1, 2)) / steps.relevant
    return PolicyLoss(
        per_head.sum(), per_head, log_ratios.detach(), k3(joint.detach(), valid, steps.valid)
    )


def _surrogate(log_ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    ratio = log_ratio.exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def k3(log_ratio: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    """Mean of (r - 1) - log r over valid steps:

    never negative, and 0 only where nothing changed.
    """
    return torch.where(valid, log_ratio.exp() - 1 - log_ratio, 0.0).sum() / count


def value_loss(
    new: Tensor,
    old: Tensor,
    returns: Tensor,
    valid: Tensor,
    clip: float,
    scale: Tensor,
    count: Tensor,
) -> Tensor:
    """Half the squared error in units of `scale`, the worse of clipped and unclipped, so that
    clipping never helps.
    """
    new, old, returns = new / scale, old / scale, returns / scale
    clipped = old + (new - old).clamp(-clip, clip)
    worst = torch.maximum((new - returns).square(), (clipped - returns).square())
    return 0.5 * torch.where(valid, worst, 0.0).sum() / count


def mean_entropy(entropy: Tensor, steps: HeadSteps, valid: Tensor) -> Tensor:
    """Each head's mean over the valid steps at which it had a choice:

    [heads]; 0 where there was none.
    """
    return torch.where(steps.is_open & valid, entropy, 0.0).sum((1, 2)) / steps.open
