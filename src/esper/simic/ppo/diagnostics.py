"""What an update did, and whether it looks wrong: records, the worst ratios, anomalies.

It reads and never steers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.simic.team import Team

_LIMIT = 80.0
"""log-ratios are clamped to this in records, which stay finite; the loss sees them as they are"""


@dataclass(frozen=True)
class HeadRecord:
    """What one update did to one head."""

    loss: float
    entropy: float  # mean where the head had a choice, 0 to 1
    clip_fraction: float
    ratio_max: float
    steps: int
    """decisions it took part in; a pass that was cut short may not have come to all of them"""


@dataclass(frozen=True)
class WorstRatio:
    """A decision whose probability moved most."""

    host: int
    epoch: int
    """its number in the row, from 1; in growth the epochs trained so far, as in every event"""
    head: str
    ratio: float

    def __str__(self) -> str:
        return f"host {self.host}, epoch {self.epoch}, head {self.head}: ratio {self.ratio:.4g}"


@dataclass(frozen=True)
class RatioExplosionDiagnostic:
    """The decisions whose probability ratio left its bounds, the worst first."""

    worst: tuple[WorstRatio, ...]
    count: int  # entries outside the bounds, all heads and all passes

    @classmethod
    def of(
        cls,
        log_ratios: Tensor,
        hosts: Tensor,
        begins: Tensor,
        names: Sequence[str],
        limit: float = 2.0,
        top: int = 5,
    ) -> Self:
        """Look through log-ratios [heads, R, T] of pieces of rows; NaN is worst of all.

        Args:
            log_ratios: how far the probability of each choice moved.
            hosts: [R], the row that each piece is of; a row comes once in every pass.
            begins: [R], the step of its row that each piece begins with.
            names: the heads.
            limit: a ratio beyond this, or below its inverse, is outside.
            top: most decisions that are named.
        """
        distances = torch.nan_to_num(log_ratios.abs(), nan=math.inf)
        joint_distances = torch.nan_to_num(log_ratios.sum(0).abs(), nan=math.inf)
        bound = math.log(limit)
        # a decision that is outside only as a whole is named by the head that moved most
        moved_most = distances == distances.amax(0)
        outside = (distances > bound) | ((joint_distances > bound) & moved_most)
        passes = int(hosts.bincount().max()) if len(hosts) else 0
        looked_at = min(top * passes, distances.numel())
        order = torch.where(outside, distances, -1.0).flatten().topk(looked_at).indices
        indices = torch.stack(torch.unravel_index(order, distances.shape), 1)
        # each choice comes once, at its worst, whatever the passes
        worst: dict[tuple[int, int, int], WorstRatio] = {}
        for head, row, step in indices.tolist():
            key = (int(hosts[row]), int(begins[row]) + step + 1, head)
            if outside[head, row, step] and key not in worst and len(worst) < top:
                ratio = float(log_ratios[head, row, step].clamp(-_LIMIT, _LIMIT).exp())
                worst[key] = WorstRatio(host=key[0], epoch=key[1], head=names[head], ratio=ratio)
        return cls(worst=tuple(worst.values()), count=int(outside.sum()))


@dataclass(frozen=True)
class UpdateRecord:
    """What one PPO update did."""

    policy_loss: float
    value_loss: float
    entropy: float  # mean over heads
    heads: Mapping[str, HeadRecord]
    explained_variance: float  # before the update; NaN where the returns did not vary
    ratio_mean: float
    ratio_std: float
    ratio_max: float
    ratio_min: float  # these four: joint ratio of whole decisions over all passes
    first_ratio_gap: Mapping[str, float]
    """largest |ratio - 1| of the first minibatch, per head and joint: by how much acting and
    learning disagree
    """
    first_worst: WorstRatio | None
    """the decision that they disagree most about; None where they agree bit for bit"""
    approx_kl: float  # of the last minibatch looked at
    clip_fraction: float
    early_stop_epoch: int | None  # pass that was cut short by the divergence
    gradient_norm: float
    steps: int  # optimiser steps taken
    judged: int  # decisions looked at in all passes together, fillers included
    skipped_steps: int  # steps left out because of gradients that were not finite
    stale_state_error: float
    """mean squared gap of stored to recomputed state after the update, where episodes continue"""
    lr: float
    entropy_weight: float
    decisions: int
    explosion: RatioExplosionDiagnostic


@dataclass(frozen=True)
class Anomaly:
    """Something in an update that a healthy one does not show."""

    kind: str
    value: float
    limit: float
    where: str = ""


class LeastKnown(NamedTuple):
    """The least explained variance from some progress of training on."""

    progress: float
    least: float


@dataclass(frozen=True)
class AnomalyDetector:
    """Limits of a healthy update; `check` names every one that is passed."""

    ratio_max: float = 5.0
    kl_max: float = 0.2
    entropy_floor: float = 0.01  # least mean entropy of the first head
    first_ratio_gap: float = 1e-4
    explained_variance: Sequence[LeastKnown] = (
        LeastKnown(progress=0.0, least=-math.inf),
        LeastKnown(progress=0.25, least=-0.5),
        LeastKnown(progress=0.5, least=0.0),
    )
    """the value has to know more as training continues"""

    def check(self, record: UpdateRecord, progress: float) -> list[Anomaly]:
        """Anomalies of one update at `progress` (0 to 1) through training."""
        worst = str(record.explosion.worst[0]) if record.explosion.worst else ""
        numbers = (record.policy_loss, record.value_loss, record.approx_kl, record.ratio_max)
        broken = record.skipped_steps + sum(not math.isfinite(number) for number in numbers)
        inverse_of_least = 1 / record.ratio_min if record.ratio_min > 0 else math.inf
        extreme = max(record.ratio_max, inverse_of_least)
        gap = max(record.first_ratio_gap.values())
        first_head, first = next(iter(record.heads.items()))
        reached = [stage for stage in self.explained_variance if progress >= stage.progress]
        may_be_too_high = (
            Anomaly("non-finite numbers", float(broken), 0.0, worst),
            Anomaly("ratio", extreme, self.ratio_max, worst),
            Anomaly("kl", record.approx_kl, self.kl_max, worst),
            Anomaly("first ratio gap", gap, self.first_ratio_gap, str(record.first_worst)),
        )
        may_be_too_low = (
            Anomaly("entropy", first.entropy, self.entropy_floor, f"head {first_head}"),
            Anomaly("explained variance", record.explained_variance, reached[-1].least),
        )
        return [
            *(anomaly for anomaly in may_be_too_high if anomaly.value > anomaly.limit),
            *(anomaly for anomaly in may_be_too_low if anomaly.value < anomaly.limit),
        ]


IMITATING = AnomalyDetector(
    ratio_max=math.inf,
    entropy_floor=0.0,
    explained_variance=(LeastKnown(progress=0.0, least=-math.inf),),
)
"""Limits while a policy imitates: it is to change, and to be as sure as its teacher."""


@dataclass(frozen=True)
class MinibatchTrace:
    """What one minibatch left behind here, still on the device."""

    rows: Tensor  # [R]: the row of each piece, numbered among those of all processes
    begins: Tensor  # [R]: the step of its row that each piece begins with
    log_ratios: Tensor  # [heads, R, T]
    is_relevant: Tensor  # [heads, R, T]
    valid: Tensor  # [R, T]
    head_losses: Tensor  # [heads], or [1] where whole decisions are clipped
    entropies: Tensor  # [heads]
    value_loss: Tensor
    kl: Tensor
    gradient_norm: Tensor | None  # None: no step, because the divergence was too large


@dataclass(frozen=True)
class UpdateFacts:
    """What the learner knows of an update beside its minibatches."""

    decisions: int
    head_decisions: Sequence[int]  # in this rollout, by head
    explained_variance: float
    early_stop_epoch: int | None
    stale_state_error: float
    lr: float
    entropy_weight: float


def summarise(
    traces: Sequence[MinibatchTrace],
    names: Sequence[str],
    clip: float,
    facts: UpdateFacts,
    team: Team,
) -> UpdateRecord:
    """One record of all minibatches of all processes."""
    minibatches = _gathered(traces, team)
    first = minibatches[0]
    whole = _joined(minibatches)
    joint = _ratios(whole.log_ratios.sum(0), whole.valid)
    policy_losses = torch.stack([trace.head_losses.sum() for trace in minibatches])
    value_losses = torch.stack([trace.value_loss for trace in minibatches])
    heads = _head_records(minibatches, whole, names, clip, facts.head_decisions)
    entropies = [record.entropy for record in heads.values()]
    norms = [trace.gradient_norm for trace in minibatches if trace.gradient_norm is not None]
    finite_norms = [norm for norm in norms if bool(torch.isfinite(norm))]
    first_look = RatioExplosionDiagnostic.of(
        first.log_ratios, first.rows, first.begins, names, limit=1.0
    )
    return UpdateRecord(
        policy_loss=float(policy_losses.mean()),
        value_loss=float(value_losses.mean()),
        entropy=sum(entropies) / len(entropies),
        heads=heads,
        explained_variance=facts.explained_variance,
        ratio_mean=float(joint.mean()),
        ratio_std=float(joint.std(unbiased=False)),
        ratio_max=float(joint.max()),
        ratio_min=float(joint.min()),
        first_ratio_gap=_ratio_gaps(first, names),
        first_worst=first_look.worst[0] if first_look.worst else None,
        approx_kl=float(minibatches[-1].kl),
        clip_fraction=_share_outside(joint, clip),
        early_stop_epoch=facts.early_stop_epoch,
        gradient_norm=float(torch.stack(finite_norms).mean()) if finite_norms else 0.0,
        steps=len(finite_norms),
        judged=whole.valid.numel(),
        skipped_steps=len(norms) - len(finite_norms),
        stale_state_error=facts.stale_state_error,
        lr=facts.lr,
        entropy_weight=facts.entropy_weight,
        decisions=facts.decisions,
        explosion=RatioExplosionDiagnostic.of(whole.log_ratios, whole.rows, whole.begins, names),
    )


def _gathered(traces: Sequence[MinibatchTrace], team: Team) -> list[MinibatchTrace]:
    """Every minibatch with the rows of all processes."""
    traces_by_rank = team.gather([_to_arrays(trace) for trace in traces])
    minibatches = []
    for parts in zip(*traces_by_rank, strict=True):
        minibatches.append(_joined([_from_arrays(part) for part in parts]))
    return minibatches


def _to_arrays(trace: MinibatchTrace) -> dict[str, NDArray[Any] | None]:
    """As arrays: tensors take about thirty times as long to send and receive."""
    return {
        name: None if value is None else value.numpy(force=True)
        for name, value in vars(trace).items()
    }


def _from_arrays(arrays: Mapping[str, NDArray[Any] | None]) -> MinibatchTrace:
    tensors: dict[str, Any] = {
        name: None if value is None else torch.as_tensor(value) for name, value in arrays.items()
    }
    return MinibatchTrace(**tensors)


def _joined(traces: Sequence[MinibatchTrace]) -> MinibatchTrace:
    """The rows of all and the sums of their losses; divergence and norm are the first one's."""
    return MinibatchTrace(
        rows=torch.cat([trace.rows for trace in traces]),
        begins=torch.cat([trace.begins for trace in traces]),
        log_ratios=torch.cat([trace.log_ratios for trace in traces], 1),
        is_relevant=torch.cat([trace.is_relevant for trace in traces], 1),
        valid=torch.cat([trace.valid for trace in traces]),
        head_losses=_added([trace.head_losses for trace in traces]),
        entropies=_added([trace.entropies for trace in traces]),
        value_loss=_added([trace.value_loss for trace in traces]),
        kl=traces[0].kl,
        gradient_norm=traces[0].gradient_norm,
    )


