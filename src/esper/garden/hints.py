"""Hints where a loop is silently wrong. The garden sees the problem; the sentences are here."""

import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from esper.kasmina.blueprints import SHAM
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.optimiser import OptimizerLink
from esper.kasmina.pruning import FossilVerdict
from esper.leyline.rates import LOW_RATE
from esper.leyline.reports import SeedStateReport
from esper.leyline.stages import SeedStage
from esper.telemetry.events import Event, FossilJudged, GrowthHint, StageChanged


def hint_of_low_rate(link: OptimizerLink, epoch: int) -> GrowthHint:
    """A seed was planted when the host hardly learns any more."""
    return _hint(
        epoch,
        f"a seed was planted at a learning rate of {link.rate:.2g}, at most {LOW_RATE:.0%} of the "
        f"peak {link.peak_rate:.2g}; it will learn little. attach(..., seed_lr=M) lets seeds "
        f"learn M times as fast.",
    )


def hint_of_idle_step(epoch: int) -> GrowthHint:
    """Two steps, and no training between them."""
    return _hint(
        epoch,
        "the attached optimiser took no step since the last garden.step; call step once per epoch "
        "that you train.",
    )


def hint_of_unpaired(base: Tensor, again: Tensor, epoch: int) -> list[GrowthHint]:
    """The same network, evaluated twice, has other values: a contribution is then mostly noise."""
    if torch.allclose(base, again, rtol=1e-3):
        return []
    is_order = torch.allclose(base.sort().values, again.sort().values, rtol=1e-3)
    difference = "the same values in another order" if is_order else "other values"
    text = (
        f"evaluate() returned {difference} for the same network, so evidence is noise. Return the "
        f"same examples in the same order, without a random generator of your own."
    )
    return [_hint(epoch, text)]


def hint_of_doubt(
    model: MorphogeneticModel, verdicts: Iterable[FossilVerdict], epoch: int
) -> list[GrowthHint]:
    """Late pruning kept fossils whose contribution is within two standard errors of 0."""
    doubtful: list[str] = []
    for verdict in verdicts:
        gain = verdict.contribution
        if not verdict.is_kept or gain is None or gain.mean >= 2 * gain.standard_error:
            continue
        module = model.slot_config.modules[verdict.slot_id]
        doubtful.append(
            f"{verdict.blueprint_id} in {verdict.slot_id} ({module}) "
            f"({gain.mean:+.2g} ± {gain.standard_error:.2g})"
        )
    if not doubtful:
        return []
    text = (
        f"kept, but may be chance: {', '.join(doubtful)}. GrowthSettings(least_gain=...) sets "
        f"what a fossil must gain."
    )
    return [_hint(epoch, text)]


def hint_of_left_out(model: MorphogeneticModel, epoch: int) -> list[GrowthHint]:
    """Seeds that were not decided about are not taken home; this is a warning as well."""
    undecided: list[str] = []
    for slot_id, report in model.get_slot_reports().items():
        if report.is_live:
            module = model.slot_config.modules[slot_id]
            way_out = _way_to_keep(report)
            undecided.append(f"{report.blueprint_id} in {slot_id} ({module}), {way_out}")
    if not undecided:
        return []
    text = f"the harvest leaves out undecided seeds: {'; '.join(undecided)}."
    warnings.warn(text, stacklevel=4)
    return [_hint(epoch, text)]


def hint_of_unjudged(
    model: MorphogeneticModel, history: Sequence[Event], epoch: int
) -> list[GrowthHint]:
    """Fossils that were never judged are taken home; this is a warning as well."""
    if not model.settings.prunes:
        return []
    by_slot: dict[str, list[str]] = {}
    for event in history:
        if isinstance(event, StageChanged) and event.after == SeedStage.FOSSILIZED.name:
            if event.blueprint != SHAM:
                by_slot.setdefault(event.slot, []).append(str(event.blueprint))
        elif isinstance(event, FossilJudged):
            by_slot.pop(event.slot, None)
    unjudged: list[str] = []
    for slot_id, blueprint_ids in by_slot.items():
        module = model.slot_config.modules[slot_id]
        unjudged += [f"{blueprint_id} in {slot_id} ({module})" for blueprint_id in blueprint_ids]
    if not unjudged:
        return []
    text = (
        f"the harvest takes fossils that were never judged: {', '.join(unjudged)}. Judge them "
        f"first: garden.prune(evaluate)."
    )
    if model.settings.epochs is None:
        text += " With GrowthSettings(epochs=...) the last step does it."
    warnings.warn(text, stacklevel=4)
    return [_hint(epoch, text)]


def _way_to_keep(report: SeedStateReport) -> str:
    """The last contribution of a seed, and the call that keeps it, if it can be kept now."""
    gain = report.metrics.counterfactual_contribution
    if gain is None or report.stage is not SeedStage.PROBATIONARY:
        return f"still {report.stage.name} and not measured: train on, or plant earlier"
    error = report.metrics.counterfactual_standard_error
    return (
        f'last contribution {gain:+.2g} ± {error:.2g}: keep it with garden.keep("{report.slot_id}")'
    )


def _hint(epoch: int, text: str) -> GrowthHint:
    return GrowthHint(host=0, epoch=epoch, text=text)
