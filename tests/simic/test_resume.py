"""Killed at any moment and resumed, a run ends as if nothing had happened:

to the bit, events included.
"""

import errno
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from cases import with_slow
from esper.simic.trainer import InterruptedTraining
from esper.storage import runfolder
from simic.tiny_runs import (
    DECISIONS,
    KILLED,
    Forked,
    Ticks,
    assert_same_end,
    command,
    end_of,
    events_of,
    is_whole,
    kill_self,
    lines_of,
    manifest_of,
    run_until_it_ends,
    tiny,
    train,
)

ROUNDS = 4
ANNEAL = ROUNDS * DECISIONS
"""what the whole run settles on; a shorter one has to be told"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nobody disturbed, by the command, and how many moments it has."""
    folder = tmp_path_factory.mktemp("whole")
    train(tiny(folder / "warm"))  # what is loaded on first use is then there in every fork
    ticks = Ticks()

    def count():
        ticks.install()
        atexit = os._exit
        os._exit = lambda code: ((folder / "moments").write_text(str(ticks.count)), atexit(code))

    code, _, err = Forked(folder / "child", command(folder / "run", rounds=ROUNDS), count).wait()
    assert (code, err) == (0, "")
    return folder / "run", int((folder / "moments").read_text())


def run_and_resume(tmp_path, kills, **changes):
    """The run folder of `esper ppo` that was killed and resumed, and how many deaths there were."""
    out = tmp_path / "run"
    first = command(out, rounds=ROUNDS, **changes)
    again = ["ppo", "--out", str(out), "--resume"]
    return out, run_until_it_ends(tmp_path / "child", first, again, kills, Ticks.install)


# -- kill -9 at counted moments --------------------------------------------------------------------


