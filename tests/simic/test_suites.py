"""Suites: families with weights, reserved variations, and a policy taught on all of them."""

import json
from dataclasses import replace

import pytest
import torch

from cli.test_cli import call
from esper.leyline.errors import EsperError, SettingError
from esper.runtime.population import Population
from esper.runtime.tasks.families import Span, Variety, variation_of
from esper.runtime.tasks.registry import TASKS, get_task, register_task
from esper.simic.checkpoints import other_episodes
from esper.simic.config import TrainingConfig
from esper.simic.host_seeds import draw_host_seeds, host_seed_draws
from esper.simic.suite_env import union_space
from esper.simic.suites import SuiteConfig, share_out
from esper.simic.trainer import build_environment, build_rollout, train_ppo_vectorized
from esper.simic.training import train_ppo
from esper.storage import runfolder
from esper.trials.config import CompareConfig
from null_sink import NullSink
from runtime.test_differing_hosts import DEEP
from simic.team_workers import (
    CLOSE,
    assert_ended_well,
    counted,
    farthest,
    farthest_tensor,
    hosts_of,
    in_team,
    run_ranks,
    tensors_of,
    train_ranks,
)
from simic.tiny_runs import TINY, checkpoints_in, events_of

FAMILY = get_task("digits_varied")
POINTS = replace(
    get_task("blobs"),
    name="noisy_points",
    epochs=5,
    epoch_examples=64,
    varies=Variety(50, noise=Span(0, 0.3)),
)
SUITE = {
    "families": [
        {"task": {"name": "deep_digits", "epochs": 3}, "weight": 2.0},
        {"task": {"name": "noisy_points"}},
    ],
    "reserved": [0, 9],
}


@pytest.fixture(scope="module", autouse=True)
def families():
    """Two families of other slots, blueprints and lengths."""
    tasks = [register_task(replace(DEEP, name="deep_digits")), register_task(POINTS)]
    yield tasks
    for task in tasks:
        del TASKS[task.name]


def suite(**changes):
    return SuiteConfig.of({**SUITE, **changes})


def settings(out, **changes):
    start = {name: value for name, value in TINY.items() if name != "task"}
    values = {**start, "hosts": 4, "host_pool": 6, "suite": SUITE, "out": str(out), **changes}
    return TrainingConfig.of(values)


def weights(agent):
    return {name: value.clone() for name, value in agent.network.state_dict().items()}


# -- the file --------------------------------------------------------------------------------------


def test_a_suite_is_read_from_a_file(tmp_path):
    path = tmp_path / "suite.json"
    path.write_text(json.dumps(SUITE))
    assert SuiteConfig.read(path) == suite()
    assert suite().families[1].weight == 1.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"families": []}, "families"),
        ({"families": [{"task": {"name": "digits"}}]}, "digits are alike"),
        ({"families": [{"task": {"name": "no_such"}}]}, "no_such"),
        ({"families": [{"task": {"name": "deep_digits"}, "weight": 0}]}, "weight"),
        ({"families": [{"task": {"name": "deep_digits"}, "wieght": 1}]}, "families.0.wieght"),
        ({"families": [{"task": {"name": "deep_digits"}}] * 2}, "twice"),
        ({"reserved": [9, 0]}, r"\[9, 0\]"),
        ({"reserved": [0, 50]}, "0 to 49"),
        ({"reserved": [0, 49]}, "all variations of noisy_points"),
        ({"reserved": [0]}, "reserved"),
        ({"reserve": [0, 9]}, "'reserve'"),
        (
            {"families": [SUITE["families"][0], {"task": {"name": "noisy_points", "compute": 1}}]},
            "clock",
        ),
    ],
)
def test_an_absurd_suite_is_refused_in_one_line(changes, said, tmp_path):
    path = tmp_path / "suite.json"
    path.write_text(json.dumps({**SUITE, **changes}))
    with pytest.raises(EsperError, match=said) as refusal:
        SuiteConfig.read(path)
    assert "\n" not in str(refusal.value)


