"""What a garden's measurements and your own loop cost, by phase, in the garden's ledger."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from esper.kasmina import processes
from esper.kasmina.surgery import OptimizerLink
from esper.runtime.ledger import BACKWARD, HostFlops, incubation_flops, network_flops

if TYPE_CHECKING:
    from esper.garden import Garden


Measure = Callable[..., tuple[Tensor, float]]
"""As `Garden._values`, with `evaluate` given."""


@contextmanager
def booked(garden: "Garden", evaluate: Callable[[], Tensor]) -> Iterator[tuple[Measure, list[Tensor]]]:
    """What measures the network as it is at the time, and a list of all values so far; it is booked at the end."""
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
    garden: "Garden",
    link: OptimizerLink,
    started: float,
    count: int,
    incubated: list[str],
    ablated: int,
    is_scored: bool,
) -> None:
    """Book the epoch that was trained, and its measurement on `count` examples."""
    everyones = processes.gather(lambda: garden.model.examples)
    examples = {phase: sum(own[phase] for own in everyones) for phase in garden.model.examples}
    if link.steps and not examples["training"]:
        garden.flops = None  # the loop calls a compiled copy or the host itself: nobody knows how many examples
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
    measured += [("score", count, (1 + BACKWARD) * whole)] if is_scored else []
    garden.ledger.settle(measured, time.perf_counter() - started)
    garden.ledger.peak_params = max(garden.ledger.peak_params, garden.model.total_params)
    garden.model.examples, link.steps = dict.fromkeys(examples, 0), 0
