"""A rule teaches first: what it would do is learnt, also where the policy's own decisions lead."""

import numpy as np
import pytest
import torch
from rich.console import Console

from esper.cli import ppo as command_line
from esper.episodes import Episodes
from esper.leyline.errors import SettingError, UnknownNameError
from esper.leyline.factored_actions import OP_FOSSILIZE, OP_GERMINATE, OP_WAIT
from esper.simic import trainer
from esper.simic.config import ImitationConfig
from esper.simic.imitation import Lesson, Teacher
from esper.simic.ppo.losses import HeadSteps, imitation_loss
from esper.simic.team import Team
from esper.simic.trainer import InterruptedTraining, build_environment
from esper.storage import runfolder
from esper.tamiyo.masks import compute_batch_masks
from esper.trials.arms import make_decider, play_epoch
from simic.tiny_runs import assert_same_end, events_of, manifest_of, tiny, train

TAUGHT = {
    "task__epochs": 10,
    "task__lengths__training": 1,
    "task__lengths__ramp": 1,
    "hosts": 4,
    "host_pool": 4,
    "imitation__policy": "heuristic:held_out_part=0",
}
"""Episodes in which the rule plants three times per host and keeps twice."""

QUICK = {"ppo__epochs": 6, "ppo__hidden_dim": 16, "ppo__head_dim": 16, "ppo__lr": 0.01}


def lesson(policy="heuristic", share=0.0):
    return Lesson(policy=policy, share=share, counts=np.zeros(4, np.int64))


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    config = tiny(
        tmp_path_factory.mktemp("learnt") / "run",
        rounds=4,
        imitation__rounds=4,
        **TAUGHT,
        **QUICK,
    )
    agent = train(config)
    return config, agent, events_of(config.out, "RoundFinished")


# -- what is learnt --------------------------------------------------------------------------------


def test_after_a_few_rounds_the_policy_does_what_the_rule_does(learnt):
    _, _, rounds = learnt
    assert rounds[0]["agreement_on_acts"] < 0.6
    assert rounds[-1]["agreement"] > 0.95
    assert rounds[-1]["agreement_on_acts"] > 0.95
    assert rounds[-1]["update"]["policy_loss"] < rounds[0]["update"]["policy_loss"] / 4
    # the last round is the policy's alone
    assert rounds[-1]["ops"]["GERMINATE"] == rounds[0]["ops"]["GERMINATE"] >= 4
    assert rounds[-1]["ops"]["FOSSILIZE"] == rounds[0]["ops"]["FOSSILIZE"] >= 4


def test_the_value_learns_what_was_earned(learnt):
    _, _, rounds = learnt
    assert rounds[-1]["update"]["explained_variance"] > rounds[0]["update"]["explained_variance"]


def test_a_round_that_imitates_is_neither_sick_nor_the_best(learnt):
    config, _, _ = learnt
    assert events_of(config.out, "AnomalyFound") == []
    assert manifest_of(config.out)["best"] is None


def test_the_best_checkpoint_is_of_a_round_that_the_policy_played(tmp_path):
    config = tiny(tmp_path / "run", rounds=3, imitation__rounds=1, keep_checkpoints=1)
    train(config)
    returns = {row["round"]: row["mean_return"] for row in events_of(config.out, "RoundFinished")}
    best = max((1, 2), key=returns.__getitem__)
    assert manifest_of(config.out)["best"]["rounds"] == best + 1
    agreements = [row["agreement"] for row in events_of(config.out, "RoundFinished")]
    assert agreements[0] is not None
    assert agreements[1:] == [None, None]


def test_the_loss_is_minus_the_log_probability_of_whole_decisions():
    new = torch.tensor([[[-1.0, -2.0, -4.0]], [[-8.0, -16.0, -32.0]]], requires_grad=True)
    relevant = torch.tensor([[[True, True, False]], [[True, False, False]]])
    steps = HeadSteps(
        is_relevant=relevant,
        is_open=relevant,
        relevant=torch.tensor([2, 1]),
        valid=torch.tensor(2),
        open=torch.tensor([2, 1]),
    )
    loss = imitation_loss(new, torch.zeros_like(new), steps)
    assert loss.per_head.tolist() == [1.5, 4.0]
    assert loss.total.item() == 5.5
    assert loss.kl.item() == 0.0
    loss.total.backward()
    assert new.grad.tolist() == [[[-0.5, -0.5, 0.0]], [[-0.5, 0.0, 0.0]]]


# -- who decides -----------------------------------------------------------------------------------


