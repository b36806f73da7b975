"""Growth as a Gymnasium vector environment over a `Population`.

It applies, trains, measures and pays; nothing learns here.

One step: ops -> tick -> one epoch of training -> measuring -> reward -> observation and masks. A
reset trains and measures one epoch first, so an action is paid for by the epoch that follows it.
The last step ends with one more measurement, of the network without its undecided seeds.
"""

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from torch import Tensor

from esper.episodes import Episodes
from esper.kasmina.randomness import read_seed
from esper.leyline.errors import EpisodeOverError, SettingError, outline
from esper.leyline.factored_actions import OP_WAIT
from esper.runtime.charges import network_flops
from esper.runtime.executors.graphs import GraphedExecutor
from esper.runtime.host import EpochReading
from esper.runtime.ledger import add_up
from esper.runtime.population import Population
from esper.runtime.tasks.task import Task
from esper.simic.contributions import ContributionBook, Worth
from esper.simic.host_seeds import read_count, read_host_seeds, read_share
from esper.simic.rewards import FAMILIES, StepFacts, check_weights, in_units, reward_parts
from esper.simic.twins import raise_twins
from esper.tamiyo.heads import HeadSpec
from esper.tamiyo.layout import ObservationLayout
from esper.tamiyo.masks import padded_masks
from esper.tamiyo.policy_files import Layout
from esper.tamiyo.readings import FURTHEST, draw_lacking, observe
from esper.telemetry.events import ActionRefused, Event, HostRolledBack, finite

Info = dict[str, Any]
StepResult = tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], Info]
"""observations, rewards, terminated, truncated, info: what Gymnasium wants of a step"""
MAX_ROLLBACKS = 3
"""the governor gives a host up at this many rollbacks in one episode"""
LEAST_CHANGE = 0.1
"""share of the loss of guessing that is the least unit of loss; the unit of a twin that learns
nothing would make noise count
"""


@dataclass(frozen=True)
class Standing:
    """How well a host did when it was last measured."""

    accuracy: float
    loss: float


@dataclass(frozen=True)
class Before:
    """A host as it stood before the step that is being played."""

    standing: Standing
    worth: Worth
    op: int  # what was done
    twin: EpochReading | None  # None for a host whose episode begins


@dataclass(frozen=True)
class SentStep:
    """What `step_wait` needs to know of the step that `step_async` has begun."""

    before: list[Before]
    events: list[list[Event]]


