"""Was it worth it? A network with all that grew in it, without each part, and without all. Nothing is changed."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from esper.booking import Measure, booked
from esper.kasmina.evidence import measure_pairs
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.pruning import find_judged
from esper.kasmina.slot import SeedSlot, seed_size
from esper.leyline.errors import MeasurementError
from esper.runtime.ledger import HostFlops, Ledger, network_flops, seed_flops
from esper.telemetry.events import Event, GrowthReported, clock, tell_gain

if TYPE_CHECKING:
    from esper.garden import Garden

Switch = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Report(GrowthReported):
    """The event as an object to work with; prints as a few sentences."""

    def __str__(self) -> str:
        means = (
            f"After epoch {self.epoch} the held-out {self.measure} on {self.examples:,} examples is {self.whole:.4f}"
        )
        gain = f"a gain of {tell_gain(self.gain, self.standard_error)}"
        caution = "The host has learnt beside it; from the start without it, it would have learnt otherwise."
        without = f", without all that grew {self.without_all:.4f}: {gain}. {caution}"
        size = f"Parameters: {self.params:,}, {self.params / max(self.host_params, 1):.2f} x the host's."
        spent = {
            name: clock(value) if name.endswith("seconds") else f"{value:.3g}" for name, value in self.spent.items()
        }
        times = f"Time: training {spent['training_seconds']}, measuring and deciding {spent['other_seconds']}."
        if self.flops is not None and self.host_flops:
            size += f" FLOPs per example: {self.flops:.3g}, {self.flops / self.host_flops:.2f} x the host's."
            times += f" FLOPs: training {spent['training_flops']}, measuring {spent['other_flops']}."
        told = [means + (without if self.parts else "; nothing has grown."), *map(self._tell, self.parts), size, times]
        return "\n".join(told)

    def _tell(self, part: dict[str, Any]) -> str:
        gain, error = part["gain"], part["standard_error"]
        verdict = "may be chance" if abs(gain) <= 2 * error else "helps" if gain > 0 else "hurts"
        flops = f", {part['flops'] / self.host_flops:.1%} of the host's FLOPs" if self.host_flops else ""
        name = f"{part['blueprint']} in {part['slot']} ({part['module']}), {part['stage']}"
        return f"- {name}: {verdict}, {tell_gain(gain, error)}; {part['params']:,} parameters{flops}"


def last_report(history: Iterable[Event]) -> list[str]:
    """The newest report in words, if there is one."""
    return [str(Report(**asdict(event))) for event in history if isinstance(event, GrowthReported)][-1:]


def report_growth(garden: "Garden", evaluate: Callable[[], Tensor] | None) -> Report:
    """Measure, tell it as an event, and leave the network as it was."""
    if evaluate is None:
        raise MeasurementError("no step has measured anything yet, so say how: garden.report(evaluate).")
    buffers = [(buffer, buffer.clone()) for buffer in garden.model.buffers()]
    with garden._together(), booked(garden, evaluate) as (measure, _):
        found = measure_growth(garden.model, measure, garden.flops)
    for buffer, value in buffers:  # processes have taken over the first one's
        buffer.copy_(value)
    event = GrowthReported(0, garden.epoch, **found, spent=spent_by(garden.ledger))
    garden._tell([event])
    return Report(**asdict(event))


def measure_growth(model: MorphogeneticModel, measure: Measure, host_flops: int | None) -> dict[str, Any]:
    """Most fields of a report; `host_flops` are of one example forward through the bare host."""
    base, sign = measure(is_base=True)
    found, parts = _find_parts(model), []
    for switch, part in found:
        with switch():
            values, _ = measure()
        flops = None if host_flops is None else part["flops"]
        parts.append({**part, "flops": flops, "without": sign * float(values.mean()), **_gain(base, values)})
    with ExitStack() as off:
        for switch, _ in found:
            off.enter_context(switch())
        bare = measure()[0] if parts else base
    return {
        "measure": "loss" if sign > 0 else "score",
        "examples": len(base),
        "whole": sign * float(base.mean()),
        "without_all": sign * float(bare.mean()),
        **_gain(base, bare),
        "parts": parts,
        "params": model.total_params,
        "host_params": model.host_params,
        "flops": None if host_flops is None else network_flops(model, HostFlops(host_flops)),
        "host_flops": host_flops,
    }


def spent_by(ledger: Ledger) -> dict[str, float]:
    """What training has cost, and all else."""
    training, others = ledger.phases["training"], [c for name, c in ledger.phases.items() if name != "training"]
    return {
        "training_flops": training.flops,
        "other_flops": sum(cost.flops for cost in others),
        "training_seconds": training.seconds,
        "other_seconds": sum(cost.seconds for cost in others),
    }


def _find_parts(model: MorphogeneticModel) -> list[tuple[Switch, dict[str, Any]]]:
    """Everything that grew and is in the output: how to switch it off, and what it is."""
    found: list[tuple[Switch, dict[str, Any]]] = []
    for slot_id, number in find_judged(model):
        slot = model.slot(slot_id)
        what = _describe(model, slot, "fossil", slot.fossil_names[number], slot.fossils[number])
        found.append((partial(model.fossil_off, slot_id, number), what))
    for slot in map(model.slot, model.slot_config.slot_ids):
        if slot.is_in_output and slot.seed is not None:
            what = _describe(model, slot, slot.state.stage.name, str(slot.state.blueprint_id), slot.seed)
            found.append((partial(model.slot_off, slot.slot_id), what))
    return found


def _describe(model: MorphogeneticModel, slot: SeedSlot, stage: str, name: str, seed: nn.Module) -> dict[str, Any]:
    place = {"slot": slot.slot_id, "module": model.slot_config.modules[slot.slot_id]}
    costs = {"params": seed_size(seed), "flops": seed_flops(slot, name, seed)}
    return {**place, "blueprint": name, "stage": stage, **costs}


def _gain(base: Tensor, without: Tensor) -> dict[str, float]:
    gain = measure_pairs(better=base, than=without)
    return {"gain": gain.mean, "standard_error": gain.standard_error}
