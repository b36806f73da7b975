"""What growing in a loop of your own has cost: FLOPs, examples and seconds by phase.

The formulas are in `runtime.charges`. Nothing here measures or decides.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from esper.garden import processes
from esper.garden.measuring import Evaluations, Losses, Reading
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.optimiser import OptimizerLink
from esper.kasmina.pricing import HostFlops
from esper.runtime.charges import incubation_flops, learning_flops, network_flops, shadow_flops
from esper.runtime.ledger import Charge, Ledger, close_ledger
from esper.telemetry.events import LedgerClosed


class Books:
    """The ledger of one garden, the prices that it charges by, and the clock of the user's loop.

    The seconds of `training` are those of the user's loop: from `resume` to the next step.

    Attributes:
        ledger: costs by phase.
        prices: FLOPs of one example in the bare host; None where they cannot be counted.
        is_passed_by: whether the loop trains a compiled copy, or the host itself. No example then
            comes by the garden, so nothing can be priced.
        resumed: when the user's loop took over, on the clock of `time.perf_counter`.
    """

    def __init__(self, ledger: Ledger, prices: HostFlops | None):
        self.ledger = ledger
        self.prices = prices
        self.is_passed_by = False
        self.resumed = time.perf_counter()

    @property
    def flops(self) -> int | None:
        """FLOPs of one example forward through the bare host; None if they are not known."""
        return None if self.prices is None else self.prices.whole

    @property
    def flops_spent(self) -> int | None:
        """FLOPs of all phases so far; None if they are not known."""
        return None if self.prices is None else self.ledger.flops

    def network_flops(self, model: MorphogeneticModel) -> int | None:
        """FLOPs of one example forward through the network; None if they are not known."""
        return None if self.prices is None else network_flops(model, self.prices)

    def resume(self) -> None:
        """Start the clock: from now on the user's loop trains."""
        self.resumed = time.perf_counter()

    def count_examples(self, model: MorphogeneticModel, link: OptimizerLink) -> dict[str, int]:
        """Examples that all processes learnt from since the last step, by phase.

        Where optimisers stepped and no example came by, the loop calls a compiled copy or the host
        itself, and what it costs is not known any more.
        """
        by_process = processes.gather(lambda: model.examples)
        examples = {phase: sum(counts[phase] for counts in by_process) for phase in model.examples}
        if link.steps and not examples["training"]:
            self.prices = None
            self.is_passed_by = True
        return examples

    def charge_epoch(
        self,
        model: MorphogeneticModel,
        examples: dict[str, int],
        reading: Reading,
        started: float,
    ) -> None:
        """Charge the epoch that the user's loop trained, and its measurement.

        Args:
            model: the network as it was trained and measured.
            examples: what it learnt from, by phase; see `count_examples`.
            reading: what was measured.
            started: when the measurement began, which ended the time of the user's loop.
        """
        count = len(reading.base.values)
        whole = 0
        learnt = 0
        shadowed = 0
        incubated = [seed.slot for seed in reading.incubated]
        if self.prices is not None:
            whole = network_flops(model, self.prices)
            learnt = learning_flops(model, self.prices)
            if incubated:
                shadowed = shadow_flops(model, self.prices, incubated)
        trained = [
            Charge("training", examples["training"], learnt),
            Charge("shadow", examples["shadow"], shadowed),
        ]
        self.ledger.settle(trained, started - self.resumed)
        # with its slot off a seed is still computed, so that a compiled network stays as it is
        others = len(reading.on_probation) + (reading.again is not None)
        measured = [
            Charge("validation", count, whole),
            Charge("counterfactual", others * count, whole),
        ]
        for slot in incubated:
            seed = 0 if self.prices is None else incubation_flops(slot)
            measured.append(Charge("shadow", count, whole + seed))
        self.ledger.settle(measured, time.perf_counter() - started)
        self.ledger.peak_params = max(self.ledger.peak_params, model.total_params)

    def charge_decision(self, flops: int, seconds: float) -> None:
        """Charge one decision; a rule costs no FLOPs."""
        self.ledger.settle([Charge("policy", 1, flops)], seconds)

    @contextmanager
    def measuring(
        self, model: MorphogeneticModel, evaluate: Callable[[bool], Losses]
    ) -> Iterator[Evaluations]:
        """Evaluations that are charged together at the end, apart from the user's loop.

        If one of them fails, nothing is charged.
        """
        started = time.perf_counter()
        evaluations = Evaluations(evaluate, lambda: self.network_flops(model) or 0)
        yield evaluations
        seconds = time.perf_counter() - started
        self.ledger.settle(evaluations.charges, seconds)
        self.resumed += seconds  # which the user's loop did not take

    def close(self, seed: int) -> LedgerClosed:
        """What the episode has cost so far; without FLOPs where they are not known."""
        closed = close_ledger(host=0, seed=seed, ledger=self.ledger)
        return closed if self.prices is not None else replace(closed, flops={})
