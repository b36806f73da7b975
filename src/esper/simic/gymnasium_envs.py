"""What `gymnasium.make` and `gymnasium.make_vec` make of a task: one growing host, or several.

Both are a `GrowthVectorEnv`; there is no other loop.
"""

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from esper.kasmina.randomness import read_seed
from esper.leyline.errors import EpisodeOverError, SettingError
from esper.leyline.factored_actions import OP_GERMINATE, OP_WAIT
from esper.runtime.tasks.registry import get_task
from esper.runtime.tasks.task import Task
from esper.simic.environment import GrowthVectorEnv, Info, read_actions
from esper.simic.host_seeds import draw_host_seeds
from esper.tamiyo.masks import Masks

HOST_POOL = 4
"""How many hosts there are where none are named: each costs an episode, its twin's, in advance."""


def grow_side_by_side(
    task: str | Task,
    num_envs: int = 1,
    *,
    host_seeds: Sequence[int] | None = None,
    folder: str | Path | None = None,
    data_root: str | Path | None = None,
    render_mode: None = None,
    **options: Any,
) -> GrowthVectorEnv:
    """Hosts that train side by side, with a default for all that Gymnasium leaves open.

    Args:
        task: what hosts learn: the name of a task, or a `Task`.
        num_envs: how many hosts there are at a time.
        host_seeds: the hosts that episodes take turns with; by default `HOST_POOL` of them, with
            large seeds, so that comparisons from seed 0 on play other hosts.
        folder: where their twins are kept; by default until this process ends.
        data_root: folder that holds the data sets, for tasks that need one.
        render_mode: there is none.
        options: what else `GrowthVectorEnv` takes (weights, devices, ...).
    """
    if render_mode is not None:
        # a TypeError, upon which Stable-Baselines3 tries again without the mode that it wants
        raise TypeError(f"render_mode is {render_mode!r}, but growth has none; leave it out.")
    return GrowthVectorEnv(
        get_task(task) if isinstance(task, str) else task,
        num_envs,
        host_seeds=draw_host_seeds(0, HOST_POOL) if host_seeds is None else host_seeds,
        folder=_folder_of_process() if folder is None else folder,
        data_root=None if data_root is None else Path(data_root),
        **options,
    )


@cache
def _folder_of_process() -> str:
    """A folder that is gone when this process has ended."""
    folder = tempfile.mkdtemp(prefix="esper-twins-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class GrowthEnv(gym.Env[NDArray[np.float32], NDArray[np.int64]]):
    """One growing host as a plain Gymnasium environment: the host of a `GrowthVectorEnv` of one.

    `gymnasium.make("esper/blobs-v0")` makes one of the task `blobs`, once `esper` is imported. A
    step is one epoch of training; an episode of `task.epochs` epochs ends terminated. An action is
    four numbers: op, slot, blueprint (0 is none) and blend. What is impossible as a whole counts as
    WAIT and is an `ActionRefused` in `info["events"]`.

    Args:
        task: name of a task, or a `Task`.
        options: `host_seeds` (the hosts that episodes take turns with), `folder` (where their twins
            are kept, if beyond this process), `data_root`, and what else `GrowthVectorEnv` takes.

    >>> import esper, gymnasium
    >>> env = gymnasium.make("esper/blobs-v0", host_seeds=[1])
    >>> obs, info = env.reset(seed=0)
    >>> env.action_space
    MultiDiscrete([4 2 3 3])
    >>> {head: mask.shape for head, mask in info["action_mask"].items()}
    {'op': (4,), 'slot': (4, 2), 'blueprint': (2, 3), 'blend': (3,)}
    >>> obs, reward, terminated, truncated, info = env.step([1, 0, 2, 0])
    >>> info["events"][0].op, info["events"][0].blueprint
    ('GERMINATE', 'mlp')
    >>> sum(info["reward_parts"].values()) == reward
    True
    >>> env.close()
    """

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, task: str | Task, **options: Any):
        self.hosts = grow_side_by_side(task, 1, **options)
        self.observation_space = self.hosts.single_observation_space
        self.action_space = self.hosts.single_action_space
        self.masks: Masks | None = None
        """what is legal now, by head; None outside of an episode"""

    def reset(
        self, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[NDArray[np.float32], Info]:
        """Begin an episode, with the host whose turn it is; `seed` begins their order again."""
        seed = None if seed is None else read_seed(seed)
        super().reset(seed=seed)
        obs, info = self.hosts.reset(seed=seed, options=options)
        return obs[0], self._see(info)

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, Info]:
        """Carry an action out and train one epoch."""
        self._require_episode()
        choice = read_actions(action, (len(self.hosts.space.sizes),))
        if not self.action_space.contains(choice):
            raise SettingError(
                f"action {choice.tolist()} is not in {self.action_space}: give whole numbers for "
                f"op, slot, blueprint and blend."
            )
        obs, rewards, terminated, truncated, info = self.hosts.step(choice[None])
        host_info = self._see(info)
        if terminated[0]:
            self.masks = None
        return obs[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), host_info

    def _see(self, info: Info) -> Info:
        """What the one host's info is, of the info of all hosts."""
        masks = {head: mask[0] for head, mask in info["action_mask"].items()}
        self.masks = masks
        host_info = {name: values[0] for name, values in info.items() if name != "action_mask"}
        return {"action_mask": masks, **host_info}

    def _require_episode(self) -> Masks:
        """The masks of the episode that is being played."""
        if self.masks is None:
            raise EpisodeOverError(
                "the episode is over or has not begun, so there is nothing to decide. Call reset()."
            )
        return self.masks

    def action_masks(self) -> NDArray[np.bool_]:
        """One flat mask, for agents whose heads do not depend on each other (MaskablePPO).

        A slot is open if some op can be done there, a blueprint if it can be planted somewhere;
        where there is nothing of that kind, index 0 is open. Which go together it cannot say, so
        an action made of open choices may still be impossible as a whole.
        """
        masks = self._require_episode()
        uses_slot = masks["op"].copy()
        uses_slot[OP_WAIT] = not uses_slot[OP_WAIT + 1 :].any()
        slots = masks["slot"][uses_slot].any(0)
        blueprints = masks["blueprint"][masks["slot"][OP_GERMINATE]].any(0)
        return np.concatenate([masks["op"], slots, blueprints, masks["blend"]])

    def close(self) -> None:
        """Close the environment of the host; a second call changes nothing."""
        self.hosts.close()