def test_hosts_are_shared_by_weight():
    assert suite().shares(4, "hosts") == [3, 1]
    assert share_out([1.0, 1.0, 1.0], 8, "hosts") == [3, 3, 2]
    assert share_out([100.0, 1.0], 2, "hosts") == [1, 1]
    with pytest.raises(SettingError, match="hosts is 1, fewer than the suite's 2"):
        suite().shares(1, "hosts")


# -- which hosts -----------------------------------------------------------------------------------


def test_training_never_draws_what_is_reserved():
    whole = suite(families=[{"task": {"name": "digits_varied"}}], reserved=[1000, 3000])
    seeds = whole.training_seeds(FAMILY, host_seed_draws(3), 300)
    numbers = [variation_of(FAMILY, seed).number for seed in seeds]
    assert len(set(seeds)) == 300
    assert not any(1000 <= number <= 3000 for number in numbers)
    everything = draw_host_seeds(3, 2000)
    allowed = [seed for seed in everything if not 1000 <= variation_of(FAMILY, seed).number <= 3000]
    assert list(seeds) == allowed[:300]


def test_judging_draws_nothing_else():
    whole = suite(families=[{"task": {"name": "digits_varied"}}], reserved=[1000, 1100])
    seeds = whole.judging_seeds(FAMILY, 0, 40)
    assert len(set(seeds)) == 40
    assert all(1000 <= variation_of(FAMILY, seed).number <= 1100 for seed in seeds)
    later = whole.judging_seeds(FAMILY, seeds[0] + 1, 39)
    assert later == seeds[1:]
    with pytest.raises(SettingError, match="reserves nothing"):
        suite(reserved=None).judging_seeds(FAMILY, 0, 1)


def test_a_reserve_that_is_never_played_is_one_line(monkeypatch):
    monkeypatch.setattr("esper.simic.suites._MOST_TRIES", 50)
    rare = suite(families=[{"task": {"name": "digits_varied"}}], reserved=[7, 7])
    with pytest.raises(SettingError, match="0 of 3 host seeds"):
        rare.judging_seeds(FAMILY, 123, 3)


def test_a_comparison_plays_what_is_reserved(tmp_path):
    path = tmp_path / "suite.json"
    path.write_text(json.dumps(SUITE))
    changes = [("suite", SUITE), ("task.name", "deep_digits"), ("seeds", 5)]
    config = CompareConfig().with_changes(changes, "the test")
    assert config.task.epochs == 3
    assert all(0 <= variation_of(DEEP, seed).number <= 9 for seed in config.host_seeds)
    with pytest.raises(SettingError, match="deep_digits, noisy_points; name one"):
        CompareConfig().with_changes([("suite", SUITE)], "the test")
    only = {**SUITE, "families": SUITE["families"][1:]}
    assert CompareConfig().with_changes([("suite", only)], "the test").task.name == "noisy_points"
    assert CompareConfig.of({"suite": only}).task == SuiteConfig.of(only).families[0].task
    with pytest.raises(SettingError, match="deep_digits, noisy_points; name one"):
        CompareConfig.of({"suite": SUITE})
    with pytest.raises(SettingError, match="Leave the search out"):
        CompareConfig().with_changes([*changes, ("policies", ["search:episodes=9"])], "the test")


def test_a_comparison_of_a_suite_is_played_and_continued(tmp_path, capsys):
    path = tmp_path / "suite.json"
    path.write_text(json.dumps(SUITE))
    out = tmp_path / "compared"
    words = ["--suite", str(path), "--task", "noisy_points", "--epochs", "2", "--seeds", "3"]
    words += ["--policies", "never", "random", "--out", str(out)]
    code, _, err = call(capsys, "compare", *words)
    assert code == 0, err
    rows = json.loads((out / runfolder.RESULTS).read_text())["rows"]
    assert {row["variation"] for row in rows} <= set(range(10))
    again = (out / runfolder.RESULTS).read_bytes()
    assert call(capsys, "compare", "--out", str(out), "--resume")[0] == 0
    assert (out / runfolder.RESULTS).read_bytes() == again


# -- configurations --------------------------------------------------------------------------------


