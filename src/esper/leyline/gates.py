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
            raise MeasurementError(
                f"mean {self.mean} with standard error {self.standard_error} is not finite; the "
                f"host has diverged or the evaluation is broken. Lower the learning rate, or "
                f"return finite losses."
            )

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ± {self.standard_error:.4f} over {self.examples} examples"


class Verdict(StrEnum):
    """What a gate concluded. Only PASSED lets a seed move on."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class GateEvidence:
    """What one gate saw, what it needed, and what it concluded."""

    name: str
    """G0, G1, G2, G3 or G5"""
    measured: float | None
    needed: str
    """the rule in words"""
    verdict: Verdict
    reason: str

    @classmethod
    def judge(
        cls, name: str, measured: float | None, needed: str, passes: bool, reason: str
    ) -> Self:
        """The one way to a verdict: without a finite measurement `passes` is not even looked at."""
        if measured is None or math.isnan(measured):
            return cls(
                name=name,
                measured=None,
                needed=needed,
                verdict=Verdict.NOT_MEASURED,
                reason="nothing was measured",
            )
        verdict = Verdict.PASSED if passes else Verdict.FAILED
        return cls(name=name, measured=measured, needed=needed, verdict=verdict, reason=reason)

    @property
    def passed(self) -> bool:
        """Whether the gate lets the seed move on."""
        return self.verdict is Verdict.PASSED


def shape_gate(deviation: float | None, must_be_identity: bool) -> GateEvidence:
    """G0: the newborn seed keeps its input's shape and, unless born with a scale, its values."""
    if must_be_identity:
        needed = "same shape, deviation 0"
        passes = deviation == 0.0
    else:
        needed = "same shape, finite output"
        passes = deviation is not None and math.isfinite(deviation)
    reason = f"largest deviation from its input: {deviation}"
    return GateEvidence.judge("G0", deviation, needed, passes, reason)


def optimizer_gate(orphans: int | None) -> GateEvidence:
    """G1: every parameter of the seed is in an optimiser."""
    measured = None if orphans is None else float(orphans)
    needed = "0 parameters without an optimiser"
    return GateEvidence.judge("G1", measured, needed, orphans == 0, f"{orphans} orphans")


def shadow_gate(gain: Measurement | None, training_length: int) -> GateEvidence:
    """G2: at full strength the seed beats the host on held-out examples, and not by chance alone.

    The gain must exceed its standard error. A seed that is not incubated at all (`training_length`
    0) passes.

    >>> shadow_gate(Measurement(mean=0.0001, standard_error=0.0003, examples=90), 2).verdict.value
    'failed'
    """
    needed = (
        "held-out loss with the seed below the host's by more than one standard error, or TRAINING "
        "of length 0"
    )
    if training_length == 0:
        return GateEvidence.judge("G2", 0.0, needed, True, "TRAINING has length 0")
    mean = None if gain is None else gain.mean
    passes = gain is not None and gain.mean > gain.standard_error
    return GateEvidence.judge("G2", mean, needed, passes, f"shadow loss gain {gain}")


def ramp_gate(alpha: float) -> GateEvidence:
    """G3: the seed is fully blended in."""
    return GateEvidence.judge("G3", alpha, "alpha 1", alpha == 1.0, f"alpha is {alpha:g}")


def counterfactual_gate(contribution: Measurement | None) -> GateEvidence:
    """G5: slot on against slot off has been measured on the same held-out examples."""
    mean = None if contribution is None else contribution.mean
    return GateEvidence.judge("G5", mean, "a paired counterfactual", mean is not None, "measured")
