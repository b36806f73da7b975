"""Actions, observations, seeds and counts of a wrong kind or shape: one line each, or they work."""

import gymnasium as gym
import numpy as np
import pytest
import torch

import esper
from esper.leyline.errors import EnvironmentMismatchError, EpisodeOverError, MaskError, SettingError
from simic.growths import POINTS, WAIT, grow

TINY = esper.PPOConfig(horizon=8, epochs=1, minibatches=1, hidden_dim=8, head_dim=8)


def carts(count=2):
    return gym.make_vec("CartPole-v1", count, vectorization_mode="sync")


@pytest.fixture(scope="module")
def agent():
    return esper.learn(carts(), 16, TINY)


@pytest.fixture(scope="module")
def hosts(twins):
    return grow(POINTS, 2, twins)


# -- actions ---------------------------------------------------------------------------------------

WRONG = {
    "one row": WAIT,
    "a row too few": [WAIT],
    "a row too many": [WAIT] * 3,
    "a head too few": [[0, 0, 0]] * 2,
    "a head too many": [[0] * 5] * 2,
    "ragged": [[0, 0], [0, 0, 0, 0]],
    "an axis too many": np.zeros((2, 4, 1), int),
    "fractions": np.full((2, 4), 0.5),
    "NaN": np.full((2, 4), np.nan),
    "text": "wait",
    "None": None,
    "a dict": {"op": 0},
}


@pytest.mark.parametrize("actions", WRONG.values(), ids=WRONG)
def test_actions_of_another_shape_are_refused_in_one_line_before_anything_trains(actions, hosts):
    hosts.reset(seed=0)
    before = [run.epoch for run in hosts.population.runs]
    with pytest.raises(SettingError, match=r"^got actions .*2 rows of 4 whole numbers: op") as told:
        hosts.step(actions)
    assert "\n" not in str(told.value)
    assert [run.epoch for run in hosts.population.runs] == before
    hosts.step([WAIT, WAIT])


@pytest.mark.parametrize(
    "actions",
    [
        np.zeros((2, 4), np.uint8),
        torch.zeros(2, 4, dtype=torch.long),
        [np.zeros(4, int), WAIT],
    ],
    ids=["uint8", "torch", "rows"],
)
def test_whole_numbers_of_any_kind_are_actions(actions, hosts):
    hosts.reset(seed=0)
    hosts.step(actions)


@pytest.mark.parametrize(
    "action", [[WAIT], [0] * 5, [0.0] * 4, "wait", None, [[0], [0, 0]]], ids=str
)
def test_one_host_refuses_an_action_of_another_shape_too(action, twins):
    env = esper.GrowthEnv(POINTS, host_seeds=(3, 4), folder=twins)
    env.reset()
    with pytest.raises(SettingError, match=r"^got actions .*give 4 whole numbers"):
        env.step(action)
    with pytest.raises(SettingError, match=r"action \[-1, 0, 0, 0\] is not in MultiDiscrete"):
        env.step(np.array([-1, 0, 0, 0]))
    env.step(WAIT)


def test_hosts_that_were_never_reset_have_nothing_to_step(twins):
    with pytest.raises(EpisodeOverError, match=r"Call reset\(\)"):
        grow(POINTS, 2, twins).step([WAIT, WAIT])


# -- seeds and counts ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [-1, 1.5, "1", np.array([1, 2])], ids=str)
def test_a_seed_that_is_no_whole_number_from_0_on_is_refused(seed, hosts, twins):
    rule = r"^seed is .*whole number of at least 0"
    with pytest.raises(SettingError, match=rule):
        esper.learn(carts(), 16, TINY, seed)
    with pytest.raises(SettingError, match=rule):
        hosts.reset(seed=seed)
    with pytest.raises(SettingError, match=rule):
        esper.GrowthEnv(POINTS, host_seeds=(3,), folder=twins).reset(seed=seed)


def test_a_seed_of_numpy_is_the_seed_of_python(hosts):
    first, _ = hosts.reset(seed=3)
    second, _ = hosts.reset(seed=np.int64(3))
    assert np.array_equal(first, second)
    esper.learn(carts(), np.int64(16), TINY, np.int64(3))


@pytest.mark.parametrize("steps", [20.5, 1, -3, "64", None, np.nan, np.inf, [64]], ids=str)
def test_total_steps_that_no_loop_could_make_are_refused(steps):
    with pytest.raises(SettingError, match=r"^total_steps is .*2 environments need as many"):
        esper.learn(carts(), steps, TINY)


