"""`esper compare`: policies and static controls on the same hosts, data orders and rate plans, seed by seed."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

from torch import Tensor

from esper.episodes import Episodes
from esper.kasmina.blueprints import SHAM
from esper.leyline.errors import MeasurementError, SaveError
from esper.runtime.devices import limited_threads, repeatable_kernels
from esper.runtime.population import Population
from esper.tamiyo.rules import is_rule, replay
from esper.telemetry.events import ActionTaken, Event, StageChanged, from_record, to_record
from esper.telemetry.runfolder import ARMS
from esper.telemetry.store import Store
from esper.trials.arms import ArmRun, Entry, Planting, Settings, make_decider, run_entries
from esper.trials.config import CompareConfig
from esper.trials.oracle import placements_of
from esper.trials.pretraining import trained_hosts
from esper.trials.running import load_fitting

ORACLE = "oracle"
_ON_A_GPU = 64
"""Hosts side by side where nothing else is asked for; on a CPU it is one arm at a time."""


class StoppedComparing(Exception):  # noqa: N818  # nobody made a mistake
    """Somebody asked to stop; finished arms are kept."""


@dataclass(frozen=True)
class Trials:
    """One arm at one rate, seed by seed, as plain data."""

    arm: str
    rate: float
    rows: tuple[dict[str, Any], ...]
    architectures: tuple[tuple[Planting, ...], ...]
    events: tuple[tuple[dict[str, Any], ...], ...]
    """what sham growth replays"""

    def mean(self, name: str) -> float:
        return sum(float(row[name]) for row in self.rows) / len(self.rows)


class Comparison:
    """Runs what is not on disk yet. Arms with equal settings live side by side in one population."""

    def __init__(self, config: CompareConfig, tell: Callable[[str], None], should_stop: Callable[[], bool]):
        self.config, self.tell, self.should_stop = config, tell, should_stop
        self.task = config.task.build()
        (device,) = config.devices
        self.settings = Settings(device, config.executor, config.amp, splits=self.task.load(config.data_root))
        probe = Population(self.task, [0], [device], executor=config.executor, splits=self.settings.splits)
        self.model = probe.runs[0].model
        for policy in config.policies:
            if is_rule(policy) and policy != SHAM:
                make_decider(Episodes(probe), 0, policy)  # settings that do not fit are refused at once
        self.most = config.side_by_side or (_ON_A_GPU if device.startswith("cuda") else config.seeds)
        trained = [policy for policy in config.policies if not is_rule(policy)]
        self.trained = {policy: load_fitting(Path(policy), self.model.space) for policy in trained}
        placements = placements_of(self.model, self.task.epochs)
        self.placements = {f"{ORACLE} {name}": policy for name, policy in placements.items()}
        self.done: dict[tuple[str, float], Trials] = {}
        self.weights: dict[int, Mapping[str, Tensor]] = {}
        self.pretrained_epochs = 0

    def run(self) -> dict[tuple[str, float], Trials]:
        """Every arm at every rate."""
        config = self.config
        with repeatable_kernels(config.deterministic), limited_threads(config.threads):
            self.weights, self.pretrained_epochs = trained_hosts(
                config.out,
                self.task,
                config.host_seeds,
                config.pretrain,
                config.source,
                self.settings,
                self.tell,
                self._watch,
            )
            for rate in config.rates:
                self._side_by_side([arm for arm in config.policies if arm != SHAM], rate)
            for rate in config.rates if SHAM in config.policies else ():
                self._sham(rate)
            for rate in config.rates:
                for arm in config.static:
                    self._static(arm, rate)
            for rate in config.rates if config.oracle else ():  # which was best is decided by validation
                self._side_by_side(list(self.placements), rate)
        return self.done

    def best(self, arm: str) -> Trials:
        """The arm at the rate that validation likes most; ties go to the first."""
        known = [trials for (name, _), trials in self.done.items() if name == arm]
        return max(known, key=lambda trials: trials.mean("validation_accuracy"))

    def _side_by_side(self, arms: Sequence[str], rate: float) -> None:
        missing = [arm for arm in dict.fromkeys(arms) if not self._is_known(arm, rate)]
        count = max(1, self.most // self.config.seeds)
        for start in range(0, len(missing), count):
            part = missing[start : start + count]
            self._live(part, rate, [self._entry(arm, seed) for arm in part for seed in self.config.host_seeds])

    def _entry(self, arm: str, seed: int) -> Entry:
        weights = self.weights.get(seed)
        if is_rule(arm) or arm in self.placements:
            return Entry(arm, seed, self.placements.get(arm, arm), weights=weights)
        policy, use_telemetry = self.trained[arm]
        return Entry(arm, seed, lambda facts: policy, use_telemetry, weights=weights)

    def _sham(self, rate: float) -> None:
        if self._is_known(SHAM, rate):
            return
        script = self.done[self.config.final_of, rate].events
        entries = [
            Entry(SHAM, seed, replay([from_record(dict(record)) for record in events]), weights=self.weights.get(seed))
            for seed, events in zip(self.config.host_seeds, script, strict=True)
        ]
        self._live([SHAM], rate, entries, blueprints=(SHAM,))

    def _static(self, arm: str, rate: float) -> None:
        """A network of fixed size from scratch: the host's own, or what the named arm grew for this seed."""
        if self._is_known(arm, rate):
            return
        seeds = self.config.host_seeds
        grown = self.best(self.config.final_of) if arm != "start" else None
        built = grown.architectures if grown else [()] * len(seeds)
        episodes = [self.task.epochs] * len(seeds)
        if arm == "final-whole":
            episodes = [self.task.epochs + self.pretrained_epochs] * len(seeds)
        elif grown is not None and arm == "final-equal-flops":
            self._static("final", rate)
            static = self.done["final", rate].rows
            episodes = [
                max(2, round(row["flops"] * other["epochs"] / other["flops"]))
                for row, other in zip(grown.rows, static, strict=True)
            ]
        entries = [Entry(arm, seed, "never", built_in=parts) for seed, parts in zip(seeds, built, strict=True)]
        self._live([arm], rate, entries, episodes=episodes)

    def _live(
        self,
        arms: Sequence[str],
        rate: float,
        entries: Sequence[Entry],
        *,
        blueprints: tuple[str, ...] | None = None,
        episodes: Sequence[int] | None = None,
    ) -> None:
        """Live these episodes, those of equal length together, and keep each arm's trials."""
        self.tell(f"{', '.join(arms)}: {len(entries)} hosts, learning rate x {rate:g}")
        lengths = list(episodes or [self.task.epochs] * len(entries))
        found: dict[int, ArmRun] = {}
        for epochs in dict.fromkeys(lengths):
            task = replace(self.task, lr=self.task.lr * rate, epochs=epochs)
            task = task if blueprints is None else replace(task, blueprints=blueprints)
            own = [index for index, length in enumerate(lengths) if length == epochs]
            for part in (own[start : start + self.most] for start in range(0, len(own), self.most)):
                runs = run_entries(task, [entries[index] for index in part], self.settings, watch=self._watch)
                found |= dict(zip(part, runs, strict=True))
        for arm in arms:
            runs = [found[index] for index, entry in enumerate(entries) if entry.arm == arm]
            broken = [run.result.seed for run in runs if not math.isfinite(run.result.test_loss)]
            if broken:
                raise MeasurementError(
                    f"{arm} at learning rate x {rate:g} ended with a loss that is no number (host seeds "
                    f"{', '.join(map(str, broken))}). Begin anew with lower --rates or without the arm."
                )
            self._keep(Trials(arm, rate, *zip(*map(_plain, runs), strict=True)))

    def _watch(self, epoch: int, events: Sequence[Event]) -> None:
        if self.should_stop():
            raise StoppedComparing

    # -- disk --------------------------------------------------------------------------------------------------------

    def _store(self, arm: str, rate: float) -> Store:
        slug = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in arm)
        if slug != arm:  # other names may look the same
            slug = f"{slug[-100:]}-{crc32(arm.encode()):08x}"
        return Store(self.config.out / ARMS / f"{slug}-{rate:g}.json", "arm of a comparison")

    def _keep(self, trials: Trials) -> None:
        self.done[trials.arm, trials.rate] = trials
        self._store(trials.arm, trials.rate).save(vars(trials))

    def _is_known(self, arm: str, rate: float) -> bool:
        if (arm, rate) not in self.done:
            store = self._store(arm, rate)
            try:
                kept = store.newest()
            except SaveError as problem:
                raise SaveError(f"{problem} If you delete {store.manifest}, its arm is run again.") from problem
            if kept is not None:
                found = kept.facts
                built = tuple(tuple(map(tuple, one)) for one in found["architectures"])
                rows, events = tuple(found["rows"]), tuple(map(tuple, found["events"]))
                self.done[arm, rate] = Trials(found["arm"], found["rate"], rows, built, events)
        return (arm, rate) in self.done


def _plain(run: ArmRun) -> tuple[dict[str, Any], tuple[Planting, ...], tuple[dict[str, Any], ...]]:
    row = {**to_record(run.result), "peak_params": run.peak_params}
    told = tuple(to_record(event) for event in run.events if isinstance(event, ActionTaken | StageChanged))
    return row, run.architecture, told
