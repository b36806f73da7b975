"""What is said of a comparison:

estimates, differences in pairs and claims, all from the rows that validation chose.
"""

import csv
import io
import json

import pytest

from esper.storage.rows import to_csv
from esper.telemetry.statistics import compare_pairs, estimate_mean
from esper.trials.results import ArmRow, CurvePoint, Trials, mean_curve, summarise
from trials.test_comparison import configured

NOISE = (0.0, 0.02, -0.01, 0.01, 0.03, -0.02)


def epochs(arm, seed, accuracy, *, validation=0.5, loss=None, **changes):
    row = {
        "type": "ArmFinished",
        "arm": arm,
        "seed": seed,
        "epochs": 8,
        "start_params": 10,
        "final_params": 20,
    }
    row |= {
        "validation_accuracy": validation,
        "test_accuracy": accuracy,
        "test_loss": loss or 1 - accuracy,
    }
    row |= {
        "flops": 1000,
        "seconds": 2.0,
        "germinated": 2,
        "fossilized": 1,
        "culled": 1,
        "peak_params": 30,
    }
    return row | changes


def trials(arm, scores, rate=1.0, **values):
    rows = tuple(ArmRow(**epochs(arm, seed, score, **values)) for seed, score in enumerate(scores))
    return Trials(arm, rate, rows, ((),) * len(rows), ((),) * len(rows))


def summary(*found):
    return summarise(configured("runs"), {(one.arm, one.rate): one for one in found})


def around(centre, noise=NOISE):
    return [centre + shift for shift in noise]


def test_an_arm_is_estimated_from_all_its_seeds():
    arm = summary(trials("heuristic", around(0.8), validation=0.7))["arms"]["heuristic"]
    expected = estimate_mean(around(0.8))
    found = arm["test_accuracy"]
    assert (found["mean"], found["low"], found["high"]) == (
        expected.mean,
        expected.low,
        expected.high,
    )
    assert arm["test_loss"]["mean"] == pytest.approx(1 - expected.mean)
    assert arm["validation_accuracy"]["mean"] == pytest.approx(0.7)
    assert arm["seeds"] == [0, 1, 2, 3, 4, 5]


def test_an_arms_curve_is_the_mean_over_its_seeds_at_epochs_that_all_have():
    short = tuple(CurvePoint(epoch, 100 * epoch, 1.0) for epoch in (1, 2))
    long = tuple(CurvePoint(epoch, 300 * epoch, 0.5) for epoch in (1, 2, 3))
    assert mean_curve((short, long)) == {
        "epoch": [1, 2],
        "flops": [200, 400],
        "held_out_loss": [0.75, 0.75],
    }
    assert mean_curve(()) == {"epoch": [], "flops": [], "held_out_loss": []}


def test_costs_are_means_over_seeds():
    rows = (
        ArmRow(**epochs("heuristic", 0, 0.5)),
        ArmRow(**epochs("heuristic", 1, 0.5, flops=3000, seconds=4.0, peak_params=50, culled=0)),
    )
    arm = summary(Trials("heuristic", 1.0, rows, ((), ()), ((), ())))["arms"]["heuristic"]
    assert (arm["flops"], arm["seconds"], arm["peak_params"], arm["culled"]) == (2000, 3.0, 40, 0.5)
    assert (arm["final_params"], arm["germinated"], arm["fossilized"], arm["epochs"]) == (
        20,
        2,
        1,
        8,
    )


def test_arms_differ_seed_by_seed():
    mine, theirs = around(0.8), around(0.8, NOISE[::-1])
    arms = summary(trials("heuristic", mine), trials("never", theirs))["arms"]
    expected = compare_pairs(mine, theirs)
    found = arms["heuristic"]["minus"]["never"]["test_accuracy"]
    assert (found["mean"], found["low"], found["high"]) == (
        expected.mean,
        expected.low,
        expected.high,
    )
    assert set(arms["heuristic"]["minus"]) == {"never"}
    assert arms["never"]["minus"]["heuristic"]["test_accuracy"]["mean"] == pytest.approx(
        -expected.mean
    )


