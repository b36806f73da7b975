"""`--watch`, tracking on the command line, and `esper runs`."""

import json
import os
import re
import shutil
import signal
import sys
import time
from threading import Timer

import pytest

from cli.test_cli import call
from esper.cli import main, ppo, run, session
from esper.cli.session import train_beside
from esper.leyline.errors import SaveError, SettingError
from esper.simic.config import TrainingConfig
from esper.telemetry import runfolder
from simic.tiny_runs import command, events_of, manifest_of
from trials.grown_runs import configured, stopped


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    for name in ("ESPER_DATA", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


GROW = ["run", "--task", "blobs", "--epochs", "4"]


def grow(out, *more):
    return [*GROW, "--out", str(out), *more]


class Screen:
    """Stands for the one in the terminal: notes what it is shown and does what it is told meanwhile."""

    def __init__(self, act=lambda: None):
        self.shown, self.act = [], act

    def __call__(self, folder):
        self.shown.append((folder, (folder / runfolder.CONFIG).exists()))
        self.act()


def wait_for(claim):
    for _ in range(1200):
        if claim():
            return
        time.sleep(0.05)
    raise AssertionError("it never came")


# -- beside ------------------------------------------------------------------------------------------------------------


def test_the_screen_shows_the_run_and_then_everything_that_was_said_is_printed(capfd, tmp_path):
    run = tmp_path / "run"
    screen = Screen(lambda: wait_for((run / runfolder.RESULTS).exists))
    assert train_beside(grow(run), run, False, screen) == 0
    assert screen.shown == [(run, True)]
    out, err = capfd.readouterr()
    assert "cpu: 1 host" in out
    assert "heuristic on blobs" in out
    assert err == ""


def test_a_run_that_is_refused_says_why_and_no_screen_is_shown(capfd, tmp_path):
    screen = Screen()
    assert train_beside(grow(tmp_path / "run", "--task", "shakespeare"), tmp_path / "run", False, screen) == 2
    out, _ = capfd.readouterr()
    assert screen.shown == []
    assert re.match("esper: .*--data-root", out.splitlines()[-1])
    assert list(tmp_path.iterdir()) == []


OTHERS = [pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGTERM, signal.SIGHUP)]


@pytest.mark.parametrize("number", [signal.SIGINT, *OTHERS], ids=lambda number: number.name)
def test_a_signal_ends_the_run_in_order_while_the_screen_is_shown_or_after(capfd, tmp_path, number):
    run = tmp_path / "run"

    def act():
        wait_for(lambda: events_of(run, "RoundFinished"))
        if number is signal.SIGINT:
            os.kill(os.getpid(), number)
        else:  # when the screen is closed
            Timer(0.3, os.kill, (os.getpid(), number)).start()

    assert train_beside(command(run, rounds=300), run, False, Screen(act)) == 130
    out, _ = capfd.readouterr()
    assert "rounds are saved. Go on with: esper ppo --out" in out.splitlines()[-1]
    assert f"Training goes on to its end, or to Ctrl-C, which saves first. Again: esper watch {run}\n" in out
    assert manifest_of(run)["rounds"] == len(events_of(run, "RoundFinished"))
    with runfolder.only_writer(run):  # nobody is left behind
        pass


def test_a_screen_that_breaks_does_not_leave_training_alone(capfd, tmp_path):
    def fail():
        raise SaveError("cannot read it.")

    run = tmp_path / "run"
    assert train_beside(grow(run, "--epochs", "30"), run, False, Screen(fail)) == 0
    out, err = capfd.readouterr()
    assert re.fullmatch("esper: .*: cannot read it.\n", err)
    assert "heuristic on blobs" in out


def test_a_folder_that_is_taken_is_refused_before_anything_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "Popen", None)
    (tmp_path / runfolder.CONFIG).write_text("{}")
    with pytest.raises(SaveError, match="--resume"):
        train_beside(grow(tmp_path), tmp_path, False, Screen())
    with runfolder.only_writer(tmp_path), pytest.raises(SaveError, match="process"):
        train_beside(grow(tmp_path), tmp_path, True, Screen())


# -- on the command line -----------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch):
    """Calls of `train_beside`, which starts nothing; a terminal is taken for granted."""
    calls = []
    monkeypatch.setattr(session, "require_screen", lambda: "screen")
    monkeypatch.setattr(session, "train_beside", lambda *given: calls.append(given) or 7)
    return calls


def test_the_child_gets_the_same_call_without_watch(capsys, started):
    given = ["ppo", "--watch", "--task", "blobs", "--devices", "cpu", "cpu", "--out", "here", "--resume"]
    assert call(capsys, *given)[0] == 7
    arguments, out, resume, show = started[0]
    assert arguments == ["ppo", "--task", "blobs", "--devices", "cpu", "cpu", "--out", "here", "--resume"]
    assert (str(out), resume, show) == ("here", True, "screen")
    assert call(capsys, "run", "--watch", "--task", "blobs")[0] == 7
    assert started[1][0] == ["run", "--task", "blobs"]
    assert str(started[1][1]) == "runs/run"


