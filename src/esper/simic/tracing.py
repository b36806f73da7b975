"""From what minibatches leave behind to one record per update: the one place where an update leaves the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esper.simic.diagnostics import HeadRecord, RatioExplosionDiagnostic, UpdateRecord

_LIMIT = 80.0
"""Log-ratios are clamped to this for the records, so that they stay finite; the loss sees them as they are."""


@dataclass(frozen=True)
class MinibatchTrace:
    """What one minibatch left behind, still on the device; log-ratios and relevance are [heads, R, T]."""

    rows: Tensor
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
    traces: Sequence[MinibatchTrace], names: Sequence[str], clip: float, uses: Sequence[int], **known: Any
) -> UpdateRecord:
    """One record of all minibatches.

    Args:
        uses: decisions that each head took part in.
        known: the fields that the caller measured itself.
    """
    log_ratios = torch.cat([trace.log_ratios for trace in traces], 1)  # [heads, rows of all passes, T]
    relevant = torch.cat([trace.is_relevant for trace in traces], 1)
    valid = torch.cat([trace.valid for trace in traces])
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
        first_worst=next(
            iter(RatioExplosionDiagnostic.of(traces[0].log_ratios, traces[0].rows, names, 1.0).worst), None
        ),
        approx_kl=float(traces[-1].kl),
        clip_fraction=float(((joint - 1).abs() > clip).float().mean()) if len(joint) else 0.0,
        gradient_norm=float(torch.stack(finite).mean()) if finite else 0.0,
        steps=len(finite),
        skipped_steps=len(norms) - len(finite),
        explosion=RatioExplosionDiagnostic.of(log_ratios, torch.cat([trace.rows for trace in traces]), names),
        **known,
    )


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
    gaps = (_ratios(trace.log_ratios) - 1).abs().amax((1, 2)).tolist()
    joint = float((_ratios(trace.log_ratios.sum(0)) - 1).abs()[trace.valid].max()) if bool(trace.valid.any()) else 0.0
    return {**dict(zip(names, gaps, strict=True)), "joint": joint}
