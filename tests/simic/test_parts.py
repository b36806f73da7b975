"""A round whose hosts take turns in two parts: the same episodes, stored and told as one."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from esper.leyline.errors import SettingError
from esper.runtime.executors.eager import EagerExecutor
from esper.simic import environment, trainer
from esper.simic.environment import GrowthVectorEnv
from esper.simic.round_summary import RoundTally
from esper.simic.team import StopVote, Team
from esper.simic.trainer import (
    InterruptedTraining,
    build_agent,
    build_environment,
    build_rollout,
    play_round,
)
from null_sink import NullSink
from simic.tiny_runs import events_of, open_sink, tiny, train

HOSTS = 9


@pytest.fixture
def _in_parts(monkeypatch):
    """On a CPU nothing trains in the background, but hosts may take turns all the same."""
    monkeypatch.setattr(environment, "GraphedExecutor", EagerExecutor)


def played(folder, team=None, should_stop=lambda: False, **options):
    config = tiny(folder, hosts=HOSTS, initial_wait=0.5)
    config.out.mkdir(parents=True)
    env = build_environment(config)
    agent, _ = build_agent(config, env, team)
    rollout = build_rollout(env, agent, config.hosts)
    vote = StopVote(agent.team, should_stop, **options)
    tally = play_round(env, agent, rollout, 1, NullSink(), vote)
    return SimpleNamespace(env=env, agent=agent, rollout=rollout, tally=tally)


@pytest.mark.usefixtures("_in_parts")
def test_hosts_are_divided_where_graphs_let_them_train_in_the_background(tmp_path, monkeypatch):
    env = played(tmp_path / "run").env
    assert [(part.first, part.num_envs) for part in env.parts()] == [(0, 4), (4, 5)]
    monkeypatch.undo()
    assert env.parts() == [env]


@pytest.mark.usefixtures("_in_parts")
def test_a_single_host_is_one_part(tmp_path):
    env = build_environment(tiny(tmp_path / "run", hosts=1))
    assert env.parts() == [env]


def test_a_round_in_two_parts_is_the_round_of_the_whole(tmp_path, monkeypatch):
    whole = played(tmp_path / "whole")
    monkeypatch.setattr(environment, "GraphedExecutor", EagerExecutor)
    steps, real = [], GrowthVectorEnv.step_async
    monkeypatch.setattr(
        GrowthVectorEnv, "step_async", lambda env, a: (steps.append(env.num_envs), real(env, a))
    )
    divided = played(tmp_path / "divided")
    assert steps == [4, 5] * whole.rollout.steps
    for name in (
        "states",
        "choices",
        "log_probs",
        "values",
        "rewards",
        "after_values",
        "terminated",
        "valid",
    ):
        torch.testing.assert_close(
            getattr(divided.rollout, name), getattr(whole.rollout, name), msg=name
        )
    for state in ("hidden", "end_hidden"):
        for own, other in zip(
            getattr(divided.rollout, state), getattr(whole.rollout, state), strict=True
        ):
            torch.testing.assert_close(own, other, msg=state)
    for name in ("ops", "stages", "refused"):
        assert str(getattr(divided.tally, name)) == str(getattr(whole.tally, name))
    assert divided.tally.returns == pytest.approx(whole.tally.returns)
    assert (
        divided.agent.update(divided.rollout).decisions
        == whole.agent.update(whole.rollout).decisions
    )


@pytest.mark.usefixtures("_in_parts")
def test_a_run_in_parts_tells_every_host_once_in_every_epoch(tmp_path):
    config = tiny(tmp_path / "run", hosts=HOSTS, rounds=2)
    agent = train(config)
    told = [(row["round"], row["host"], row["epoch"]) for row in events_of(config.out, "HostEpoch")]
    assert sorted(told) == [
        (number, host, epoch + 1)
        for number in (0, 1)
        for host in range(HOSTS)
        for epoch in range(config.task.epochs)
    ]
    assert agent.decisions == 2 * HOSTS * (config.task.epochs - 1)


def test_whether_to_stop_is_asked_after_every_so_many_epochs(tmp_path):
    asked = []
    played(tmp_path / "run", should_stop=lambda: asked.append(None) or False, every=2)
    steps = tiny(tmp_path / "x").task.epochs - 1
    assert len(asked) == steps // 2
    with pytest.raises(InterruptedTraining):
        played(tmp_path / "stopped", should_stop=lambda: True, every=steps)


@pytest.mark.usefixtures("_in_parts")
def test_who_stops_in_the_middle_leaves_nothing_under_way(tmp_path, monkeypatch):
    settled = []
    monkeypatch.setattr(EagerExecutor, "settle", lambda executor, runs: settled.append(len(runs)))
    with pytest.raises(InterruptedTraining):
        played(tmp_path / "run", should_stop=lambda: True)
    assert settled[-1] == HOSTS


def test_waiting_for_a_step_that_nobody_took_is_refused(tmp_path):
    env = build_environment(tiny(tmp_path / "run"))
    for wait in (env.step_wait, env.reset_wait):
        with pytest.raises(SettingError, match="start_epoch"):
            wait()


class Lone(Team):
    """One of two ranks, whose other one adds nothing."""

    def sum(self, values):
        return values.clone()

    def ask(self, claim):
        return lambda: claim

    def gather(self, value):
        return [value]


def test_ranks_ask_every_two_seconds_and_read_later_unless_epochs_are_long(tmp_path, monkeypatch):
    """From what the slowest took for the last round, so that all of them ask and read at the same
    epochs.
    """
    given, real, finish = [], trainer.play_round, RoundTally.finish

    def play(*arguments, **options):
        given.append((arguments[-1].every, arguments[-1].reads_later))
        return real(*arguments, **options)

    monkeypatch.setattr(trainer, "play_round", play)
    seconds = iter([2.8, 100.0, 28.0, 20.0, 0.001])

    def took(tally, *rest):
        return replace(finish(tally, *rest), seconds=next(seconds))

    monkeypatch.setattr(RoundTally, "finish", took)
    config = tiny(tmp_path / "run", rounds=6, task__epochs=15, hosts=4)
    with pytest.raises(StopIteration):  # before the sixth update is told
        train(config, team=Lone(0, 2))
    assert given == [(1, False), (10, True), (1, False), (1, False), (1, True), (14, True)]


@pytest.mark.parametrize(
    ("number", "later"), [(2, False), (2, True), (None, True)], ids=["at once", "next", "last"]
)
def test_an_answer_may_be_read_with_the_next_question_or_at_the_end_of_the_round(
    number, later, tmp_path, monkeypatch
):
    asked, played_epochs, real = [], [], GrowthVectorEnv.step_wait
    monkeypatch.setattr(
        GrowthVectorEnv, "step_wait", lambda env: (played_epochs.append(None), real(env))[1]
    )
    steps = tiny(tmp_path / "x").task.epochs - 1
    claims = dict.fromkeys([number or steps], True)
    with pytest.raises(InterruptedTraining):
        played(
            tmp_path / "run",
            should_stop=lambda: asked.append(None) or claims.get(len(asked), False),
            reads_later=later,
        )
    assert len(asked) == (number or steps)
    assert len(played_epochs) == len(asked) - 1 + later


class Counting(Team):
    """Notes how many questions are open whenever one is asked, itself among them."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = set(), []

    def ask(self, claim):
        question = object()
        self.open.add(question)
        self.seen.append(len(self.open))
        return lambda: (self.open.discard(question), claim)[1]


@pytest.mark.parametrize("reads_later", [False, True])
def test_never_more_than_one_question_is_open_and_none_at_the_end(reads_later, tmp_path):
    """Ranks that lose another one could not leave before it is answered."""
    team = Counting()
    played(tmp_path / "run", team=team, reads_later=reads_later)
    assert team.seen == [1] * (tiny(tmp_path / "x").task.epochs - 1)
    assert not team.open


def test_the_diagnostic_counts_epochs_as_the_record_of_the_decision_does(tmp_path):
    config = tiny(tmp_path / "run", ppo__minibatches=1, telemetry__level="debug")
    env = build_environment(config)
    agent, _ = build_agent(config, env)
    rollout = build_rollout(env, agent)
    with open_sink(config) as sink:
        play_round(env, agent, rollout, 0, sink, StopVote(agent.team))
    for step in range(rollout.steps):
        rollout.log_probs[step, 1, 0] += 0.1 * (step + 1)
    worst = agent.update(rollout).first_worst
    records = [row for row in events_of(config.out, "ACTION_TAKEN") if row["env_id"] == 1]
    assert (worst.host, worst.epoch) == (1, records[-1]["inner_epoch"])
