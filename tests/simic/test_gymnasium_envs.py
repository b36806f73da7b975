"""Growth as Gymnasium makes it, checked and played by other people's code."""

import os
import pickle
import subprocess
import sys
import warnings
from dataclasses import replace
from itertools import product

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env

import esper
from cases import is_legal
from esper.leyline.errors import DataError, EpisodeOverError, SettingError, UnknownNameError
from esper.leyline.factored_actions import OP_GERMINATE, OP_WAIT, FactoredAction
from esper.runtime.tasks.builtin import BUILT_IN
from esper.runtime.tasks.gymnasium_ids import BUILT_IN_NAMES
from esper.runtime.tasks.registry import TASKS
from esper.telemetry.events import ActionRefused
from simic.growths import BUSY, MLP, PLANT, POINTS, WAIT, grow, kinds, play, scripted
from test_every_action import small

GrowthEnv = esper.GrowthEnv
IMPOSSIBLE = (OP_GERMINATE, 0, 0, 0)
"""Planting no blueprint: every head of it is open, the whole never is."""


def python(code, **options):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **options)


def single(twins, task=POINTS, **options):
    return GrowthEnv(task, host_seeds=(3, 4, 5, 6), folder=twins, **options)


def episode(env, script, seed=None):
    """Observations, rewards and what else was told of an episode, step by step."""
    obs, info = env.reset(seed=seed)
    told = [(obs, 0.0, False, False, info)]
    while not told[-1][2]:
        told.append(env.step(script.get(len(told) - 1, WAIT)))
    return told


def assert_same(left, right):
    assert len(left) == len(right)
    for (obs, *outcome, info), (other_obs, *other_outcome, other_info) in zip(
        left, right, strict=True
    ):
        assert np.array_equal(obs, other_obs)
        assert outcome == other_outcome
        assert info["events"] == other_info["events"]


@pytest.fixture
def own_task():
    """A name that no task has; what is entered in a test is gone afterwards."""
    before = [(known, dict(known)) for known in (TASKS, gym.registry)]
    yield "my_points"
    for known, entries in before:
        known.clear()
        known.update(entries)


# -- ids -------------------------------------------------------------------------------------------


def test_importing_esper_is_enough_and_loads_no_torch():
    code = "import sys, esper, gymnasium; print(*gymnasium.registry, 'torch' in sys.modules)"
    *ids, has_torch = python(code).stdout.split()
    growths = [env_id for env_id in ids if env_id.startswith("esper/")]
    assert growths == [f"esper/{task.name}-v0" for task in BUILT_IN]
    assert has_torch == "False"


def test_importing_gymnasium_is_enough_where_the_id_names_the_module(twins):
    code = (
        "import gymnasium;"
        f"env = gymnasium.make('esper:esper/blobs-v0', host_seeds=[1], folder={str(twins)!r});"
        "obs, info = env.reset(seed=0);"
        "print(obs.dtype, *info['action_mask'])"
    )
    done = python(code)
    assert done.stdout == "float32 op slot blueprint blend\n", done.stderr


@pytest.mark.parametrize("name", BUILT_IN_NAMES)
def test_every_built_in_task_is_made_and_its_observations_are_in_their_box(
    name, twins, monkeypatch
):
    monkeypatch.setitem(TASKS, name, small(TASKS[name]))
    env = gym.make(f"esper/{name}-v0", host_seeds=[1], folder=twins)
    steps = episode(env, {0: PLANT}, seed=0)
    assert len(steps) == TASKS[name].epochs
    for obs, reward, _, truncated, info in steps:
        assert env.observation_space.contains(obs)
        assert obs.dtype == np.float32
        assert np.isclose(reward, sum(info["reward_parts"].values()))
        assert {head: mask.dtype for head, mask in info["action_mask"].items()} == dict.fromkeys(
            ("op", "slot", "blueprint", "blend"), np.dtype(bool)
        )
        assert not truncated
    many = gym.make_vec(f"esper/{name}-v0", num_envs=2, host_seeds=[1], folder=twins)
    assert many.reset(seed=0)[0].shape == (2, *env.observation_space.shape)


