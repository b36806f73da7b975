"""The maths of one PPO step: surrogate, value loss, entropy, divergence.

Numbers in, numbers out; nothing is recorded here.
"""

from dataclasses import dataclass

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
    """What the decisions of a minibatch were like; nothing in it depends on the network.

    Losses are divided by the counts, which are at least 1. Where several processes share a
    minibatch, the counts are those of all.
    """

    is_relevant: Tensor  # [heads, R, T]: where each took part
    is_open: Tensor  # [heads, R, T]: where each had a choice
    relevant: Tensor  # [heads]: steps that each took part in
    valid: Tensor  # valid steps
    open: Tensor  # [heads]: valid steps at which each had a choice


@dataclass(frozen=True)
class StepTable:
    """What all decisions of a rollout were like, piece by piece.

    Where heads took part is known for the P pieces of this process; the counts are of all Q
    pieces of all processes.
    """

    is_relevant: Tensor  # [heads, P, T]
    is_open: Tensor  # [heads, P, T]
    counts: Tensor  # [2 heads + 1, Q]: as `counts_by_row` has them

    @property
    def decisions(self) -> Tensor:
        """Decisions that each head took part in, and last all decisions: [heads + 1]."""
        return self.counts[: len(self.is_relevant) + 1].sum(1)

    def minibatch(self, index_here: Tensor, index_of_all: Tensor) -> HeadSteps:
        """One minibatch: which pieces of this process it has, and which of all processes."""
        heads = len(self.is_relevant)
        counts = self.counts[:, index_of_all].sum(1).clamp(min=1)
        relevant, valid, opened = counts.split([heads, 1, heads])
        return HeadSteps(
            is_relevant=self.is_relevant[:, index_here],
            is_open=self.is_open[:, index_here],
            relevant=relevant,
            valid=valid[0],
            open=opened,
        )


def counts_by_row(is_relevant: Tensor, valid: Tensor, is_open: Tensor) -> Tensor:
    """Counts of each row, [2 heads + 1, R].

    First the steps that each head took part in, then the valid steps, then the valid steps at
    which each head had a choice.
    """
    return torch.cat([is_relevant.sum(2), valid.sum(1)[None], (is_open & valid).sum(2)])


def relevant_steps(spec: HeadSpec, choices: PerHead, valid: Tensor) -> Tensor:
    """Where each head took part in the decision: [heads, R, T]."""
    first_choices = choices[spec.names[0]]
    by_head = []
    for head in spec.heads:
        uses = torch.tensor(spec.uses(head), device=first_choices.device)
        by_head.append(valid & torch.isin(first_choices, uses))
    return torch.stack(by_head)


def policy_loss(
    new: Tensor,
    old: Tensor,
    advantages: Tensor,
    steps: HeadSteps,
    valid: Tensor,
    clip: float,
    mode: str,
) -> PolicyLoss:
    """The clipped surrogate, to be minimised.

    By head it is the sum of each head's mean over the steps where the head took part. In mode
    "joint" it is the mean over whole decisions.
    """
    log_ratios = torch.where(steps.is_relevant, new - old, 0.0)
    joint = log_ratios.sum(0)
    if mode == "joint":
        per_head = (_surrogate(joint, advantages, clip) * valid).sum()[None] / steps.valid
    else:
        surrogate = torch.where(steps.is_relevant, _surrogate(log_ratios, advantages, clip), 0.0)
        per_head = surrogate.sum((1, 2)) / steps.relevant
    return PolicyLoss(
        total=per_head.sum(),
        per_head=per_head,
        log_ratios=log_ratios.detach(),
        kl=k3(joint.detach(), valid, steps.valid),
    )


def imitation_loss(new: Tensor, old: Tensor, steps: HeadSteps) -> PolicyLoss:
    """Minus the log-probability of stored choices, in the mean of valid steps, to be minimised.

    No divergence is too large: the choices are a teacher's.
    """
    per_head = -torch.where(steps.is_relevant, new, 0.0).sum((1, 2)) / steps.valid
    log_ratios = torch.where(steps.is_relevant, new - old, 0.0)
    return PolicyLoss(
        total=per_head.sum(),
        per_head=per_head,
        log_ratios=log_ratios.detach(),
        kl=new.new_zeros(()),
    )


def _surrogate(log_ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    ratio = log_ratio.exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def k3(log_ratio: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    """Mean of (r - 1) - log r over valid steps.

    It is never negative, and 0 only where nothing changed.
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
    """Half the squared error in units of `scale`.

    The worse of clipped and unclipped counts, so that clipping never helps.
    """
    new = new / scale
    old = old / scale
    returns = returns / scale
    clipped = old + (new - old).clamp(-clip, clip)
    worst = torch.maximum((new - returns).square(), (clipped - returns).square())
    return 0.5 * torch.where(valid, worst, 0.0).sum() / count


def mean_entropy(entropy: Tensor, steps: HeadSteps, valid: Tensor) -> Tensor:
    """Each head's mean over the valid steps at which it had a choice, [heads]; 0 without any."""
    return torch.where(steps.is_open & valid, entropy, 0.0).sum((1, 2)) / steps.open