@pytest.mark.parametrize("seed", with_slow(range(3), {1, 2}))
def test_killed_at_random_moments_and_resumed_it_ends_the_same(whole, tmp_path, seed):
    draw = random.Random(seed)
    out, deaths = run_and_resume(tmp_path, [draw.randint(1, whole[1] // 2) for _ in range(2)])
    assert deaths == 2
    assert_same_end(out, whole[0])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_killed_once_anywhere_and_resumed_it_ends_the_same(whole, tmp_path, seed):
    out, deaths = run_and_resume(tmp_path, [random.Random(seed).randint(1, whole[1])])
    assert deaths == 1
    assert_same_end(out, whole[0])


@pytest.mark.parametrize(
    "before", [pytest.param(True, marks=pytest.mark.slow), False], ids=["before", "after"]
)
@pytest.mark.parametrize("name", ["round-000002.safetensors", runfolder.MANIFEST])
def test_killed_right_around_a_rename_and_resumed_it_ends_the_same(whole, tmp_path, name, before):
    def install():
        real = os.replace

        def replace(source, target):
            is_it = Path(target).name == name and (
                name != runfolder.MANIFEST or Path(target).exists()
            )
            if is_it and before:
                kill_self()
            real(source, target)
            if is_it:
                kill_self()

        os.replace = replace

    out = tmp_path / "run"
    assert Forked(tmp_path / "child", command(out, rounds=ROUNDS), install).wait()[0] == KILLED
    told = events_of(out, "RoundFinished")
    assert 1 <= len(told) <= 2
    assert Forked(tmp_path / "child", ["ppo", "--out", str(out), "--resume"]).wait()[0] == 0
    assert_same_end(out, whole[0])


def test_killed_in_the_middle_of_a_line_it_is_cut_off(whole, tmp_path):
    out, size = tmp_path / "run", 3000

    def install():
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # ends the process in the middle of a write

    child = Forked(tmp_path / "child", command(out, rounds=ROUNDS), install)
    assert child.wait()[0] == -signal.SIGXFSZ
    code, _, err = Forked(tmp_path / "child", ["ppo", "--out", str(out), "--resume"]).wait()
    assert (code, err) == (0, "")
    assert_same_end(out, whole[0])


def test_killed_before_the_first_checkpoint_it_begins_at_the_beginning(whole, tmp_path):
    out = tmp_path / "run"
    started = Forked(
        tmp_path / "child",
        command(out, rounds=ROUNDS),
        Ticks(whole[1] // ROUNDS // 2, kill_self).install,
    )
    assert started.wait()[0] == KILLED
    assert not (out / runfolder.MANIFEST).exists()
    assert Forked(tmp_path / "child", ["ppo", "--out", str(out), "--resume"]).wait()[0] == 0
    assert_same_end(out, whole[0])


# -- kill -9 by the clock --------------------------------------------------------------------------


def esper(arguments):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "esper", *arguments],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def killed_by_the_clock(out, draw, deaths):
    """A real command, killed some time after its first record, again and again, until it ends."""
    arguments = command(out, rounds=ROUNDS)
    while True:
        process = esper(arguments)
        size = (out / runfolder.EVENTS).stat().st_size if (out / runfolder.EVENTS).exists() else -1
        while deaths and process.poll() is None:
            here = out / runfolder.EVENTS
            if here.exists() and here.stat().st_size != size:
                time.sleep(draw.uniform(0, 0.5))
                process.kill()
                deaths -= 1
                break
            time.sleep(0.005)
        err = process.communicate()[1]
        assert process.returncode in (0, KILLED), err
        if process.returncode == 0:
            return
        arguments = ["ppo", "--out", str(out), "--resume"]


@pytest.mark.slow
def test_a_run_is_resumed_by_a_new_interpreter_to_the_same_end(whole, tmp_path):
    out = tmp_path / "run"
    dies = Ticks(whole[1] * 2 // 3, kill_self)
    assert Forked(tmp_path / "child", command(out, rounds=ROUNDS), dies.install).wait()[0] == KILLED
    again = esper(["ppo", "--out", str(out), "--resume"])
    assert (again.communicate()[1], again.returncode) == ("", 0)
    assert_same_end(out, whole[0])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_command_killed_twice_by_the_clock_and_resumed_ends_the_same(whole, tmp_path, seed):
    killed_by_the_clock(tmp_path / "run", random.Random(200 + seed), deaths=2)
    assert_same_end(tmp_path / "run", whole[0])


# -- asked to stop ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_after_the_epoch_and_the_run_goes_on_as_if_nothing_was(
    whole, tmp_path, number
):
    out = tmp_path / "run"
    signalled = Ticks(whole[1] // 2, lambda: os.kill(os.getpid(), number))
    code, said, err = Forked(
        tmp_path / "child", command(out, rounds=ROUNDS), signalled.install
    ).wait()
    rounds = len(manifest_of(out)["checkpoints"])
    assert (code, err) == (130, "")
    assert 1 <= rounds < ROUNDS
    last = said.splitlines()[-1]
    assert re.search(f" {rounds} .*esper ppo --out {out} --resume$", last)
    again = last.split("esper ")[1].split()
    code, said, err = Forked(tmp_path / "child", again).wait()
    assert (code, err) == (0, "")
    first_round = next(line for line in said.splitlines() if line.startswith("round "))
    assert first_round.startswith(f"round {rounds + 1}/{ROUNDS} ")
    assert_same_end(out, whole[0])


def test_a_second_signal_ends_at_once_and_without_a_traceback(whole, tmp_path):
    def install():
        from esper.simic.environment import GrowthVectorEnv

        real = GrowthVectorEnv.reset_async

        def reset(self, **options):
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(os.getpid(), number)
            return real(self, **options)

        GrowthVectorEnv.reset_async = reset

    code, _, err = Forked(
        tmp_path / "child", command(tmp_path / "run", rounds=ROUNDS), install
    ).wait()
    assert code not in (0, 2, 99), err
    assert "Traceback" not in err
    assert (
        Forked(tmp_path / "child", ["ppo", "--out", str(tmp_path / "run"), "--resume"]).wait()[0]
        == 0
    )
    assert_same_end(tmp_path / "run", whole[0])


# -- what else a resume must get right -------------------------------------------------------------


def test_a_run_stopped_in_every_round_ends_the_same(whole, tmp_path):
    config = tiny(tmp_path / "run", rounds=ROUNDS)
    asks = []

    def should_stop():
        asks.append(None)
        return len(asks) % 5 == 0  # a round has three epochs

    stops, resume = 0, False
    while True:
        try:
            train(config, resume=resume, should_stop=should_stop)
            break
        except InterruptedTraining:
            stops, resume = stops + 1, True
    assert stops > 2
    assert_same_end(config.out, whole[0])


def test_an_escalation_goes_on_after_a_resume(tmp_path):
    loud = {"ppo__lr": 0.5, "ppo__target_kl": None, "rounds": 4, "telemetry__escalation_rounds": 4}
    train(tiny(tmp_path / "whole", **loud))
    assert events_of(tmp_path / "whole", "ACTION_TAKEN"), (
        "no anomaly was found, so there is nothing to test"
    )
    config = tiny(tmp_path / "cut", **loud)
    asks = iter(range(1000))
    for resume in (False, True):
        with pytest.raises(InterruptedTraining):
            train(
                config, resume=resume, should_stop=lambda: next(asks) in (8, 13)
            )  # twins live first
    train(config, resume=True)
    assert_same_end(config.out, tmp_path / "whole")


def test_a_damaged_newest_checkpoint_costs_one_round_and_nothing_else(whole, tmp_path, capsys):
    config = tiny(tmp_path / "run", rounds=ROUNDS)
    asks = iter(range(1000))
    with pytest.raises(InterruptedTraining):
        train(config, should_stop=lambda: next(asks) == 14)
    newest = config.out / runfolder.CHECKPOINTS / manifest_of(config.out)["checkpoints"][-1]["file"]
    newest.write_bytes(newest.read_bytes()[:-100])
    train(config, resume=True)
    assert f"{newest} is truncated or altered" in capsys.readouterr().err
    assert_same_end(config.out, whole[0])


def test_more_rounds_go_on_from_the_end_of_a_finished_run(whole, tmp_path):
    out = tmp_path / "run"
    assert (
        Forked(tmp_path / "child", command(out, rounds=3, ppo__anneal_decisions=ANNEAL)).wait()[0]
        == 0
    )
    again = ["ppo", "--out", str(out), "--resume", "--rounds", str(ROUNDS)]
    assert Forked(tmp_path / "child", again).wait()[0] == 0
    tensors, _, _ = end_of(out)
    expected, _, _ = end_of(whole[0])
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_the_reference_learned_something_in_every_round(whole):
    assert [row["round"] for row in lines_of(whole[0]) if row["type"] == "RoundFinished"] == list(
        range(ROUNDS)
    )
    assert whole[1] > 100


# -- a full disk -----------------------------------------------------------------------------------


def room(size):
    """A limit for every file: a longer write fails, as on a full disk."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_events_that_do_not_fit_are_told_once_and_training_goes_on(whole, tmp_path):
    out, size = (
        tmp_path / "run",
        max(path.stat().st_size for path in (whole[0] / runfolder.CHECKPOINTS).iterdir()),
    )
    arguments = command(out, rounds=6, telemetry__level="debug")
    code, said, err = Forked(tmp_path / "child", arguments, room(size + 500)).wait()
    assert code == 0
    assert re.fullmatch("esper: .*events-0.jsonl: File too large.*\n", err)
    assert err.count("\n") == 1
    assert said.count("\nround ") == manifest_of(out)["rounds"] == 6
    assert 0 < len(events_of(out, "RoundFinished")) < 6  # and every line that is there is whole


def test_a_checkpoint_that_does_not_fit_is_an_error_and_the_one_before_is_untouched(
    whole, tmp_path
):
    out = tmp_path / "run"
    # few events, so that the checkpoint is what does not fit
    settings = {"ppo__anneal_decisions": ANNEAL, "telemetry__level": "minimal"}
    start = command(out, rounds=2, **settings)
    assert Forked(tmp_path / "child", start).wait()[0] == 0
    before, events = manifest_of(out), events_of(out)
    again = ["ppo", "--out", str(out), "--resume", "--rounds", str(ROUNDS)]
    code, _, err = Forked(tmp_path / "child", again, room(35_000)).wait()
    assert code == 2
    assert err.startswith(
        f"esper: cannot save {out}/checkpoints/round-000003.safetensors: File too large."
    )
    assert "untouched. Free disk space" in err
    assert err.count("\n") == 1
    assert manifest_of(out) == before
    assert all(is_whole(out, entry) for entry in before["checkpoints"])
    assert events_of(out)[: len(events)] == events
    assert Forked(tmp_path / "child", again).wait()[0] == 0
    tensors, _, _ = end_of(out)
    expected, _, _ = end_of(whole[0])
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_twins_that_do_not_fit_are_one_line_and_the_start_can_be_repeated(whole, tmp_path):
    out = tmp_path / "run"

    def install():
        real = os.replace

        def replace(source, target):
            if Path(target).name.startswith("twin-"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(source, target)

        os.replace = replace

    code, _, err = Forked(tmp_path / "child", command(out, rounds=ROUNDS), install).wait()
    assert code == 2
    assert err.count("\n") == 1
    assert "No space left on device" in err
    assert "Free disk space" in err
    code, _, err = Forked(tmp_path / "child", ["ppo", "--out", str(out), "--resume"]).wait()
    assert (code, err) == (0, "")
    assert_same_end(out, whole[0])
