"""Growth as a Gymnasium vector environment over a `Population`. It applies, trains, measures and pays; no learning.

One step: ops -> tick -> one epoch of training -> measuring -> reward -> observation and masks. A reset trains and
measures one epoch first, so an action is paid for by the epoch that follows it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from esper.kasmina.changes import tell_changes
from esper.kasmina.randomness import mix_seed
from esper.leyline.errors import SettingError
from esper.leyline.factored_actions import OP_WAIT, FactoredAction
from esper.leyline.legality import GrowthView, refusal
from esper.runtime.host import EpochReading
from esper.runtime.ledger import network_flops
from esper.runtime.population import Population
from esper.runtime.tasks import Task
from esper.simic.observing import epoch_signals, loss_scale
from esper.simic.rewards import FAMILIES, StepFacts, check_weights, reward_parts
from esper.simic.twins import twin_readings
from esper.tamiyo.heads import HeadSpec
from esper.tamiyo.masks import compute_batch_masks
from esper.tamiyo.observation import LARGEST, observation_width, observe
from esper.tamiyo.signals import SignalTracker
from esper.telemetry.events import ActionRefused, ActionTaken, Event, HostRolledBack, finite

MAX_ROLLBACKS = 3
"""The governor gives a host up at this many rollbacks in one episode."""
LEAST_CHANGE = 0.1
"""Part of the loss of guessing that is the least unit of loss: a twin that learns nothing would make noise count."""


class GrowthVectorEnv(VectorEnv[Any, Any, Any]):
    """N hosts that live side by side. Episodes end by themselves after `task.epochs` epochs (terminated).

    A host that has ended begins a new episode in the next step, which ignores its action (NEXT_STEP).

    Args:
        host_seeds: the hosts there are; each episode takes one, and each one's twin is computed once.
        folder: where twins are kept.
        weights: reward terms by name; `rewards.FAMILIES` has two sets.
        first: the number that the first host goes by in events, where other processes have hosts too.
        population: how to run hosts, as `Population` takes it (devices, executor, amp, data_root, splits).
    """

    def __init__(
        self,
        task: Task,
        count: int,
        *,
        host_seeds: Sequence[int],
        folder: Path,
        weights: Mapping[str, float] | None = None,
        use_telemetry: bool = True,
        first: int = 0,
        **population: Any,
    ):
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_modes": []}
        if count < 1 or not host_seeds or task.epochs < 2:
            raise SettingError(
                f"{count} hosts, {len(host_seeds)} host seeds, episodes of {task.epochs} epochs: growth needs at least "
                "one host, one seed, and two epochs (the first is measured before anything is decided)."
            )
        self.task, self.num_envs, self.host_seeds = task, count, tuple(host_seeds)
        self.weights = check_weights(FAMILIES["contribution"] if weights is None else weights)
        self.use_telemetry, self.first = use_telemetry, first
        found = twin_readings(task, self.host_seeds, folder, **population)
        assert found is not None  # nobody is asked whether to stop
        self.twins = {seed: bridge_gaps(readings, task.chance) for seed, readings in found.items()}
        self.units = {seed: typical_change(readings, task.chance) for seed, readings in self.twins.items()}
        self.population = Population(task, [self.host_seeds[0]] * count, **population)
        model = self.population.runs[0].model
        self.space = model.space
        self.heads = HeadSpec.of_space(self.space)
        self.budget = model.budget
        self.width = observation_width(self.space.slots.num_slots, use_telemetry)
        self.single_observation_space = gym.spaces.Box(-LARGEST, LARGEST, (self.width,), np.float32)
        self.single_action_space = gym.spaces.MultiDiscrete(list(self.space.sizes))
        self.observation_space = batch_space(self.single_observation_space, count)
        self.action_space = batch_space(self.single_action_space, count)
        self.seed, self.episodes = 0, 0
        self.refused = 0
        self.is_over = np.zeros(count, bool)
        self.trackers: list[SignalTracker] = []
        self.views: list[GrowthView] = []
        self.accuracy = np.zeros(count)
        self.loss = np.zeros(count)

    # -- episodes ------------------------------------------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin N episodes. `options={"episodes": k}` sets the count that decides which hosts come next."""
        if seed is not None:
            self.seed, self.episodes = seed, 0
        self.episodes = int((options or {}).get("episodes", self.episodes))
        self.trackers = [self._begin(host) for host in range(self.num_envs)]
        self.is_over[:] = False
        happened: list[list[Event]] = [[] for _ in range(self.num_envs)]
        self._live(happened)
        return self._see(happened, {})

    def _begin(self, host: int) -> SignalTracker:
        """A new episode in this place, with the host whose turn it is."""
        order = np.random.default_rng([self.seed, self.episodes // len(self.host_seeds)]).permutation(
            len(self.host_seeds)
        )
        self.population.reset(host, self.host_seeds[order[self.episodes % len(self.host_seeds)]])
        self.episodes += 1
        self.accuracy[host], self.loss[host] = self.task.chance, -math.log(self.task.chance)
        return SignalTracker(self.space.slots, loss_scale=loss_scale(self.task))

    def twin(self, host: int) -> EpochReading:
        """The twin's reading of the epoch that the host has just lived."""
        run = self.population.runs[host]
        return self.twins[run.seed][run.epoch - 1]

    # -- a step ------------------------------------------------------------------------------------------------------

    def step(
        self, actions: Any
    ) -> tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """One epoch of every host."""
        begins: list[int] = np.flatnonzero(self.is_over).tolist()
        happened: list[list[Event]] = [[] for _ in range(self.num_envs)]
        before = [None if host in begins else self.twin(host) for host in range(self.num_envs)]
        for host in begins:
            self.trackers[host] = self._begin(host)
        ops = self._apply(np.asarray(actions), begins, happened)
        for host, changes in enumerate(self.population.tick()):
            happened[host] += tell_changes(self.first + host, self._epoch(host), changes)
        was = self.accuracy.copy(), self.loss.copy()
        broken = self._live(happened)
        rewards, terminated = np.zeros(self.num_envs), np.zeros(self.num_envs, bool)
        parts: list[dict[str, float]] = [{} for _ in range(self.num_envs)]
        for host, twin_before in enumerate(before):
            if twin_before is not None:
                facts = self._facts(host, ops[host], was, twin_before, host in broken)
                parts[host] = reward_parts(facts, self.weights)
                rewards[host] = sum(parts[host].values())
                terminated[host] = facts.is_last
        self.is_over = terminated.copy()
        obs, info = self._see(happened, {"reward_parts": parts})
        return obs, rewards, terminated, np.zeros(self.num_envs, bool), info

    def _live(self, happened: list[list[Event]]) -> set[int]:
        """Train and measure one epoch of every host. Returns the hosts that the governor had to bring back."""
        self.population.train_epoch()
        broken = set()
        for rollback in self.population.evaluate():
            host, epoch = rollback.host, self._epoch(rollback.host)
            broken.add(host)
            happened[host].append(HostRolledBack(self.first + host, epoch, rollback.reason))
            happened[host] += tell_changes(self.first + host, epoch, rollback.changes)
        self._track()
        return broken

    def _epoch(self, host: int) -> int:
        return self.population.runs[host].epoch

    def _apply(self, actions: NDArray[np.int64], begins: Sequence[int], happened: list[list[Event]]) -> list[int]:
        """Carry out what is possible; what is not becomes WAIT and is counted. Returns the ops that were done."""
        done = [OP_WAIT] * self.num_envs
        for host, (op, slot, blueprint, blend) in enumerate(actions.tolist()):
            if op == OP_WAIT or host in begins:
                continue
            action = FactoredAction.from_indices(
                op_idx=op, slot_idx=slot, blueprint_idx=blueprint, blend_idx=blend, space=self.space
            )
            epoch, name = self._epoch(host), action.op.name
            problem = refusal(action, self.views[host])
            if problem is not None:
                self.refused += 1
                happened[host].append(ActionRefused(self.first + host, epoch, name, action.slot_id, str(problem)))
                continue
            change = self.population.apply(host, action)
            done[host] = op
            planted = (action.blueprint_id, action.blend_algorithm_id) if action.is_germinate else (None, None)
            happened[host].append(ActionTaken(self.first + host, epoch, name, action.slot_id, *planted))
            happened[host] += tell_changes(self.first + host, epoch, [change] if change else [])
        return done

    def _facts(
        self,
        host: int,
        op: int,
        was: tuple[NDArray[np.float64], NDArray[np.float64]],
        twin_before: EpochReading,
        is_rolled_back: bool,
    ) -> StepFacts:
        run, twin = self.population.runs[host], self.twin(host)
        model = run.model
        own = self.population.flops.whole
        added = model.fossilized_params + model.active_params
        is_lost = self.population.governors[host].rollbacks >= MAX_ROLLBACKS
        return StepFacts(
            accuracy=float(self.accuracy[host]),
            accuracy_before=float(was[0][host]),
            twin_accuracy=_measured(twin.held_out_accuracy),
            twin_accuracy_before=_measured(twin_before.held_out_accuracy),
            loss=float(self.loss[host]),
            loss_before=float(was[1][host]),
            twin_loss=_measured(twin.held_out_loss),
            twin_loss_before=_measured(twin_before.held_out_loss),
            loss_unit=self.units[run.seed],
            op=op,
            params_share=added / model.host_params,
            flops_share=network_flops(model, self.population.flops) / own - 1.0,
            kept_share=model.fossilized_params / added if added else 0.0,
            is_last=is_lost or run.epoch >= self.task.epochs,
            is_rolled_back=is_rolled_back,
            is_lost=is_lost,
        )

    # -- seeing ------------------------------------------------------------------------------------------------------

    def _track(self) -> None:
        """Take in the epoch's readings. A host without any stands where it stood, and so does a twin."""
        self.views = self.population.views()
        for host, (run, view) in enumerate(zip(self.population.runs, self.views, strict=True)):
            reading = run.reading
            assert reading is not None
            if _is_measured(reading):
                self.accuracy[host] = _measured(reading.held_out_accuracy)
                self.loss[host] = _measured(reading.held_out_loss)
            self.trackers[host].update(epoch_signals(self.task, run.epoch, reading, view), view.reports)

    def _see(self, happened: list[list[Event]], more: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        info = {
            "action_mask": compute_batch_masks(self.views),
            "reports": [view.reports for view in self.views],
            "ledger": [run.ledger.counts() for run in self.population.runs],
            "events": happened,
            **more,
        }
        return observe(self.trackers, self.use_telemetry), info


def _measured(value: float | None) -> float:
    assert value is not None, "the epoch has not been measured"
    return value


def _is_measured(reading: EpochReading) -> bool:
    return finite(reading.held_out_loss) is not None and finite(reading.held_out_accuracy) is not None


def bridge_gaps(readings: Sequence[EpochReading], chance: float) -> list[EpochReading]:
    """A twin that broke down for an epoch counts as standing where it stood before, which at first is guessing."""
    steady: list[EpochReading] = []
    stands = replace(readings[0], held_out_loss=-math.log(chance), held_out_accuracy=chance)
    for reading in readings:
        stands = reading if _is_measured(reading) else stands
        steady.append(stands)
    return steady


def typical_change(twin: Sequence[EpochReading], chance: float) -> float:
    """How far a twin's held-out loss falls in its episode, or a part of the loss of guessing if that is more."""
    losses = [_measured(reading.held_out_loss) for reading in twin]
    return max(losses[0] - min(losses), LEAST_CHANGE * -math.log(chance))


def draw_host_seeds(seed: int, count: int) -> tuple[int, ...]:
    """The hosts of a run, from its seed."""
    return tuple(mix_seed(seed, 7, number) for number in range(count))