@pytest.mark.parametrize("name", ["ppo", "run"])
def test_a_wrong_setting_is_refused_without_a_child(capsys, started, name):
    code, out, err = call(capsys, name, "--watch", "--task", "blob")
    assert (code, out, started) == (2, "", [])
    assert re.match("esper: .*'blob'", err)


@pytest.mark.parametrize("name", ["ppo", "run"])
def test_without_a_terminal_it_is_one_line(capsys, monkeypatch, tmp_path, name):
    monkeypatch.setattr(session, "Popen", None)
    code, out, err = call(capsys, name, "--watch", "--task", "blobs", "--out", "run")
    assert (code, out) == (2, "")
    assert re.fullmatch("esper: --watch .*`esper watch`.*\n", err)
    assert list(tmp_path.iterdir()) == []


def test_without_textual_it_is_refused_with_what_to_install(monkeypatch):
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.delitem(sys.modules, "esper.dashboard.watch", raising=False)
    monkeypatch.setitem(sys.modules, "textual", None)
    with pytest.raises(SettingError, match=r"pip install 'esper-lite\[tui\]'"):
        session.require_screen()


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
    monkeypatch.setattr(ppo, "run_ppo", lambda config, *rest: taken.append(config.telemetry.track) or True)
    monkeypatch.setattr(run, "run_policy", lambda config, *rest: taken.append(config.telemetry.track))
    call(capsys, "ppo", *flags)
    call(capsys, "run", *flags)
    assert taken == [expected, expected]


def test_a_resumed_run_is_tracked_as_before_unless_the_call_says_otherwise(capsys, monkeypatch, tmp_path):
    taken = []
    monkeypatch.setattr(ppo, "run_ppo", lambda config, *rest: taken.append(config.telemetry.track) or True)
    monkeypatch.setattr(run, "run_policy", lambda config, *rest: taken.append(config.telemetry.track))
    grown = configured(tmp_path / "run", telemetry={"track": ["wandb"]}).model_dump(mode="json")
    trained = TrainingConfig.from_preset("digits").with_changes([("telemetry.track", ["wandb"])], "the test")
    for name, values in (("ppo", trained.model_dump(mode="json")), ("run", {"command": "run", **grown})):
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
        assert re.fullmatch(r"esper: .*wandb .*pip install 'esper-lite\[track\]'\n", err)
    assert list(tmp_path.iterdir()) == []


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a finished training, a growing that was stopped, and something else; not to be changed."""
    folder = tmp_path_factory.mktemp("runs")
    for arguments in (command(folder / "trained"), grow(folder / "grown")):
        with pytest.raises(SystemExit) as leaving:
            main(arguments)
        assert not leaving.value.code
    config = configured(folder / "stopped", hosts=1)
    stopped(config, 3)
    runfolder.write_json(config.out / runfolder.CONFIG, {"command": "run", **config.model_dump(mode="json")})
    (folder / "notes").mkdir()
    return folder


def test_the_runs_of_a_folder_are_a_table(capsys, runs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    code, out, err = call(capsys, "runs", str(runs))
    assert (code, err) == (0, "")
    rows = {name: line for name in ("trained", "grown", "stopped") for line in out.splitlines() if f" {name} " in line}
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


def test_a_folder_without_runs_is_an_empty_list_and_one_that_is_not_there_a_line(capsys, runs, tmp_path):
    assert json.loads(call(capsys, "runs", str(runs / "notes"), "--json")[1]) == []
    code, out, err = call(capsys, "runs", str(tmp_path / "nowhere"))
    assert (code, out) == (2, "")
    assert re.match(f"esper: .*{tmp_path / 'nowhere'}: No such file", err)
    assert err.count("\n") == 1


def test_a_growing_run_whose_length_nobody_named_knows_it_and_goes_on(capsys, tmp_path):
    """`blobs` episodes as long as the task says; the screens must know how long that is."""
    run = tmp_path / "run"
    code, _, _ = call(capsys, "run", "--task", "blobs", "--out", str(run))
    assert code == 0
    row = json.loads(call(capsys, "runs", str(run), "--json")[1])[0]
    assert row["done"] == row["total"] == json.loads((run / runfolder.CONFIG).read_text())["task"]["epochs"] > 0
    before = events_of(run)
    (run / runfolder.RESULTS).unlink()
    shutil.rmtree(run / "networks")
    assert call(capsys, "run", "--out", str(run), "--resume")[0] == 0
    assert events_of(run) == before
