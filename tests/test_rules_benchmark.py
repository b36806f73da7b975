"""benchmarks/rules.py:

seeds that choose do not judge, episodes are paired by seed, and what is finished is read.
"""

import json
import runpy
import sys

import pytest

from readme_tables import ROOT


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    monkeypatch.setattr(sys, "argv", ["rules.py", *map(str, arguments)])
    runpy.run_path(str(ROOT / "benchmarks" / "rules.py"), run_name="__main__")


def test_a_seed_that_chooses_does_not_judge(monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match="host seed 13 "):
        call(monkeypatch, "choose", "--choose", 10, 4, "--judge", 13, 2, "--out", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("stage", "metric"), [("choose", "validation_accuracy"), ("judge", "test_accuracy")]
)
def test_arms_are_paired_by_seed_and_chunks_make_one_table(
    stage, metric, monkeypatch, tmp_path, capsys
):
    few = [
        "--tasks",
        "digits",
        "--shorten",
        2,
        "--choose",
        10,
        3,
        "--judge",
        20,
        3,
        "--out",
        tmp_path,
    ]
    call(monkeypatch, stage, "--arms", "never", *few)
    call(monkeypatch, stage, "--arms", "random:epochs=0", *few, "--chunk", 2)
    capsys.readouterr()
    call(monkeypatch, stage, "--arms", "never", "random:epochs=0", *few, "--table")
    found = json.loads((tmp_path / f"{stage}-short-2.json").read_text())
    assert found["seeds"] == {"choose": [10, 11, 12], "judge": [20, 21, 22]}
    arms = found["tasks"]["digits"]["arms"]
    one, other = (arms[name]["values"][metric] for name in ("random:epochs=0", "never"))
    expected = sum(a - b for a, b in zip(one, other, strict=True)) / 3
    assert arms["random:epochs=0"]["minus"][metric]["mean"] == pytest.approx(expected)
    assert ("test_accuracy" in arms["never"]) is (stage == "judge"), (
        "validation chooses, and nobody looks further"
    )
    assert f"{metric}, points; differences to never" in capsys.readouterr().out
