"""How far long work is: a bar with the time left on a terminal, nothing in a pipe."""

import io
import json
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from cli.console.test_progress import FIRST
from esper.cli import compare, ppo, run
from esper.cli.console import show_rounds
from esper.cli.progress import Meter, show_progress
from esper.simic.config import TrainingConfig
from esper.trials.config import CompareConfig, RunConfig


def terminal():
    return Console(file=io.StringIO(), width=100, force_terminal=True)


@pytest.mark.parametrize(
    "kind", [{"force_terminal": False}, {"quiet": True, "force_terminal": True}]
)
def test_in_a_pipe_and_on_a_quiet_console_nothing_is_shown(kind):
    console = Console(file=io.StringIO(), **kind)
    with show_progress(console) as advance:
        advance("epochs", 1, 2)
    assert console.file.getvalue() == ""


def test_a_notebook_asks_for_colours_and_is_no_terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = Console(file=io.StringIO())
    assert console.is_terminal
    with show_progress(console) as advance:
        advance("epochs", 1, 2)
    assert console.file.getvalue() == ""


@pytest.fixture(autouse=True)
def no_forced_colours(monkeypatch):
    """Terminals here are said to be some; the environment of the tests says nothing of them."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def test_on_a_terminal_the_bar_says_how_much_there_is_and_goes_away():
    console = terminal()
    with show_progress(console) as advance:
        advance("epochs", 3, 8)
        console.print("a line")
    text = console.file.getvalue()
    assert "3/8" in text
    assert "left" in text
    assert "a line" in text
    assert text.endswith("\x1b[2K")  # the line of the bar is erased


def test_work_of_another_name_begins_a_new_bar():
    meter = Meter()
    meter.advance("twins", 8, 8)
    meter.advance("round 1", 1, 5)
    (task,) = meter.bar.tasks
    assert (task.description, task.completed, task.total) == ("round 1", 1, 5)
    meter.clear()
    assert meter.bar.tasks == []


def test_the_time_left_follows_the_speed():
    now = 0.0
    meter = Meter()
    meter.bar.get_time = lambda: now
    for done in (1, 2, 3):
        now = 10.0 * done
        meter.advance("epochs", done, 8)
    (task,) = meter.bar.tasks
    assert task.time_remaining == pytest.approx(50, abs=10)


def test_rounds_on_a_terminal_have_the_bar_below_and_leave_the_last_round():
    console = terminal()
    meter = Meter()
    with show_rounds(10, console, meter) as show:
        meter.advance("round 1", 2, 7)
        show(FIRST)
        meter.advance("round 2", 3, 7)
        show(replace(FIRST, round=1))
    text = console.file.getvalue()
    assert "3/7" in text
    assert "round 2 of 10" in text
    assert "3/7" not in text.rpartition("round 2 of 10")[2]


POINTS = {"name": "blobs", "epochs": 3}


def seen(console_of, monkeypatch, module):
    """What a command tells its bar."""
    told = []

    class Spy(Meter):
        def advance(self, work, done, total):
            told.append((work, done, total))

    monkeypatch.setattr(sys.modules["esper.cli.progress"], "Meter", Spy)
    monkeypatch.setattr(module, "Meter", Spy, raising=False)
    console_of(terminal())
    return told


def test_a_run_counts_its_epochs(tmp_path, monkeypatch):
    config = RunConfig.of({"task": POINTS, "policy": "never", "out": str(tmp_path / "run")})
    told = seen(lambda console: run.run_policy(config, False, console), monkeypatch, run)
    assert told == [("epochs", done, 3) for done in (1, 2, 3)]


def test_a_comparison_counts_the_epochs_of_all_hosts_and_not_those_it_has_already(
    tmp_path, monkeypatch
):
    settings = {"task": POINTS, "policies": ["never", "random"], "seeds": 2, "static": []}
    config = CompareConfig.of({**settings, "pretrain": 1, "out": str(tmp_path / "run")})
    told = seen(lambda console: compare.run_compare(config, False, console), monkeypatch, compare)
    assert [done for _, done, _ in told] == [2, 4, 6, 8, 10, 12, 14]
    assert {total for *_, total in told} == {14}
    arm = next((tmp_path / "run/arms").glob("random*.json"))
    arm.unlink()
    again = seen(lambda console: compare.run_compare(config, True, console), monkeypatch, compare)
    assert {total for *_, total in again} == {6}


def test_a_training_counts_its_twins_and_the_decisions_of_each_round(tmp_path, monkeypatch):
    config = TrainingConfig.of(
        {"task": POINTS, "hosts": 1, "host_pool": 1, "rounds": 2, "out": str(tmp_path / "run")}
    )
    told = seen(lambda console: ppo.run_ppo(config, False, console), monkeypatch, ppo)
    works = [work for work, *_ in told]
    assert list(dict.fromkeys(works)) == ["twins", "round 1", "round 2"]
    assert told[2] == ("twins", 3, 3)
    for name in ("round 1", "round 2"):
        counts = [(done, total) for work, done, total in told if work == name]
        assert counts == [(1, 3), (2, 3), (3, 3)]
    assert json.loads((tmp_path / "run/config.json").read_text())["rounds"] == 2
