"""Our learner on any Gymnasium vector environment: `learn` plays rollouts and updates.

Growth has its own trainer.
"""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from torch import Tensor

from esper.kasmina.randomness import mix_seed, own_randomness, read_seed
from esper.leyline.errors import (
    EnvironmentMismatchError,
    MeasurementError,
    SettingError,
    is_number,
    outline,
)
from esper.simic.ppo.agent import PPOAgent
from esper.simic.ppo.codecs import ActionCodec, Codecs, Mask, ObservationCodec
from esper.simic.ppo.diagnostics import UpdateRecord
from esper.simic.ppo.rollout import Rollout
from esper.simic.ppo.settings import PPOConfig
from esper.tamiyo.heads import HeadSpec
from esper.tamiyo.network import ActorCritic, RecurrentActorCritic
from esper.tamiyo.policy_files import Layout


def learn(
    env: gym.vector.VectorEnv[Any, Any, Any],
    total_steps: int = 50_000,
    config: PPOConfig | None = None,
    seed: int = 0,
    *,
    spec: HeadSpec | None = None,
    watch: Callable[[PPOAgent, UpdateRecord], None] = lambda agent, record: None,
) -> PPOAgent:
    """Train a recurrent policy on a vector environment and return its agent.

    Masks are read from `info["action_mask"]` (flat, or an array per head) or, where the
    environments have one, from their `action_masks()`.

    Args:
        env: what the agent learns; it resets in the NEXT_STEP or the SAME_STEP mode.
        total_steps: steps of all its environments together.
        config: how it learns.
        seed: decides the weights, the draws and the environments' own random numbers.
        spec: names of the heads and which choices depend on which. Without it they are what the
            environment has as `heads`, as `GrowthVectorEnv` does, or independent.
        watch: gets the agent and the record of every update.

    >>> import esper, gymnasium
    >>> env = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync")
    >>> config = esper.PPOConfig(horizon=32, epochs=1, hidden_dim=8, head_dim=8)
    >>> agent = esper.learn(
    ...     env, 128, config, watch=lambda agent, record: print("update", agent.updates)
    ... )
    update 1
    update 2
    >>> obs, info = env.reset(seed=0)
    >>> actions, state = agent.act(obs)
    >>> actions.shape
    (2,)
    """
    _check(env, total_steps, config, spec)
    total_steps, seed = int(total_steps), read_seed(seed)
    config = (config or PPOConfig()).annealed_over(total_steps)
    env_heads = getattr(env.unwrapped, "heads", None)
    observations = ObservationCodec(env.single_observation_space)
    actions = ActionCodec(env.single_action_space, spec or env_heads)
    # what sees growth as it is gets a growth policy
    bare_space = env.unwrapped.single_observation_space
    is_bare = actions.spec == env_heads and env.single_observation_space == bare_space
    layout_of = getattr(env.unwrapped, "layout_of", None)
    layout: Layout | None = None
    if layout_of is not None and is_bare:
        layout = layout_of(config.hidden_dim, config.head_dim)
    with own_randomness(mix_seed(seed, 0)):
        network: ActorCritic
        if layout is not None:
            growth: Any = env.unwrapped
            network = layout.build().for_space(growth.layout, layout.blends)
        else:
            network = RecurrentActorCritic(
                observations.width,
                actions.spec,
                hidden_dim=config.hidden_dim,
                head_dim=config.head_dim,
            )
    codecs = Codecs(observations=observations, actions=actions)
    agent = PPOAgent(network, config, seed=seed, codecs=codecs)
    agent.layout = layout
    player = Player(env, agent, seed)
    steps = total_steps // env.num_envs
    for done in range(0, steps, config.horizon):
        rollout = player.play(min(config.horizon, steps - done))
        record = agent.update(rollout)
        watch(agent, record)
        if not record.steps:
            raise MeasurementError(
                "no gradient was finite, so nothing was learned. Look for NaN in the environments."
            )
    return agent


def _check(env: Any, total_steps: Any, config: Any, spec: Any) -> None:
    """Refuse what `learn` cannot learn from or with."""
    if not isinstance(env, gym.vector.VectorEnv):
        raise EnvironmentMismatchError(
            f"env is {outline(env)}; learn wants several side by side: gymnasium.make_vec(name, 4)."
        )
    if not is_number(total_steps, env.num_envs, is_whole=True):
        raise SettingError(
            f"total_steps is {outline(total_steps)}, no whole number or too few: "
            f"{env.num_envs} environments need as many."
        )
    if config is not None and not isinstance(config, PPOConfig):
        raise SettingError(f"config is {outline(config)}; write esper.PPOConfig(horizon=128).")
    if spec is not None and not isinstance(spec, HeadSpec):
        raise SettingError(f"spec is {outline(spec)}; esper.tamiyo.heads.HeadSpec makes one.")


