"""Small environments whose every number is known, agents for them, and rollouts of growth decisions
without growth.
"""

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from esper.leyline.factored_actions import (
    NUM_BLENDS,
    NUM_BLUEPRINTS,
    NUM_OPS,
    OP_CULL,
    OP_FOSSILIZE,
    OP_GERMINATE,
)
from esper.simic import PPOAgent, PPOConfig
from esper.simic.ppo.any_env import Player
from esper.simic.ppo.codecs import ActionCodec, ObservationCodec
from esper.simic.ppo.rollout import Rollout
from esper.tamiyo.network import FactoredRecurrentActorCritic, RecurrentActorCritic
from tamiyo.policy_cases import ends_of

NEXT_STEP, SAME_STEP = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP
SMALL = PPOConfig(horizon=16, epochs=2, minibatches=2, hidden_dim=16, head_dim=8)
SLOTS, WIDTH = 3, 5


class Clock(gym.Env):
    """Observation: (who, time since the reset, episodes so far). An episode has `episode` steps, or
    never ends.

    Args: ends: "terminated" or "truncated". masked: whether info has an action mask, another one at
        every step; the last one of an episode allows nothing. penalty: paid, with a termination,
        when action 1 is taken first; 0.1 is paid otherwise. last: what the final observation is
        filled with, if anything.
    """

    def __init__(
        self,
        who=0,
        epochs=None,
        ends="terminated",
        actions=None,
        masked=False,
        penalty=None,
        last=None,
    ):
        self.who, self.epochs, self.ends, self.masked, self.penalty, self.last = (
            who,
            epochs,
            ends,
            masked,
            penalty,
            last,
        )
        self.observation_space = gym.spaces.Box(-1e3, 1e3, (3,), np.float32)
        self.action_space = actions or gym.spaces.Discrete(3)
        self.episodes = -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.episodes = 0, self.episodes + 1
        return self.observation(), self.info(False)

    def step(self, action):
        self.time += 1
        fails = self.penalty is not None and int(np.asarray(action).flat[0]) == 1
        is_last = fails or self.time == self.epochs
        observation = self.observation()
        if is_last and self.last is not None:
            observation[:] = self.last
        reward = self.penalty if fails else 0.1 * (1 + self.time)
        terminated = fails or (is_last and self.ends == "terminated")
        return observation, reward, terminated, is_last and not terminated, self.info(is_last)

    def observation(self):
        return np.array([self.who, self.time, self.episodes], np.float32)

    def info(self, is_last):
        if not self.masked:
            return {}
        forbidden = self.time + self.who + self.episodes
        rows = [
            (np.arange(size) != forbidden % size) | (size == 1)
            for size in ActionCodec(self.action_space).spec.sizes
        ]
        mask = np.concatenate(rows)
        return {"action_mask": mask & (not is_last)}


def clocks(count=3, mode=SAME_STEP, episodes=None, **settings):
    """`count` clocks side by side, each with its own length of an episode."""
    episodes = episodes or [None] * count
    return SyncVectorEnv(
        [lambda who=who: Clock(who, episodes[who], **settings) for who in range(count)],
        autoreset_mode=mode,
    )


class OneArray(VectorEnv):
    """Two environments that live in one array each of observations and masks, rewritten in place at
    every step.
    """

    metadata = {"autoreset_mode": NEXT_STEP}  # noqa: RUF012
    num_envs = 2

    def __init__(self):
        self.single_observation_space = gym.spaces.Box(-1e3, 1e3, (2,), np.float32)
        self.single_action_space = gym.spaces.Discrete(4)
        self.observations, self.masks = np.zeros((2, 2), np.float32), np.zeros((2, 4), bool)
        self.shown = []

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return self.show(), {"action_mask": self.masks}

    def step(self, actions):
        self.check_untouched()
        self.time += 1
        ends = np.array([self.time % 5 == 4, False])
        return self.show(), np.ones(2), ends, np.zeros(2, bool), {"action_mask": self.masks}

    def show(self):
        self.observations[:] = [[0, self.time], [1, self.time]]
        self.masks[:] = [np.arange(4) != self.time % 4, np.arange(4) == self.time % 4]
        self.masks[0] &= self.time % 5 != 4  # nothing is possible in an episode that is over
        self.shown.append((self.observations.copy(), self.masks.copy()))
        return self.observations

    def check_untouched(self):
        assert np.array_equal(self.observations, self.shown[-1][0])
        assert np.array_equal(self.masks, self.shown[-1][1])


