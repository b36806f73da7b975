"""Ranks within a round: stopping together, failing together, each with its own hosts for good."""

import os
import signal
import subprocess
import time
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from cases import with_slow
from esper.cli import ppo as running
from esper.leyline.errors import DeviceError, MaskError, SaveError
from esper.simic import team as teams
from esper.simic.environment import GrowthVectorEnv
from esper.simic.ppo.agent import PPOAgent
from esper.simic.round_summary import RoundTally
from esper.simic.team import joined_team
from esper.simic.trainer import InterruptedTraining, train_ppo_vectorized
from esper.telemetry.sink import Sink
from null_sink import NullSink
from simic import team_workers
from simic.team_workers import (
    FREE,
    assert_ended_well,
    assert_one_line,
    assigned,
    in_team,
    run_ranks,
    train_ranks,
)
from simic.tiny_runs import command, tiny

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("warm_forks")]


def at_call(owner, name, number, act):
    """`act` comes before the `number`-th call of a function."""
    real, calls = getattr(owner, name), []

    def called(*args, **kwargs):
        calls.append(None)
        if len(calls) == number:
            act()
        return real(*args, **kwargs)

    setattr(owner, name, called)


def failing(problem):
    def act():
        raise problem

    return act


# -- stopping together -----------------------------------------------------------------------------


STOPS = {
    "in the second round": (4, 4, (1, 4)),
    "after the epoch": (13, 2, (0, 2)),
    "after the last epoch": (13, 12, (0, 12)),
    "while twins are played": (4, -2, (0, 0)),
}
EVERY_STOP = [f"{asker}-{moment}" for moment in STOPS for asker in (0, 1)]


@pytest.mark.parametrize(
    "case", with_slow(EVERY_STOP, {"0-in the second round", "1-after the last epoch"})
)
def test_whoever_is_asked_to_stop_all_stop_at_the_same_step(case, tmp_path):
    asker, moment = int(case[0]), case[2:]
    epochs, asks, ends = STOPS[moment]

    def live(team):
        asked = []

        def should_stop():
            asked.append(None)
            return team.rank == asker and len(asked) == epochs + asks  # twins are played first

        config = tiny(tmp_path / "run", hosts=2, rounds=3, task__epochs=epochs)
        with pytest.raises(InterruptedTraining) as stop:
            train_ppo_vectorized(config, sink=NullSink(), team=team, should_stop=should_stop)
        return stop.value.rounds, max(0, len(asked) - epochs)

    (tmp_path / "run").mkdir()
    ended = run_ranks(tmp_path / "ranks", 2, in_team(live))
    assert_ended_well(ended)
    assert [rank.value for rank in ended] == [ends, ends]


def test_all_stop_at_the_same_step_when_answers_are_read_later(tmp_path, monkeypatch):
    finish = RoundTally.finish
    monkeypatch.setattr(
        RoundTally, "finish", lambda tally, *rest: replace(finish(tally, *rest), seconds=20.0)
    )

    def live(team):
        asked = []

        def should_stop():
            asked.append(None)
            return (
                team.rank == 1 and len(asked) == 13 + 12 + 3
            )  # twins, the first round, and some of the second

        config = tiny(tmp_path / "run", hosts=2, rounds=3, task__epochs=13)
        with pytest.raises(InterruptedTraining) as stop:
            train_ppo_vectorized(config, sink=NullSink(), team=team, should_stop=should_stop)
        return stop.value.rounds, len(asked)

    (tmp_path / "run").mkdir()
    ended = run_ranks(tmp_path / "ranks", 2, in_team(live))
    assert_ended_well(ended)
    assert [rank.value for rank in ended] == [
        (1, 13 + 12 + 3)
    ] * 2  # it is read before the fourth is asked


def test_who_asks_does_not_wait_for_the_others(tmp_path):
    def live(team):
        if team.rank == 1:
            time.sleep(1.0)
        began = time.perf_counter()
        answer = team.ask(team.rank == 1)
        return time.perf_counter() - began < 0.5, answer(), team.any(False)

    ended = run_ranks(tmp_path / "ranks", 2, in_team(live))
    assert_ended_well(ended)
    assert [rank.value for rank in ended] == [(True, True, False)] * 2


# -- failing together ------------------------------------------------------------------------------

