"""Growth as a Gymnasium vector environment over a `Population`. It applies, trains, measures and
pays; no learning.

One step: ops -> tick -> one epoch of training -> measuring -> reward -> observation and masks. A
reset trains and measures one epoch first, so an action is paid for by the epoch that follows it.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from esper.episodes import Episodes
from esper.kasmina.randomness import mix_seed
from esper.leyline.errors import SettingError
from esper.leyline.factored_actions import OP_WAIT
from esper.runtime.charges import network_flops
from esper.runtime.executors.graphs import GraphedExecutor
from esper.runtime.host import EpochReading
from esper.runtime.population import Population
from esper.runtime.tasks.task import Task
from esper.simic.rewards import FAMILIES, StepFacts, check_weights, reward_parts
from esper.simic.twins import twin_readings
from esper.tamiyo.heads import HeadSpec
from esper.tamiyo.masks import compute_batch_masks
from esper.tamiyo.observation import LARGEST, feature_names, observe
from esper.tamiyo.policy_files import Layout
from esper.telemetry.events import ActionRefused, Event, HostRolledBack, finite

Info = dict[str, Any]
MAX_ROLLBACKS = 3  # The governor gives a host up at this many rollbacks in one episode.
LEAST_CHANGE = 0.1
"""Part of the loss of guessing that is the least unit of loss:

a twin that learns nothing would make noise count.
"""


class GrowthVectorEnv(VectorEnv[Any, Any, Any]):
    """N hosts that train side by side. Episodes end by themselves after `task.epochs` epochs
    (terminated).

    A host that has ended begins a new episode in the next step, which ignores its action
    (NEXT_STEP).

    Args: host_seeds: the hosts there are; each episode takes one, and each one's twin is computed
        once. folder: where twins are kept. weights: reward terms by name; `rewards.FAMILIES` has
        sets of them. first: the number that the first host goes by in events, where other processes
        have hosts too. population: how to run hosts, as `Population` takes it (devices, executor,
        amp, data_root, splits).
    """

    def __init__(
        self,
        task: Task,
        count: int,
        *,
        host_seeds: Sequence[int],
        folder: str | Path,
        weights: Mapping[str, float] | None = None,
        use_telemetry: bool = True,
        first: int = 0,
        **population: Any,
    ):
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_modes": []}
        if not isinstance(task, Task):
            raise SettingError(
                f"task is {task!r}; get_task(name) of esper.runtime.tasks.registry gives one."
            )
        if count < 1 or not host_seeds or task.epochs < 2:
            raise SettingError(
                f"growth needs 1 host, 1 host seed and 2 epochs; got {count}, {len(host_seeds)} "
                f"and {task.epochs}."
            )
        self.task, self.num_envs, self.host_seeds = task, count, tuple(host_seeds)
        self.weights = check_weights(
            FAMILIES.get(task.clock, FAMILIES["contribution"]) if weights is None else weights
        )
        self.use_telemetry, self.first = use_telemetry, first
        found = twin_readings(task, self.host_seeds, Path(folder), **population)
        assert found is not None  # nobody is asked whether to stop
        self.twins = {seed: bridge_gaps(readings, task.chance) for seed, readings in found.items()}
        self.units = {
            seed: typical_change(readings, task.chance) for seed, readings in self.twins.items()
        }
        self.population = Population(task, [self.host_seeds[0]] * count, **population)
        self.episodes = Episodes(self.population, first)
        self.space = self.population.runs[0].model.space
        self.heads = HeadSpec.growth(*self.space.sizes[1:])
        self.layout_of = partial(
            Layout.of, self.space, use_telemetry
        )  # of two widths: what a policy here fits
        self.width = len(feature_names(self.space.slots, use_telemetry))
        self.single_observation_space = gym.spaces.Box(-LARGEST, LARGEST, (self.width,), np.float32)
        self.single_action_space = gym.spaces.MultiDiscrete(list(self.space.sizes))
        self.observation_space = batch_space(self.single_observation_space, count)
        self.action_space = batch_space(self.single_action_space, count)
        self.seed, self.begun = 0, 0
        self.is_over = np.zeros(count, bool)
        self.accuracy, self.loss = np.zeros(count), np.zeros(count)

    def parts(self) -> list["GrowthVectorEnv"]:
        """Views of these hosts to step in turn:

        two where graphs let one half train while Python has the other.
        """
        half = self.num_envs // 2  # thirds and quarters were slower: the policy is asked more often
        if not half or not isinstance(self.population.executor, GraphedExecutor):
            return [self]
        return [self._part(hosts) for hosts in (range(half), range(half, self.num_envs))]

    def _part(self, hosts: range) -> "GrowthVectorEnv":
        """Some hosts; whoever steps parts and then the whole must reset it first, which follows
        none of them.
        """
        part, own = copy.copy(self), slice(hosts.start, hosts.stop)
        part.num_envs, part.first, part.population = (
            len(hosts),
            self.first + hosts.start,
            self.population.part(hosts),
        )
        part.episodes = Episodes(part.population, part.first)
        part.is_over, part.accuracy, part.loss = (
            self.is_over[own],
            self.accuracy[own],
            self.loss[own],
        )
        part.observation_space = batch_space(self.single_observation_space, len(hosts))
        part.action_space = batch_space(self.single_action_space, len(hosts))
        return part

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        """Begin N episodes.

        `options={"episodes": k}` sets the count that decides which hosts come next.
        """
        self.reset_async(seed=seed, options=options)
        return self.reset_wait()

    def reset_async(self, *, seed: int | None = None, options: Info | None = None) -> None:
        """Begin N episodes; devices train their first epoch until `reset_wait`."""
        if seed is not None:
            self.seed, self.begun = seed, 0
        self.begun = int((options or {}).get("episodes", self.begun))
        for host in range(self.num_envs):
            self._begin(host)
        self.is_over[:] = False
        self.episodes.start()

    def reset_wait(self) -> tuple[Any, Info]:
        return self._see(self._finish(), {})

    def _begin(self, host: int) -> None:
        """A new episode in this place, with the host whose turn it is."""
        turn, place = divmod(self.begun, len(self.host_seeds))
        order = np.random.default_rng([self.seed, turn]).permutation(len(self.host_seeds))
        self.episodes.begin(host, self.host_seeds[order[place]])
        self.begun += 1
        self.accuracy[host], self.loss[host] = self.task.chance, -math.log(self.task.chance)

    def twin(self, host: int) -> EpochReading:
        """The twin's reading of the epoch that the host has just been trained for."""
        run = self.population.runs[host]
        return self.twins[run.seed][run.epoch - 1]

    def step(
        self, actions: Any
    ) -> tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], Info]:
        """One epoch of every host."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Carry actions out; devices train the epoch that follows until `step_wait`."""
        begins: list[int] = np.flatnonzero(self.is_over).tolist()
        before = [None if host in begins else self.twin(host) for host in range(self.num_envs)]
        for host in begins:
            self._begin(host)
        ops, acted = self._apply(np.asarray(actions), begins)
        ticked = self.episodes.tick()
        was = list(zip(self.accuracy.tolist(), self.loss.tolist(), strict=True))
        self._sent = before, ops, was, [[*a, *b] for a, b in zip(acted, ticked, strict=True)]
        self.episodes.start()

    def step_wait(
        self,
    ) -> tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], Info]:
        """What came of the actions that were carried out."""
        trained = self._finish()
        before, ops, was, acted = self._sent
        rewards, terminated = np.zeros(self.num_envs), np.zeros(self.num_envs, bool)
        parts: list[dict[str, float]] = [{} for _ in range(self.num_envs)]
        for host, twin_before in enumerate(before):
            if twin_before is not None:
                is_rolled_back = any(isinstance(event, HostRolledBack) for event in trained[host])
                facts = self._facts(host, ops[host], was[host], twin_before, is_rolled_back)
                parts[host] = reward_parts(facts, self.weights)
                rewards[host] = sum(parts[host].values())
                terminated[host] = facts.is_last
        self.is_over[:] = terminated
        happened = [[*a, *b] for a, b in zip(acted, trained, strict=True)]
        obs, info = self._see(happened, {"reward_parts": parts})
        return obs, rewards, terminated, np.zeros(self.num_envs, bool), info

    def _apply(
        self, actions: NDArray[np.int64], begins: Sequence[int]
    ) -> tuple[list[int], list[list[Event]]]:
        """Carry out what is possible; what is not counts as WAIT.

        Returns the ops that were done and what happened.
        """
        done, happened = [OP_WAIT] * self.num_envs, []
        for host, (op, slot, blueprint, blend) in enumerate(actions.tolist()):
            happened.append(
                [] if host in begins else self.episodes.act(host, (op, slot, blueprint, blend))
            )
            is_refused = any(isinstance(event, ActionRefused) for event in happened[host])
            done[host] = op if happened[host] and not is_refused else OP_WAIT
        return done, happened

    def _facts(
        self,
        host: int,
        op: int,
        was: tuple[float, float],
        twin_before: EpochReading,
        is_rolled_back: bool,
    ) -> StepFacts:
        run, twin, flops = self.population.runs[host], self.twin(host), self.population.flops
        if (
            self.population.clock is not None and run.epoch == 2
        ):  # a twin pays for no measurement: it has seen more
            was = _measured(twin_before.held_out_accuracy), _measured(twin_before.held_out_loss)
        model, added = run.model, run.model.fossilized_params + run.model.active_params
        is_lost = self.population.governors[host].rollbacks >= MAX_ROLLBACKS
        return StepFacts(
            accuracy=float(self.accuracy[host]),
            accuracy_before=was[0],
            twin_accuracy=_measured(twin.held_out_accuracy),
            twin_accuracy_before=_measured(twin_before.held_out_accuracy),
            loss=float(self.loss[host]),
            loss_before=was[1],
            twin_loss=_measured(twin.held_out_loss),
            twin_loss_before=_measured(twin_before.held_out_loss),
            loss_unit=self.units[run.seed],
            op=op,
            params_share=added / model.host_params,
            flops_share=network_flops(model, flops) / flops.whole - 1.0,
            kept_share=model.fossilized_params / added if added else 0.0,
            is_last=is_lost or run.epoch >= self.task.epochs,
            is_rolled_back=is_rolled_back,
            is_lost=is_lost,
        )

    def _finish(self) -> list[list[Event]]:
        """Wait for the epoch of every host.

        One without a reading stands where it stood, and so does a twin.
        """
        happened = self.episodes.finish()
        for host, reading in enumerate(self.population.readings()):
            if reading is not None and _is_measured(reading):
                self.accuracy[host] = _measured(reading.held_out_accuracy)
                self.loss[host] = _measured(reading.held_out_loss)
        return happened

    def _see(self, happened: list[list[Event]], more: Info) -> tuple[Any, Info]:
        info = {
            "action_mask": compute_batch_masks(self.episodes.views),
            "reports": [view.reports for view in self.episodes.views],
            "ledger": [run.ledger.counts() for run in self.population.runs],
            "events": happened,
            **more,
        }
        return observe(self.episodes.trackers, self.use_telemetry), info


def _measured(value: float | None) -> float:
    assert value is not None, "the epoch has not been measured"
    return value


def _is_measured(reading: EpochReading) -> bool:
    return (
        finite(reading.held_out_loss) is not None and finite(reading.held_out_accuracy) is not None
    )


def bridge_gaps(readings: Sequence[EpochReading], chance: float) -> list[EpochReading]:
    """A twin that broke down for an epoch counts as standing where it stood before, which at first
    is guessing.
    """
    guessing = replace(readings[0], held_out_loss=-math.log(chance), held_out_accuracy=chance)
    return list(
        accumulate(readings, lambda was, now: now if _is_measured(now) else was, initial=guessing)
    )[1:]


def typical_change(twin: Sequence[EpochReading], chance: float) -> float:
    """How far a twin's held-out loss falls in its episode, or a part of the loss of guessing if
    that is more.
    """
    losses = [_measured(reading.held_out_loss) for reading in twin]
    return max(losses[0] - min(losses), LEAST_CHANGE * -math.log(chance))


def draw_host_seeds(seed: int, count: int) -> tuple[int, ...]:
    """The hosts of a run, from its seed."""
    return tuple(mix_seed(seed, 7, number) for number in range(count))