def test_data_are_read_from_the_folder_that_is_named(tmp_path, monkeypatch):
    short = replace(TASKS["shakespeare"], epochs=2, epoch_examples=64, held_out=8)
    monkeypatch.setitem(TASKS, "shakespeare", short)
    options = {"host_seeds": [1], "folder": tmp_path}
    with pytest.raises(DataError) as refused:
        gym.make("esper/shakespeare-v0", **options)
    assert "data_root" in str(refused.value)
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare/input.txt").write_bytes(b"To be, or not to be. " * 1000)
    env = gym.make("esper/shakespeare-v0", data_root=str(tmp_path), **options)
    assert [steps[2] for steps in episode(env, {})] == [False, True]


def test_a_task_of_your_own_is_made_and_a_replaced_one_too(own_task, twins):
    options = {"host_seeds": [3], "folder": twins}
    with pytest.raises(gym.error.NameNotFound):
        gym.make(f"esper/{own_task}-v0", **options)
    esper.register_task(replace(POINTS, name=own_task, epochs=3))
    assert len(episode(gym.make(f"esper/{own_task}-v0", **options), {})) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        esper.register_task(replace(POINTS, name=own_task, epochs=4), replace=True)
    assert len(episode(gym.make(f"esper/{own_task}-v0", **options), {})) == 4
    assert gym.make_vec(f"esper/{own_task}-v0", num_envs=2, **options).task.name == own_task


def test_a_task_whose_name_fits_no_id_is_entered_without_one(own_task):
    known = set(gym.registry)
    for name in ("my points", "my/points", "my:points"):
        esper.register_task(replace(POINTS, name=name))
    assert set(gym.registry) == known


def test_an_unknown_task_is_refused(twins):
    with pytest.raises(UnknownNameError) as refused:
        GrowthEnv("blob", folder=twins)
    assert "'blobs'" in str(refused.value)


# -- checks of others ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["blobs", "digits"])
def test_it_passes_the_checks_of_gymnasium_and_of_stable_baselines(name, twins):
    checker = pytest.importorskip("stable_baselines3.common.env_checker")
    env = gym.make(f"esper/{name}-v0", host_seeds=[1, 2], folder=twins)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)
        checker.check_env(env)


def test_there_is_no_render_mode_and_stable_baselines_does_without(twins):
    env_util = pytest.importorskip("stable_baselines3.common.env_util")
    options = {"host_seeds": [1], "folder": twins}
    env = gym.make("esper/blobs-v0", render_mode=None, **options)
    assert (env.render_mode, env.metadata) == (None, {"render_modes": []})
    with pytest.warns(UserWarning, match="render_mode"), pytest.raises(TypeError):
        gym.make("esper/blobs-v0", render_mode="human", **options)
    with pytest.warns(UserWarning, match="render_mode"):  # it asks for rgb_array first
        hosts = env_util.make_vec_env("esper/blobs-v0", 2, env_kwargs=options)
    assert hosts.reset().shape == (2, *env.observation_space.shape)


def test_the_spec_makes_the_same_environment_from_a_pickle_and_from_json(twins):
    env = gym.make("esper/blobs-v0", host_seeds=[1], folder=str(twins))
    again = gym.make(pickle.loads(pickle.dumps(env.spec)))
    once_more = gym.make(EnvSpec.from_json(env.spec.to_json()))
    obs, _ = env.reset(seed=0)
    assert np.array_equal(again.reset(seed=0)[0], obs)
    assert np.array_equal(once_more.reset(seed=0)[0], obs)


