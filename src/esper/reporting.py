"""What growing in one's own loop costs, phase by phase, and what it is worth. The network is as before afterwards."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from esper import telling
from esper.episodes import close_ledger
from esper.kasmina import processes
from esper.kasmina.evidence import measure_pairs
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.probing import buffers_kept
from esper.kasmina.pruning import find_judged
from esper.kasmina.slot import has_gate, seed_size
from esper.kasmina.surgery import OptimizerLink
from esper.leyline.errors import MeasurementError
from esper.runtime.ledger import BACKWARD, HostFlops, incubation_flops, network_flops
from esper.telemetry.events import GrowthReported

if TYPE_CHECKING:
    from esper.garden import Garden

Measure = Callable[..., tuple[Tensor, float]]
Switch = Callable[[], AbstractContextManager[None]]


def report_growth(garden: "Garden", evaluate: Callable[[], Tensor] | None) -> GrowthReported:
    """Measure with everything, without each part, and without all; tell it as an event."""
    if evaluate is None:
        raise MeasurementError("no step has measured anything yet, so say how: garden.report(evaluate).")
    model = garden.model
    with buffers_kept(model), garden._together(), booked(garden, evaluate) as (measure, values):
        found = _measure_growth(model, measure)
        again = measure()[0] if telling.looks_unpaired(values[0], values[1:]) else values[0]
    for hint in telling.warn_of_unpaired(values[0], again, garden.epoch):
        raise MeasurementError(str(hint))
    found |= {"params": model.total_params, "host_params": model.host_params, "host_flops": garden.flops}
    found["flops"] = None if garden.flops is None else network_flops(model, HostFlops(garden.flops))
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
        rows.append({"without": sign * float(values.mean()), "gain": gain.mean, "standard_error": gain.standard_error})
    *rows, bare = rows
    told = {"measure": "loss" if sign > 0 else "score", "examples": len(base), "whole": sign * float(base.mean())}
    each = [{**part, **row} for (_, part), row in zip(parts, rows, strict=True)]
    return {**told, "without_all": bare.pop("without"), **bare, "parts": each}


def _find_parts(model: MorphogeneticModel) -> Iterator[tuple[Switch, dict[str, Any]]]:
    """All that grew and is in the output: how to switch it off, and what it is."""
    for slot_id, module in model.slot_config.modules.items():
        slot = model.slot(slot_id)
        own = [(partial(model.fossil_off, slot_id, n), "fossil", n) for s, n in find_judged(model) if s == slot_id]
        if slot.is_in_output:
            own.append((partial(model.slot_off, slot_id), slot.state.stage.name, len(slot.fossils)))
        seeds, names = [*slot.fossils, slot.seed], [*slot.fossil_names, str(slot.state.blueprint_id)]
        for switch, stage, number in own:
            seed, name = seeds[number], names[number]
            what = {"slot": slot_id, "module": module, "blueprint": name, "stage": stage}
            yield switch, {**what, "params": seed_size(seed), "flops": slot.prices[name, has_gate(seed)].flops}


@contextmanager
def booked(garden: "Garden", evaluate: Callable[[], Tensor]) -> Iterator[tuple[Measure, list[Tensor]]]:
    """What measures the network as it is at the time, and all values so far; at the end the ledger has it."""
    started, charges, found = time.perf_counter(), list[tuple[str, int, int]](), list[Tensor]()

    def measure(*, is_base: bool = False) -> tuple[Tensor, float]:
        values, sign = garden._values(evaluate, is_base=is_base)
        flops = 0 if garden.flops is None else network_flops(garden.model, HostFlops(garden.flops))
        charges.append(("validation" if is_base else "counterfactual", len(values), flops))
        found.append(values)
        return values, sign

    yield measure, found
    seconds = time.perf_counter() - started
    garden.ledger.settle(charges, seconds)
    garden._resumed += seconds  # which your own loop did not take


def charge_epoch(
    garden: "Garden", link: OptimizerLink, started: float, count: int, incubated: list[str], ablated: int
) -> None:
    """Book the epoch that was trained, and its measurement on `count` examples."""
    everyones = processes.gather(lambda: garden.model.examples)
    examples = {phase: sum(own[phase] for own in everyones) for phase in garden.model.examples}
    if link.steps and not examples["training"]:
        # the loop calls a compiled copy or the host itself: nobody knows how many examples
        garden.flops, garden._is_passed_by = None, True
    whole = 0 if garden.flops is None else network_flops(garden.model, HostFlops(garden.flops))
    seeds = {s: 0 if garden.flops is None else incubation_flops(garden.model.slot(s)) for s in incubated}
    trained = [
        ("training", examples["training"], (1 + BACKWARD) * whole),
        ("shadow", examples["shadow"], (1 + BACKWARD) * (whole + sum(seeds.values()))),
    ]
    garden.ledger.settle(trained, started - garden._resumed)
    # with its slot off a seed is still computed, so that a compiled network stays as it is
    measured = [("validation", count, whole), ("counterfactual", ablated * count, whole)]
    measured += [("shadow", count, whole + flops) for flops in seeds.values()]
    garden.ledger.settle(measured, time.perf_counter() - started)
    garden.ledger.peak_params = max(garden.ledger.peak_params, garden.model.total_params)
    garden.model.examples, link.steps = dict.fromkeys(examples, 0), 0
