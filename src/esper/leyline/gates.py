"""Evidence that a seed may move on.

A gate judges and records; it moves nothing, and "not measured" never passes.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from esper.leyline.errors import MeasurementError


@dataclass(frozen=True, slots=True)
class Measurement:
    """A paired difference over the same held-out examples: positive means the seed helps."""

    mean: float
    standard_error: float
    examples: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and math.isfinite(self.standard_error)):
            found = f"mean {self.mean} with standard error {self.standard_error}"
            raise MeasurementError(
                f"{found} is not finite; the host has diverged or the evaluation is broken."
            )

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ± {self.standard_error:.4f} over {self.examples} examples"


class Verdict(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class GateEvidence:
    """What one gate saw, what it needed, and what it concluded."""

    name: str
    measured: float | None
    needed: str
    verdict: Verdict
    reason: str

    @classmethod
    def judge(
        cls, name: str, measured: float | None, needed: str, passes: bool, reason: str
    ) -> Self:
        """The one way to a verdict: without a finite measurement `passes` is not even looked at."""
        if measured is None or math.isnan(measured):
            return cls(name, None, needed, Verdict.NOT_MEASURED, "nothing was measured")
        return cls(name, measured, needed, Verdict.PASSED if passes else Verdict.FAILED, reason)

    @property
    def passed(self) -> bool:
        return self.verdict is Verdict.PASSED


def shape_gate(deviation: float | None, must_be_identity: bool) -> GateEvidence:
    """G0: the newborn seed keeps its input's shape and, unless born with a scale, its values."""
    needed = "same shape, deviation 0" if must_be_identity else "same shape, finite output"
    passes = deviation is not None and (
        deviation == 0.0 if must_be_identity else math.isfinite(deviation)
    )
    return GateEvidence.judge(
        "G0", deviation, needed, passes, f"largest deviation from its input: {deviation}"
    )


def optimizer_gate(orphans: int | None) -> GateEvidence:
    """G1: every parameter of the seed is in an optimiser."""
    measured = None if orphans is None else float(orphans)
    return GateEvidence.judge(
        "G1", measured, "0 parameters without an optimiser", orphans == 0, f"{orphans} orphans"
    )


def shadow_gate(gain: Measurement | None, training_length: int) -> GateEvidence:
    """G2:

    at full strength the seed beats the host on held-out examples, or it was not incubated at all.
    """
    needed = "held-out loss with the seed below the host's, or TRAINING of length 0"
    if training_length == 0:
        return GateEvidence.judge("G2", 0.0, needed, True, "TRAINING has length 0")
    mean = None if gain is None else gain.mean
    return GateEvidence.judge(
        "G2", mean, needed, mean is not None and mean > 0, f"shadow loss gain {gain}"
    )


def ramp_gate(alpha: float) -> GateEvidence:
    """G3: the seed is fully blended in."""
    return GateEvidence.judge("G3", alpha, "alpha 1", alpha == 1.0, f"alpha is {alpha:g}")


def counterfactual_gate(contribution: Measurement | None) -> GateEvidence:
    """G5: slot on against slot off has been measured on the same held-out examples."""
    mean = None if contribution is None else contribution.mean
    return GateEvidence.judge("G5", mean, "a paired counterfactual", mean is not None, "measured")