def test_learning_from_one_environment_or_with_a_dict_is_refused_with_the_way_out():
    with pytest.raises(EnvironmentMismatchError, match=r"^env is .*make_vec"):
        esper.learn(gym.make("CartPole-v1"), 16, TINY)
    with pytest.raises(EnvironmentMismatchError, match=r"^env is 'CartPole-v1'; "):
        esper.learn("CartPole-v1", 16, TINY)
    with pytest.raises(SettingError, match=r"^config is .*esper.PPOConfig"):
        esper.learn(carts(), 16, {"horizon": 8})
    with pytest.raises(SettingError, match=r"^spec is 'op'; "):
        esper.learn(carts(), 16, TINY, spec="op")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"count": 1.5}, "whole number of hosts"),
        ({"count": "2"}, "whole number of hosts"),
        ({"host_seeds": 3}, "^host_seeds is 3; name the hosts"),
        ({"host_seeds": [1.5]}, "^a host seed is 1.5"),
        ({"host_seeds": ["a"]}, "^a host seed is 'a'"),
        ({"gamma": "1"}, "^gamma is '1'"),
    ],
    ids=str,
)
def test_hosts_in_numbers_that_make_no_sense_are_refused(options, match, twins):
    options = {"count": 1, "host_seeds": [3], "folder": twins} | options
    with pytest.raises(SettingError, match=match):
        esper.GrowthVectorEnv(POINTS, options.pop("count"), **options)


@pytest.mark.parametrize("options", [[1], "x", {"episodes": -1}, {"episodes": "a"}], ids=str)
def test_options_of_a_reset_that_make_no_sense_are_refused(options, hosts):
    with pytest.raises(SettingError, match=r"^options"):
        hosts.reset(seed=0, options=options)


# -- what an agent is asked ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "obs",
    [
        *(np.zeros(4), np.zeros((2, 7)), np.zeros((4, 2)), np.zeros((2, 4)) * 1j),
        *(3.0, "ab", None, [None], {"a": 1}, [[0.0], [0.0, 0.0]]),
    ],
    ids=lambda obs: str(getattr(obs, "shape", obs)),
)
def test_observations_of_another_shape_are_refused_with_the_shape_of_the_space(obs, agent):
    with pytest.raises(EnvironmentMismatchError, match=r"^got observations .*N rows of Box"):
        agent.act(obs)


@pytest.mark.parametrize("change", ["hosts", "width", "one", "three", "text"])
def test_a_state_of_other_environments_is_refused(change, agent):
    obs = np.zeros((2, 4), np.float32)
    _, (memory, cell) = agent.act(obs)
    state = {
        "hosts": (memory[:, :1], cell[:, :1]),
        "width": (memory[..., :4], cell[..., :4]),
        "one": memory,
        "three": (memory, cell, cell),
        "text": "fresh",
    }[change]
    with pytest.raises(SettingError, match=r"^state is .*what act returned for 2 environments"):
        agent.act(obs, None, state)
    agent.act(obs, None, (memory, cell))


@pytest.mark.parametrize("begins", [[True], [1, 0, 1], [0.5, 1.0], "ab", None], ids=str)
def test_an_agent_restarts_only_environments_that_are_there(begins, agent):
    _, state = agent.act(np.zeros((2, 4), np.float32))
    with pytest.raises(SettingError, match=r"^begins is .*each of 2 environments"):
        agent.restart(state, begins)
    assert not agent.restart(state, [True, False])[0][:, 0].any()


def test_a_mask_that_is_no_mask_is_refused(agent):
    with pytest.raises(MaskError, match=r"it must be \[2, 2\]"):
        agent.act(np.zeros((2, 4), np.float32), 3)


# -- settings in numbers of numpy ------------------------------------------------------------------


def test_numbers_of_numpy_and_torch_are_settings_as_those_of_python_are():
    values = {"horizon": np.int64(16), "lr": np.float32(0.5), "clip": torch.tensor(0.25)}
    plain = esper.PPOConfig(horizon=16, lr=0.5, clip=0.25)
    assert esper.PPOConfig(**values) == esper.PPOConfig.of(values) == plain
    nested = {"hosts": np.int64(2), "task": {"name": "blobs", "epochs": np.int32(3)}, "out": "x"}
    assert esper.TrainingConfig.of(nested).task.epochs == 3
    with pytest.raises(SettingError, match=r"^the configuration: hosts is \"\[0. 0.\]\""):
        esper.TrainingConfig.of({**nested, "hosts": np.zeros(2)})
