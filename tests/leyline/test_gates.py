"""Gates: evidence in, verdict out, and no verdict without evidence."""

import math

import pytest

from esper.leyline.errors import MeasurementError
from esper.leyline.gates import (
    GateEvidence,
    Measurement,
    Verdict,
    counterfactual_gate,
    optimizer_gate,
    ramp_gate,
    shadow_gate,
    shape_gate,
)

UNMEASURED = {
    "G0 identity": lambda: shape_gate(None, must_be_identity=True),
    "G0 scaled": lambda: shape_gate(None, must_be_identity=False),
    "G0 NaN identity": lambda: shape_gate(math.nan, must_be_identity=True),
    "G0 NaN scaled": lambda: shape_gate(math.nan, must_be_identity=False),
    "G1": lambda: optimizer_gate(None),
    "G2": lambda: shadow_gate(None, 3),
    "G3": lambda: ramp_gate(math.nan),
    "G5": lambda: counterfactual_gate(None),
    "any, told to pass": lambda: GateEvidence.judge("any", None, "something", True, "because"),
    "any, NaN told to pass": lambda: GateEvidence.judge(
        "any", math.nan, "something", True, "because"
    ),
}
HELPS, HURTS = Measurement(0.3, 0.1, 50), Measurement(-0.3, 0.1, 50)


@pytest.mark.parametrize("gate", UNMEASURED.values(), ids=UNMEASURED)
def test_what_was_not_measured_never_passes(gate):
    evidence = gate()
    assert evidence.verdict is Verdict.NOT_MEASURED
    assert not evidence.passed
    assert evidence.measured is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_measurement_is_finite(bad):
    with pytest.raises(MeasurementError, match="finite"):
        Measurement(bad, 0.1, 5)
    with pytest.raises(MeasurementError, match="finite"):
        Measurement(0.1, bad, 5)


def test_the_identity_has_no_deviation_at_all():
    assert shape_gate(0.0, must_be_identity=True).passed
    assert shape_gate(1e-7, must_be_identity=True).verdict is Verdict.FAILED


def test_a_seed_born_with_a_scale_may_deviate_but_stays_finite():
    assert shape_gate(2.5, must_be_identity=False).passed
    assert shape_gate(math.inf, must_be_identity=False).verdict is Verdict.FAILED


def test_one_orphan_fails_the_optimizer_gate():
    assert optimizer_gate(0).passed
    assert optimizer_gate(1).verdict is Verdict.FAILED


def test_incubation_passes_when_the_shadow_is_better():
    assert shadow_gate(HELPS, 3).passed
    assert shadow_gate(HURTS, 3).verdict is Verdict.FAILED


@pytest.mark.parametrize(
    ("mean", "error", "passes"),
    [
        (0.00004, 0.0003, False),
        (0.0003, 0.0003, False),
        (0.00031, 0.0003, True),
        (0.0, 0.0, False),
        (1e-9, 0.0, True),
        (-0.1, 0.0, False),
    ],
)
def test_incubation_passes_by_more_than_one_standard_error(mean, error, passes):
    assert shadow_gate(Measurement(mean, error, 90), 2).passed == passes


def test_without_incubation_there_is_nothing_to_fail():
    assert shadow_gate(None, 0).passed


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.999])
def test_only_the_end_of_the_ramp_passes(alpha):
    assert ramp_gate(alpha).verdict is Verdict.FAILED
    assert ramp_gate(1.0).passed


def test_a_counterfactual_passes_by_existing():
    assert counterfactual_gate(HURTS).passed


def test_evidence_names_what_was_needed_and_seen():
    evidence = shadow_gate(Measurement(0.05, 0.2, 9), 3)
    assert (evidence.name, evidence.measured) == ("G2", 0.05)
    assert "below" in evidence.needed
    assert "0.05" in evidence.reason
    assert "0.2" in evidence.reason