FULL, NO_ROOM = DeviceError("out of GPU memory."), SaveError("the disk is full.")
FAULTS = {
    "a step": (1, GrowthVectorEnv, "step_wait", 5, FULL),
    "a step of rank 0": (0, GrowthVectorEnv, "step_wait", 5, FULL),
    "the last step": (1, GrowthVectorEnv, "step_wait", 6, FULL),
    "a reset": (0, GrowthVectorEnv, "reset_wait", 2, FULL),
    "an event": (1, Sink, "write_record", 30, NO_ROOM),
    "a commit": (1, Sink, "commit", 2, NO_ROOM),
    "an update": (1, PPOAgent, "_judge", 2, MaskError("nothing is possible.")),
    "the last minibatch": (0, PPOAgent, "_descend", 8, MaskError("nothing is possible.")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_of_one_rank_within_a_round_ends_all_with_one_line(fault, tmp_path):
    rank, owner, name, number, problem = FAULTS[fault]

    def prepare(own):
        if own == rank:
            at_call(owner, name, number, failing(problem))

    ended = train_ranks(tmp_path / "run", 2, prepare=prepare, ppo__target_kl=10.0)
    assert_one_line(ended, str(problem))
    assert [f"esper: rank {rank} " in own.said for own in ended] == [rank == 1, rank == 0]


def test_a_rank_that_is_far_away_from_the_others_is_ended_too(tmp_path):
    def prepare(rank):
        if rank == 0:
            at_call(GrowthVectorEnv, "step_wait", 2, lambda: time.sleep(1000))
        else:
            at_call(GrowthVectorEnv, "step_wait", 2, failing(FULL))

    assert_one_line(train_ranks(tmp_path / "run", 2, prepare=prepare), str(FULL))


def test_what_is_no_mistake_of_the_callers_is_told_to_the_others(tmp_path):
    def prepare(rank):
        if rank == 1:
            at_call(GrowthVectorEnv, "step_wait", 2, failing(ZeroDivisionError("a fault of ours")))

    other, own = train_ranks(tmp_path / "run", 2, prepare=prepare)
    assert_one_line([other], "rank 1 .*ZeroDivisionError: a fault of ours")
    assert (own.code, "Traceback" in own.said) == (99, True)


def test_a_rank_that_is_killed_is_one_line_on_the_others(tmp_path):
    def prepare(rank):
        if rank == 1:
            at_call(GrowthVectorEnv, "step_wait", 5, lambda: os.kill(os.getpid(), signal.SIGKILL))

    other, own = train_ranks(tmp_path / "run", 2, prepare=prepare)
    assert_one_line([other], "rank 0 lost contact with rank 1.*--resume")
    assert own.code == -signal.SIGKILL


def test_of_several_ranks_rank_0_names_the_one_that_is_gone(tmp_path):
    def prepare(rank):
        if rank == 2:
            at_call(GrowthVectorEnv, "step_wait", 5, lambda: os.kill(os.getpid(), signal.SIGKILL))

    first, second, _ = train_ranks(tmp_path / "run", 3, prepare=prepare, hosts=3)
    assert_one_line([first], "rank 0 lost contact with rank 2")
    assert_one_line([second], "rank 1 lost contact with rank 0")


def test_a_rank_that_falls_silent_is_not_waited_for(tmp_path):
    def pause():
        subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

    def prepare(rank):
        teams._SILENCE = timedelta(seconds=1.5)
        if rank == 1:
            at_call(GrowthVectorEnv, "step_wait", 5, pause)

    first, second = train_ranks(tmp_path / "run", 2, prepare=prepare)
    assert_one_line([first], "lost contact with rank 1")
    assert_one_line([second], "lost contact with rank 0")


# -- hosts that stay -------------------------------------------------------------------------------


@pytest.mark.slow
def test_hosts_stay_with_their_rank_and_the_slow_one_is_named(tmp_path):
    def prepare(rank):
        if rank == 1:
            team_workers.step_slowly(0.1)

    ended = train_ranks(tmp_path / "run", 2, prepare=prepare, **{**FREE, "hosts": 5})
    assert_ended_well(ended)
    assert assigned(tmp_path / "run") == [[3, 2]] * 3
    assert ended[0].said.count("wait for rank 1") == 3  # waiting is not counted as playing


@pytest.mark.slow
def test_another_number_of_ranks_has_other_hosts_each(tmp_path):
    assert_ended_well(train_ranks(tmp_path / "run", 2, **FREE))
    assert_ended_well(train_ranks(tmp_path / "run", 3, resume=True, **{**FREE, "rounds": 4}))
    assert assigned(tmp_path / "run") == [[2, 2]] * 3 + [[2, 1, 1]]


# -- ranks that share a GPU ------------------------------------------------------------------------


class OnGpu:
    """A tensor that says it is on a GPU and tells where it was moved to."""

    device = torch.device("cpu", 0)

    def detach(self):
        return self

    def to(self, place, copy):
        self.moved = str(place)
        return torch.tensor(1.0)


@pytest.mark.parametrize("is_shared", [False, True])
def test_where_a_gpu_is_shared_sums_are_made_on_the_cpu(is_shared, tmp_path):
    def live(rank):
        begin, backends = dist.init_process_group, []
        dist.init_process_group = lambda backend, **options: (
            backends.append(backend),
            begin("gloo", **options),
        )
        teams._own_device = lambda: torch.device("meta")
        name = "the only one" if is_shared else f"number {rank}"
        torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=name)
        with joined_team(wants_cuda=True) as team:
            values = OnGpu()
            summed = team.sum(values).item()
            return backends[0], team.shares_gpu, values.moved, summed

    ended = run_ranks(tmp_path, 2, live)
    assert_ended_well(ended)
    expected = (
        ("gloo", True, "cpu", 2.0) if is_shared else ("cpu:gloo,cuda:nccl", False, "cpu:0", 2.0)
    )
    assert [own.value for own in ended] == [expected] * 2


def test_a_run_whose_ranks_share_a_gpu_says_so(tmp_path):
    def prepare(rank):
        teams.Team.shares_gpu = property(lambda team: team.size > 1, lambda team, value: None)
        teams.Team.sum = lambda team, values: values
        running.train_ppo_vectorized = lambda *args, **options: None

    def live(rank):
        prepare(rank)
        team_workers.esper(command(tmp_path / "run"))

    first, second = run_ranks(tmp_path / "ranks", 2, live)
    assert_ended_well([first, second])
    assert first.said.count("rank 0 on cpu: 1, rank 1 on cpu: 1; ") == 1
    assert "share" not in second.said
