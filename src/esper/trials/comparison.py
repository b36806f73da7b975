"""`esper compare`: policies and static controls on the same hosts, data orders and rate plans.

Every arm is played on every host seed. What it comes to is in `results`.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, product
from typing import Any, TypeVar
from zlib import crc32

import torch
from pydantic import TypeAdapter
from safetensors.torch import load, save_file

from esper.episodes import Episodes, facts_of
from esper.leyline.errors import MeasurementError, SaveError
from esper.runtime.devices import limited_threads, repeatable_kernels
from esper.runtime.population import Population
from esper.runtime.splits import Splits
from esper.runtime.tasks.families import at_rate, for_host, shallowest
from esper.runtime.tasks.task import Task
from esper.simic.checkpoints import episodes_of, other_episodes
from esper.storage.runfolder import ARMS, PLANS, PRETRAINED, label_policies
from esper.storage.store import NewFile, Save, Store, fitting
from esper.tamiyo.policies import Policy
from esper.tamiyo.policy_names import NEVER, Rule, Sham, build_policy, parse, read_policy
from esper.tamiyo.rules import HostFacts, replay
from esper.telemetry.events import (
    ActionTaken,
    Event,
    HostEpoch,
    StageChanged,
    from_record,
    to_record,
)
from esper.trials.arms import ArmRun, Entry, Planting, Say, Stopped, make_decider, run_entries
from esper.trials.config import START, CompareConfig
from esper.trials.results import ORACLE, ArmRow, Curve, CurvePoint, Trials, best_by_validation
from esper.trials.searching import (
    PlanOnHost,
    Searching,
    SearchSettings,
    placements_of,
    read_search,
)

Item = TypeVar("Item")

# Most hosts side by side on a GPU; on a CPU it is one arm at a time.
_MOST_ON_A_GPU = 64


class Comparison:
    """Runs what is not on disk yet. Arms with equal settings run side by side in one population.

    `say` gets lines for people; `should_stop` is asked after every epoch. `watch` gets how many
    epochs have been played by this call, counted host by host, and how many it plays.
    """

    def __init__(
        self,
        config: CompareConfig,
        say: Say,
        should_stop: Callable[[], bool],
        splits: Splits | None = None,
        watch: Callable[[int, int], None] = lambda done, total: None,
    ):
        self.config = config
        self.say = say
        self.should_stop = should_stop
        self.watch = watch
        self.played = 0  # epochs, host by host
        self.planned = 0
        self.task = config.task.build()
        self.splits = splits or self.task.load(config.data_root)
        self.most_hosts = _MOST_ON_A_GPU if config.devices[0].startswith("cuda") else config.seeds
        self.done: dict[tuple[str, float], Trials] = {}  # by arm and rate
        self.plans: dict[tuple[str, float], str] = {}  # what searches found, by arm and rate
        self.weights: dict[int, Mapping[str, torch.Tensor]] = {}  # of pretrained hosts, by seed
        probe = self.populate(self.task, [0])
        probe.describe(say)
        fewest = shallowest(self.task)
        if fewest is not self.task:  # plans and rules are to fit every host
            probe = self.populate(fewest, [0])
        self._refuse_unfitting_rules(probe)
        model = probe.runs[0].model
        self.facts = facts_of(model, self.task.epochs)
        self.trained = {policy: read_policy(policy) for policy in config.files}
        for trained in self.trained.values():  # what does not fit is refused before any episode
            build_policy(trained, self.facts)
        for file in config.files.values():
            warning = None if file.is_shipped else other_episodes(file.path, self.task)
            if warning:
                say(warning)
        placements = placements_of(model, self.task.epochs)
        self.placements = {f"{ORACLE} {name}": plan for name, plan in placements.items()}

    def _refuse_unfitting_rules(self, probe: Population) -> None:
        """Refuse settings that do not fit the hosts, before anything is played."""
        for policy in self.config.policies:
            kind = parse(policy)
            if isinstance(kind, Rule) and not isinstance(kind, Sham):
                make_decider(Episodes(probe), 0, policy)

    def populate(self, task: Task, seeds: Sequence[int]) -> Population:
        """Hosts of a task on the comparison's device and data."""
        return Population(
            task, seeds, self.config.devices, splits=self.splits, **self.config.way_to_run
        )

    def run(self) -> dict[tuple[str, float], Trials]:
        """The trials of every arm, by arm and rate."""
        config = self.config
        with repeatable_kernels(config.deterministic), limited_threads(config.threads):
            self.planned = self._plan()
            if config.pretrain:
                self._pretrain(config.host_seeds)
            for stage, rate in product(self._stages(), config.rates):
                for arms in stage:
                    self.play_arms(arms, rate)
        return self.done

    def _plan(self) -> int:
        """How many epochs are to be played, host by host.

        It is an estimate: searches play no plan twice, and how long arms of equal FLOPs are is
        known when the others are over.
        """
        config = self.config
        known_hosts = [self._host_store(seed).manifest.is_file() for seed in config.host_seeds]
        epochs = config.pretrain * known_hosts.count(False)
        for stage, rate in product(self._stages(), config.rates):
            for arm in chain.from_iterable(stage):
                if not self._arm_store(arm, rate).manifest.is_file():
                    search = read_search(arm) if arm in config.policies else None
                    episodes = 0 if search is None else search.episodes
                    epochs += self.task.epochs * (config.seeds + episodes)
        return epochs

    def _stages(self) -> list[list[list[str]]]:
        """Groups of arms in the order in which they are played.

        All rates of a stage come before the next one: sham replays an arm, and final networks are
        of the rate that validation chose. So it is for the oracle's placements too.
        """
        config = self.config
        shams = [arm for arm in config.policies if isinstance(parse(arm), Sham)]
        others = [arm for arm in config.policies if not isinstance(parse(arm), Sham)]
        static: list[list[str]] = []
        for kind in config.static:
            if kind == START:
                static.append([START])
            else:
                finals = config.finals.items()
                static.append([arm for arm, final in finals if final.kind == kind])
        placements = list(self.placements) if config.oracle else []
        return [[others], [shams], static, [placements]]

    def best(self, arm: str) -> Trials:
        """The arm at the rate that validation likes most; ties go to the first."""
        return best_by_validation([trials for trials in self.done.values() if trials.arm == arm])

    # -- arms --------------------------------------------------------------------------------------

    def play_arms(self, arms: Sequence[str], rate: float) -> None:
        """Play the arms that are not known yet, several side by side, and keep their trials."""
        finals = self.config.finals
        for arm in arms:
            if arm in finals and finals[arm].kind == "final-equal-flops":
                # its episodes are as long as the FLOPs of this one say
                self.play_arms([f"final of {finals[arm].follows}"], rate)
        missing = [arm for arm in dict.fromkeys(arms) if not self._is_known(arm, rate)]
        arms_at_once = max(1, self.most_hosts // self.config.seeds)
        for group in _batches(missing, arms_at_once):
            runs = self._play_group(group, rate)
            for arm in group:
                plan = self.plans.get((arm, rate))
                trials = trials_of(arm, rate, runs[arm], episodes=self._episodes(arm), plan=plan)
                self._arm_store(arm, rate).save(trials.to_record())
                self.done[arm, rate] = trials
        for arm in dict.fromkeys(arms):  # in this order, whatever was known before
            self.done[arm, rate] = self.done.pop((arm, rate))

    def _play_group(self, group: Sequence[str], rate: float) -> dict[str, list[ArmRun]]:
        """The episodes of some arms, seed by seed; those of equal length are played together."""
        for arm in group:
            search = read_search(arm)
            if search is not None:
                self.plans[arm, rate] = self._search(search, arm, rate)
        entries: list[Entry] = []
        lengths: list[int] = []
        for arm in group:
            entries += self._entries(arm, rate)
            lengths += self._lengths(arm, rate)
        labels = label_policies(group)
        self.say(f"{', '.join(labels.values())}: {len(entries)} hosts, learning rate x {rate:g}")
        runs: dict[int, ArmRun] = {}  # by the number of the entry
        for numbers in group_by_length(lengths, self.most_hosts):
            task = self._task_for(group, rate, lengths[numbers[0]])
            played = self._play(task, [entries[number] for number in numbers])
            runs |= dict(zip(numbers, played, strict=True))
        by_arm: dict[str, list[ArmRun]] = {arm: [] for arm in group}
        for number, entry in enumerate(entries):
            by_arm[entry.arm].append(runs[number])
        return by_arm

    def _task_for(self, group: Sequence[str], rate: float, epochs: int) -> Task:
        """The task at a learning rate and length; of sham growth with its blueprint alone."""
        task = replace(at_rate(self.task, rate), epochs=epochs)
        for arm in group:
            blueprints = parse(arm).blueprints()
            if blueprints:
                task = replace(task, blueprints=blueprints)
        return task

    def _play(self, task: Task, entries: Sequence[Entry]) -> list[ArmRun]:
        def watch(epoch: int, events: Sequence[Event]) -> None:
            self._count_epoch(len(entries))
            self._stop_if_asked()

        return run_entries(task, entries, self.populate, watch=watch, say=self.say)

    def _count_epoch(self, hosts: int) -> None:
        """Take note of an epoch that so many hosts have played."""
        self.played += hosts
        self.watch(self.played, max(self.planned, self.played))

    def _stop_if_asked(self) -> None:
        if self.should_stop():
            raise Stopped

    def _entries(self, arm: str, rate: float) -> list[Entry]:
        """An arm's hosts, seed by seed."""
        if arm == START or arm in self.config.finals:
            return self._static_entries(arm)
        policies = self._policies(arm, rate)
        return [
            Entry(arm=arm, seed=seed, policy=policy, weights=self.weights.get(seed))
            for seed, policy in zip(self.config.host_seeds, policies, strict=True)
        ]

    def _static_entries(self, arm: str) -> list[Entry]:
        """Networks of fixed size, from scratch: the host's own, or what their arm grew."""
        seeds = self.config.host_seeds
        architectures: Sequence[tuple[Planting, ...]] = [()] * len(seeds)
        if arm != START:
            architectures = self.best(self.config.finals[arm].follows).architectures
        return [
            Entry(arm=arm, seed=seed, policy=NEVER, built_in=plantings)
            for seed, plantings in zip(seeds, architectures, strict=True)
        ]

    def _policies(self, arm: str, rate: float) -> Sequence[str | Callable[[HostFacts], Policy]]:
        """What decides about each of an arm's hosts."""
        if isinstance(parse(arm), Sham):
            replayed = self.done[self.config.followed[0], rate]
            return [replay([from_record(record) for record in log]) for log in replayed.events]
        if arm in self.trained:
            return [self.trained[arm]] * self.config.seeds
        policy = self.plans.get((arm, rate), self.placements.get(arm, arm))
        return [policy] * self.config.seeds

    def _lengths(self, arm: str, rate: float) -> list[int]:
        """Epochs of each of an arm's episodes."""
        final = self.config.finals.get(arm)
        if final is not None and final.kind == "final-equal-flops":
            grown_rows = self.best(final.follows).rows
            final_rows = self.done[f"final of {final.follows}", rate].rows
            return [
                max(2, round(grown.flops * equal.epochs / equal.flops))
                for grown, equal in zip(grown_rows, final_rows, strict=True)
            ]
        epochs = self.task.epochs
        if final is not None and final.kind == "final-whole":
            epochs += self.config.pretrain
        return [epochs] * self.config.seeds

    def _episodes(self, arm: str) -> int | None:
        """Episodes that were played before to find what decides in an arm.

        A final network counts as the arm that it follows. A rule has none. None where a checkpoint
        does not say.
        """
        final = self.config.finals.get(arm)
        if final is not None:
            arm = final.follows
        if arm in self.trained:
            return episodes_of(self.config.files[arm].path)
        if arm in self.placements:  # validation chooses among all of them
            return len(self.placements) * self.config.seeds * len(self.config.rates)
        search = read_search(arm)
        return 0 if search is None else search.episodes * len(self.config.rates)

    # -- searches ----------------------------------------------------------------------------------

    def _search(self, settings: SearchSettings, arm: str, rate: float) -> str:
        """The plan that an arm's search finds at this rate.

        What was played before a stop is not played again.
        """
        store = self._store(PLANS, "search for a plan", arm, rate)
        save = _newest(store, "its search starts again")
        known: dict[str, float] = {}
        if save is not None:
            with fitting(store.manifest):
                known = TypeAdapter(dict[str, float]).validate_python(save.facts["known"])
        task = at_rate(self.task, rate)
        if self.config.pretrain:
            self._pretrain(settings.host_seeds)

        def play(wanted: Sequence[PlanOnHost]) -> list[float]:
            episodes = {f"{plan.policy} @{plan.host}": plan for plan in wanted}
            missing = [key for key in episodes if key not in known]
            for keys in _batches(missing, self.most_hosts):
                entries = []
                for key in keys:
                    seed = settings.seed + episodes[key].host
                    policy = episodes[key].policy
                    entries.append(Entry(arm, seed, policy, weights=self.weights.get(seed)))
                for key, run in zip(keys, self._play(task, entries), strict=True):
                    score = run.result.validation_accuracy
                    known[key] = score if math.isfinite(score) else 0.0
                store.save({"known": known})
            return [known[key] for key in episodes]

        self.say(f"{arm}: looks for a plan, learning rate x {rate:g}")
        best = Searching(settings, self.facts, play).find()
        mean = sum(best.scores) / len(best.scores)
        self.say(
            f"{arm}: {best.policy} (validation {mean:.2%} on {len(best.scores)} hosts of its own)"
        )
        return best.policy

    # -- pretraining -------------------------------------------------------------------------------

    def _pretrain(self, seeds: Sequence[int]) -> None:
        """Train each seed's host alone, or read again the one that was."""
        stores = {seed: self._host_store(seed) for seed in seeds}
        for seed, store in stores.items():
            self._read_host(seed, store)
        epochs = self.config.pretrain
        task = replace(self.task, epochs=epochs, clock="epochs")
        missing = [seed for seed in stores if seed not in self.weights]
        for batch in _batches(missing, self.most_hosts):
            self.say(f"training {len(batch)} hosts alone for {epochs} epochs")
            hosts = self.populate(task, batch)
            episodes = Episodes(hosts)
            for _ in range(epochs):
                self._stop_if_asked()
                episodes.train()  # rolls back a host that broke
                self._count_epoch(len(batch))
            for seed, run in zip(batch, hosts.runs, strict=True):
                state = {
                    name: value.cpu().contiguous().clone()
                    for name, value in run.model.host.state_dict().items()
                }
                file = NewFile(
                    name=f"{_name_of_host(seed)}.safetensors", content=partial(save_file, state)
                )
                stores[seed].save({"epochs": epochs}, {"host": file})
                self.weights[seed] = state

    def _read_host(self, seed: int, store: Store) -> None:
        """Take the weights of a trained host, if there is one."""
        save = _newest(store, "its host is trained again")
        if save is None:
            return
        with fitting(store.manifest), torch.device("meta"):
            state = load(save.contents["host"])
            host = for_host(self.task, seed, self.splits).task.build_host()
            host.load_state_dict(state, assign=True)  # refuses what does not fit
            self.weights[seed] = state

    def _host_store(self, seed: int) -> Store:
        name = _name_of_host(seed)
        settings = self.config.digest(
            "task", "pretrain", "devices", "deterministic", *self.config.way_to_run
        )
        return Store(
            self.config.out / PRETRAINED / f"{name}.json",
            "trained host",
            owned=re.compile(name),
            bound_to=f"{settings} {name}",
        )

    # -- what is on disk ---------------------------------------------------------------------------

    def _store(self, folder: str, kind: str, arm: str, rate: float) -> Store:
        """The saves of one arm at one rate; no two share a file."""
        slug = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in arm)
        if slug != arm:  # other names may look the same
            slug = f"{slug[-100:]}-{crc32(arm.encode()):08x}"
        shown_rate = f"{rate:g}"
        if float(shown_rate) != rate:
            shown_rate = repr(rate)
        return Store(
            self.config.out / folder / f"{slug}-{shown_rate}.json",
            kind,
            bound_to=f"{self.config.digest()} {arm} {rate}",
        )

    def _arm_store(self, arm: str, rate: float) -> Store:
        return self._store(ARMS, "arm of a comparison", arm, rate)

    def _is_known(self, arm: str, rate: float) -> bool:
        """Whether an arm's trials are there already, here or on disk; those on disk are read."""
        if (arm, rate) in self.done:
            return True
        store = self._arm_store(arm, rate)
        save = _newest(store, "its arm is run again")
        if save is None:
            return False
        with fitting(store.manifest):
            trials = TypeAdapter(Trials).validate_python(save.facts)
            trials.describe()  # values of another type are refused here
            self.done[arm, rate] = trials
        return True