def test_the_rule_decides_alone_at_first_and_the_policy_at_last():
    config = ImitationConfig(rounds=9)
    shares = [Lesson.of(config, number).share for number in range(9)]
    assert shares[:3] == [0, 0, 0]
    assert shares[3:] == pytest.approx([n / 6 for n in range(1, 7)])
    assert Lesson.of(config, 9) is None
    assert Lesson.of(ImitationConfig(rounds=1), 0).share == 0
    assert Lesson.of(ImitationConfig(), 0) is None


def play_with(config, teacher_of, wait=True):
    """One round of a fresh environment; what was done at each step, and the environment."""
    env = build_environment(config)
    env.reset(seed=env.seed, options={"episodes": 0})
    teacher = teacher_of(env)
    done = []
    for step in range(env.task.epochs - 1):
        likeliest = np.zeros((env.num_envs, 4), np.int64)
        correction = teacher.correct(step, likeliest, np.ones(env.num_envs, bool))
        done.append(correction)
        env.step(correction.done)
    return env, done


def plantings_of(happened):
    return [
        (event.slot, event.blueprint)
        for event in happened
        if type(event).__name__ == "ActionTaken" and event.op == "GERMINATE"
    ]


def test_the_teacher_keeps_what_may_be_kept_and_else_does_what_the_rule_does(tmp_path):
    config = tiny(tmp_path / "run", **TAUGHT)
    env = build_environment(config)
    _, info = env.reset(seed=env.seed, options={"episodes": 0})
    teacher = Teacher(lesson(config.imitation.policy), env, env.task.epochs - 1, 0)
    here = [[] for _ in range(env.num_envs)]
    for step in range(env.task.epochs - 1):
        correction = teacher.correct(
            step, np.zeros((env.num_envs, 4), np.int64), np.ones(env.num_envs, bool)
        )
        assert (correction.done == correction.wanted).all()
        for host, (op, slot, blueprint, blend) in enumerate(correction.wanted.tolist()):
            masks = {name: mask[host] for name, mask in info["action_mask"].items()}
            assert masks["op"][op]
            if op == OP_FOSSILIZE:
                assert masks["slot"][op, slot]
            elif op == OP_GERMINATE:
                assert masks["slot"][op, slot]
                assert masks["blueprint"][slot, blueprint]
                assert masks["blend"][blend]
                assert not masks["slot"][OP_FOSSILIZE][masks["op"][OP_FOSSILIZE]].any()
        *_, info = env.step(correction.wanted)
        for host, happened in enumerate(info["events"]):
            here[host] += happened
    # in an episode of its own the rule plants the same, first
    seeds = [run.seed for run in env.population.runs]
    alone = Episodes(type(env.population)(env.task, seeds))
    deciders = [make_decider(alone, host, config.imitation.policy) for host in range(len(seeds))]
    there = [[] for _ in seeds]
    for _ in range(env.task.epochs):
        for host, happened in enumerate(play_epoch(alone, deciders)):
            there[host] += happened
    for host in range(len(seeds)):
        assert plantings_of(here[host])[:2] == plantings_of(there[host])[:2] != []


def test_the_policy_decides_its_share_of_the_decisions(tmp_path):
    config = tiny(tmp_path / "run", **{**TAUGHT, "task__epochs": 12})
    for share, least, most in ((0.0, 0, 0), (1.0, 1, 1), (0.5, 0.3, 0.7)):
        own = 0
        likeliest = np.full((4, 4), 9)  # what nobody else would do
        env = build_environment(config)
        env.reset(seed=1, options={"episodes": 0})
        teacher = Teacher(lesson("never", share), env, 11, 0)
        for step in range(11):
            correction = teacher.correct(step, likeliest, np.ones(4, bool))
            assert (correction.wanted == OP_WAIT).all()
            own += (correction.done == 9).all(1).sum()
        assert least <= own / 44 <= most
    # draws belong to episodes, whichever rank plays them
    half = Teacher(lesson("never"), env, 11, 2).draws
    assert (half[:, :2] == teacher.draws[:, 2:]).all()


def test_a_host_that_is_given_up_is_asked_nothing_and_counts_for_nothing(tmp_path):
    env = build_environment(tiny(tmp_path / "run"))
    env.reset(seed=0)
    asked = lesson("never")
    teacher = Teacher(asked, env, 3, 0)
    teacher.correct(0, np.ones((2, 4), np.int64), np.array([True, False]))
    assert asked.counts.tolist() == [1, 0, 0, 0]
    assert teacher.memory[1] is None
    assert asked.agreement(Team()) == (0.0, None)