class Player:
    """Plays a vector environment with an agent, rollout after rollout.

    Episodes continue from one rollout to the next.
    """

    def __init__(self, env: gym.vector.VectorEnv[Any, Any, Any], agent: PPOAgent, seed: int):
        mode = env.metadata.get("autoreset_mode")
        if mode not in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
            raise EnvironmentMismatchError(
                f"the metadata says autoreset_mode={mode}. Supported: NEXT_STEP and SAME_STEP; "
                f"declare what it does."
            )
        assert agent.codecs is not None
        self.env = env
        self.agent = agent
        self.pieces = -(-agent.config.minibatches // env.num_envs)
        """parts of a row: as few as give every minibatch one, so that memory is learned over as
        many steps as possible
        """
        self.observations, self.actions = agent.codecs
        self.resets_at_once = mode is AutoresetMode.SAME_STEP
        obs, info = env.reset(seed=seed)
        self.states = self.observations.encode(obs)
        self.hidden = agent.network.get_initial_hidden(env.num_envs)
        self.begins = torch.ones(env.num_envs, dtype=torch.bool)
        self.is_filler = torch.zeros(env.num_envs, dtype=torch.bool)
        self._ask_masks = _asker_of_masks(env)
        self._is_masked = "action_mask" in info or self._ask_masks is not None
        self.masks = self._read_masks(info)
        self._rollout: Rollout | None = None

    def _read_masks(self, info: dict[str, Any]) -> dict[str, Tensor]:
        """A mask per head; empty where nothing is ever masked.

        Masks are copied, as the environment may change its arrays.
        """
        mask: Mask = info.get("action_mask")
        if mask is None and self._ask_masks is not None:
            mask = np.array(self._ask_masks(), dtype=np.bool_)
        has_one = np.broadcast_to(info.get("_action_mask", mask is not None), self.env.num_envs)
        wrong = np.flatnonzero(has_one != self._is_masked).tolist()
        if wrong:
            has = "no" if self._is_masked else "an"
            raise EnvironmentMismatchError(
                f"environments {wrong} have {has} action_mask, unlike all at the first reset. "
                f"Give one each time, or never; all true forbids nothing."
            )
        masks = self.actions.split_mask(mask, self.env.num_envs)
        # a finished episode may allow nothing, and the choice of a filler step does not count
        for head_mask in masks.values():
            head_mask[self.is_filler] = True
        return masks

    @torch.no_grad()
    def play(self, steps: int) -> Rollout:
        """The next `steps` steps of every environment. The storage is reused by the next call."""
        if self._rollout is None or self._rollout.steps != steps:
            shapes = {name: tuple(mask.shape[1:]) for name, mask in self.masks.items()}
            self._rollout = Rollout(
                steps=steps,
                count=self.env.num_envs,
                state_dim=self.observations.width,
                spec=self.actions.spec,
                mask_shapes=shapes,
                pieces=self.pieces,
            )
        rollout = self._rollout
        rollout.begin(self.hidden)
        for _ in range(steps):
            rollout.keep_state(self.hidden)
            self._step(rollout)
        rollout.finish(self.agent.network.look(self.states, self.hidden), self.hidden)
        return rollout

    def _step(self, rollout: Rollout) -> None:
        choices, log_probs, values, hidden = self.agent.network.get_action(
            self.states, self.hidden, self.masks, generator=self.agent.draws
        )
        rollout.add_decision(
            self.states,
            self.masks,
            choices,
            log_probs,
            values,
            valid=~self.is_filler,
            starts=self.begins,
        )
        obs, rewards, terminated, truncated, info = self.env.step(self.actions.decode(choices))
        self.states = self.observations.encode(obs)
        self.hidden = hidden
        ends = torch.as_tensor(terminated | truncated) & ~self.is_filler
        finals = self._final_values(info, truncated & ~terminated) if self.resets_at_once else None
        rollout.add_outcome(
            torch.as_tensor(rewards),
            torch.as_tensor(terminated),
            torch.as_tensor(truncated),
            finals,
        )
        # with NEXT_STEP the terminal observation is looked at once more, and that step is filler
        self.begins = ends if self.resets_at_once else self.is_filler
        self.is_filler = torch.zeros_like(ends) if self.resets_at_once else ends
        self.masks = self._read_masks(info)
        if bool(self.begins.any()):
            self.hidden = self.agent.restart(self.hidden, self.begins)

    def _final_values(self, info: dict[str, Any], truncated: NDArray[np.bool_]) -> Tensor:
        """Values of the last observations of truncated episodes; NaN elsewhere.

        They are seen with the memory of those episodes.
        """
        if not truncated.any():
            return torch.full((self.env.num_envs,), torch.nan)
        shown = self.states.clone()
        for host in np.flatnonzero(truncated):
            shown[host] = self.observations.encode(np.asarray(info["final_obs"][host])[None])[0]
        values = self.agent.network.look(shown, self.hidden)
        return torch.where(torch.as_tensor(truncated), values, torch.nan)


def _asker_of_masks(env: gym.vector.VectorEnv[Any, Any, Any]) -> Callable[[], Any] | None:
    """A function that asks the environments for their `action_masks()`; None where none has it."""
    call = getattr(env.unwrapped, "call", None)
    if call is None:
        method: Callable[[], Any] | None = getattr(env.unwrapped, "action_masks", None)
        return method
    # environments in other processes are asked the same way
    if all(call("has_wrapper_attr", "action_masks")):
        return lambda: call("action_masks")
    return None
