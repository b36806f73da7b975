"""Whatever the disk refuses: one clear error, the old save is whole, nothing is left behind."""

import errno

import pytest

import esper
from dashboard.web_runs import grow_run
from esper.dashboard.report import write_report
from esper.leyline.errors import SaveError
from faults.damage import tree
from faults.failing import every_failure
from user_models import CNN, PLANT_FIRST, grow_cnn, script, walk_to

OPTIONAL = {"unlink", "rmdir"}
"""Calls that only tidy up; what they leave goes with the next save."""


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_garden_whose_save_fails_anywhere_is_the_old_one_and_says_so(tmp_path, number):
    garden = walk_to(grow_cnn({0: PLANT_FIRST}), "PROBATIONARY")
    garden.save(tmp_path)
    seen = set()
    for call, problem in every_failure(lambda: garden.save(tmp_path), number=number):
        seen.add(call)
        assert isinstance(problem, SaveError) or (problem is None and call in OPTIONAL), (
            call,
            problem,
        )
        assert esper.load(tmp_path, CNN(), policy=script({})).epoch == garden.epoch
    garden.save(tmp_path)
    assert {"open", "fsync", "replace", "mkdir"} <= seen
    assert not [name for name in tree(tmp_path) if ".new-" in name]
    assert len(tree(tmp_path)) == 3


def test_a_report_that_does_not_fit_on_the_disk_is_the_old_one(tmp_path):
    run, out = grow_run(tmp_path / "run"), tmp_path / "report.html"
    former = '<meta name="generator" content="esper report">'
    out.write_text(former)
    calls = []
    for call, problem in every_failure(
        lambda: write_report([run], out), calls=("fsync", "replace", "fchmod")
    ):
        calls.append(call)
        assert isinstance(problem, SaveError), call
        # the fsync of the folder comes after the move
        assert out.read_text() == former or call == "fsync"
        out.write_text(former)
    assert calls == ["fsync", "replace", "fsync"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "run"]