def _added(parts: Sequence[Tensor]) -> Tensor:
    """The sum, in the order of the parts."""
    total: Any = sum(parts)
    return torch.as_tensor(total)


def _head_records(
    minibatches: Sequence[MinibatchTrace],
    whole: MinibatchTrace,
    names: Sequence[str],
    clip: float,
    decisions: Sequence[int],
) -> dict[str, HeadRecord]:
    """A record for each head, by name."""
    head_losses = [trace.head_losses.expand(len(names)) for trace in minibatches]
    losses = torch.stack(head_losses).mean(0).tolist()
    entropies = torch.stack([trace.entropies for trace in minibatches]).mean(0).tolist()
    records = {}
    for head, name in enumerate(names):
        ratios = _ratios(whole.log_ratios[head], whole.is_relevant[head])
        records[name] = HeadRecord(
            loss=losses[head],
            entropy=entropies[head],
            clip_fraction=_share_outside(ratios, clip),
            ratio_max=float(ratios.max()),
            steps=decisions[head],
        )
    return records


def _ratio_gaps(trace: MinibatchTrace, names: Sequence[str]) -> dict[str, float]:
    """Largest |ratio - 1| of one minibatch, per head and joint."""
    gaps = {}
    for head, name in enumerate(names):
        ratios = _ratios(trace.log_ratios[head], trace.is_relevant[head])
        gaps[name] = float((ratios - 1).abs().max())
    joint = _ratios(trace.log_ratios.sum(0), trace.valid)
    gaps["joint"] = float((joint - 1).abs().max())
    return gaps


def _ratios(log_ratios: Tensor, counted: Tensor) -> Tensor:
    """The ratios that count; where there are none, 1: nothing has moved."""
    ratios = log_ratios.clamp(-_LIMIT, _LIMIT).exp()[counted]
    return ratios if len(ratios) else ratios.new_ones(1)


def _share_outside(ratios: Tensor, clip: float) -> float:
    """Share of the ratios that the surrogate clips."""
    return float(((ratios - 1).abs() > clip).float().mean())