class GrowthVectorEnv(VectorEnv[Any, Any, Any]):
    """N hosts that train side by side, each in episodes of `task.epochs` epochs.

    An episode ends by itself (terminated). A host that has ended begins a new episode in the next
    step, which ignores its action (NEXT_STEP). An action is four numbers: op, slot, blueprint and
    blend; `info["action_mask"]` has what is legal, by head.

    Args:
        task: what hosts learn, as `esper.runtime.tasks.registry.get_task` gives it.
        count: N.
        host_seeds: the hosts there are. Each episode takes one of them, and the twin of each,
            the same host never grown, is computed once.
        folder: where twins are kept.
        weights: reward terms by name; `esper.simic.rewards.FAMILIES` has sets of them.
        gamma: the discount with which what is earned will be added up.
        lacking: groups of readings that no observation has (`esper.tamiyo.readings.GROUPS`).
        drop_readings: chance of each group to be absent in an episode, as in a loop that lacks it.
        layout: where the numbers of an observation lie, and how wide masks are; by default as many
            slots and blueprints as the host has.
        first: number of the first host in events, where other processes have hosts too.
        population: how to run hosts, as `Population` takes it (devices, executor, amp,
            data_root, splits).

    >>> from dataclasses import replace
    >>> import esper
    >>> from esper.runtime.tasks.registry import get_task
    >>> task = replace(get_task("blobs"), epochs=3, epoch_examples=64)
    >>> env = esper.GrowthVectorEnv(task, 2, host_seeds=[1, 2], folder="twins")
    >>> obs, info = env.reset(seed=0)
    >>> obs.shape == (2, env.width)
    True
    >>> wait = [0, 0, 0, 0]
    >>> for epoch in (2, 3):
    ...     obs, rewards, terminated, truncated, info = env.step([wait, wait])
    >>> terminated.tolist(), truncated.tolist()
    ([True, True], [False, False])
    >>> list(info["reward_parts"][0])
    ['contribution:r0c0', 'contribution:r0c1', 'harm', 'rent', 'churn', 'breakdown']
    """

    def __init__(
        self,
        task: Task,
        count: int,
        *,
        host_seeds: Sequence[int],
        folder: str | Path,
        weights: Mapping[str, float] | None = None,
        gamma: float = 0.99,
        lacking: Collection[str] = (),
        drop_readings: float = 0.0,
        layout: ObservationLayout | None = None,
        first: int = 0,
        **population: Any,
    ):
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_modes": []}
        self.host_seeds = read_host_seeds(host_seeds)
        count = read_count(task, count, self.host_seeds)
        self.task = task
        self.num_envs = count
        if weights is None:
            weights = FAMILIES.get(task.clock, FAMILIES["contribution"])
        self.weights = check_weights(weights)
        self.gamma = read_share(gamma, "gamma", "discount")
        self.lacking = frozenset(lacking)
        self.drop_readings = read_share(drop_readings, "drop_readings", "chance")
        self.lacks = [self.lacking] * count
        self.first = first
        twins = raise_twins(task, self.host_seeds, Path(folder), **population)
        assert twins is not None  # no should_stop was given that could end it
        self.twin_ledger = add_up(twin.ledger for twin in twins.values())
        self.twins = {seed: bridge_gaps(twin.readings, task.chance) for seed, twin in twins.items()}
        self.units = {seed: typical_change(twin, task.chance) for seed, twin in self.twins.items()}
        self.population = Population(task, [self.host_seeds[0]] * count, **population)
        self.population.measure_left()
        self.population.expect_undecided(range(count))
        self.episodes = Episodes(self.population, first)
        self.books = [ContributionBook() for _ in range(count)]
        self.space = self.population.space
        self._take_layout(layout)
        self.seed = 0
        self.begun = 0
        self.is_over = np.zeros(count, bool)
        self.accuracy = np.zeros(count)
        self.loss = np.zeros(count)

    def _take_layout(self, layout: ObservationLayout | None) -> None:
        """Spaces and heads as wide as the layout, or as the host."""
        _, slots, blueprints, blends = self.space.sizes
        self.layout = layout or ObservationLayout(slots, blueprints)
        self.heads = HeadSpec.growth(self.layout.num_slots, self.layout.num_blueprints, blends)
        self.width = self.layout.width
        bounds = (-FURTHEST, FURTHEST)
        self.single_observation_space = gym.spaces.Box(*bounds, (self.width,), np.float32)
        self.single_action_space = gym.spaces.MultiDiscrete(list(self.heads.sizes))
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def layout_of(self, hidden_dim: int, head_dim: int) -> Layout:
        """What a policy of these widths is built for if it learns here."""
        return Layout.of(self.space, hidden_dim, head_dim, lacking=self.lacking)

    def locate(self, host: int) -> tuple["GrowthVectorEnv", int]:
        """Where a host of a round is: its environment, and its row there."""
        return self, host

    def settle(self) -> None:
        """Wait for hosts that still train, where a round stops in the middle."""
        self.population.executor.settle(self.population.runs)

    @property
    def task_names(self) -> list[str]:
        """The task of each host."""
        return [self.task.name] * self.num_envs

    def begin_from(self, seed: int) -> None:
        """Let this seed decide which hosts come next."""
        self.seed = seed

    @property
    def epochs(self) -> int:
        """Epochs of an episode."""
        return self.task.epochs

    @property
    def twin_count(self) -> int:
        """How many twins there are."""
        return len(self.twins)

    @property
    def corpus(self) -> str | None:
        """What the hosts' data rest on, where that differs between machines."""
        return self.population.corpus

    def describe(self, report: Callable[[str], None]) -> None:
        """Report what episodes may cost and rest on, where settings do not say so."""
        self.population.describe(report)

    def parts(self) -> list["GrowthVectorEnv"]:
        """Views of these hosts to step in turn.

        There are two where graphs let one half train while Python has the other, else one.
        """
        half = self.num_envs // 2  # thirds and quarters were slower: the policy is asked more often
        if not half or not isinstance(self.population.executor, GraphedExecutor):
            return [self]
        return [self._part(hosts) for hosts in (range(half), range(half, self.num_envs))]

    def _part(self, hosts: range) -> "GrowthVectorEnv":
        """Some of the hosts.

        The whole does not follow its parts: reset it before you step it again.
        """
        part = copy.copy(self)
        rows = slice(hosts.start, hosts.stop)
        part.num_envs = len(hosts)
        part.first = self.first + hosts.start
        part.population = self.population.part(hosts)
        part.episodes = Episodes(part.population, part.first)
        part.books = self.books[rows]
        part.lacks = self.lacks[rows]
        part.is_over = self.is_over[rows]
        part.accuracy = self.accuracy[rows]
        part.loss = self.loss[rows]
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
            self.seed = read_seed(seed)
            self.begun = 0
        if not isinstance(options, Mapping | None):
            raise SettingError(f"options is {outline(options)}; write options={{'episodes': 0}}.")
        self.begun = read_seed((options or {}).get("episodes", self.begun), "options['episodes']")
        for host in range(self.num_envs):
            self._begin(host)
        self.is_over[:] = False
        self.episodes.start()

    def reset_wait(self) -> tuple[Any, Info]:
        """Observations and info after the epoch that `reset_async` has begun."""
        return self._see(self._finish(), {"reward_parts": [{} for _ in range(self.num_envs)]})

    def _begin(self, host: int) -> None:
        """A new episode in place of this host's, with the seed whose turn it is."""
        turn, index = divmod(self.begun, len(self.host_seeds))
        order = np.random.default_rng([self.seed, turn]).permutation(len(self.host_seeds))
        self.episodes.begin(host, self.host_seeds[order[index]])
        draw = np.random.default_rng([self.seed, 1, self.begun])
        self.lacks[host] = self.lacking | draw_lacking(self.drop_readings, draw)
        self.begun += 1
        self.accuracy[host] = self.task.chance
        self.loss[host] = -math.log(self.task.chance)
        self.books[host].begin(self.population.runs[host].slots)

    def twin(self, host: int) -> EpochReading:
        """The twin's reading of the epoch that the host has just been trained for."""
        run = self.population.runs[host]
        return self.twins[run.seed][run.epoch - 1]

    def step(self, actions: Any) -> StepResult:
        """One epoch of every host."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Carry actions out; devices train the epoch that follows until `step_wait`."""
        if not self.begun:
            raise EpisodeOverError("no episode has begun, so there is nothing to do. Call reset().")
        choices = read_actions(actions, (self.num_envs, len(self.space.sizes)))
        begins: list[int] = np.flatnonzero(self.is_over).tolist()
        twins_before = [
            None if host in begins else self.twin(host) for host in range(self.num_envs)
        ]
        for host in begins:
            self._begin(host)
        ops, acted = self._apply(choices, begins)
        ticked = self.episodes.tick()
        before = []
        for host, (op, twin) in enumerate(zip(ops, twins_before, strict=True)):
            standing = Standing(accuracy=float(self.accuracy[host]), loss=float(self.loss[host]))
            before.append(Before(standing=standing, worth=self.books[host].worth, op=op, twin=twin))
        self._sent = SentStep(before=before, events=_chained(acted, ticked))
        self.episodes.start()

    def step_wait(self) -> StepResult:
        """What came of the actions that were carried out."""
        trained = self._finish()
        sent = self._sent
        rewards = np.zeros(self.num_envs)
        terminated = np.zeros(self.num_envs, bool)
        parts: list[dict[str, float]] = [{} for _ in range(self.num_envs)]
        for host, before in enumerate(sent.before):
            if before.twin is None:
                continue
            is_rolled_back = any(isinstance(event, HostRolledBack) for event in trained[host])
            facts = self._facts(host, before, before.twin, is_rolled_back)
            parts[host] = reward_parts(facts, self.weights)
            rewards[host] = sum(parts[host].values())
            terminated[host] = facts.is_last
        self.is_over[:] = terminated
        obs, info = self._see(_chained(sent.events, trained), {"reward_parts": parts})
        return obs, rewards, terminated, np.zeros(self.num_envs, bool), info

    def _apply(
        self, actions: NDArray[np.int64], begins: Sequence[int]
    ) -> tuple[list[int], list[list[Event]]]:
        """Carry out what is possible; what is not counts as WAIT.

        Returns the ops that were done and what happened, by host.
        """
        done = []
        happened = []
        for host, (op, slot, blueprint, blend) in enumerate(actions.tolist()):
            events: list[Event] = []
            if host not in begins:
                events = self.episodes.act(host, (op, slot, blueprint, blend), self.space)
            is_refused = any(isinstance(event, ActionRefused) for event in events)
            done.append(op if events and not is_refused else OP_WAIT)
            happened.append(events)
        return done, happened

    def _facts(
        self,
        host: int,
        before: Before,
        twin_before: EpochReading,
        is_rolled_back: bool,
    ) -> StepFacts:
        """What rewards may know of a host's epoch."""
        run = self.population.runs[host]
        model = run.model
        twin_standing = _standing_of(self.twin(host))
        twin_standing_before = _standing_of(twin_before)
        standing_before = before.standing
        if run.clock is not None and run.epoch == 2:
            # a twin pays for no measurement, so in the first epoch it has seen more than the host
            standing_before = twin_standing_before
        flops = run.flops
        added = model.fossilized_params + model.active_params
        is_last = self._is_last(host)
        measured = model.fossilized_params if is_last else added
        worth = self.books[host].worth
        return StepFacts(
            accuracy=float(self.accuracy[host]),
            accuracy_before=standing_before.accuracy,
            twin_accuracy=twin_standing.accuracy,
            twin_accuracy_before=twin_standing_before.accuracy,
            loss=float(self.loss[host]),
            loss_before=standing_before.loss,
            twin_loss=twin_standing.loss,
            twin_loss_before=twin_standing_before.loss,
            loss_unit=self.units[run.seed],
            op=before.op,
            params_share=added / model.host_params,
            flops_share=network_flops(model, flops) / flops.whole - 1.0,
            kept_share=model.fossilized_params / measured if measured else 0.0,
            is_last=is_last,
            is_rolled_back=is_rolled_back,
            is_lost=self._is_lost(host),
            contributions=worth.contributions,
            contributions_before=before.worth.contributions,
            lead=worth.lead,
            lead_before=before.worth.lead,
            gamma=self.gamma,
        )

    def _is_lost(self, host: int) -> bool:
        """Whether the governor has given the host up."""
        return self.population.governors[host].rollbacks >= MAX_ROLLBACKS

    def _is_last(self, host: int) -> bool:
        """Whether the episode of a host ends with the epoch that it was just trained for."""
        return self._is_lost(host) or self.population.runs[host].epoch >= self.task.epochs

    def _finish(self) -> list[list[Event]]:
        """Wait for the epoch of every host; what happened, by host.

        A host without a reading stands where it stood, and so does a twin. One whose episode ends
        stands where what is left of it stands; one that was given up is not measured again.
        """
        happened = self.episodes.finish()
        for host, run in enumerate(self.population.runs):
            if self._is_last(host) and not self._is_lost(host):
                happened[host] += self.episodes.measure_remains(host)
            if run.reading is not None and _is_measured(run.reading):
                standing = _standing_of(run.reading)
                self.accuracy[host] = standing.accuracy
                self.loss[host] = standing.loss
            unit = self.units[run.seed]
            twin_loss = _standing_of(self.twin(host)).loss
            lead = in_units(twin_loss - float(self.loss[host]), unit)
            self.books[host].read(run, happened[host], lead, unit)
        return happened

    def _see(self, happened: list[list[Event]], more: Info) -> tuple[Any, Info]:
        """Observations and info of all hosts as they stand."""
        info = {
            "action_mask": padded_masks(self.episodes.views, self.layout),
            "reports": [view.reports for view in self.episodes.views],
            "ledger": [run.ledger.counts() for run in self.population.runs],
            "events": happened,
            **more,
        }
        sights = [self.episodes.sight(host) for host in range(self.num_envs)]
        return observe(sights, self.layout, self.lacks), info


