"""What a garden tells:

costs by phase, what growing is worth, a summary, hints where a loop is silently wrong.
"""

import io
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from esper.episodes import close_ledger
from esper.garden import processes
from esper.kasmina.evidence import measure_pairs
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.optimiser import OptimizerLink
from esper.kasmina.probing import buffers_kept
from esper.kasmina.pruning import FossilVerdict, find_judged
from esper.kasmina.slot import has_gate, seed_size
from esper.leyline.errors import MeasurementError
from esper.leyline.factored_actions import OP_GERMINATE, OP_NAMES
from esper.leyline.rates import LOW_RATE
from esper.runtime.charges import incubation_flops, learning_flops, network_flops, shadow_flops
from esper.runtime.ledger import Charge
from esper.telemetry.events import ActionTaken, Event, GrowthHint, GrowthReported, format_gain

if TYPE_CHECKING:
    from esper.garden.garden import Garden

Measure = Callable[..., tuple[Tensor, float]]
Switch = Callable[[], AbstractContextManager[None]]


def report_growth(garden: "Garden", evaluate: Callable[[], Tensor] | None) -> GrowthReported:
    """Measure with everything, without each part, and without all; tell it as an event."""
    if evaluate is None:
        raise MeasurementError(
            "no step has measured anything yet, so say how: garden.report(evaluate)."
        )
    model = garden.model
    with buffers_kept(model), garden._together(), booked(garden, evaluate) as (measure, values):
        found = _measure_growth(model, measure)
        again = measure()[0] if looks_unpaired(values[0], values[1:]) else values[0]
    for hint in warn_of_unpaired(values[0], again, garden.epoch):
        raise MeasurementError(str(hint))
    found |= {
        "params": model.total_params,
        "host_params": model.host_params,
        "host_flops": garden.flops,
    }
    found["flops"] = None if garden.prices is None else network_flops(model, garden.prices)
    closed = close_ledger(0, 0, garden.ledger)
    spent = {} if garden.flops is None else closed.flops
    told = GrowthReported(0, garden.epoch, **found, spent=spent, seconds=closed.seconds)
    garden._tell([told])
    return told


def _measure_growth(model: MorphogeneticModel, measure: Measure) -> dict[str, Any]:
    (base, sign), parts, rows = measure(is_base=True), list(_find_parts(model)), []
    for switches in [*([part] for part in parts), parts]:
        with ExitStack() as off:
            for switch, _ in switches:
                off.enter_context(switch())
            values = measure()[0]
        gain = measure_pairs(better=base, than=values)
        rows.append(
            {
                "without": sign * float(values.mean()),
                "gain": gain.mean,
                "standard_error": gain.standard_error,
            }
        )
    *rows, bare = rows
    told = {
        "measure": "loss" if sign > 0 else "score",
        "examples": len(base),
        "whole": sign * float(base.mean()),
    }
    each = [{**part, **row} for (_, part), row in zip(parts, rows, strict=True)]
    return {**told, "without_all": bare.pop("without"), **bare, "parts": each}


def _find_parts(model: MorphogeneticModel) -> Iterator[tuple[Switch, dict[str, Any]]]:
    """All that grew and is in the output: how to switch it off, and what it is."""
    for slot_id, module in model.slot_config.modules.items():
        slot = model.slot(slot_id)
        own = [
            (partial(model.fossil_off, slot_id, n), "fossil", n)
            for s, n in find_judged(model)
            if s == slot_id
        ]
        if slot.is_in_output:
            own.append((partial(model.slot_off, slot_id), slot.state.stage.name, len(slot.fossils)))
        seeds, names = (
            [*slot.fossils, slot.seed],
            [*slot.fossil_names, str(slot.state.blueprint_id)],
        )
        for switch, stage, number in own:
            seed, name = seeds[number], names[number]
            what = {"slot": slot_id, "module": module, "blueprint": name, "stage": stage}
            yield (
                switch,
                {
                    **what,
                    "params": seed_size(seed),
                    "flops": slot.prices[name, has_gate(seed)].flops,
                },
            )


@contextmanager
def booked(
    garden: "Garden", evaluate: Callable[[], Tensor]
) -> Iterator[tuple[Measure, list[Tensor]]]:
    """What measures the network as it is at the time, and all values so far; at the end the ledger
    has it.
    """
    started, charges, found = time.perf_counter(), list[Charge](), list[Tensor]()

    def measure(*, is_base: bool = False) -> tuple[Tensor, float]:
        values, sign = garden._values(evaluate, is_base=is_base)
        flops = 0 if garden.prices is None else network_flops(garden.model, garden.prices)
        charges.append(Charge("validation" if is_base else "counterfactual", len(values), flops))
        found.append(values)
        return values, sign

    yield measure, found
    seconds = time.perf_counter() - started
    garden.ledger.settle(charges, seconds)
    garden._resumed += seconds  # which your own loop did not take


