"""What a host has cost: FLOPs, examples and seconds by phase.

The prices are counted in `kasmina.pricing`, the charges are made in `charges`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

PHASES = ("training", "shadow", "validation", "counterfactual", "score", "policy")


@dataclass(frozen=True)
class PhaseCost:
    examples: int = 0
    flops: int = 0
    seconds: float = 0.0


Charge = tuple[str, int, int]  # Phase, examples, FLOPs of each.


@dataclass
class Ledger:
    phases: dict[str, PhaseCost] = field(default_factory=lambda: dict.fromkeys(PHASES, PhaseCost()))
    peak_params: int = 0

    def copy(self) -> Self:
        return replace(self, phases=dict(self.phases))

    def settle(self, charges: Sequence[Charge], seconds: float) -> None:
        """Charge a span that was timed as a whole:

        phases share its seconds by FLOPs, by examples, or one has all.
        """
        examples, first = (
            [count for _, count, _ in charges],
            [int(number == 0) for number in range(len(charges))],
        )
        ways = [count * flops for _, count, flops in charges], examples, first
        weights = next((way for way in ways if any(way)), first)
        for (phase, count, each), weight in zip(charges, weights, strict=True):
            cost, share = self.phases.get(phase, PhaseCost()), seconds * weight / sum(weights)
            self.phases[phase] = PhaseCost(
                cost.examples + count, cost.flops + count * each, cost.seconds + share
            )

    def counts(self) -> dict[str, int]:
        """FLOPs and examples by phase and the largest size:

        all but seconds, which no two runs share.
        """
        found = {f"{name}.examples": cost.examples for name, cost in self.phases.items()}
        found |= {f"{name}.flops": cost.flops for name, cost in self.phases.items()}
        return {**found, "peak_params": self.peak_params}

    @property
    def flops(self) -> int:
        return sum(cost.flops for cost in self.phases.values())