def _chained(earlier: list[list[Event]], later: list[list[Event]]) -> list[list[Event]]:
    """The events of each host, one after the other."""
    return [first + second for first, second in zip(earlier, later, strict=True)]


def _standing_of(reading: EpochReading) -> Standing:
    accuracy = reading.held_out_accuracy
    loss = reading.held_out_loss
    assert accuracy is not None, "the epoch has not been measured"
    assert loss is not None, "the epoch has not been measured"
    return Standing(accuracy=accuracy, loss=loss)


def _is_measured(reading: EpochReading) -> bool:
    has_loss = finite(reading.held_out_loss) is not None
    return has_loss and finite(reading.held_out_accuracy) is not None


def bridge_gaps(readings: Sequence[EpochReading], chance: float) -> list[EpochReading]:
    """A twin's readings; where it broke down it stands where it stood before.

    Before its first epoch a twin guesses.
    """
    last = replace(readings[0], held_out_loss=-math.log(chance), held_out_accuracy=chance)
    bridged = []
    for reading in readings:
        if _is_measured(reading):
            last = reading
        bridged.append(last)
    return bridged


def typical_change(twin: Sequence[EpochReading], chance: float) -> float:
    """How far a twin's held-out loss falls in its episode.

    It is at least `LEAST_CHANGE` of the loss of guessing.
    """
    losses = [_standing_of(reading).loss for reading in twin]
    return max(losses[0] - min(losses), LEAST_CHANGE * -math.log(chance))


def read_actions(actions: Any, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Actions as whole numbers of this shape, the last axis of which are the heads."""
    if isinstance(actions, Tensor):
        actions = actions.detach().cpu()
    try:
        choices = np.asarray(actions)
    except ValueError:  # rows of different lengths
        choices = np.empty(0)
    if choices.shape != shape or choices.dtype.kind not in "iub":
        rows = f"{shape[0]} rows of {shape[1]}" if len(shape) > 1 else f"{shape[0]}"
        raise SettingError(
            f"got actions {outline(actions)}; give {rows} whole numbers: op, slot, blueprint and "
            f"blend."
        )
    return choices.astype(np.int64)
