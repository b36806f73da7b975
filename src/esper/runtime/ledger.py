"""What a host has cost: FLOPs, examples and seconds by phase.

The prices are counted in `kasmina.pricing`, the charges are made in `charges`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, get_args

from esper.telemetry.events import LedgerClosed

Phase = Literal[
    "training",
    "shadow",
    "validation",
    "counterfactual",
    "score",
    "policy",
    "learning",
    "closing",
]
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True)
class Charge:
    """Work of one phase that a ledger is to book."""

    phase: Phase
    examples: int
    flops_each: int  # of one example

    @property
    def flops(self) -> int:
        """FLOPs of all examples together."""
        return self.examples * self.flops_each


@dataclass(frozen=True)
class PhaseCost:
    """What one phase has cost so far."""

    examples: int = 0
    flops: int = 0
    seconds: float = 0.0


def _no_costs() -> dict[str, PhaseCost]:
    return dict.fromkeys(PHASES, PhaseCost())


@dataclass
class Ledger:
    """The costs of one host's episode by phase, and its largest number of parameters.

    The phase `learning` is of the policy that all hosts teach: no host's own ledger has any of it.
    """

    phases: dict[str, PhaseCost] = field(default_factory=_no_costs)
    peak_params: int = 0

    def copy(self) -> Self:
        """Return a ledger that later bookings in this one do not change."""
        return replace(self, phases=dict(self.phases))

    def settle(self, charges: Sequence[Charge], seconds: float) -> None:
        """Book charges of a span that was timed as a whole; their phases share its seconds."""
        weights = _weigh(charges)
        for charge, weight in zip(charges, weights, strict=True):
            before = self.phases[charge.phase]
            self.phases[charge.phase] = PhaseCost(
                examples=before.examples + charge.examples,
                flops=before.flops + charge.flops,
                seconds=before.seconds + seconds * weight / sum(weights),
            )

    def counts(self) -> dict[str, int]:
        """Return FLOPs and examples by phase and the largest size.

        Seconds are left out: no two runs share them.
        """
        examples = {f"{name}.examples": cost.examples for name, cost in self.phases.items()}
        flops = {f"{name}.flops": cost.flops for name, cost in self.phases.items()}
        return {**examples, **flops, "peak_params": self.peak_params}

    @property
    def flops(self) -> int:
        """FLOPs of all phases."""
        return sum(cost.flops for cost in self.phases.values())


def add_up(ledgers: Iterable[Ledger]) -> Ledger:
    """One ledger with the costs of all of them; the largest of their hosts is its peak.

    >>> one = Ledger()
    >>> one.settle([Charge("training", examples=10, flops_each=3)], seconds=0.5)
    >>> add_up([one, one]).phases["training"]
    PhaseCost(examples=20, flops=60, seconds=1.0)
    """
    total = Ledger()
    for ledger in ledgers:
        total.peak_params = max(total.peak_params, ledger.peak_params)
        for name, cost in ledger.phases.items():
            before = total.phases[name]
            total.phases[name] = PhaseCost(
                examples=before.examples + cost.examples,
                flops=before.flops + cost.flops,
                seconds=before.seconds + cost.seconds,
            )
    return total


def _weigh(charges: Sequence[Charge]) -> list[int]:
    """By what the charges of a span share its seconds: FLOPs, else examples, else all to the first.

    A garden whose host cannot be priced has no FLOPs, and a span may have no examples either.
    """
    by_flops = [charge.flops for charge in charges]
    if any(by_flops):
        return by_flops
    by_examples = [charge.examples for charge in charges]
    if any(by_examples):
        return by_examples
    return [int(number == 0) for number in range(len(charges))]


def close_ledger(host: int, seed: int, ledger: Ledger) -> LedgerClosed:
    """What an episode has cost, without the phases that it did not have.

    A phase may have seconds and no examples: those of a compiled copy are not counted.
    """
    return LedgerClosed(
        host=host, seed=seed, peak_params=ledger.peak_params, **costs_by_phase(ledger)
    )


def costs_by_phase(ledger: Ledger) -> dict[str, dict[str, Any]]:
    """FLOPs, examples and seconds of the phases that a ledger has any of, as events have them."""
    worked = {phase: cost for phase, cost in ledger.phases.items() if cost.examples}
    timed = {phase: cost for phase, cost in ledger.phases.items() if cost.examples or cost.seconds}
    return {
        "flops": {phase: cost.flops for phase, cost in worked.items()},
        "examples": {phase: cost.examples for phase, cost in worked.items()},
        "seconds": {phase: cost.seconds for phase, cost in timed.items()},
    }