def test_what_a_rule_culls_it_does_not_keep(tmp_path, monkeypatch):
    config = tiny(tmp_path / "run", **TAUGHT)
    env, _ = play_with(config, lambda env: Teacher(lesson("never"), env, 20, 0))
    env.reset(seed=env.seed, options={"episodes": 0})
    teacher = Teacher(lesson(config.imitation.policy), env, 20, 0)
    for step in range(8):
        wanted = teacher.correct(step, np.zeros((4, 4), np.int64), np.ones(4, bool)).wanted
        if wanted[0, 0] == OP_FOSSILIZE:
            break
        env.step(wanted)
    slot = int(wanted[0, 1])
    culls = np.array([[2, slot, 0, 0]])
    monkeypatch.setattr(type(teacher.rules[0]), "decide", lambda self, *rest: (culls, rest[3]))
    assert compute_batch_masks(env.episodes.views[:1])["slot"][0, 2, slot]
    assert teacher.correct(step, wanted, np.ones(4, bool)).wanted[0].tolist() == [2, slot, 0, 0]


@pytest.mark.parametrize("impossible", [(2, 1, 0, 0), (3, 0, 0, 0), (1, 0, 0, 0)])
def test_what_a_rule_cannot_do_is_taught_as_waiting(impossible, tmp_path, monkeypatch):
    env = build_environment(tiny(tmp_path / "run"))
    env.reset(seed=0)
    teacher = Teacher(lesson("never"), env, 3, 0)
    answers = np.array([impossible])
    monkeypatch.setattr(type(teacher.rules[0]), "decide", lambda self, *rest: (answers, rest[3]))
    correction = teacher.correct(0, np.zeros((2, 4), np.int64), np.ones(2, bool))
    assert correction.wanted.tolist() == correction.done.tolist() == [[0, 0, 0, 0]] * 2
    assert teacher.lesson.counts.tolist() == [2, 2, 0, 0]


# -- the run ---------------------------------------------------------------------------------------


def test_a_run_stopped_in_every_round_ends_the_same(tmp_path):
    changes = {"rounds": 5, "imitation__rounds": 3}
    train(tiny(tmp_path / "whole", **changes))
    config = tiny(tmp_path / "cut", **changes)
    asks, stops, resume = [], 0, False

    def should_stop():
        asks.append(None)
        return len(asks) % 5 == 0  # a round has three epochs

    while True:
        try:
            train(config, resume=resume, should_stop=should_stop)
            break
        except InterruptedTraining:
            stops, resume = stops + 1, True
    assert stops > 3
    assert_same_end(config.out, tmp_path / "whole")


def test_hosts_in_two_parts_are_taught_alike(tmp_path, monkeypatch):
    changes = {"rounds": 2, "imitation__rounds": 2, "hosts": 4, "imitation__policy": "schedule"}
    whole = train(tiny(tmp_path / "whole", **changes))
    monkeypatch.setattr(
        trainer.GrowthVectorEnv,
        "parts",
        lambda self: [self._part(range(2)), self._part(range(2, 4))],
    )
    parts = train(tiny(tmp_path / "parts", **changes))
    for name, value in whole.network.state_dict().items():
        torch.testing.assert_close(parts.network.state_dict()[name], value, msg=name)
    ends = [events_of(tmp_path / name, "RoundFinished") for name in ("whole", "parts")]
    assert [row["agreement"] for row in ends[0]] == [row["agreement"] for row in ends[1]]
    assert [row["ops"] for row in ends[0]] == [row["ops"] for row in ends[1]]


def test_the_command_says_whom_it_imitates_and_how_often_it_agrees(tmp_path, capsys):
    config = tiny(tmp_path / "run", rounds=2, imitation__rounds=1, imitation__policy="never")
    assert command_line.run_ppo(config, False, Console(width=300))
    said = capsys.readouterr().out.splitlines()
    first, *rounds = [line for line in said if "round" in line]
    assert "the first 1 imitate never" in first
    assert "as the rule in " in rounds[0]
    assert "as the rule in " not in rounds[1]


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"imitation__policy": "heurisitc"}, UnknownNameError, "heuristic"),
        ({"imitation__policy": "heuristic:part=1"}, UnknownNameError, "part"),
        ({"imitation__rounds": 3}, SettingError, "imitation.rounds is 3, of 2 rounds in all"),
    ],
)
def test_what_cannot_be_imitated_is_refused(tmp_path, changes, error, words):
    with pytest.raises(error, match=words):
        tiny(tmp_path / "run", **changes).check()


def test_a_plan_of_several_ops_is_refused(tmp_path):
    plan = "schedule:epochs=1+1:places=r0c0.mlp+r0c1.mlp"
    with pytest.raises(SettingError, match="several ops in one decision"):
        train(tiny(tmp_path / "run", imitation__rounds=1, imitation__policy=plan))
    assert not (tmp_path / "run" / runfolder.TWINS).exists()
