"""Tracking on the command line, and `esper runs`."""

import json
import re
import shutil
import sys

import pytest

from cli.test_cli import call
from esper.cli import main, ppo, run
from esper.simic.config import TrainingConfig
from esper.storage import runfolder
from simic.tiny_runs import command, events_of
from trials.grown_runs import configured, stopped


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    for name in ("ESPER_DATA", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


GROW = ["run", "--task", "blobs", "--epochs", "4"]


def grow(out, *more):
    return [*GROW, "--out", str(out), *more]


def test_without_textual_watch_is_refused_with_what_to_install(capsys, monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "esper.dashboard.watch", raising=False)
    monkeypatch.setitem(sys.modules, "textual", None)
    code, _, said = call(capsys, "watch", str(tmp_path))
    assert code == 2
    assert "pip install 'esper-lite[tui]'" in said


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], ()),
        (["--tensorboard"], ("tensorboard",)),
        (["--wandb"], ("wandb",)),
        (["--wandb", "--tensorboard"], ("tensorboard", "wandb")),
    ],
    ids=" ".join,
)
def test_the_flags_of_trackers_reach_the_configuration(capsys, monkeypatch, flags, expected):
    taken = []
    monkeypatch.setattr(
        ppo, "run_ppo", lambda config, *rest, **more: taken.append(config.telemetry.track) or True
    )
    monkeypatch.setattr(
        run, "run_policy", lambda config, *rest: taken.append(config.telemetry.track)
    )
    call(capsys, "ppo", *flags)
    call(capsys, "run", *flags)
    assert taken == [expected, expected]


def test_a_resumed_run_is_tracked_as_before_unless_the_call_says_otherwise(
    capsys, monkeypatch, tmp_path
):
    taken = []
    monkeypatch.setattr(
        ppo, "run_ppo", lambda config, *rest, **more: taken.append(config.telemetry.track) or True
    )
    monkeypatch.setattr(
        run, "run_policy", lambda config, *rest: taken.append(config.telemetry.track)
    )
    grown = configured(tmp_path / "run", telemetry={"track": ["wandb"]}).model_dump(mode="json")
    trained = TrainingConfig.from_preset("digits").with_changes(
        [("telemetry.track", ["wandb"])], "the test"
    )
    for name, values in (
        ("ppo", trained.model_dump(mode="json")),
        ("run", {"command": "run", **grown}),
    ):
        (tmp_path / name).mkdir()
        runfolder.write_json(tmp_path / name / runfolder.CONFIG, values)
        call(capsys, name, "--out", name, "--resume")
        call(capsys, name, "--out", name, "--resume", "--tensorboard")
    assert taken == [("wandb",), ("tensorboard",)] * 2


def test_a_missing_tracker_is_one_line_and_leaves_nothing(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    for arguments in (["ppo", "--task", "blobs", "--out", "run"], grow("run")):
        code, out, err = call(capsys, *arguments, "--wandb")
        assert (code, out) == (2, "")
        assert re.fullmatch(
            r"esper: .*wandb\. Install it: pip install 'esper-lite\[track\]'\n", err
        )
    assert list(tmp_path.iterdir()) == []


# -- runs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a finished training, a growing that was stopped, and something else; not to be
    changed.
    """
    folder = tmp_path_factory.mktemp("runs")
    for arguments in (command(folder / "trained"), grow(folder / "grown")):
        with pytest.raises(SystemExit) as leaving:
            main(arguments)
        assert not leaving.value.code
    config = configured(folder / "stopped", hosts=1)
    stopped(config, 3)
    runfolder.write_json(
        config.out / runfolder.CONFIG, {"command": "run", **config.model_dump(mode="json")}
    )
    (folder / "notes").mkdir()
    return folder


def test_the_runs_of_a_folder_are_a_table(capsys, runs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    code, out, err = call(capsys, "runs", str(runs))
    assert (code, err) == (0, "")
    rows = {
        name: line
        for name in ("trained", "grown", "stopped")
        for line in out.splitlines()
        if f" {name} " in line
    }
    assert len(rows) == 3
    assert "2/2" in rows["trained"].replace(" ", "")
    assert "4/4" in rows["grown"].replace(" ", "")
    assert "3/8" in rows["stopped"].replace(" ", "")


def test_the_runs_of_a_folder_are_json(capsys, runs):
    code, out, err = call(capsys, "runs", str(runs), "--json")
    assert (code, err) == (0, "")
    found = {row["name"]: row for row in json.loads(out)}
    assert {name: (row["status"], row["done"], row["total"]) for name, row in found.items()} == {
        "trained": ("finished", 2, 2),
        "grown": ("finished", 4, 4),
        "stopped": ("stopped", 3, 8),
    }
    for name, row in found.items():
        assert row["events"] == len(events_of(runs / name))
        assert row["best_accuracy"] is not None
        assert row["path"] == str(runs / name)


def test_a_folder_without_runs_is_an_empty_list_and_one_that_is_not_there_a_line(
    capsys, runs, tmp_path
):
    assert json.loads(call(capsys, "runs", str(runs / "notes"), "--json")[1]) == []
    code, out, err = call(capsys, "runs", str(tmp_path / "nowhere"))
    assert (code, out) == (2, "")
    assert re.match(f"esper: .*{tmp_path / 'nowhere'}: No such file", err)
    assert err.count("\n") == 1


@pytest.mark.slow
def test_a_growing_run_whose_length_nobody_named_knows_it_and_goes_on(capsys, tmp_path):
    """`blobs` episodes as long as the task says; the screens must know how long that is."""
    run = tmp_path / "run"
    code, _, _ = call(capsys, "run", "--task", "blobs", "--out", str(run))
    assert code == 0
    row = json.loads(call(capsys, "runs", str(run), "--json")[1])[0]
    assert (
        row["done"]
        == row["total"]
        == json.loads((run / runfolder.CONFIG).read_text())["task"]["epochs"]
        > 0
    )
    before = events_of(run)
    (run / runfolder.RESULTS).unlink()
    shutil.rmtree(run / "networks")
    assert call(capsys, "run", "--out", str(run), "--resume")[0] == 0
    assert events_of(run) == before
