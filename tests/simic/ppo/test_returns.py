"""Advantages and returns in closed form:

what bootstraps, what does not, and that no trace crosses an end.
"""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor

from cases import with_slow
from esper.simic import PPOConfig, learn
from esper.simic.ppo.rollout import explained_variance, gae, normalise_advantages
from simic.worlds import NEXT_STEP, SAME_STEP, counting_player, growth_agent, growth_rollout

MODES = pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP], ids=["next_step", "same_step"])
GAMMA, LAM = 0.9, 0.8
NO, YES = False, True


def advantages_of(rewards, values, after, terminated, ended, gamma=GAMMA, lam=LAM):
    """For one environment, as a list."""
    columns = [tensor(column)[:, None] for column in (rewards, values, after, terminated, ended)]
    return gae(*columns, gamma, lam)[:, 0].tolist()


def slow_advantages(rewards, values, after, terminated, ended, gamma, lam):
    """By the definition:

    a sum of discounted errors, up to the end of the episode or of the rollout.
    """
    found = []
    for step in range(len(rewards)):
        total, weight = 0.0, 1.0
        for later in range(step, len(rewards)):
            bootstrap = 0.0 if terminated[later] else gamma * after[later]
            total += weight * (rewards[later] + bootstrap - values[later])
            weight *= gamma * lam
            if ended[later]:
                break
        found.append(total)
    return found


numbers = st.floats(-10, 10, width=32)
moments = st.tuples(numbers, numbers, numbers, st.booleans(), st.booleans())


@given(st.lists(moments, min_size=1, max_size=20), st.floats(0.1, 1.0), st.floats(0.0, 1.0))
def test_advantages_are_the_sum_that_defines_them(steps, gamma, lam):
    rewards, values, after, terminated, truncated = (
        list(column) for column in zip(*steps, strict=True)
    )
    ended = [one or other for one, other in zip(terminated, truncated, strict=True)]
    found = advantages_of(rewards, values, after, terminated, ended, gamma, lam)
    assert found == pytest.approx(
        slow_advantages(rewards, values, after, terminated, ended, gamma, lam), abs=1e-3
    )


def test_a_termination_does_not_bootstrap_whatever_comes_after_it():
    for after in (0.0, 1e6, math.nan, math.inf):
        assert advantages_of([2.0], [0.5], [after], [YES], [YES]) == [1.5]


def test_a_truncation_bootstraps_from_the_last_observation():
    assert advantages_of([2.0], [0.5], [10.0], [NO], [YES]) == pytest.approx(
        [2.0 + GAMMA * 10.0 - 0.5]
    )


@pytest.mark.parametrize("terminates", [NO, YES])
def test_no_trace_crosses_an_end(terminates):
    def first(next_episode):
        return advantages_of(
            [1.0, next_episode], [0.0, 0.0], [3.0, 0.0], [terminates, NO], [YES, NO]
        )[0]

    assert first(1.0) == first(1e6)


def test_without_an_end_the_trace_goes_on():
    found = advantages_of([1.0, 5.0], [0.0, 0.0], [0.0, 0.0], [NO, NO], [NO, NO])
    assert found == pytest.approx([1.0 + GAMMA * LAM * 5.0, 5.0])


@pytest.mark.parametrize("steps", [1, 5])
def test_a_rollout_that_breaks_off_bootstraps_from_the_next_observation(steps):
    """Reward 1 and value v throughout:

    every error is 1 + gamma v - v, and advantages are geometric sums of it.
    """
    value = 4.0
    found = advantages_of(
        [1.0] * steps, [value] * steps, [value] * steps, [NO] * steps, [NO] * steps
    )
    error, decay = 1 + GAMMA * value - value, GAMMA * LAM
    assert found == pytest.approx(
        [error * (1 - decay ** (steps - step)) / (1 - decay) for step in range(steps)]
    )


def test_environments_do_not_touch_each_other():
    """Adding an environment, or putting them in another order, leaves each one's advantages as they
    are to the bit.
    """
    rollout = growth_rollout(growth_agent(), steps=12, count=6, ends=0.3)
    columns = (
        rollout.rewards,
        rollout.values,
        rollout.after_values,
        rollout.terminated,
        rollout.ended,
    )
    whole = gae(*columns, GAMMA, LAM)
    for index in ([0, 1, 2, 3, 4], [5, 3, 1, 0, 4, 2], [4]):
        assert torch.equal(
            gae(*(column[:, index] for column in columns), GAMMA, LAM), whole[:, index]
        )


def test_an_end_that_is_both_counts_as_a_termination():
    rollout = growth_rollout(growth_agent(), steps=1)
    rollout.length = 0
    both = torch.ones(4, dtype=torch.bool)
    rollout.add_outcome(torch.ones(4), both, both, torch.full((4,), 100.0))
    rollout.finish(torch.zeros(4), rollout.hidden)
    assert rollout.targets(GAMMA, LAM).returns[0].tolist() == pytest.approx([1.0] * 4)


# -- stable-baselines3's own problems --------------------------------------------------------------


