"""One growing host as an ordinary Gymnasium environment, for agents that know nothing of vector environments."""

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from esper.leyline.errors import SettingError
from esper.simic.environment import GrowthVectorEnv


class GrowthEnv(gym.Env[NDArray[np.float32], NDArray[np.int64]]):
    """A view of a `GrowthVectorEnv` with one host. An action that is impossible as a whole is executed as WAIT."""

    def __init__(self, hosts: GrowthVectorEnv):
        if hosts.num_envs != 1:
            raise SettingError(f"a view of one host cannot show {hosts.num_envs}; build the hosts with count=1.")
        self.metadata = {"render_modes": []}
        self.hosts = hosts
        self.observation_space = hosts.single_observation_space
        self.action_space = hosts.single_action_space
        self._masks: dict[str, NDArray[np.bool_]] = {}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        obs, info = self.hosts.reset(seed=seed, options=options)
        return obs[0], self._own(info)

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        obs, rewards, terminated, truncated, info = self.hosts.step(np.asarray(action)[None])
        return obs[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), self._own(info)

    def _own(self, info: dict[str, Any]) -> dict[str, Any]:
        self._masks = {head: mask[0] for head, mask in info["action_mask"].items()}
        return {name: self._masks if name == "action_mask" else values[0] for name, values in info.items()}

    def action_masks(self) -> NDArray[np.bool_]:
        """One flat mask for agents whose heads do not depend on each other: a choice counts if any case allows it."""
        masks = self._masks
        used = masks["op"].nonzero()[0]
        open_slots = masks["slot"][used].any(0)
        return np.concatenate([masks["op"], open_slots, masks["blueprint"][open_slots].any(0), masks["blend"]])