def test_a_suite_brings_its_tasks(tmp_path):
    config = settings(tmp_path)
    assert config.task.name == "deep_digits"
    assert config.task.epochs == 3
    assert [share[1:] for share in config.shares_of_hosts] == [(3, 4), (1, 2)]
    assert TrainingConfig.of(config.settled().model_dump(mode="json")) == config.settled()
    start = TrainingConfig.start()
    assert start.with_changes([("suite", SUITE)], "the test").task.name == "deep_digits"
    with pytest.raises(SettingError, match="leave task"):
        settings(tmp_path, task={"name": "digits"})
    with pytest.raises(SettingError, match="leave task"):
        start.with_changes([("suite", SUITE), ("task.epochs", 9)], "the test")
    with pytest.raises(SettingError, match="host_pool is 1"):
        settings(tmp_path, host_pool=1)


def test_the_decisions_of_all_families_are_counted(tmp_path):
    per_round = 3 * (3 - 1) + 1 * (5 - 1)
    assert settings(tmp_path, rounds=2).settled().ppo.anneal_decisions == 2 * per_round
    alone = {"task": {"name": "noisy_points"}, "rounds": 3, "hosts": 2, "out": str(tmp_path)}
    assert TrainingConfig.of(alone).settled().ppo.anneal_decisions == 3 * 2 * (5 - 1)


# -- training --------------------------------------------------------------------------------------


def test_families_show_masks_of_one_width(tmp_path, families):
    env = build_environment(settings(tmp_path))
    assert env.space.slots.slot_ids == ("r0c0", "r0c1", "r0c2")
    names = {name for family in env.families for name in family.population.space.blueprint_ids}
    assert set(env.space.blueprint_ids) == names
    assert env.num_envs == 4
    assert [part.num_envs for part in env.parts()] == [3, 1]
    assert env.locate(3)[0] is env.families[1]
    assert env.locate(3)[1] == 0
    for part in env.parts():
        obs, info = part.reset(seed=0)
        assert obs.shape == (part.num_envs, env.width)
        _, slots, blueprints, _ = part.population.space.sizes
        mask = info["action_mask"]["blueprint"]
        assert mask.shape[1:] == (env.layout.num_slots, env.layout.num_blueprints)
        assert mask[:, :slots, :blueprints].any()
        assert not mask[:, :, blueprints:].any()
    for run in (run for part in env.parts() for run in part.population.runs):
        assert run.variation.number > 9
    alone = union_space([env.families[0].population.space])
    assert alone is env.families[0].population.space


def test_a_policy_is_taught_on_a_suite(tmp_path):
    rounds = []
    agent = train_ppo(settings(tmp_path / "run"), watch=rounds.append)
    # three hosts of two decisions and one of four, in each of two rounds
    assert [event.decisions for event in rounds] == [10, 20]
    for event in rounds:
        assert all(gap <= 1e-6 for gap in event.update["first_ratio_gap"].values())
    again = train_ppo(settings(tmp_path / "again"))
    first, second = weights(agent), weights(again)
    assert all(torch.equal(first[name], second[name]) for name in first)
    began = events_of(tmp_path / "run", "HostBegan")
    assert [event["host"] for event in began] == [0, 1, 2, 3] * 2
    assert all(event["variation"] > 9 for event in began)
    closed = events_of(tmp_path / "run", "LedgerClosed")
    assert [event["host"] for event in closed] == [0, 1, 2, 3] * 2
    (twins,) = [
        event for event in events_of(tmp_path / "run", "CostsBooked") if event["what"] == "twins"
    ]
    assert twins["flops"]["training"] > 0
    assert len(list((tmp_path / "run" / runfolder.TWINS).iterdir())) == 6


def test_a_rule_teaches_a_suite_and_each_family_is_measured_by_itself(tmp_path):
    rounds = []
    config = settings(tmp_path / "run", rounds=3, imitation={"rounds": 2})
    agent = train_ppo(config, watch=rounds.append)
    assert agent.returns.names == ("deep_digits", "noisy_points")
    counts = {name: count for name, (_, _, count) in agent.returns.state().items()}
    assert counts == {"deep_digits": 3 * 3 * 2, "noisy_points": 3 * 1 * 4}
    assert [event.agreement is not None for event in rounds] == [True, True, False]
    env = build_environment(config)
    assert build_rollout(env, agent, 4).families == [0, 0, 0, 1]
    half = train_ppo(settings(tmp_path / "half", rounds=2, imitation={"rounds": 2}))
    assert half.returns.state() != agent.returns.state()
    whole = train_ppo(settings(tmp_path / "half", rounds=3, imitation={"rounds": 2}), resume=True)
    assert whole.returns.state() == agent.returns.state()


