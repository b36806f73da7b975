"""One growing host as a plain Gymnasium environment, for agents that know no vector environments
(MaskablePPO, say).
"""

import argparse
import tempfile
from pathlib import Path

import gymnasium as gym
import numpy as np

from esper.runtime.tasks.registry import get_task
from esper.simic.environment import GrowthVectorEnv


class GrowthEnv(gym.Env):
    """A view of a `GrowthVectorEnv` with one host.

    An action that is impossible as a whole is executed as WAIT.
    """

    def __init__(self, hosts: GrowthVectorEnv):
        if hosts.num_envs != 1:
            raise ValueError(
                f"a view of one host cannot show {hosts.num_envs}; build the hosts with count=1."
            )
        self.metadata, self.hosts = {"render_modes": []}, hosts
        self.observation_space, self.action_space = (
            hosts.single_observation_space,
            hosts.single_action_space,
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        obs, info = self.hosts.reset(seed=seed, options=options)
        return obs[0], self._own(info)

    def step(self, action):
        obs, rewards, terminated, truncated, info = self.hosts.step(np.asarray(action)[None])
        return obs[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), self._own(info)

    def _own(self, info):
        self.masks = {head: mask[0] for head, mask in info["action_mask"].items()}
        return {
            name: self.masks if name == "action_mask" else values[0]
            for name, values in info.items()
        }

    def action_masks(self):
        """One flat mask for agents whose heads do not depend on each other:

        a choice counts if any case allows it.
        """
        op, slot, blueprint, blend = (
            self.masks[head] for head in ("op", "slot", "blueprint", "blend")
        )
        open_slots = slot[op.nonzero()[0]].any(0)
        return np.concatenate([op, open_slots, blueprint[open_slots].any(0), blend])


def main(steps: int) -> None:
    twins, draw = Path(tempfile.mkdtemp()), np.random.default_rng(0)
    env = GrowthEnv(GrowthVectorEnv(get_task("blobs"), 1, host_seeds=[1], folder=twins))
    env.reset(seed=0)
    sizes = np.cumsum(env.action_space.nvec)[:-1]
    for _ in range(steps):
        action = [draw.choice(np.flatnonzero(head)) for head in np.split(env.action_masks(), sizes)]
        _, reward, is_over, _, info = env.step(action)
        print(f"reward {reward:+.3f}", *info["events"], sep="; ")
        if is_over:
            env.reset()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    main(**vars(parser.parse_args()))