def test_twins_of_no_named_folder_are_shared_and_go_with_the_process(tmp_path):
    code = (
        "import os, gymnasium;"
        "gymnasium.make('esper:esper/blobs-v0', host_seeds=[1]);"
        "gymnasium.make_vec('esper:esper/blobs-v0', host_seeds=[1, 2]);"
        "kept = [name for _, _, names in os.walk(os.environ['TMPDIR']) for name in names];"
        "print(*(name[:11] for name in kept))"
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = python(code, cwd=tmp_path, env={**os.environ, "TMPDIR": str(temporary)})
    assert done.stdout == "twin-blobs- twin-blobs-\n", done.stderr
    assert list(tmp_path.rglob("*")) == [temporary]


def test_maskable_ppo_plays_two_hundred_steps(twins):
    contrib = pytest.importorskip("sb3_contrib")
    task = replace(POINTS, epoch_examples=32)
    env = gym.make("esper/blobs-v0", task=task, host_seeds=(3, 4), folder=twins)
    agent = contrib.MaskablePPO(
        "MlpPolicy",
        env,
        n_steps=50,
        batch_size=25,
        n_epochs=1,
        policy_kwargs={"net_arch": [8]},
        seed=0,
        device="cpu",
    )
    agent.learn(200)
    assert agent.num_timesteps == 200
    assert env.unwrapped.hosts.begun == 1 + 200 // (POINTS.epochs - 1)


# -- one host --------------------------------------------------------------------------------------


def test_one_host_is_the_vector_environments_host(twins):
    many = play(grow(POINTS, 1, twins), scripted(BUSY))
    steps = episode(single(twins), BUSY, seed=0)
    assert len(steps) == len(many)
    for (obs, reward, terminated, truncated, info), expected in zip(steps, many, strict=True):
        assert np.array_equal(obs, expected.obs[0])
        assert reward == expected.rewards[0]
        assert terminated == expected.terminated[0]
        assert not truncated
        for head, mask in expected.info["action_mask"].items():
            assert np.array_equal(info["action_mask"][head], mask[0])
        for name in ("reports", "ledger", "events", "reward_parts"):
            assert info[name] == expected.info[name][0]
    assert steps[0][-1]["reward_parts"] == {}


def test_a_seed_repeats_episodes_and_decides_whose_turn_it_is(twins):
    env = single(twins)
    first = episode(env, BUSY, seed=5)
    second = episode(env, BUSY)
    assert not np.array_equal(first[0][0], second[0][0])
    assert_same(episode(env, BUSY, seed=5), first)
    assert_same(episode(env, BUSY), second)
    orders = set()
    for seed in range(8):
        env.reset(seed=seed)
        orders.add(env.hosts.population.runs[0].seed)
    assert len(orders) > 1


def test_outside_of_an_episode_there_is_no_step(twins):
    env = single(twins, replace(POINTS, epochs=2))
    for ask in (env.action_masks, lambda: env.step(WAIT)):
        with pytest.raises(EpisodeOverError):
            ask()
    assert episode(env, {})[-1][2]
    epoch = env.hosts.population.runs[0].epoch
    for ask in (env.action_masks, lambda: env.step(WAIT)):
        with pytest.raises(EpisodeOverError):
            ask()
    assert env.hosts.population.runs[0].epoch == epoch
    env.reset()
    assert env.step(WAIT)[2]


@pytest.mark.parametrize(
    "action",
    [(0, 0, 0), (0, 0, 0, 3), (0, 2, 0, 0), (-1, 0, 0, 0), (0.0, 0.0, 0.0, 0.0), "WAIT", 0],
    ids=str,
)
def test_what_is_no_action_is_refused_and_trains_nothing(action, twins):
    env = single(twins)
    env.reset(seed=0)
    with pytest.raises(SettingError):
        env.step(action)
    assert env.hosts.population.runs[0].epoch == 1


def test_what_is_impossible_as_a_whole_counts_as_waiting_and_is_an_event(twins):
    env = single(twins)
    waited = episode(env, {}, seed=0)[1]
    refused = episode(env, {0: IMPOSSIBLE}, seed=0)[1]
    assert refused[1] == waited[1]
    assert np.array_equal(refused[0], waited[0])
    assert len(kinds(refused[-1]["events"], ActionRefused)) == 1
    assert kinds(waited[-1]["events"], ActionRefused) == []


def legal_actions(env):
    """Every action that may be done now, but for waiting; heads that its op does not use are 0."""
    view = env.hosts.population.views()[0]
    legal = set()
    for choice in product(*(range(size) for size in env.action_space.nvec.tolist())):
        op, slot, blueprint, blend = choice
        action = FactoredAction.from_indices(slot, blueprint, blend, op, space=env.hosts.space)
        if op != OP_WAIT and is_legal(action, view):
            legal.add(choice if op == OP_GERMINATE else (op, slot, 0, 0))
    return legal


@pytest.mark.parametrize("max_seeds", [None, 1])
def test_the_flat_mask_opens_a_choice_if_and_only_if_a_legal_action_that_uses_it_makes_it(
    max_seeds, twins
):
    """Heads of other people's agents do not depend on each other, so no more can be said than head
    by head.
    """
    env = single(twins, replace(POINTS, max_seeds=max_seeds))
    env.reset(seed=0)
    nothing_legal = 0
    ends = np.cumsum(env.action_space.nvec)[:-1]
    for step in range(POINTS.epochs - 1):
        ops, slots, blueprints, blends = (
            set(np.flatnonzero(head).tolist()) for head in np.split(env.action_masks(), ends)
        )
        legal = legal_actions(env)
        planted = {action for action in legal if action[0] == OP_GERMINATE}
        assert ops == {OP_WAIT} | {op for op, *_ in legal}
        assert slots == ({slot for _, slot, *_ in legal} or {0})
        assert blueprints == ({blueprint for _, _, blueprint, _ in planted} or {0})
        nothing_legal += not legal
        assert blends
        assert blends <= ({blend for *_, blend in planted} or {0})
        env.step(BUSY.get(step, WAIT))
    assert bool(nothing_legal) is (max_seeds == 1)  # the fossil is the one seed there may be


def test_closing_twice_is_closing(twins):
    env = single(twins)
    env.reset()
    env.close()
    env.close()
    assert env.hosts.closed


# -- several hosts ---------------------------------------------------------------------------------


def test_make_vec_makes_hosts_side_by_side_which_our_learner_plays(twins):
    options = {"task": POINTS, "host_seeds": (3, 4, 5, 6), "folder": twins}
    env = gym.make_vec("esper/blobs-v0", num_envs=2, **options)
    assert type(env) is esper.GrowthVectorEnv
    expected = play(grow(POINTS, 2, twins), scripted(BUSY))
    for step, known in zip(play(env, scripted(BUSY)), expected, strict=True):
        assert np.array_equal(step.obs, known.obs)
        assert np.array_equal(step.rewards, known.rewards)
    config = esper.PPOConfig(horizon=8, epochs=1, minibatches=1, hidden_dim=8, head_dim=8)
    assert esper.learn(env, 16, config).layout is not None


def test_hosts_in_turn_are_the_hosts_side_by_side(twins):
    options = {"task": POINTS, "host_seeds": (3,), "folder": twins}
    together = gym.make_vec("esper/blobs-v0", num_envs=2, **options)
    in_turn = gym.make_vec("esper/blobs-v0", num_envs=2, vectorization_mode="sync", **options)
    together.reset(seed=0)
    in_turn.reset(seed=0)
    for action in (PLANT, WAIT, (0, 1, MLP, 0)):
        obs, rewards, *_ = together.step([action, WAIT])
        other_obs, other_rewards, *_, info = in_turn.step([action, WAIT])
        assert np.array_equal(obs, other_obs)
        assert np.array_equal(rewards, other_rewards)
        assert set(info) >= {"action_mask", "reward_parts", "events"}