def charge_epoch(
    garden: "Garden",
    link: OptimizerLink,
    started: float,
    count: int,
    incubated: list[str],
    ablated: int,
) -> None:
    """Book the epoch that was trained, and its measurement on `count` examples."""
    everyones = processes.gather(lambda: garden.model.examples)
    examples = {phase: sum(own[phase] for own in everyones) for phase in garden.model.examples}
    if link.steps and not examples["training"]:
        # the loop calls a compiled copy or the host itself: nobody knows how many examples
        garden.prices, garden._is_passed_by = None, True
    whole = 0 if garden.prices is None else network_flops(garden.model, garden.prices)
    seeds = {
        s: 0 if garden.flops is None else incubation_flops(garden.model.slot(s)) for s in incubated
    }
    learnt = 0
    shadowed = 0
    if garden.prices is not None:
        learnt = learning_flops(garden.model, garden.prices)
        slots = [garden.model.slot(slot_id) for slot_id in incubated]
        shadowed = shadow_flops(garden.model, garden.prices, slots) if slots else 0
    trained = [
        Charge("training", examples["training"], learnt),
        Charge("shadow", examples["shadow"], shadowed),
    ]
    garden.ledger.settle(trained, started - garden._resumed)
    # with its slot off a seed is still computed, so that a compiled network stays as it is
    measured = [
        Charge("validation", count, whole),
        Charge("counterfactual", ablated * count, whole),
    ]
    measured += [Charge("shadow", count, whole + flops) for flops in seeds.values()]
    garden.ledger.settle(measured, time.perf_counter() - started)
    garden.ledger.peak_params = max(garden.ledger.peak_params, garden.model.total_params)
    garden.model.examples, link.steps = dict.fromkeys(examples, 0), 0


def summarize(model: MorphogeneticModel, epoch: int) -> str:
    text = io.StringIO()
    limit = f" of {model.budget:,}" if model.budget is not None else ""
    seeds = f"{model.active_seeds} live, {model.fossilized_seeds} kept"
    table = Table(
        title=f"epoch {epoch}", caption=f"{model.total_params:,}{limit} parameters; seeds: {seeds}"
    )
    numbers = ("alpha", "parameters", "fossils", "contribution")
    for column in ("slot", "module", "kind", "stage", "seed", *numbers):
        table.add_column(column, justify="right" if column in numbers else "left")
    for slot_id, report in model.get_slot_reports().items():
        gain = (
            report.metrics.counterfactual_contribution,
            report.metrics.counterfactual_standard_error,
        )
        alpha, evidence = (
            (f"{report.alpha:.2f}", format_gain(*gain)) if report.is_live else ("-", "-")
        )
        place = (slot_id, model.slot_config.modules[slot_id], report.kind, report.stage.name)
        counts = (f"{report.metrics.seed_param_count:,}", str(report.fossil_count))
        table.add_row(*place, report.blueprint_id or "-", alpha, *counts, evidence)
    Console(width=120, file=text).print(table)
    return text.getvalue().rstrip()


def warn_of_low_rate(link: OptimizerLink, events: Iterable[Event], epoch: int) -> list[Event]:
    """A seed was planted when the host hardly learns any more."""
    is_planted = any(
        isinstance(event, ActionTaken) and event.op == OP_NAMES[OP_GERMINATE] for event in events
    )
    rate = (
        f"a learning rate of {link.rate:.2g}, at most {LOW_RATE:.0%} of the peak "
        f"{link.peak_rate:.2g}"
    )
    way_out = "attach(..., seed_lr=M) lets seeds learn M times as fast."
    text = f"a seed was planted at {rate}; it will learn little. {way_out}"
    return [GrowthHint(0, epoch, text)] if is_planted and link.is_rate_low else []


def warn_of_idle_step(link: OptimizerLink, epoch: int) -> list[Event]:
    """Two steps, and no training between them."""
    text = (
        "the attached optimiser took no step since the last garden.step; call step "
        "once per epoch that you train."
    )
    return (
        [GrowthHint(0, epoch, text)] if epoch > 1 and link.follows_rates and not link.steps else []
    )


def looks_unpaired(base: Tensor, others: Iterable[Tensor]) -> bool:
    """Whether two evaluations have so little in common that they may be of other examples, or in
    another order.
    """
    pairs = [
        torch.stack([base, other])
        for other in others
        if float(base.std()) > 0 and float(other.std()) > 0
    ]
    return any(float(torch.corrcoef(pair)[0, 1]) < 0.5 for pair in pairs)


def warn_of_unpaired(base: Tensor, again: Tensor, epoch: int) -> list[Event]:
    """The same network, evaluated twice, has other values: a contribution is then mostly noise."""
    is_order = torch.allclose(base.sort().values, again.sort().values, rtol=1e-3)
    what = "the same values in another order" if is_order else "other values"
    way_out = "Return the same examples in the same order, without a random generator of your own."
    text = f"evaluate() returned {what} for the same network, so evidence is noise. {way_out}"
    return [] if torch.allclose(base, again, rtol=1e-3) else [GrowthHint(0, epoch, text)]


def warn_of_doubt(
    model: MorphogeneticModel, verdicts: Iterable[FossilVerdict], epoch: int
) -> list[Event]:
    """Fossils that late pruning kept although their contribution is within two standard errors of
    0.
    """
    own = model.slot_config.modules
    doubtful = [
        f"{v.blueprint_id} in {v.slot_id} ({own[v.slot_id]}) ({gain.mean:+.2g} ± "
        f"{gain.standard_error:.2g})"
        for v in verdicts
        if v.is_kept
        and (gain := v.contribution) is not None
        and gain.mean < 2 * gain.standard_error
    ]
    names, way_out = (
        ", ".join(doubtful),
        "GrowthSettings(least_gain=...) sets what a fossil must gain.",
    )
    return (
        [GrowthHint(0, epoch, f"kept, but may be chance: {names}. {way_out}")] if doubtful else []
    )


def warn_of_left_out(model: MorphogeneticModel, epoch: int) -> list[Event]:
    """Seeds that are not part of what is taken home."""
    names = model.slot_config.modules
    live = [
        f"{r.blueprint_id} in {s} ({names[s]})"
        for s, r in model.get_slot_reports().items()
        if r.is_live
    ]
    text = (
        f"the harvest leaves out live seeds: {', '.join(live)}. Train on until they "
        f"are kept, or plant earlier."
    )
    if live:
        warnings.warn(text, stacklevel=4)
    return [GrowthHint(0, epoch, text)] if live else []
