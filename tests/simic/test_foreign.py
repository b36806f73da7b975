"""Problems that other people set:

the peers' identity environments and their invalid-action ones.
"""

import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from sb3_contrib.common.envs import InvalidActionEnvDiscrete, InvalidActionEnvMultiDiscrete
from stable_baselines3.common.envs import (
    IdentityEnv,
    IdentityEnvMultiBinary,
    IdentityEnvMultiDiscrete,
)

from esper.simic import PPOConfig, learn
from simic.worlds import SMALL, agent_for

LENGTH = 100


def envs_of(make, count=8, seed=0):
    env = SyncVectorEnv([make] * count)
    np.random.seed(seed)  # these environments draw from the global generator
    for index, single in enumerate(env.envs):
        single.action_space.seed(1000 * seed + index)
    return env


def mean_return(agent, env, masked=False):
    """Over one episode of each environment."""
    observations, state, total = env.reset()[0], None, np.zeros(env.num_envs)
    for _ in range(LENGTH):
        mask = np.array(env.call("action_masks")) if masked else None
        actions, state = agent.act(observations, mask, state)
        observations, rewards = env.step(actions)[:2]
        total += rewards
    return total.mean()


@pytest.mark.parametrize("make", [IdentityEnv, IdentityEnvMultiDiscrete, IdentityEnvMultiBinary])
def test_an_identity_is_learned_in_1200_steps(make):
    config = PPOConfig(gamma=0.4, horizon=30, hidden_dim=64)
    agent = learn(envs_of(lambda: make(4)), 1200, config, seed=1)
    assert mean_return(agent, envs_of(lambda: make(4), seed=2)) > 90


@pytest.mark.slow
def test_one_environment_teaches_four_masked_heads_in_two_passes():
    """Mean of three random seeds:

    77. With whole rows, where each pass is one step of the optimiser, it is 54.
    """

    def make():
        return InvalidActionEnvMultiDiscrete(dims=[3, 3, 3, 3], n_invalid_actions=4)

    config = PPOConfig(gamma=0.4, epochs=2)
    agents = [learn(envs_of(make, 1, seed), 1024, config, seed) for seed in range(3)]
    found = [mean_return(agent, envs_of(make, 20, seed=10_000), masked=True) for agent in agents]
    assert np.mean(found) > 66


@pytest.mark.parametrize("count", [4, 8])
def test_the_defaults_learn_four_masked_heads_with_few_environments_and_with_many(count):
    """Mean of three random seeds: 54 and 62. If a fresh network's values are random, they hide
    a reward that four heads earn together, and it is 24 and 21.
    """

    def make():
        return InvalidActionEnvMultiDiscrete(dims=[4, 5, 5, 6], n_invalid_actions=8)

    agents = []
    shares = []

    def keep_first_share(agent, record):
        if agent.updates == 1:
            shares.append(record.explained_variance)

    for seed in range(3):
        env = envs_of(make, count, seed)
        agents.append(learn(env, 2048, PPOConfig(gamma=0.4), seed, watch=keep_first_share))
    returns = [mean_return(agent, envs_of(make, 20, seed=10_000), masked=True) for agent in agents]
    assert min(shares) > -0.05  # values that know nothing yet, and do not claim to
    assert np.mean(returns) > 40


ONE_VALID = [
    lambda: InvalidActionEnvDiscrete(dim=20, n_invalid_actions=19),
    lambda: InvalidActionEnvMultiDiscrete(dims=[2, 3], n_invalid_actions=3),
]


@pytest.mark.parametrize("make", ONE_VALID, ids=["discrete", "multi_discrete"])
def test_where_masks_leave_one_choice_an_untrained_agent_is_right_with_them_and_wrong_without(make):
    agent = agent_for(envs_of(make), SMALL)
    assert mean_return(agent, envs_of(make), masked=True) > 99
    assert mean_return(agent, envs_of(make)) < 30


@pytest.mark.parametrize("make", ONE_VALID, ids=["discrete", "multi_discrete"])
def test_learning_reads_their_masks_by_itself(make):
    records = []
    learn(
        envs_of(make, 2),
        200,
        SMALL.model_copy(update={"horizon": 100}),
        watch=lambda _, r: records.append(r),
    )
    assert records[0].heads["action_0"].entropy == 0.0  # nothing to decide
    assert records[0].policy_loss == pytest.approx(0.0, abs=1e-6)