def group_by_length(lengths: Sequence[int], most: int) -> Iterator[Sequence[int]]:
    """Numbers of the episodes that can be played together, at most so many at once.

    `lengths` has the epochs of every episode; the length that comes first is played first.
    """
    for epochs in dict.fromkeys(lengths):
        numbers = [number for number, length in enumerate(lengths) if length == epochs]
        yield from _batches(numbers, most)


def trials_of(
    arm: str,
    rate: float,
    runs: Sequence[ArmRun],
    *,
    episodes: int | None = 0,
    plan: str | None = None,
) -> Trials:
    """What an arm's episodes left, seed by seed, as plain data.

    An arm that ended with a loss that is no number is refused.
    """
    broken = [str(run.result.seed) for run in runs if not math.isfinite(run.result.test_loss)]
    if broken:
        raise MeasurementError(
            f"{arm} at learning rate x {rate:g} ended with a NaN loss (host seeds "
            f"{', '.join(broken)}). Start again with lower --rates or without it."
        )
    logs: list[tuple[dict[str, Any], ...]] = []
    for run in runs:
        kept = [event for event in run.events if isinstance(event, ActionTaken | StageChanged)]
        logs.append(tuple(to_record(event) for event in kept))
    return Trials(
        arm=arm,
        rate=rate,
        rows=tuple(ArmRow.of(run.result, run.peak_params, run.variation) for run in runs),
        architectures=tuple(run.architecture for run in runs),
        events=tuple(logs),
        episodes=episodes,
        plan=plan,
        curves=tuple(curve_of(run.events) for run in runs),
    )


def curve_of(happened: Sequence[Event]) -> Curve:
    """How one episode went: what was spent by the end of each epoch, and the loss then."""
    points = []
    for event in happened:
        if isinstance(event, HostEpoch) and event.held_out_loss is not None:
            assert event.flops is not None  # hosts of a comparison are priced
            point = CurvePoint(
                epoch=event.epoch, flops=event.flops, held_out_loss=event.held_out_loss
            )
            points.append(point)
    return tuple(points)


def _name_of_host(seed: int) -> str:
    return f"seed-{seed}"


def _batches(values: Sequence[Item], most: int) -> Iterator[Sequence[Item]]:
    """The values in order, at most so many at once."""
    for start in range(0, len(values), most):
        yield values[start : start + most]


def _newest(store: Store, consequence: str) -> Save | None:
    """What a store holds; where it is damaged, the error says what deleting it leads to."""
    try:
        return store.newest()
    except SaveError as problem:
        raise SaveError(f"{problem} If you delete {store.manifest}, {consequence}.") from problem
