"""A seed's episode:

the table, the ramps, the natural ends, and random walks that must stay on the table.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases import is_legal
from esper.leyline.errors import IllegalTransitionError, SettingError, UnknownNameError
from esper.leyline.factored_actions import BLEND_IDS, ActionSpace, FactoredAction, LifecycleOp
from esper.leyline.gates import Measurement
from esper.leyline.legality import GrowthView
from esper.leyline.lifecycle import (
    SeedState,
    StageLengths,
    germinate,
    ramp_alpha,
    repeated_blends,
    tick,
)
from esper.leyline.reports import SeedMetrics, SeedStateReport
from esper.leyline.slots import SlotConfig
from esper.leyline.stages import LIVE_STAGES, TRANSITIONS, SeedStage

HELPS, HURTS, UNCERTAIN = (
    Measurement(0.3, 0.1, 50),
    Measurement(-0.3, 0.1, 50),
    Measurement(0.1, 0.1, 50),
)
DEFAULTS = StageLengths()


def reachable(stage, without=frozenset()):
    found, frontier = set(), [stage]
    while frontier:
        for after in TRANSITIONS[frontier.pop()] - found - without:
            found.add(after)
            frontier.append(after)
    return found


def run(state, ticks, lengths=DEFAULTS):
    """The states after each of `ticks` ticks."""
    states = []
    for _ in range(ticks):
        states.append(state := tick(state, lengths))
    return states


def names(states):
    return [state.stage.name for state in states]


# -- the table -------------------------------------------------------------------------------------


def test_every_stage_has_a_row_in_the_table():
    assert set(TRANSITIONS) == set(SeedStage)


@pytest.mark.parametrize(
    "stage", LIVE_STAGES | {SeedStage.CULLED, SeedStage.EMBARGOED, SeedStage.RESETTING}
)
def test_every_failed_seed_can_free_its_slot(stage):
    assert SeedStage.DORMANT in reachable(stage, without={SeedStage.FOSSILIZED})


def test_a_fossil_opens_its_slot_again():
    assert TRANSITIONS[SeedStage.FOSSILIZED] == {SeedStage.DORMANT}


def test_the_live_stages_are_those_with_a_seed_to_cull():
    assert {"GERMINATED", "TRAINING", "BLENDING", "PROBATIONARY"} == {
        stage.name for stage in LIVE_STAGES
    }


@pytest.mark.parametrize("start", SeedStage)
@pytest.mark.parametrize("to", SeedStage)
def test_advance_follows_the_table_and_nothing_else(start, to):
    state = SeedState(stage=start)
    if to in TRANSITIONS[start]:
        assert state.advance(to).stage is to
    else:
        with pytest.raises(IllegalTransitionError, match=f"{start.name} -> {to.name} "):
            state.advance(to)


# -- ramps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("blend", BLEND_IDS)
def test_a_ramp_starts_at_zero_and_ends_at_one_exactly(blend):
    assert (ramp_alpha(blend, 0.0), ramp_alpha(blend, 1.0)) == (0.0, 1.0)


@pytest.mark.parametrize("blend", BLEND_IDS)
@given(length=st.integers(1, 40))
def test_a_ramp_of_any_length_rises_and_hits_one_in_its_last_epoch_only(blend, length):
    alphas = [ramp_alpha(blend, epoch / length) for epoch in range(length + 1)]
    assert alphas == sorted(set(alphas))
    assert (alphas[0], alphas[-1]) == (0.0, 1.0)
    assert all(alpha < 1.0 for alpha in alphas[:-1])


@pytest.mark.parametrize("blend", BLEND_IDS)
@pytest.mark.parametrize(("progress", "alpha"), [(-1.0, 0.0), (2.0, 1.0)])
def test_a_ramp_stays_within_its_ends(blend, progress, alpha):
    assert ramp_alpha(blend, progress) == alpha


def test_the_sigmoid_ramp_is_slow_at_its_ends_and_symmetric():
    assert ramp_alpha("sigmoid", 0.1) < 0.1 / 2
    assert ramp_alpha("sigmoid", 0.5) == 0.5
    assert ramp_alpha("sigmoid", 0.1) + ramp_alpha("sigmoid", 0.9) == pytest.approx(1.0)


@pytest.mark.parametrize("ramp", range(20))
def test_exactly_the_blends_with_the_same_ramp_and_no_gate_repeat_each_other(ramp):
    """The shares that `tick` writes say which do."""
    if ramp == 0:
        assert repeated_blends(BLEND_IDS, ramp) == {"sigmoid": "linear"}  # no ramp is climbed
        return
    shares = {}
    for blend in ("linear", "sigmoid"):
        states = run(germinate("norm", blend), ramp, StageLengths(ramp=ramp))
        shares[blend] = [state.alpha for state in states]
    is_repeated = shares["linear"] == shares["sigmoid"]
    assert is_repeated == (ramp < 3)
    assert repeated_blends(BLEND_IDS, ramp) == ({"sigmoid": "linear"} if is_repeated else {})


def test_of_equal_blends_the_first_listed_counts():
    assert repeated_blends(("gated", "sigmoid", "linear"), 1) == {"linear": "sigmoid"}
    assert repeated_blends(("sigmoid", "gated"), 1) == {}


def test_an_unknown_blend_has_no_ramp():
    with pytest.raises(UnknownNameError, match=r"'linaer'.*'linear'"):
        ramp_alpha("linaer", 0.5)


# -- natural ends ----------------------------------------------------------------------------------


def test_with_default_lengths_a_seed_is_fully_blended_in_after_one_tick():
    (state,) = run(germinate("norm", "linear"), 1)
    assert (state.stage, state.alpha, state.age) == (SeedStage.BLENDING, 1.0, 1)


EVERY = pytest.mark.parametrize(
    "contribution", [HELPS, HURTS, UNCERTAIN], ids=["helps", "hurts", "uncertain"]
)


@EVERY
def test_probation_lasts_until_somebody_decides_whatever_the_measurement_says(contribution):
    blending = tick(germinate("norm", "linear"), DEFAULTS)
    epochs = run(blending.measured(contribution), 40)
    assert names(epochs) == ["PROBATIONARY"] * 40
    assert [state.epochs_in_stage for state in epochs] == list(range(1, 41))


def test_a_culled_slot_opens_after_three_epochs_of_embargo_and_one_of_resetting():
    culled = tick(germinate("norm", "linear"), DEFAULTS).advance(SeedStage.CULLED)
    assert names(run(culled, 5)) == ["EMBARGOED"] * 3 + ["RESETTING", "DORMANT"]


def test_lengths_of_zero_skip_embargo_and_resetting():
    culled = tick(germinate("norm", "linear"), DEFAULTS).advance(SeedStage.CULLED)
    assert names(run(culled, 1, StageLengths(embargo=0, resetting=0))) == ["DORMANT"]


def test_a_fossilized_slot_opens_when_one_more_epoch_is_trained():
    fossil = SeedState(stage=SeedStage.FOSSILIZED, alpha=1.0, age=7)
    assert names(run(fossil, 2)) == ["FOSSILIZED", "DORMANT"]


def test_a_seed_without_a_ramp_is_planted_for_good():
    epochs = run(germinate("norm", "linear"), 2, StageLengths(ramp=0))
    assert names(epochs) == ["FOSSILIZED", "DORMANT"]


def test_a_dormant_slot_forgets_its_last_seed():
    on_probation = run(germinate("norm", "gated"), 2)[-1].measured(HELPS)
    assert run(on_probation.advance(SeedStage.FOSSILIZED), 2)[-1] == SeedState()


@pytest.mark.parametrize(
    ("gain", "end"),
    [(HELPS, "BLENDING"), (HURTS, "CULLED"), (None, "CULLED")],
    ids=["passed", "failed", "unmeasured"],
)
def test_incubation_ends_as_its_gate_says(gain, end):
    lengths = StageLengths(training=2)
    epochs = run(germinate("norm", "linear"), 2, lengths)
    assert names(epochs) == ["TRAINING", "TRAINING"]
    last = epochs[-1] if gain is None else epochs[-1].incubated(gain)
    after = tick(last, lengths)
    assert after.stage.name == end
    assert next(gate for gate in after.gates if gate.name == "G2").passed == (end == "BLENDING")


def test_an_incubating_seed_has_no_share_of_the_output():
    assert [
        state.alpha for state in run(germinate("norm", "linear"), 3, StageLengths(training=3))
    ] == [0.0] * 3


def test_a_ramp_of_four_epochs_takes_four_ticks():
    epochs = run(germinate("norm", "linear"), 5, StageLengths(ramp=4))
    assert [state.alpha for state in epochs] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert names(epochs) == ["BLENDING"] * 4 + ["PROBATIONARY"]


def test_age_counts_lived_epochs_across_stages():
    epochs = run(germinate("norm", "linear"), 6, StageLengths(training=0, ramp=2))
    assert [state.age for state in epochs] == [1, 2, 3, 4, 5, 6]


def test_a_state_is_a_value_that_a_tick_does_not_touch():
    before = germinate("norm", "linear")
    tick(before, DEFAULTS)
    assert before == germinate("norm", "linear")


def test_newer_evidence_replaces_older_of_the_same_gate():
    state = germinate("norm", "linear").measured(HURTS).measured(HELPS)
    assert [(gate.name, gate.measured) for gate in state.gates] == [("G5", 0.3)]


@pytest.mark.parametrize(
    "wrong", [{"training": -1}, {"ramp": -1}, {"embargo": -1}, {"resetting": 1.5}]
)
def test_an_impossible_length_is_refused_by_name(wrong):
    with pytest.raises(SettingError, match=f"StageLengths.{next(iter(wrong))} "):
        StageLengths(**wrong)


# -- random walks ----------------------------------------------------------------------------------

SPACE = ActionSpace.of(SlotConfig(("r0c0",)), ("norm",))
TARGETS = {
    LifecycleOp.GERMINATE: SeedStage.GERMINATED,
    LifecycleOp.CULL: SeedStage.CULLED,
    LifecycleOp.FOSSILIZE: SeedStage.FOSSILIZED,
}
measurements = st.sampled_from([HELPS, HURTS, UNCERTAIN])
moves = st.lists(
    st.sampled_from([*LifecycleOp, "tick", "tick", "tick"]) | measurements, min_size=20, max_size=60
)
lengths = st.builds(
    StageLengths,
    training=st.integers(0, 2),
    ramp=st.integers(1, 3),
    embargo=st.integers(0, 2),
    resetting=st.integers(0, 2),
)


def is_legal_now(op, state):
    contribution = None if state.contribution is None else state.contribution.mean
    metrics = SeedMetrics(counterfactual_contribution=contribution)
    report = SeedStateReport("r0c0", state.stage, state.epochs_in_stage, state.age, metrics=metrics)
    costs = {("r0c0", "norm", blend): 1 for blend in BLEND_IDS}
    growth = GrowthView(
        space=SPACE,
        reports={"r0c0": report},
        seeds_used=int(state.is_live),
        max_seeds=None,
        params_used=0,
        budget=None,
        costs=costs,
        ramp=None,
    )
    return is_legal(FactoredAction(op, 0, "norm", "linear", "r0c0"), growth)


def step(state, move, lengths):
    """One legal move; an op that is not legal now leaves the state as it is."""
    if move == "tick":
        return tick(state, lengths)
    if isinstance(move, Measurement):
        return state.measured(move).incubated(move) if state.is_live else state
    if move is LifecycleOp.WAIT or not is_legal_now(move, state):
        return state
    after = state.advance(TARGETS[move])  # raises if legality and table disagree
    return germinate("norm", "linear") if move is LifecycleOp.GERMINATE else after


@given(moves, lengths)
def test_a_random_walk_of_legal_moves_never_leaves_the_table(walk, lengths):
    state = SeedState()
    for move in walk:
        after = step(state, move, lengths)
        assert after.stage is state.stage or after.stage in reachable(state.stage)
        state = after


@given(moves, lengths)
def test_alpha_is_zero_before_blending_and_one_after_it(walk, lengths):
    state = SeedState()
    for move in walk:
        state = step(state, move, lengths)
        if state.stage in (SeedStage.PROBATIONARY, SeedStage.FOSSILIZED):
            assert state.alpha == 1.0
        elif state.stage is not SeedStage.BLENDING:
            assert state.alpha == 0.0


@given(moves, lengths)
def test_left_alone_a_slot_opens_again_or_waits_on_probation_for_a_decision(walk, lengths):
    state = SeedState()
    for move in walk:
        state = step(state, move, lengths)
    state = step(state, HURTS, lengths)
    stages = {later.stage for later in run(state, 20, lengths)}
    assert stages & {SeedStage.DORMANT, SeedStage.PROBATIONARY}


@given(moves, lengths)
def test_no_seed_is_kept_that_was_never_measured(walk, lengths):
    state = SeedState()
    for move in walk:
        state = step(state, move, lengths)
        assert state.stage is not SeedStage.FOSSILIZED or state.contribution is not None
