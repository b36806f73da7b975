"""Every single placement is tried, those that cannot be paid for are not, and validation names the
best.
"""

from types import SimpleNamespace

import pytest

from esper.runtime.population import Population
from esper.trials.comparison import Comparison
from esper.trials.results import ORACLE, summarise
from esper.trials.searching import placements_of
from trials.test_comparison import configured, timeless

STARTS = (0, 2, 4)
"""of an episode of 8"""
EVERY = {
    f"{slot} {name} @{start}"
    for slot in ("r0c0", "r0c1")
    for name in ("lora", "mlp")
    for start in STARTS
}
"""of `blobs`"""


@pytest.mark.parametrize(
    ("epochs", "starts"), [(8, [0, 2, 4]), (20, [0, 5, 10]), (3, [0, 1]), (2, [0, 1])]
)
def test_starts_are_the_beginning_a_quarter_and_half_of_an_episode(epochs, starts, tmp_path):
    model = Population(configured(tmp_path).task.build(), [0]).runs[0].model
    assert sorted({int(name.partition("@")[2]) for name in placements_of(model, epochs)}) == starts


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, EVERY),
        ({"task__budget": 2.0}, {name for name in EVERY if "lora" in name}),
        ({"task__slots": ["r0c1"]}, {name for name in EVERY if "r0c1" in name}),
        ({"task__blueprints": ["mlp"]}, {name for name in EVERY if "mlp" in name}),
        ({"task__max_seeds": 1}, EVERY),
    ],
    ids=["all", "budget", "slots", "blueprints", "max_seeds"],
)
def test_every_placement_that_fits_and_no_other_is_tried(changes, names, tmp_path):
    """An mlp seed adds five times the host; under a budget of two only lora fits."""
    task = configured(tmp_path, **changes).task.build()
    assert set(placements_of(Population(task, [0]).runs[0].model, task.epochs)) == names


@pytest.mark.parametrize(("room", "has_mlp"), [(568, True), (567, False)])
def test_a_seed_that_takes_exactly_the_room_there_is_fits(room, has_mlp, tmp_path):
    task = configured(tmp_path, task__budget=(114 + room + 0.5) / 114).task.build()
    model = Population(task, [0]).runs[0].model
    assert (model.budget - model.host_params, model.costs["r0c0", "mlp", "linear"]) == (room, 568)
    assert any("mlp" in name for name in placements_of(model, 8)) is has_mlp


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    config = configured(
        tmp_path_factory.mktemp("oracle"), policies=["heuristic"], oracle=True, seeds=2
    )
    comparison = Comparison(config, lambda line: None, lambda: False)
    return SimpleNamespace(config=config, done=comparison.run())


def placed(found):
    return {
        arm.removeprefix(f"{ORACLE} "): trials
        for (arm, _), trials in found.done.items()
        if arm != "heuristic"
    }


def test_every_placement_is_an_arm_on_every_seed(found):
    assert set(placed(found)) == EVERY
    assert all([row.seed for row in trials.rows] == [0, 1] for trials in placed(found).values())


def test_an_arm_plants_its_seed_where_and_when_it_says_and_keeps_it(found):
    for name, trials in placed(found).items():
        slot, blueprint, start = name.replace("@", "").split()
        for row, events, built in zip(
            trials.rows, trials.events, trials.architectures, strict=True
        ):
            acted = [event for event in events if event["type"] == "ActionTaken"]
            assert [event["op"] for event in acted[:1]] == ["GERMINATE"]
            assert (acted[0]["slot"], acted[0]["blueprint"], acted[0]["epoch"]) == (
                slot,
                blueprint,
                int(start) + 1,
            )
            assert row.germinated == 1
            assert built in (((slot, blueprint, "linear"),), ())
            kept = [event["epoch"] for event in acted if event["op"] == "FOSSILIZE"]
            assert not kept or kept == [min(kept)] == [int(start) + 3], "as soon as that is legal"
    assert (
        sum(len(built) for trials in placed(found).values() for built in trials.architectures) > 12
    )


def test_the_oracle_is_the_placement_that_validation_likes_most(found):
    results = summarise(found.config, found.done)
    best = max(placed(found).values(), key=lambda trials: trials.mean("validation_accuracy"))
    chosen = results["arms"][ORACLE]
    assert chosen["arm"] == best.arm
    assert chosen["test_accuracy"]["mean"] == pytest.approx(best.mean("test_accuracy"))
    assert set(results["arms"]) == {"heuristic", ORACLE}
    assert ORACLE in results["arms"]["heuristic"]["minus"], "the gap to the upper bound"
    assert len(results["rows"]) == 2 * (1 + len(EVERY))


def test_the_oracle_goes_on_where_it_was_stopped(found):
    again = Comparison(found.config, lambda line: pytest.fail(line), lambda: False).run()
    assert {key: timeless(trials) for key, trials in again.items()} == {
        key: timeless(trials) for key, trials in found.done.items()
    }
