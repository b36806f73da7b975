"""From what minibatches leave behind to one record per update: the one place where an update leaves the device."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from esper.simic.diagnostics import HeadRecord, RatioExplosionDiagnostic, UpdateRecord, WorstRatio
from esper.simic.team import Team

_NAMED = 5
"""Decisions that a record names."""
_LIMIT = 80.0
"""Log-ratios are clamped to this for the records, so that they stay finite; the loss sees them as they are."""


@dataclass(frozen=True)
class MinibatchTrace:
    """What one minibatch left behind, still on the device; log-ratios and relevance are [heads, R, T]."""

    rows: Tensor
    begins: Tensor
    """the step of its row that each piece begins with"""
    log_ratios: Tensor
    is_relevant: Tensor
    valid: Tensor
    head_losses: Tensor
    entropies: Tensor
    value_loss: Tensor
    kl: Tensor
    gradient_norm: Tensor | None
    """None: the step was not taken because the divergence was too large"""


def summarise(
    traces: Sequence[MinibatchTrace],
    names: Sequence[str],
    clip: float,
    uses: Sequence[int],
    team: Team,
    first: int = 0,
    **known: Any,
) -> UpdateRecord:
    """One record of all minibatches of all processes.

    Args:
        uses: decisions that each head took part in, here.
        first: number of the first row here.
        known: the fields that the caller measured itself.
    """
    sizes = [len(traces[0].head_losses), len(names), 1]
    told = [torch.cat([trace.head_losses, trace.entropies, trace.value_loss[None]]) for trace in traces]
    whole = []
    for trace, row in zip(traces, team.sum(torch.stack(told)), strict=True):
        losses, entropies, value = row.split(sizes)
        pooled = {"head_losses": losses, "entropies": entropies, "value_loss": value[0]}
        whole.append(replace(trace, rows=trace.rows + first, **pooled))
    own = summarise_own(whole, names, clip, uses, **known)
    seen = torch.cat([trace.is_relevant for trace in traces], 1).sum((1, 2)).tolist()
    decisions = sum(int(trace.valid.sum()) for trace in traces)
    return merge_records(team.gather((own, decisions, seen)))


def merge_records(found: Sequence[tuple[UpdateRecord, int, list[int]]]) -> UpdateRecord:
    """One record from those of all processes, with how many ratios each has seen, jointly and by head."""
    records = [record for record, *_ in found]
    if len(records) == 1:
        return records[0]
    first, total = records[0], max(1, sum(count for _, count, _ in found))
    mean = sum(record.ratio_mean * count for record, count, _ in found) / total
    square = sum((record.ratio_std**2 + record.ratio_mean**2) * count for record, count, _ in found) / total
    worst = sorted((one for record in records for one in record.explosion.worst), key=_size, reverse=True)
    seen = [record.first_worst for record in records if record.first_worst is not None]
    return replace(
        first,
        heads={
            name: _merge_heads([record.heads[name] for record in records], [seen[place] for _, _, seen in found])
            for place, name in enumerate(first.heads)
        },
        ratio_mean=mean,
        ratio_std=max(0.0, square - mean**2) ** 0.5,
        ratio_max=max(record.ratio_max for record in records),
        ratio_min=min(record.ratio_min for record in records),
        first_ratio_gap={name: max(r.first_ratio_gap[name] for r in records) for name in first.first_ratio_gap},
        first_worst=max(seen, key=_size, default=None),
        clip_fraction=sum(record.clip_fraction * count for record, count, _ in found) / total,
        explosion=RatioExplosionDiagnostic(tuple(worst[:_NAMED]), sum(record.explosion.count for record in records)),
    )


def _merge_heads(heads: Sequence[HeadRecord], seen: Sequence[int]) -> HeadRecord:
    used = [(head, count) for head, count in zip(heads, seen, strict=True) if count]
    return replace(
        heads[0],
        clip_fraction=sum(head.clip_fraction * count for head, count in used) / max(1, sum(seen)),
        ratio_max=max((head.ratio_max for head, _ in used), default=1.0),
        steps=sum(head.steps for head in heads),
    )


def _size(worst: WorstRatio) -> float:
    """How far a ratio is from 1, either way; NaN is farthest of all."""
    return abs(math.log(worst.ratio)) if worst.ratio > 0 else math.inf


def summarise_own(
    traces: Sequence[MinibatchTrace], names: Sequence[str], clip: float, uses: Sequence[int], **known: Any
) -> UpdateRecord:
    """The record of the rows that are here."""
    log_ratios = torch.cat([trace.log_ratios for trace in traces], 1)  # [heads, rows of all passes, T]
    relevant = torch.cat([trace.is_relevant for trace in traces], 1)
    valid, rows, begins = (
        torch.cat([getattr(trace, name) for trace in traces]) for name in ("valid", "rows", "begins")
    )
    joint = _ratios(log_ratios.sum(0))[valid]
    losses = torch.stack([trace.head_losses.expand(len(names)) for trace in traces]).mean(0).tolist()
    entropies = torch.stack([trace.entropies for trace in traces]).mean(0).tolist()
    norms = [trace.gradient_norm for trace in traces if trace.gradient_norm is not None]
    heads = {
        name: _head_record(own[relevant[place]], losses[place], entropies[place], clip, uses[place])
        for place, (name, own) in enumerate(zip(names, _ratios(log_ratios), strict=True))
    }
    finite = [norm for norm in norms if bool(torch.isfinite(norm))]
    return UpdateRecord(
        policy_loss=float(torch.stack([trace.head_losses.sum() for trace in traces]).mean()),
        value_loss=float(torch.stack([trace.value_loss for trace in traces]).mean()),
        entropy=sum(entropies) / len(entropies),
        heads=heads,
        ratio_mean=float(joint.mean()) if len(joint) else 1.0,
        ratio_std=float(joint.std(unbiased=False)) if len(joint) else 0.0,
        ratio_max=float(joint.max()) if len(joint) else 1.0,
        ratio_min=float(joint.min()) if len(joint) else 1.0,
        first_ratio_gap=_first_gaps(traces[0], names),
        first_worst=_first_worst(traces[0], names),
        approx_kl=float(traces[-1].kl),
        clip_fraction=float(((joint - 1).abs() > clip).float().mean()) if len(joint) else 0.0,
        gradient_norm=float(torch.stack(finite).mean()) if finite else 0.0,
        steps=len(finite),
        skipped_steps=len(norms) - len(finite),
        explosion=RatioExplosionDiagnostic.of(log_ratios, rows, begins, names),
        **known,
    )


def _first_worst(trace: MinibatchTrace, names: Sequence[str]) -> WorstRatio | None:
    if not len(trace.rows):
        return None
    return next(iter(RatioExplosionDiagnostic.of(trace.log_ratios, trace.rows, trace.begins, names, 1.0).worst), None)


def _ratios(log_ratios: Tensor) -> Tensor:
    return log_ratios.clamp(-_LIMIT, _LIMIT).exp()


def _head_record(own: Tensor, loss: float, entropy: float, clip: float, steps: int) -> HeadRecord:
    return HeadRecord(
        loss=loss,
        entropy=entropy,
        clip_fraction=float(((own - 1).abs() > clip).float().mean()) if len(own) else 0.0,
        ratio_max=float(own.max()) if len(own) else 1.0,
        steps=steps,
    )


def _first_gaps(trace: MinibatchTrace, names: Sequence[str]) -> dict[str, float]:
    if not len(trace.rows):
        return dict.fromkeys((*names, "joint"), 0.0)
    gaps = (_ratios(trace.log_ratios) - 1).abs().amax((1, 2)).tolist()
    joint = float((_ratios(trace.log_ratios.sum(0)) - 1).abs()[trace.valid].max()) if bool(trace.valid.any()) else 0.0
    return {**dict(zip(names, gaps, strict=True)), "joint": joint}
