"""benchmarks/harm.py:

seeds that choose do not judge, each seed has data of its own, and what is known is not played again.
"""

import json
import runpy
import sys

import pytest

from readme_tables import ROOT

BEFORE = "heuristic:held_out_part=0"


def load(monkeypatch, name="harm", *arguments):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    monkeypatch.setattr(sys, "argv", ["harm.py", *map(str, arguments)])
    return runpy.run_path(str(ROOT / "benchmarks" / "harm.py"), run_name=name)


def test_an_interrupted_call_plays_the_rest_and_replaces_nothing(monkeypatch, tmp_path, capsys):
    out = tmp_path / "harm.json"
    options = ["judge", "--many", 0, "--epochs", 2, "--out", out]
    load(monkeypatch, "__main__", *options, "--few", 1)
    first = json.loads(out.read_text())["judge"]["variations"]
    arms = first["80 examples, noise 0.3, width 8"]
    arms["never"]["9000"]["test_accuracy"] = 0.5  # a mark that a second play would remove
    record = json.loads(out.read_text())
    record["judge"]["variations"] = first
    out.write_text(json.dumps(record))
    load(monkeypatch, "__main__", *options, "--few", 2)
    both = json.loads(out.read_text())["judge"]["variations"]
    assert len(both) == 6
    for arms in both.values():
        assert set(arms) == {"never", BEFORE, "heuristic"}
        assert all(set(seeds) == {"9000", "9001"} for seeds in arms.values())
    assert both["80 examples, noise 0.3, width 8"]["never"]["9000"]["test_accuracy"] == 0.5
    assert capsys.readouterr().out.count("6 of 6") == 2


def test_seeds_that_choose_do_not_judge_and_each_has_data_of_its_own(monkeypatch):
    script = load(monkeypatch)
    seeds = script["FIRST_SEED"]
    assert abs(seeds["choose"] - seeds["judge"]) >= 1000
    variation = script["Variation"](80, 0.3, 2)
    splits = [script["make_task"](variation, seed, 2).load(None) for seed in (1, 1, 2)]
    inputs = [split.train.inputs for split in splits]
    assert inputs[0].equal(inputs[1])
    assert not inputs[0].equal(inputs[2])
    clean = script["make_task"](script["Variation"](80, 0.0, 2), 1, 2).load(None)
    assert len(clean.train) + len(clean.validation) == 100


@pytest.mark.parametrize(
    ("mean", "error", "is_harm"),
    [
        (-1.4, 0.1, False),
        (-1.6, 0.7, True),
        (-1.6, 0.9, False),
        (-4.0, 1.9, True),
        (2.0, 0.1, False),
    ],
)
def test_a_rule_harms_if_it_is_behind_by_more_than_the_bar_beyond_doubt(
    mean, error, is_harm, monkeypatch
):
    assert load(monkeypatch)["Lead"](mean, error).is_harm is is_harm