class LastStepPays(gym.Env):
    """A reward of 1 at the last of `length` steps, which terminates."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.time += 1
        is_last = self.time >= self.length
        return np.zeros(2, np.float32), float(is_last), is_last, False, {}


@MODES
@pytest.mark.parametrize("lam", [1.0, 0.9])
@pytest.mark.parametrize("gamma", [1.0, 0.99])
@pytest.mark.parametrize("episodes", [1, 3])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_reward_at_the_last_step_reaches_back_as_the_closed_form_says(
    mode, lam, gamma, episodes, value
):
    length = 16
    env = SyncVectorEnv([lambda: LastStepPays(length)], autoreset_mode=mode)
    steps = length * episodes + (episodes - 1 if mode is NEXT_STEP else 0)
    rollout = counting_player(env, value).play(steps)
    advantages, returns = (found[rollout.valid] for found in rollout.targets(gamma, lam))
    decay, error = gamma * lam, gamma * value - value
    left = np.tile(np.arange(length)[::-1], episodes)  # steps until the last one
    sums = [sum(decay**k for k in range(n)) for n in left]
    expected = np.array(sums) * error + decay**left * (1 - value)
    assert advantages.numpy() == pytest.approx(expected, abs=1e-5)
    assert returns.numpy() == pytest.approx(expected + value, abs=1e-5)


class RewardOfOne(gym.Env):
    """Reward 1 at every step; an episode is cut off at random, every eighth step on average."""

    observation_space = gym.spaces.Discrete(4)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, ends):
        self.ends = ends

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return 0, {}

    def step(self, action):
        self.time += 1
        is_last = bool(self.np_random.random() < 1 / 8)
        return (
            self.time % 4,
            1.0,
            is_last and self.ends == "terminated",
            is_last and self.ends == "truncated",
            {},
        )


def learned_value(ends, mode):
    """Value of the first observation after 1,000 steps at gamma 0.8.

    The peers' own version cuts every episode at the eighth step. A policy with memory never learns
    from a ninth, so its value there is a guess, and bootstrapping adds the guess up: 52 to 54
    instead of 50 at gamma 0.98.
    """
    config = PPOConfig(
        gamma=0.8,
        gae_lambda=1.0,
        horizon=24,
        minibatches=4,
        epochs=4,
        lr=1e-2,
        target_kl=None,
        hidden_dim=16,
    )
    agent = learn(SyncVectorEnv([lambda: RewardOfOne(ends)] * 4, autoreset_mode=mode), 1000, config)
    return agent.network.look(torch.eye(4)[:1], agent.network.get_initial_hidden(1)).item()


@pytest.mark.parametrize(
    "mode", with_slow([NEXT_STEP, SAME_STEP], [SAME_STEP]), ids=["next_step", "same_step"]
)
def test_a_stream_of_ones_that_is_only_truncated_is_worth_its_infinite_sum(mode):
    assert learned_value("truncated", mode) == pytest.approx(1 / (1 - 0.8), rel=0.03)


@MODES
def test_a_stream_of_ones_that_terminates_is_worth_only_what_is_paid(mode):
    assert learned_value("terminated", mode) == pytest.approx(1 / (1 - 0.8 * 7 / 8), rel=0.2)


# -- advantages to learn from ----------------------------------------------------------------------


def test_advantages_are_normalised_over_valid_steps_only():
    raw = tensor([[1.0, 1e9], [3.0, -1e9], [5.0, 7.0]])
    valid = tensor([[YES, NO], [YES, NO], [YES, YES]])
    found = normalise_advantages(raw, valid)
    assert found[valid].tolist() == pytest.approx([(x - 4) / math.sqrt(5) for x in (1, 3, 5, 7)])
    assert found[~valid].eq(0).all()


@pytest.mark.parametrize("valid", [[NO, NO, NO], [NO, YES, NO]])
def test_with_fewer_than_two_valid_steps_every_advantage_is_zero(valid):
    assert normalise_advantages(tensor([[5.0, 7.0, math.nan]]), tensor([valid])).tolist() == [
        [0, 0, 0]
    ]


def test_two_valid_steps_are_one_above_and_one_below():
    found = normalise_advantages(tensor([[5.0, 9.0, 2.0]]), tensor([[YES, NO, YES]]))
    assert found.tolist() == [[pytest.approx(1), 0, pytest.approx(-1)]]


def test_equal_advantages_are_zero_and_finite():
    assert normalise_advantages(torch.full((2, 2), 3.0), torch.ones(2, 2).bool()).eq(0).all()


def test_explained_variance_is_the_share_of_the_returns_that_the_values_knew():
    returns, valid = tensor([[1.0, 3.0, 99.0]]), tensor([[YES, YES, NO]])
    assert explained_variance(returns, returns, valid) == 1.0
    assert explained_variance(torch.full_like(returns, 2.0), returns, valid) == 0.0
    assert explained_variance(tensor([[3.0, 1.0, 0.0]]), returns, valid) == -3.0


@pytest.mark.parametrize("valid", [[NO, NO], [YES, NO], [YES, YES]])
def test_explained_variance_of_returns_that_do_not_vary_is_unknown(valid):
    assert math.isnan(
        explained_variance(tensor([[1.0, 2.0]]), tensor([[4.0, 4.0]]), tensor([valid]))
    )