def test_ahead_is_more_accuracy_and_less_loss():
    better, worse = trials("heuristic", around(0.9)), trials("never", around(0.8))
    arms = summary(better, worse)["arms"]
    for metric, mean in (("test_accuracy", 0.1), ("test_loss", -0.1)):
        ahead, behind = (
            arms["heuristic"]["minus"]["never"][metric],
            arms["never"]["minus"]["heuristic"][metric],
        )
        assert ahead["mean"] == pytest.approx(mean)
        assert (ahead["verdict"], behind["verdict"]) == ("ahead", "behind")


def test_what_the_data_do_not_support_is_said_to_be_unsupported():
    found = summary(trials("heuristic", around(0.801)), trials("never", around(0.8, NOISE[::-1])))[
        "arms"
    ]
    assert {
        found["heuristic"]["minus"]["never"][metric]["verdict"]
        for metric in ("test_accuracy", "test_loss")
    } == {"unsupported"}


def test_fewer_than_five_seeds_claim_nothing():
    arms = summary(trials("heuristic", around(0.9)[:4]), trials("never", around(0.1)[:4]))["arms"]
    assert arms["heuristic"]["minus"]["never"]["test_accuracy"]["verdict"] == "fewer than 5 seeds"


def test_one_seed_has_no_interval():
    arms = summary(trials("heuristic", [0.9]), trials("never", [0.1]))["arms"]
    assert arms["heuristic"]["test_accuracy"]["low"] is None
    assert arms["heuristic"]["minus"]["never"]["test_loss"]["high"] is None


def test_an_arm_is_reported_at_the_rate_that_validation_chose():
    """The other rate has the better test score, and nobody may know."""
    low = trials("heuristic", around(0.9), 0.5, validation=0.6)
    high = trials("heuristic", around(0.7), 2.0, validation=0.8)
    tied = trials("heuristic", around(0.95), 4.0, validation=0.8)
    for found in (summary(low, high, tied), summary(high, tied, low)):
        arm = found["arms"]["heuristic"]
        assert arm["rate"] == 2.0
        assert arm["test_accuracy"]["mean"] == pytest.approx(estimate_mean(around(0.7)).mean)
        assert sorted({row["rate"] for row in found["rows"]}) == [0.5, 2.0, 4.0], (
            "rows of every rate are kept"
        )
        assert len(found["rows"]) == 18


def test_the_best_placement_is_the_oracle_and_validation_names_it():
    one = trials("oracle r0c0 mlp @0", around(0.95), validation=0.6)
    best = trials("oracle r0c1 mlp @2", around(0.85), validation=0.9)
    arms = summary(trials("heuristic", around(0.8)), one, best)["arms"]
    assert list(arms) == ["heuristic", "oracle"]
    assert arms["oracle"]["arm"] == "oracle r0c1 mlp @2"
    assert arms["heuristic"]["minus"]["oracle"]["test_accuracy"]["mean"] == pytest.approx(-0.05)


def test_a_summary_is_json_without_nan_and_says_what_was_compared():
    found = summary(trials("heuristic", [0.9]), trials("never", [0.1]))
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["config"]["task"]["name"] == "blobs"
    assert not {"out", "data_root"} & set(found["config"])


def test_a_table_of_episodes_parses_back_to_the_rows():
    rows = summary(trials('a,b\n"c"', [0.1, 0.9]), trials("never", [0.123456789, 0.5], 2.0))["rows"]
    parsed = list(csv.DictReader(io.StringIO(to_csv(rows))))
    assert len(parsed) == 4
    for row, read in zip(rows, parsed, strict=True):
        assert read == {name: str(value) for name, value in row.items() if name != "type"}
