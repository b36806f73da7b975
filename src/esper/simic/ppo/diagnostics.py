"""What an update did, and whether it looks wrong:

records, the worst ratios by name, anomalies. Reads, never steers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from esper.simic.team import Team

# Log-ratios are clamped to this for the records, which stay finite; the loss sees them as they are.
_LIMIT = 80.0


@dataclass(frozen=True)
class HeadRecord:
    loss: float
    entropy: float  # mean where the head had a choice, 0 to 1
    clip_fraction: float
    ratio_max: float
    steps: (
        int  # decisions it took part in; a pass that was cut short may not have come to all of them
    )


@dataclass(frozen=True)
class WorstRatio:
    """A decision whose probability moved most."""

    host: int
    epoch: int
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
        """Look through log-ratios [heads, R, T] of `hosts`, each from the step `begins` on; NaN is
        worst of all.
        """
        size = torch.nan_to_num(log_ratios.abs(), nan=math.inf)
        bound = math.log(limit)
        whole = torch.nan_to_num(log_ratios.sum(0).abs(), nan=math.inf)
        # a decision that is outside only as a whole is named by the head that moved most
        outside = (size > bound) | ((whole > bound) & (size == size.amax(0)))
        passes = int(hosts.bincount().max()) if len(hosts) else 0
        order = (
            torch.where(outside, size, -1.0).flatten().topk(min(top * passes, size.numel())).indices
        )
        worst: dict[
            tuple[int, int, int], WorstRatio
        ] = {}  # each choice once, at its worst, whatever the passes
        for head, row, step in torch.stack(torch.unravel_index(order, size.shape), 1).tolist():
            key = (int(hosts[row]), int(begins[row]) + step, head)
            if outside[head, row, step] and key not in worst and len(worst) < top:
                ratio = float(log_ratios[head, row, step].clamp(-_LIMIT, _LIMIT).exp())
                worst[key] = WorstRatio(*key[:2], names[head], ratio)
        return cls(tuple(worst.values()), int(outside.sum()))


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
    ratio_min: float  # joint ratio of whole decisions over all passes
    first_ratio_gap: Mapping[str, float]
    """largest |ratio - 1| of the first minibatch, per head and joint:

    what acting and learning disagree by
    """
    first_worst: (
        WorstRatio | None
    )  # the decision that they disagree most about; None where they agree to the bit
    approx_kl: float  # of the last minibatch looked at
    clip_fraction: float
    early_stop_epoch: int | None  # pass that was cut short by the divergence
    gradient_norm: float
    steps: int  # optimiser steps taken
    skipped_steps: int  # steps left out because of gradients that were not finite
    stale_state_error: (
        float  # mean squared gap of stored to recomputed state, in the end, where episodes go on
    )
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


@dataclass(frozen=True)
class AnomalyDetector:
    """Limits of a healthy update. `check` names every one that was passed."""

    ratio_max: float = 5.0
    kl_max: float = 0.2
    entropy_floor: float = 0.01  # least mean entropy of the first head
    first_ratio_gap: float = 1e-4
    explained_variance: Sequence[tuple[float, float]] = ((0.0, -math.inf), (0.25, -0.5), (0.5, 0.0))
    """(progress from, least value): the value has to know more as training goes on"""

    def check(self, record: UpdateRecord, progress: float) -> list[Anomaly]:
        """Anomalies of one update at `progress` (0 to 1) through training."""
        worst = str(record.explosion.worst[0]) if record.explosion.worst else ""
        numbers = (record.policy_loss, record.value_loss, record.approx_kl, record.ratio_max)
        broken = record.skipped_steps + sum(not math.isfinite(number) for number in numbers)
        extreme = max(record.ratio_max, 1 / record.ratio_min if record.ratio_min > 0 else math.inf)
        gap = max(record.first_ratio_gap.values())
        head, first = next(iter(record.heads.items()))
        least = [limit for start, limit in self.explained_variance if progress >= start][-1]
        too_high = (
            Anomaly("non-finite numbers", float(broken), 0.0, worst),
            Anomaly("ratio", extreme, self.ratio_max, worst),
            Anomaly("kl", record.approx_kl, self.kl_max, worst),
            Anomaly("first ratio gap", gap, self.first_ratio_gap, str(record.first_worst)),
        )
        entropy = Anomaly("entropy", first.entropy, self.entropy_floor, f"head {head}")
        explained = Anomaly("explained variance", record.explained_variance, least)
        found = [anomaly for anomaly in too_high if anomaly.value > anomaly.limit]
        return found + [
            anomaly for anomaly in (entropy, explained) if anomaly.value < anomaly.limit
        ]


@dataclass(frozen=True)
class MinibatchTrace:
    """What one minibatch left behind here, still on the device; log-ratios and relevance are
    [heads, R, T].
    """

    rows: Tensor  # their numbers among those of all processes
    begins: Tensor  # the step of its row that each piece begins with
    log_ratios: Tensor
    is_relevant: Tensor
    valid: Tensor
    head_losses: Tensor
    entropies: Tensor
    value_loss: Tensor
    kl: Tensor
    gradient_norm: (
        Tensor | None
    )  # None: the step was not taken because the divergence was too large


def summarise(
    traces: Sequence[MinibatchTrace],
    names: Sequence[str],
    clip: float,
    uses: Sequence[int],
    team: Team,
    **known: Any,
) -> UpdateRecord:
    """One record of all minibatches of all processes.

    `uses` counts decisions by head; `known` are the other fields.
    """
    # as arrays: tensors take about thirty times as long to send and receive
    here = [
        replace(own, **{k: v.numpy(force=True) for k, v in vars(own).items() if v is not None})
        for own in traces
    ]
    whole = [_joined(parts) for parts in zip(*team.gather(here), strict=True)]
    first, every, look = whole[0], _joined(whole), RatioExplosionDiagnostic.of
    joint = _ratios(every.log_ratios.sum(0), every.valid)
    losses = torch.stack([trace.head_losses.expand(len(names)) for trace in whole]).mean(0).tolist()
    entropies = torch.stack([trace.entropies for trace in whole]).mean(0).tolist()
    norms = [trace.gradient_norm for trace in whole if trace.gradient_norm is not None]
    finite = [norm for norm in norms if bool(torch.isfinite(norm))]
    logs, used = (*first.log_ratios, first.log_ratios.sum(0)), (*first.is_relevant, first.valid)
    at_first = zip((*names, "joint"), map(_ratios, logs, used), strict=True)
    heads = {}
    for place, name in enumerate(names):
        own = _ratios(every.log_ratios[place], every.is_relevant[place])
        heads[name] = HeadRecord(
            losses[place], entropies[place], _outside(own, clip), float(own.max()), uses[place]
        )
    return UpdateRecord(
        policy_loss=float(torch.stack([trace.head_losses.sum() for trace in whole]).mean()),
        value_loss=float(torch.stack([trace.value_loss for trace in whole]).mean()),
        entropy=sum(entropies) / len(entropies),
        heads=heads,
        ratio_mean=float(joint.mean()),
        ratio_std=float(joint.std(unbiased=False)),
        ratio_max=float(joint.max()),
        ratio_min=float(joint.min()),
        first_ratio_gap={name: float((ratios - 1).abs().max()) for name, ratios in at_first},
        first_worst=next(
            iter(look(first.log_ratios, first.rows, first.begins, names, limit=1.0).worst), None
        ),
        approx_kl=float(whole[-1].kl),
        clip_fraction=_outside(joint, clip),
        gradient_norm=float(torch.stack(finite).mean()) if finite else 0.0,
        steps=len(finite),
        skipped_steps=len(norms) - len(finite),
        explosion=look(every.log_ratios, every.rows, every.begins, names),
        **known,
    )


def _joined(parts: Sequence[MinibatchTrace]) -> MinibatchTrace:
    """The rows of all and the sums of their losses; divergence and gradient are those of the
    first.
    """
    each: list[Any] = [
        {k: v if v is None else torch.as_tensor(v) for k, v in vars(own).items()} for own in parts
    ]
    tables = {
        name: torch.cat([part[name] for part in each], 1) for name in ("log_ratios", "is_relevant")
    }
    lists = {name: torch.cat([part[name] for part in each]) for name in ("rows", "begins", "valid")}
    sums = {
        name: sum(part[name] for part in each)
        for name in ("head_losses", "entropies", "value_loss")
    }
    return MinibatchTrace(**{**each[0], **tables, **lists, **sums})


def _ratios(log_ratios: Tensor, counted: Tensor) -> Tensor:
    """The ratios that count; where there are none, 1: nothing has moved."""
    found = log_ratios.clamp(-_LIMIT, _LIMIT).exp()[counted]
    return found if len(found) else found.new_ones(1)


def _outside(ratios: Tensor, clip: float) -> float:
    return float(((ratios - 1).abs() > clip).float().mean())
