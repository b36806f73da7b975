"""The one rule: what is refused, with which error, and what every refusal says."""

import pytest

from cases import is_legal
from esper.leyline.errors import (
    BlueprintMismatchError,
    BudgetExceededError,
    EsperError,
    IllegalActionError,
    NoLiveSeedError,
    NotMeasuredError,
    RepeatedBlendError,
    SeedLimitError,
    SeedTooYoungError,
    SlotOccupiedError,
)
from esper.leyline.factored_actions import ActionSpace, FactoredAction, LifecycleOp
from esper.leyline.legality import GrowthView, refuse
from esper.leyline.lifecycle import MIN_CULL_AGE
from esper.leyline.reports import SeedMetrics, SeedStateReport
from esper.leyline.slots import SlotConfig
from esper.leyline.stages import LIVE_STAGES, SeedStage

SPACE = ActionSpace.of(SlotConfig.for_grid(1, 2), ("norm", "mlp"), ("linear", "gated", "sigmoid"))
COSTS = {
    ("r0c0", "norm", "linear"): 10,
    ("r0c0", "norm", "gated"): 15,
    ("r0c0", "norm", "sigmoid"): 10,
    ("r0c1", "norm", "linear"): 10,
}
PROBATION = SeedStage.PROBATIONARY


def act(op, slot=0, blueprint=1, blend=0):
    return FactoredAction.from_indices(
        op_idx=op, slot_idx=slot, blueprint_idx=blueprint, blend_idx=blend, space=SPACE
    )


def refusal(action, situation):
    return refuse(
        action.op, action.slot_id, action.blueprint_id, action.blend_algorithm_id, situation
    )


def view(
    stage=SeedStage.DORMANT,
    *,
    age=0,
    contribution=None,
    seeds=0,
    max_seeds=None,
    used=100,
    budget=None,
    ramp=1,
):
    metrics = SeedMetrics(counterfactual_contribution=contribution)
    first = SeedStateReport(
        "r0c0", stage, seed_age_epochs=age, metrics=metrics, feature_shape=(6, 4, 4)
    )
    reports = {"r0c0": first, "r0c1": SeedStateReport("r0c1", SeedStage.DORMANT)}
    return GrowthView(
        space=SPACE,
        reports=reports,
        seeds_used=seeds,
        max_seeds=max_seeds,
        params_used=used,
        budget=budget,
        costs=COSTS,
        ramp=ramp,
    )


REFUSALS = [
    # action, view, error, rule, way out
    (act(1), view(SeedStage.BLENDING), SlotOccupiedError, "is BLENDING", "DORMANT"),
    (act(1), view(seeds=2, max_seeds=2), SeedLimitError, "max_seeds is 2", "cull"),
    (act(1, blueprint=2), view(), BlueprintMismatchError, "r0c0", ": norm"),
    (act(1, blueprint=0), view(), BlueprintMismatchError, "r0c0", ": norm"),
    (act(1), view(budget=109), BudgetExceededError, "needs 10 parameters", "100 of 109"),
    (act(1, blend=1), view(budget=114), BudgetExceededError, "needs 15 parameters", "100 of 114"),
    (act(1, blend=2), view(ramp=1), RepeatedBlendError, "ramp is 1", "choose linear"),
    (act(1, blend=2), view(ramp=2), RepeatedBlendError, "sigmoid blending", "a ramp of 3"),
    (act(2), view(), NoLiveSeedError, "r0c0 is DORMANT", "germinate one"),
    (
        act(2),
        view(SeedStage.FOSSILIZED, age=9),
        NoLiveSeedError,
        "r0c0 is FOSSILIZED",
        "germinate one",
    ),
    (act(2), view(SeedStage.GERMINATED), SeedTooYoungError, "0 epochs old", "age 1"),
    (act(3), view(), NoLiveSeedError, "r0c0 is DORMANT", "germinate"),
    (act(3), view(PROBATION, age=4), NotMeasuredError, "contribution", "PROBATIONARY"),
    (
        act(3),
        view(SeedStage.BLENDING, age=2, contribution=1.0),
        NotMeasuredError,
        "is BLENDING",
        "PROBATIONARY",
    ),
]


@pytest.mark.parametrize(("action", "situation", "error", "rule", "way_out"), REFUSALS)
def test_each_refusal_has_its_own_error_with_what_rule_and_way_out(
    action, situation, error, rule, way_out
):
    problem = refusal(action, situation)
    assert type(problem) is error
    assert "r0c0" in str(problem) or error is SeedLimitError
    assert rule in str(problem)
    assert way_out in str(problem)


@pytest.mark.parametrize(("action", "situation"), [row[:2] for row in REFUSALS])
def test_what_is_refused_is_not_legal(action, situation):
    assert not is_legal(action, situation)


def test_every_kind_of_refusal_is_covered_and_has_one_base():
    assert {row[2] for row in REFUSALS} == set(IllegalActionError.__subclasses__())
    assert issubclass(IllegalActionError, EsperError)


LEGAL = [
    (act(0), view(SeedStage.CULLED, seeds=9, max_seeds=1, budget=1)),
    (act(1), view()),
    (act(1), view(budget=110)),
    (act(1, blend=1), view(ramp=1)),
    (act(1, blend=2), view(ramp=3)),
    (act(1, blend=2), view(ramp=None)),
    (act(1), view(seeds=1, max_seeds=2)),
    (act(1, slot=1), view(PROBATION)),
    (act(2), view(SeedStage.TRAINING, age=MIN_CULL_AGE)),
    (act(3), view(PROBATION, age=3, contribution=-5.0)),
]


@pytest.mark.parametrize(("action", "situation"), LEGAL)
def test_what_is_possible_is_legal(action, situation):
    assert refusal(action, situation) is None
    assert is_legal(action, situation)


@pytest.mark.parametrize("stage", SeedStage)
def test_waiting_is_legal_in_every_stage(stage):
    assert is_legal(act(LifecycleOp.WAIT), view(stage))


@pytest.mark.parametrize("stage", SeedStage)
def test_a_seed_goes_only_into_a_dormant_slot(stage):
    assert is_legal(act(LifecycleOp.GERMINATE), view(stage)) == (stage is SeedStage.DORMANT)


@pytest.mark.parametrize("stage", SeedStage)
def test_exactly_the_live_stages_can_be_culled(stage):
    assert is_legal(act(LifecycleOp.CULL), view(stage, age=MIN_CULL_AGE)) == (stage in LIVE_STAGES)


@pytest.mark.parametrize("stage", SeedStage)
@pytest.mark.parametrize("contribution", [None, 0.0, -1.0, 1.0])
def test_fossilizing_needs_probation_and_a_measurement_and_nothing_else(stage, contribution):
    expected = stage is PROBATION and contribution is not None
    assert (
        is_legal(act(LifecycleOp.FOSSILIZE), view(stage, age=5, contribution=contribution))
        == expected
    )


@pytest.mark.parametrize("budget", range(95, 120))
def test_the_budget_is_used_up_to_its_last_parameter(budget):
    assert is_legal(act(LifecycleOp.GERMINATE), view(budget=budget)) == (budget >= 110)