def test_families_of_other_blends_are_refused():
    spaces = [get_task("blobs"), replace(get_task("blobs"), blends=("linear",))]
    spaces = [Population(task, [1]).space for task in spaces]
    with pytest.raises(SettingError, match=r"the same: task\.blends"):
        union_space(spaces)


def test_teaching_on_a_suite_is_continued(tmp_path):
    whole = train_ppo(settings(tmp_path / "whole"))
    train_ppo(settings(tmp_path / "half", rounds=1))
    halves = train_ppo(settings(tmp_path / "half"), resume=True)
    first, second = weights(whole), weights(halves)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_a_policy_was_taught_on_is_known(tmp_path, families):
    config = settings(tmp_path / "run", rounds=1)
    train_ppo(config)
    path = config.out / runfolder.CHECKPOINTS / checkpoints_in(config.out)[-1]
    points = get_task("noisy_points")
    assert other_episodes(path, points) is None
    assert "epochs 5 there and 9 here" in other_episodes(path, replace(points, epochs=9))
    assert "name deep_digits there and digits here" in other_episodes(path, get_task("digits"))


def test_the_command_takes_a_suite(tmp_path, capsys):
    path = tmp_path / "suite.json"
    path.write_text(json.dumps(SUITE))
    out = tmp_path / "run"
    words = ["--suite", str(path), "--hosts", "2", "--rounds", "1", "--out", str(out)]
    words += ["--set", "host_pool=2", "--set", "ppo.hidden_dim=8", "--set", "ppo.head_dim=8"]
    code, text, err = call(capsys, "ppo", *words)
    assert code == 0, err
    assert "suite of 1 x deep_digits, 1 x noisy_points: 1 rounds" in text + err
    assert json.loads((out / runfolder.CONFIG).read_text())["suite"]["reserved"] == [0, 9]
    code, text, err = call(capsys, "ppo", "--out", str(out), "--resume", "--rounds", "2")
    assert code == 0, err
    code, out, _ = call(capsys, "runs", str(tmp_path))
    assert "noisy_points" in out
    path.write_text("{")
    code, out, err = call(capsys, "ppo", "--suite", str(path), "--out", str(tmp_path / "other"))
    assert (code, out, err.count("\n")) == (2, "", 1)


# -- several ranks ---------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.usefixtures("warm_forks")
def test_several_ranks_find_what_one_finds_on_hosts_that_differ(tmp_path):
    changes = {"hosts": 4, "ppo__target_kl": 10.0, "task__name": "deep_digits", "task__epochs": 3}
    ended = [train_ranks(tmp_path / str(size), size, **changes) for size in (1, 2)]
    for ranks in ended:
        assert_ended_well(ranks)
    (tensors, _), (tensors2, _) = tensors_of(tmp_path / "1"), tensors_of(tmp_path / "2")
    assert farthest_tensor(tensors, tensors2) < (CLOSE,)
    assert counted(tmp_path / "1") == counted(tmp_path / "2")
    assert farthest(hosts_of(tmp_path / "1"), hosts_of(tmp_path / "2")) < (CLOSE,)


@pytest.mark.ranks
@pytest.mark.usefixtures("warm_forks")
@pytest.mark.parametrize("size", [2, 4])
def test_several_ranks_share_the_families_of_a_suite(size, tmp_path):
    changes = {"ppo": {**TINY["ppo"], "target_kl": 10.0}}

    def live(out):
        def play(team):
            torch.set_default_dtype(torch.float64)
            config = settings(out, **changes)
            agent = train_ppo_vectorized(config, sink=NullSink(), team=team)
            return agent.network.state_dict()

        return play

    found = []
    for ranks in (1, size):
        out = tmp_path / f"run-{ranks}"
        out.mkdir()
        ended = run_ranks(tmp_path / f"ranks-{ranks}", ranks, in_team(live(out)))
        assert_ended_well(ended)
        found.append(ended[-1].value)
    assert farthest_tensor(*found) < (CLOSE,)
