"""What growing is worth, part by part, and a garden as a table. Nothing here changes a network."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from esper.garden.books import Books
from esper.garden.measuring import Evaluations
from esper.kasmina.evidence import measure_pairs
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.pruning import find_judged
from esper.kasmina.slot import SeedSlot, has_gate, seed_size
from esper.leyline.reports import SeedStateReport
from esper.telemetry.events import Event, GrowthReported
from esper.telemetry.wording import format_gain


@dataclass(frozen=True)
class GrownPart:
    """A fossil or live seed that is in the output: what it is, and how to switch it off."""

    facts: dict[str, Any]
    switch: Callable[[], AbstractContextManager[None]]


def measure_growth(model: MorphogeneticModel, evaluations: Evaluations) -> dict[str, Any]:
    """Measure a network with everything, without each part, and without all that grew.

    Returns the fields of `GrowthReported` that say what growing is worth.
    """
    base = evaluations.measure(is_base=True)
    parts = list(_find_parts(model))
    rows: list[dict[str, float]] = []
    for left_out in [*([part] for part in parts), parts]:
        with ExitStack() as off:
            for part in left_out:
                off.enter_context(part.switch())
            values = evaluations.measure().values
        gain = measure_pairs(better=base.values, than=values)
        rows.append(
            {
                "without": base.sign * float(values.mean()),
                "gain": gain.mean,
                "standard_error": gain.standard_error,
            }
        )
    without_all = rows.pop()
    return {
        "measure": "loss" if base.sign > 0 else "score",
        "examples": len(base.values),
        "whole": base.sign * float(base.values.mean()),
        "without_all": without_all["without"],
        "gain": without_all["gain"],
        "standard_error": without_all["standard_error"],
        "parts": [{**part.facts, **row} for part, row in zip(parts, rows, strict=True)],
    }


def compose_report(
    model: MorphogeneticModel, books: Books, epoch: int, growth: dict[str, Any]
) -> GrowthReported:
    """The event that says what growing is worth and what it costs; `growth` was measured."""
    closed = books.close(seed=0)
    return GrowthReported(
        host=0,
        epoch=epoch,
        **growth,
        params=model.total_params,
        host_params=model.host_params,
        flops=books.network_flops(model),
        host_flops=books.flops,
        spent=closed.flops,
        seconds=closed.seconds,
    )


def _find_parts(model: MorphogeneticModel) -> Iterator[GrownPart]:
    """All that grew and is in the output, slot by slot: fossils, newest first, then the seed."""
    judged = find_judged(model)
    for slot_id, module in model.slot_config.modules.items():
        slot = model.slot(slot_id)
        for fossil_slot, number in judged:
            if fossil_slot == slot_id:
                facts = _describe_part(
                    slot, module, slot.fossils[number], slot.fossil_names[number], "fossil"
                )
                yield GrownPart(facts, partial(model.fossil_off, slot_id, number))
        if slot.is_in_output and slot.seed is not None:
            state = slot.state
            facts = _describe_part(
                slot, module, slot.seed, str(state.blueprint_id), state.stage.name
            )
            yield GrownPart(facts, partial(model.slot_off, slot_id))


def _describe_part(
    slot: SeedSlot, module: str, grown: nn.Module, blueprint: str, stage: str
) -> dict[str, Any]:
    """A part as `GrowthReported` has it; `module` is the host's, `grown` what is in the slot."""
    return {
        "slot": slot.slot_id,
        "module": module,
        "blueprint": blueprint,
        "stage": stage,
        "params": seed_size(grown),
        "flops": slot.prices[blueprint, has_gate(grown)].flops,
    }


def summarize(model: MorphogeneticModel, epoch: int, history: Sequence[Event]) -> str:
    """Slots, stages, parameters and evidence as a table to print, and the last report."""
    limit = f" of {model.budget:,}" if model.budget is not None else ""
    seeds = f"{model.active_seeds} live, {model.fossilized_seeds} kept"
    caption = f"{model.total_params:,}{limit} parameters; seeds: {seeds}"
    rows: list[Sequence[str]] = [_COLUMNS]
    for slot_id, report in model.get_slot_reports().items():
        rows.append(_row_of(report, model.slot_config.modules[slot_id]))
    reported = [str(event) for event in history if isinstance(event, GrowthReported)]
    return "\n".join([f"epoch {epoch}", *_aligned(rows), caption, *reported[-1:]])


_COLUMNS = (
    *("slot", "module", "kind", "stage", "seed"),
    *("alpha", "parameters", "fossils", "contribution"),
)
_WORDS = 5  # columns of words, on the left; numbers follow


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Each row as one line, its columns under each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = []
        for number, (text, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(text.ljust(width) if number < _WORDS else text.rjust(width))
        yield "  ".join(cells)


def _row_of(report: SeedStateReport, module: str) -> tuple[str, ...]:
    """One slot; without a live seed it has neither alpha nor evidence."""
    metrics = report.metrics
    alpha = "-"
    evidence = "-"
    if report.is_live:
        alpha = f"{report.alpha:.2f}"
        evidence = format_gain(
            metrics.counterfactual_contribution, metrics.counterfactual_standard_error
        )
    return (
        report.slot_id,
        module,
        report.kind,
        report.stage.name,
        report.blueprint_id or "-",
        alpha,
        f"{metrics.seed_param_count:,}",
        str(report.fossil_count),
        evidence,
    )
