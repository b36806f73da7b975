"""From what minibatches leave behind to one record per update: the one place where an update leaves the device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from esper.simic.diagnostics import HeadRecord, RatioExplosionDiagnostic, UpdateRecord, WorstRatio
from esper.simic.team import Team

_LIMIT = 80.0
"""Log-ratios are clamped to this for the records, so that they stay finite; the loss sees them as they are."""


@dataclass(frozen=True)
class MinibatchTrace:
    """What one minibatch left behind here, still on the device; log-ratios and relevance are [heads, R, T]."""

    rows: Tensor
    """their numbers among those of all processes"""
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
    **known: Any,
) -> UpdateRecord:
    """One record of all minibatches of all processes, the same on each.

    Args:
        uses: decisions of all processes that each head took part in.
        known: the fields that the caller measured itself.
    """
    whole = [_joined(parts) for parts in zip(*team.gather([_to_cpu(trace) for trace in traces]), strict=True)]
    log_ratios = torch.cat([trace.log_ratios for trace in whole], 1)  # [heads, rows of all passes, T]
    relevant = torch.cat([trace.is_relevant for trace in whole], 1)
    valid, rows, begins = (torch.cat([getattr(trace, name) for trace in whole]) for name in ("valid", "rows", "begins"))
    joint = _ratios(log_ratios.sum(0), valid)
    losses = torch.stack([trace.head_losses.expand(len(names)) for trace in whole]).mean(0).tolist()
    entropies = torch.stack([trace.entropies for trace in whole]).mean(0).tolist()
    norms = [trace.gradient_norm for trace in whole if trace.gradient_norm is not None]
    finite = [norm for norm in norms if bool(torch.isfinite(norm))]
    heads = {}
    for place, name in enumerate(names):
        own = _ratios(log_ratios[place], relevant[place])
        heads[name] = HeadRecord(losses[place], entropies[place], _outside(own, clip), float(own.max()), uses[place])
    return UpdateRecord(
        policy_loss=float(torch.stack([trace.head_losses.sum() for trace in whole]).mean()),
        value_loss=float(torch.stack([trace.value_loss for trace in whole]).mean()),
        entropy=sum(entropies) / len(entropies),
        heads=heads,
        ratio_mean=float(joint.mean()),
        ratio_std=float(joint.std(unbiased=False)),
        ratio_max=float(joint.max()),
        ratio_min=float(joint.min()),
        first_ratio_gap=_first_gaps(whole[0], names),
        first_worst=_first_worst(whole[0], names),
        approx_kl=float(whole[-1].kl),
        clip_fraction=_outside(joint, clip),
        gradient_norm=float(torch.stack(finite).mean()) if finite else 0.0,
        steps=len(finite),
        skipped_steps=len(norms) - len(finite),
        explosion=RatioExplosionDiagnostic.of(log_ratios, rows, begins, names),
        **known,
    )


def _to_cpu(trace: MinibatchTrace) -> MinibatchTrace:
    moved: dict[str, Any] = {name: value.cpu() for name, value in vars(trace).items() if value is not None}
    return replace(trace, **moved)


def _joined(parts: Sequence[MinibatchTrace]) -> MinibatchTrace:
    """A minibatch from what each process had of it; divergence and gradient are the same on all of them."""
    tables = {name: torch.cat([vars(part)[name] for part in parts], 1) for name in ("log_ratios", "is_relevant")}
    lists = {name: torch.cat([vars(part)[name] for part in parts]) for name in ("rows", "begins", "valid")}
    sums = {name: sum(vars(part)[name] for part in parts) for name in ("head_losses", "entropies", "value_loss")}
    return replace(parts[0], **tables, **lists, **sums)


def _ratios(log_ratios: Tensor, counted: Tensor) -> Tensor:
    """The ratios that count; where there are none, 1: nothing has moved."""
    found = log_ratios.clamp(-_LIMIT, _LIMIT).exp()[counted]
    return found if len(found) else found.new_ones(1)


def _outside(ratios: Tensor, clip: float) -> float:
    return float(((ratios - 1).abs() > clip).float().mean())


def _first_gaps(trace: MinibatchTrace, names: Sequence[str]) -> dict[str, float]:
    shown = zip((*names, "joint"), (*trace.log_ratios, trace.log_ratios.sum(0)), strict=True)
    used = (*trace.is_relevant, trace.valid)
    return {name: float((_ratios(log, own) - 1).abs().max()) for (name, log), own in zip(shown, used, strict=True)}


def _first_worst(trace: MinibatchTrace, names: Sequence[str]) -> WorstRatio | None:
    return next(iter(RatioExplosionDiagnostic.of(trace.log_ratios, trace.rows, trace.begins, names, 1.0).worst), None)
