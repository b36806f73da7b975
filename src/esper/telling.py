"""What a garden tells whoever trains it: the summary as a table, and hints where a loop is silently wrong."""

import io
import warnings
from collections.abc import Iterable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.pruning import FossilVerdict
from esper.kasmina.surgery import LOW_RATE, OptimizerLink
from esper.leyline.factored_actions import OP_GERMINATE, OP_NAMES
from esper.telemetry.events import ActionTaken, Event, GrowthHint, tell_gain


def summarize(model: MorphogeneticModel, epoch: int) -> str:
    text = io.StringIO()
    limit = f" of {model.budget:,}" if model.budget is not None else ""
    seeds = f"{model.active_seeds} live, {model.fossilized_seeds} kept"
    table = Table(title=f"epoch {epoch}", caption=f"{model.total_params:,}{limit} parameters; seeds: {seeds}")
    numbers = ("alpha", "parameters", "fossils", "contribution")
    for column in ("slot", "module", "kind", "stage", "seed", *numbers):
        table.add_column(column, justify="right" if column in numbers else "left")
    for slot_id, report in model.get_slot_reports().items():
        gain = report.metrics.counterfactual_contribution, report.metrics.counterfactual_standard_error
        alpha, evidence = (f"{report.alpha:.2f}", tell_gain(*gain)) if report.is_live else ("-", "-")
        place = (slot_id, model.slot_config.modules[slot_id], report.kind, report.stage.name)
        counts = (f"{report.metrics.seed_param_count:,}", str(report.fossil_count))
        table.add_row(*place, report.blueprint_id or "-", alpha, *counts, evidence)
    Console(width=120, file=text).print(table)
    return text.getvalue().rstrip()


def warn_of_low_rate(link: OptimizerLink, events: Iterable[Event], epoch: int) -> list[Event]:
    """A seed was planted when the host hardly learns any more."""
    is_planted = any(isinstance(event, ActionTaken) and event.op == OP_NAMES[OP_GERMINATE] for event in events)
    text = (
        f"a seed was planted at a learning rate of {link.rate:.2g}, at most {LOW_RATE:.0%} of the peak "
        f"{link.peak_rate:.2g}; it will learn little. attach(..., seed_lr=M) lets seeds learn M times as fast."
    )
    return [GrowthHint(0, epoch, text)] if is_planted and link.is_rate_low else []


def warn_of_idle_step(link: OptimizerLink, epoch: int) -> list[Event]:
    """Two steps, and no training between them."""
    text = "the attached optimiser took no step since the last garden.step; call step once per epoch that you train."
    return [GrowthHint(0, epoch, text)] if epoch > 1 and link.follows_rates and not link.steps else []


def looks_unpaired(base: Tensor, others: Iterable[Tensor]) -> bool:
    """Whether two evaluations have so little in common that they may be of other examples, or in another order."""
    pairs = [torch.stack([base, other]) for other in others if float(base.std()) > 0 and float(other.std()) > 0]
    return any(float(torch.corrcoef(pair)[0, 1]) < 0.5 for pair in pairs)


def warn_of_unpaired(base: Tensor, again: Tensor, epoch: int) -> list[Event]:
    """The same network, evaluated twice, has other values: a contribution is then mostly noise."""
    is_order = torch.allclose(base.sort().values, again.sort().values, rtol=1e-3)
    what = "the same values in another order" if is_order else "other values"
    text = (
        f"evaluate() returned {what} for the same network, so evidence is noise. Return the same examples in the same "
        "order, without a random generator of your own."
    )
    return [] if torch.allclose(base, again, rtol=1e-3) else [GrowthHint(0, epoch, text)]


def warn_of_doubt(model: MorphogeneticModel, verdicts: Iterable[FossilVerdict], epoch: int) -> list[Event]:
    """Fossils that late pruning kept although their contribution is within two standard errors of 0."""
    own = model.slot_config.modules
    found = [(f"{v.blueprint_id} in {v.slot_id} ({own[v.slot_id]})", v.contribution) for v in verdicts if v.is_kept]
    doubtful = [
        f"{name} ({gain.mean:+.2g} ± {gain.standard_error:.2g})"
        for name, gain in found
        if gain is not None and gain.mean < 2 * gain.standard_error
    ]
    names, way_out = ", ".join(doubtful), "GrowthSettings(least_gain=...) sets what a fossil must gain."
    return [GrowthHint(0, epoch, f"kept, but may be chance: {names}. {way_out}")] if doubtful else []


def warn_of_left_out(model: MorphogeneticModel, epoch: int) -> list[Event]:
    """Seeds that are not part of what is taken home."""
    names = model.slot_config.modules
    live = [f"{r.blueprint_id} in {s} ({names[s]})" for s, r in model.get_slot_reports().items() if r.is_live]
    text = f"the harvest leaves out live seeds: {', '.join(live)}. Train on until they are kept, or plant earlier."
    if live:
        warnings.warn(text, stacklevel=4)
    return [GrowthHint(0, epoch, text)] if live else []