class StepCounter:
    """Stands in for a network:

    its state counts the steps of an episode, and the value is the state before the step.
    """

    def __init__(self, spec, value=None):
        self.spec, self.value = spec, value

    def get_initial_hidden(self, count):
        return torch.zeros(1, count, 1), torch.zeros(1, count, 1)

    def get_action(self, states, hidden, masks, deterministic=False, generator=None):
        zeros = torch.zeros(len(states))
        choices = {name: zeros.long() for name in self.spec.names}
        return (
            choices,
            dict.fromkeys(self.spec.names, zeros),
            self.look(states, hidden),
            (hidden[0] + 1, hidden[1] + 1),
        )

    def look(self, states, hidden):
        return (
            hidden[0][0, :, 0].clone()
            if self.value is None
            else torch.full((len(states),), self.value)
        )


def codecs_of(env, spec=None):
    return ObservationCodec(env.single_observation_space), ActionCodec(
        env.single_action_space, spec
    )


def agent_for(env, config=SMALL, seed=0):
    """A fresh agent as `learn` builds it."""
    codecs = codecs_of(env)
    torch.manual_seed(seed)
    network = RecurrentActorCritic(
        codecs[0].width, codecs[1].spec, hidden_dim=config.hidden_dim, head_dim=8
    )
    return PPOAgent(network, config, seed=seed, codecs=codecs)


def player_for(env, config=SMALL, seed=0):
    return Player(env, agent_for(env, config, seed), seed)


def counting_player(env, value=None):
    """A player whose network counts steps."""
    agent = agent_for(env)
    agent.network = StepCounter(agent.codecs[1].spec, value)
    return Player(env, agent, 0)


# -- growth decisions ------------------------------------------------------------------------------


def growth_agent(config=SMALL, seed=0):
    torch.manual_seed(seed)
    network = FactoredRecurrentActorCritic(
        WIDTH, SLOTS, hidden_dim=config.hidden_dim, head_dim=config.head_dim
    )
    for layer in ends_of(network.policy_heads):
        torch.nn.init.normal_(layer.weight, std=0.5)  # a policy with opinions
    return PPOAgent(network, config, seed=seed)


def growth_masks(count, draw):
    """Random masks as hosts have them: WAIT always, unused heads with index 0 only."""

    def some(*shape):
        mask = torch.rand(*shape, generator=draw) < 0.6
        return mask | (
            torch.nn.functional.one_hot(
                torch.randint(shape[-1], shape[:-1], generator=draw), shape[-1]
            )
            > 0
        )

    op, slot = some(count, NUM_OPS), some(count, NUM_OPS, SLOTS)
    op[:, 0] = True
    unused = [
        index for index in range(NUM_OPS) if index not in (OP_GERMINATE, OP_CULL, OP_FOSSILIZE)
    ]
    slot[:, unused] = torch.arange(SLOTS) == 0
    return {
        "op": op,
        "slot": slot,
        "blueprint": some(count, SLOTS, NUM_BLUEPRINTS),
        "blend": some(count, NUM_BLENDS),
    }


def growth_rollout(
    agent,
    steps=8,
    count=4,
    seed=0,
    ends=0.15,
    whole=False,
    reward=lambda draws: draws,
    has_graph=False,
):
    """A rollout of random observations and masks, with episodes that end at random, half of them
    truncated.

    Args:
        whole: one episode per row, which ends with the row.
        has_graph: gradients are recorded while it is filled.
    """
    draw = torch.Generator().manual_seed(seed)
    network = agent.network
    shapes = {name: tuple(mask.shape[1:]) for name, mask in growth_masks(1, draw).items()}
    rollout = Rollout(steps, count, WIDTH, network.spec, shapes)
    hidden, begins = network.get_initial_hidden(count), torch.ones(count, dtype=torch.bool)
    rollout.begin(hidden)
    with torch.set_grad_enabled(has_graph):
        for step in range(steps):
            states, masks = torch.randn(count, WIDTH, generator=draw), growth_masks(count, draw)
            choices, log_probs, values, hidden = network.get_action(
                states, hidden, masks, generator=draw
            )
            valid = torch.ones(count, dtype=torch.bool)
            rollout.add_decision(states, masks, choices, log_probs, values, valid, begins)
            begins = torch.rand(count, generator=draw) < ends
            truncated = begins & (torch.rand(count, generator=draw) < 0.5)
            if whole:
                begins, truncated = (
                    torch.full((count,), step == steps - 1),
                    torch.zeros(count, dtype=torch.bool),
                )
            rewards = reward(torch.randn(count, generator=draw))
            finals = torch.where(
                truncated,
                network.look(torch.randn(count, WIDTH, generator=draw), hidden),
                torch.nan,
            )
            rollout.add_outcome(rewards, begins & ~truncated, truncated, finals)
            hidden = agent.restart(hidden, begins)
        rollout.finish(network.look(torch.randn(count, WIDTH, generator=draw), hidden), hidden)
    return rollout


def bytes_of(module):
    """Everything in a module, as bytes: equal only if not one bit differs."""
    return {name: value.detach().numpy().tobytes() for name, value in module.state_dict().items()}
