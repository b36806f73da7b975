"""Our learner on any Gymnasium vector environment:

`learn` plays rollouts and updates. Growth has its own trainer.
"""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from torch import Tensor

from esper.kasmina.randomness import mix_seed, own_randomness
from esper.leyline.errors import EnvironmentMismatchError, MeasurementError, SettingError
from esper.simic.ppo.agent import PPOAgent
from esper.simic.ppo.codecs import ActionCodec, Mask, ObservationCodec
from esper.simic.ppo.diagnostics import UpdateRecord
from esper.simic.ppo.rollout import Rollout
from esper.simic.ppo.settings import PPOConfig
from esper.tamiyo.heads import HeadSpec
from esper.tamiyo.network import RecurrentActorCritic


def learn(
    env: gym.vector.VectorEnv[Any, Any, Any],
    total_steps: int = 50_000,
    config: PPOConfig | None = None,
    seed: int = 0,
    *,
    spec: HeadSpec | None = None,
    watch: Callable[[PPOAgent, UpdateRecord], None] = lambda agent, record: None,
) -> PPOAgent:
    """Train a recurrent policy on a vector environment for `total_steps` of all its environments
    together.

    Masks are read from `info["action_mask"]` (flat, or an array per head) or, where the
    environments have one, from their `action_masks()`.

    Args: spec: names of the heads and which choices depend on which; without it they are what the
        environment has as `heads`, as `GrowthVectorEnv` does, or independent. watch: is shown the
        agent and the record of every update.
    """
    if total_steps < env.num_envs:
        raise SettingError(
            f"total_steps is {total_steps}, but {env.num_envs} environments need as many."
        )
    config = (config or PPOConfig()).annealed_over(total_steps)
    own = getattr(env.unwrapped, "heads", None)
    seen, acts = (
        ObservationCodec(env.single_observation_space),
        ActionCodec(env.single_action_space, spec or own),
    )
    with own_randomness(mix_seed(seed, 0)):
        network = RecurrentActorCritic(
            seen.width, acts.spec, hidden_dim=config.hidden_dim, head_dim=config.head_dim
        )
    agent = PPOAgent(network, config, seed=seed, codecs=(seen, acts))
    is_bare = (
        acts.spec == own and env.single_observation_space == env.unwrapped.single_observation_space
    )
    if (lay_out := getattr(env.unwrapped, "layout_of", None)) is not None and is_bare:
        agent.layout = lay_out(config.hidden_dim, config.head_dim)
    player = Player(env, agent, seed)
    steps = total_steps // env.num_envs
    for done in range(0, steps, config.horizon):
        watch(agent, record := agent.update(player.play(min(config.horizon, steps - done))))
        if not record.steps:
            raise MeasurementError(
                "no gradient was finite, so nothing was learned. Look for NaN in the environments."
            )
    return agent


class Player:
    """Plays a vector environment with an agent, rollout after rollout; episodes go on from one to
    the next.
    """

    def __init__(self, env: gym.vector.VectorEnv[Any, Any, Any], agent: PPOAgent, seed: int):
        if (mode := env.metadata.get("autoreset_mode")) not in (
            AutoresetMode.NEXT_STEP,
            AutoresetMode.SAME_STEP,
        ):
            found = f"the metadata says autoreset_mode={mode}"
            raise EnvironmentMismatchError(
                f"{found}. Supported: NEXT_STEP and SAME_STEP; declare what it does."
            )
        assert agent.codecs is not None
        self.env, self.agent = env, agent
        self.pieces = -(-agent.config.minibatches // env.num_envs)
        """parts of a row:

        as few as give every minibatch one, so that memory is learned over as many steps as can be
        """
        self.observations, self.actions = agent.codecs
        self.resets_at_once = mode is AutoresetMode.SAME_STEP
        obs, info = env.reset(seed=seed)
        self.states = self.observations.encode(obs)
        self.hidden = agent.network.get_initial_hidden(env.num_envs)
        self.begins = torch.ones(env.num_envs, dtype=torch.bool)
        self.is_filler = torch.zeros(env.num_envs, dtype=torch.bool)
        call = getattr(
            env.unwrapped, "call", None
        )  # environments in other processes are asked the same way
        self._ask = (
            call if call is not None and all(call("has_wrapper_attr", "action_masks")) else None
        )
        if call is None and (own := getattr(env.unwrapped, "action_masks", None)) is not None:
            self._ask = lambda _: own()
        self._is_masked = "action_mask" in info or self._ask is not None
        self.masks = self._read_masks(info)
        self._rollout: Rollout | None = None

    def _read_masks(self, info: dict[str, Any]) -> dict[str, Tensor]:
        """A mask per head, copied, as the environment may go on with its arrays; empty where
        nothing is ever masked.
        """
        given: Mask = info.get("action_mask")
        if given is None and self._ask is not None:
            given = np.array(self._ask("action_masks"), dtype=np.bool_)
        has_one = np.broadcast_to(info.get("_action_mask", given is not None), self.env.num_envs)
        if wrong := np.flatnonzero(has_one != self._is_masked).tolist():
            has = "no" if self._is_masked else "an"
            found = f"environments {wrong} have {has} action_mask, unlike all at the first reset"
            raise EnvironmentMismatchError(
                f"{found}. Give one each time, or never; all true forbids nothing."
            )
        masks = self.actions.split_mask(given, self.env.num_envs)
        for mask in masks.values():
            mask[self.is_filler] = (
                True  # a finished episode may allow nothing, and nobody chooses there
            )
        return masks

    @torch.no_grad()
    def play(self, steps: int) -> Rollout:
        """The next `steps` steps of every environment. The storage is reused by the next call."""
        if self._rollout is None or self._rollout.steps != steps:
            shapes = {name: tuple(mask.shape[1:]) for name, mask in self.masks.items()}
            size = steps, self.env.num_envs, self.observations.width
            self._rollout = Rollout(*size, self.actions.spec, shapes, pieces=self.pieces)
        rollout = self._rollout
        rollout.begin(self.hidden)
        for _ in range(steps):
            rollout.keep_state(self.hidden)
            self._step(rollout)
        rollout.finish(self.agent.network.look(self.states, self.hidden), self.hidden)
        return rollout

    def _step(self, rollout: Rollout) -> None:
        choices, log_probs, values, hidden = self.agent.network.choose(
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
        paid, is_terminal, is_cut = map(torch.as_tensor, (rewards, terminated, truncated))
        rollout.add_outcome(paid, is_terminal, is_cut, finals)
        # with NEXT_STEP the terminal observation is looked at once more, and that step is filler
        self.begins = ends if self.resets_at_once else self.is_filler
        self.is_filler = torch.zeros_like(ends) if self.resets_at_once else ends
        self.masks = self._read_masks(info)
        if bool(self.begins.any()):
            self.hidden = self.agent.restart(self.hidden, self.begins)

    def _final_values(self, info: dict[str, Any], truncated: NDArray[np.bool_]) -> Tensor:
        """Values of truncated episodes' last observations, seen with the memory of those episodes;
        NaN elsewhere.
        """
        if not truncated.any():
            return torch.full((self.env.num_envs,), torch.nan)
        shown = self.states.clone()
        for host in np.flatnonzero(truncated):
            shown[host] = self.observations.encode(np.asarray(info["final_obs"][host])[None])[0]
        return torch.where(
            torch.as_tensor(truncated), self.agent.network.look(shown, self.hidden), torch.nan
        )
