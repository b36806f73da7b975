"""`esper compare`:

policies and static controls on the same hosts, data orders and rate plans, seed by seed.
"""

import csv
import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any
from zlib import crc32

import torch
from pydantic import Field, TypeAdapter, create_model
from safetensors.torch import load, save_file

from esper.episodes import Episodes, facts_of
from esper.kasmina.blueprints import SHAM
from esper.leyline.errors import MeasurementError, SaveError
from esper.runtime.devices import limited_threads, repeatable_kernels
from esper.runtime.population import Population
from esper.runtime.splits import Splits
from esper.runtime.tasks.task import Task
from esper.simic.checkpoints import episodes_of, other_episodes
from esper.storage.runfolder import ARMS, PLANS, PRETRAINED
from esper.storage.store import Generation, NewFile, Store, fitting
from esper.tamiyo.policy_files import load_fitting
from esper.tamiyo.policy_names import Rule, parse
from esper.tamiyo.rules import replay
from esper.telemetry.events import (
    ActionTaken,
    ArmFinished,
    Event,
    StageChanged,
    from_record,
    to_record,
)
from esper.telemetry.statistics import compare_pairs, estimate_mean
from esper.trials.arms import ArmRun, Entry, Planting, Say, Stopped, make_decider, run_entries
from esper.trials.config import CompareConfig
from esper.trials.searching import Search, Searching, placements_of, read_search

ORACLE, _KEPT = "oracle", (ARMS, "arm of a comparison")
_ON_A_GPU = 64  # Most hosts side by side; on a CPU it is one arm at a time.
METRICS = {
    "test_accuracy": 1.0,
    "test_loss": -1.0,
}  # Name and sign: what is ahead has more of it times the sign.
_OPPOSITE = {"ahead": "behind", "behind": "ahead"}
_COSTS = (
    "final_params",
    "peak_params",
    "flops",
    "seconds",
    "germinated",
    "fossilized",
    "culled",
    "epochs",
)


@dataclass(frozen=True)
class Trials:
    """One arm at one rate, seed by seed, as plain data."""

    arm: str
    rate: float
    rows: tuple[dict[str, Any], ...]  # as `_Row` has them
    architectures: tuple[tuple[Planting, ...], ...]
    events: tuple[tuple[dict[str, Any], ...], ...]  # what sham growth replays
    episodes: int | None = (
        0  # episodes played before to find what decides here; None where a checkpoint does not say
    )
    plan: str | None = None  # what a search found, as a policy

    def column(self, name: str) -> list[float]:
        return [float(row[name]) for row in self.rows]

    def mean(self, name: str) -> float:
        return sum(self.column(name)) / len(self.rows)


_NUMBER = Field(strict=True, ge=-(10**30), le=10**30)  # what is summed up of such numbers is finite
_KINDS: Any = {str: Annotated[str, Field(max_length=10**5)]} | {
    kind: Annotated[kind, _NUMBER] for kind in (int, float)
}
_told: Any = {"type": str, "peak_params": int} | {
    field.name: field.type for field in fields(ArmFinished)
}
_row: Any = {name: (_KINDS[kind], ...) for name, kind in _told.items()}
_Row: Any = create_model("_Row", __config__={"extra": "forbid"}, **_row)


class Comparison:
    """Runs what is not on disk yet. Arms with equal settings run side by side in one population."""

    def __init__(
        self,
        config: CompareConfig,
        tell: Say,
        should_stop: Callable[[], bool],
        splits: Splits | None = None,
    ):
        self.config, self.tell, self.should_stop = config, tell, should_stop
        self.task = config.task.build()
        self.splits = splits or self.task.load(config.data_root)
        probe = self.populate(self.task, [0])
        probe.describe(tell)
        model = probe.runs[0].model
        for policy in config.policies:
            if isinstance(parse(policy), Rule) and policy != SHAM:
                make_decider(
                    Episodes(probe), 0, policy
                )  # settings that do not fit are refused at once
        self.most = _ON_A_GPU if config.devices[0].startswith("cuda") else config.seeds
        self.facts = facts_of(model, self.task.epochs)
        self.trained = {
            policy: load_fitting(Path(policy), model.space) for policy in config.checkpoints
        }
        for line in filter(
            None, (other_episodes(Path(policy), self.task) for policy in config.checkpoints)
        ):
            tell(line)
        self.placements = {
            f"{ORACLE} {name}": plan
            for name, plan in placements_of(model, self.task.epochs).items()
        }
        self.done: dict[tuple[str, float], Trials] = {}
        self.weights: dict[int, Mapping[str, torch.Tensor]] = {}
        self.plans: dict[tuple[str, float], str] = {}

    def populate(self, task: Task, seeds: Sequence[int]) -> Population:
        return Population(
            task, seeds, self.config.devices, splits=self.splits, **self.config.way_to_run
        )

    def run(self) -> dict[tuple[str, float], Trials]:
        config = self.config
        grown = [arm for arm in config.policies if arm != SHAM]
        replayed = [SHAM] if SHAM in config.policies else []
        tried = (
            list(self.placements) if config.oracle else []
        )  # which was best is decided by validation
        kinds = {"start": ("start", ""), **config.finals}
        static = [
            [arm for arm, (kind, _) in kinds.items() if kind == wanted] for wanted in config.static
        ]
        stages: list[list[list[str]]] = [[grown], [replayed], static, [tried]]
        with repeatable_kernels(config.deterministic), limited_threads(config.threads):
            if config.pretrain:
                self._pretrain(config.host_seeds)
            for stage, rate in product(stages, config.rates):
                for arms in stage:
                    self._live(arms, rate)
        return self.done

    def best(self, arm: str) -> Trials:
        """The arm at the rate that validation likes most; ties go to the first."""
        known = [trials for (name, _), trials in self.done.items() if name == arm]
        return max(known, key=lambda trials: trials.mean("validation_accuracy"))

    def _live(self, arms: Sequence[str], rate: float) -> None:
        """Play the episodes of arms that are not known yet, those of equal length together, and
        keep the trials.
        """
        for kind, followed in (self.config.finals.get(arm, ("", "")) for arm in arms):
            if kind == "final-equal-flops":
                self._live([f"final of {followed}"], rate)
        missing = [arm for arm in dict.fromkeys(arms) if not self._is_known(arm, rate)]
        for group in _batches(missing, max(1, self.most // self.config.seeds)):
            for arm in group:
                search = read_search(arm)
                if search is not None:
                    self.plans[arm, rate] = self._search(search, arm, rate)
            entries = [entry for arm in group for entry in self._entries(arm, rate)]
            lengths = [length for arm in group for length in self._lengths(arm, rate)]
            self.tell(f"{', '.join(group)}: {len(entries)} hosts, learning rate x {rate:g}")
            found: dict[int, ArmRun] = {}
            for epochs in dict.fromkeys(lengths):
                task = replace(self.task, lr=self.task.lr * rate, epochs=epochs)
                task = replace(task, blueprints=(SHAM,)) if SHAM in group else task
                for part in _batches(
                    [index for index, length in enumerate(lengths) if length == epochs], self.most
                ):
                    runs = run_entries(
                        task, [entries[index] for index in part], self.populate, watch=self._watch
                    )
                    found |= dict(zip(part, runs, strict=True))
            for arm in group:
                runs = [found[index] for index, entry in enumerate(entries) if entry.arm == arm]
                if broken := [
                    str(run.result.seed) for run in runs if not math.isfinite(run.result.test_loss)
                ]:
                    where = (
                        f"{arm} at learning rate x {rate:g} ended with a NaN loss "
                        f"(host seeds {', '.join(broken)})"
                    )
                    raise MeasurementError(f"{where}. Start anew with lower --rates or without it.")
                rows = tuple(
                    {**to_record(run.result), "peak_params": run.peak_params} for run in runs
                )
                kept = [
                    [each for each in run.events if isinstance(each, ActionTaken | StageChanged)]
                    for run in runs
                ]
                told = tuple(tuple(map(to_record, own)) for own in kept)
                built = tuple(run.architecture for run in runs)
                trials = Trials(
                    arm, rate, rows, built, told, self._episodes(arm), self.plans.get((arm, rate))
                )
                self._store(*_KEPT, arm, rate).save(vars(trials))
                self.done[arm, rate] = trials
        for arm in dict.fromkeys(arms):  # in this order, whatever was known before
            self.done[arm, rate] = self.done.pop((arm, rate))

    def _entries(self, arm: str, rate: float) -> list[Entry]:
        """An arm's hosts.

        Networks of fixed size begin from scratch: the host's own, or what their arm grew.
        """
        seeds, config = self.config.host_seeds, self.config
        if arm == "start" or arm in config.finals:
            built = (
                [()] * len(seeds)
                if arm == "start"
                else self.best(config.finals[arm][1]).architectures
            )
            return [
                Entry(arm, seed, "never", built_in=parts)
                for seed, parts in zip(seeds, built, strict=True)
            ]
        policies: list[Any] = [self.plans.get((arm, rate), self.placements.get(arm, arm))] * len(
            seeds
        )
        if arm == SHAM:
            replayed = self.done[config.followed[0], rate]
            policies = [replay([from_record(dict(one)) for one in own]) for own in replayed.events]
        elif arm in self.trained:
            policies = [lambda facts: self.trained[arm]] * len(seeds)
        pairs = zip(seeds, policies, strict=True)
        return [Entry(arm, seed, policy, weights=self.weights.get(seed)) for seed, policy in pairs]

    def _lengths(self, arm: str, rate: float) -> list[int]:
        """Epochs of each of an arm's episodes."""
        kind, followed = self.config.finals.get(arm, (arm, ""))
        if kind == "final-equal-flops":
            rows = zip(
                self.best(followed).rows, self.done[f"final of {followed}", rate].rows, strict=True
            )
            return [
                max(2, round(grown["flops"] * final["epochs"] / final["flops"]))
                for grown, final in rows
            ]
        return [
            self.task.epochs + (self.config.pretrain if kind == "final-whole" else 0)
        ] * self.config.seeds

    def _episodes(self, arm: str) -> int | None:
        """What an arm was given before:

        a final network as much as the arm that it follows, a rule nothing.
        """
        _, arm = self.config.finals.get(arm, ("", arm))
        if arm in self.trained:
            return episodes_of(Path(arm))
        if arm in self.placements:  # validation chooses among all of them
            return len(self.placements) * self.config.seeds * len(self.config.rates)
        search = read_search(arm)
        return 0 if search is None else search.episodes * len(self.config.rates)

    def _search(self, search: Search, arm: str, rate: float) -> str:
        """The plan that an arm's search finds at this rate; what was played before a stop is not
        played again.
        """
        store = self._store(PLANS, "search for a plan", arm, rate)
        save = _newest(store, "its search starts anew")
        with fitting(store.manifest):
            known = (
                {}
                if save is None
                else TypeAdapter(dict[str, float]).validate_python(save.facts["known"])
            )
        task = replace(self.task, lr=self.task.lr * rate)
        if self.config.pretrain:
            self._pretrain(search.host_seeds)

        def play(wanted: Sequence[tuple[str, int]]) -> list[float]:
            hosts = {f"{plan} @{host}": (plan, search.seed + host) for plan, host in wanted}
            for part in _batches([key for key in hosts if key not in known], self.most):
                own = [hosts[key] for key in part]
                entries = [
                    Entry(arm, seed, plan, weights=self.weights.get(seed)) for plan, seed in own
                ]
                for key, run in zip(
                    part, run_entries(task, entries, self.populate, watch=self._watch), strict=True
                ):
                    score = run.result.validation_accuracy
                    known[key] = score if math.isfinite(score) else 0.0
                store.save({"known": known})
            return [known[key] for key in hosts]

        self.tell(f"{arm}: looks for a plan, learning rate x {rate:g}")
        plan, scores = Searching(search, self.facts, play).find()
        self.tell(
            f"{arm}: {plan} (validation {sum(scores) / len(scores):.2%} on "
            f"{len(scores)} hosts of its own)"
        )
        return plan

    def _pretrain(self, seeds: Sequence[int]) -> None:
        """Train each seed's host alone, or read again the one that was."""
        epochs, folder = self.config.pretrain, self.config.out / PRETRAINED
        settings = self.config.digest(
            "task", "pretrain", "devices", "deterministic", *self.config.way_to_run
        )
        own = {seed: f"seed-{seed}" for seed in seeds}
        stores = {
            s: Store(
                folder / f"{n}.json",
                "trained host",
                owned=re.compile(n),
                bound_to=f"{settings} {n}",
            )
            for s, n in own.items()
        }
        for seed, store in stores.items():
            if (save := _newest(store, "its host is trained again")) is not None:
                with fitting(store.manifest), torch.device("meta"):
                    state = load(store.path(save, "host").read_bytes())
                    self.task.build_host().load_state_dict(
                        state, assign=True
                    )  # refuses what does not fit
                    self.weights[seed] = state
        for missing in _batches([seed for seed in stores if seed not in self.weights], self.most):
            self.tell(f"training {len(missing)} hosts alone for {epochs} epochs")
            hosts = self.populate(replace(self.task, epochs=epochs, clock="epochs"), missing)
            episodes = Episodes(hosts)
            for epoch in range(epochs):
                self._watch(epoch, ())
                episodes.train()  # rolls back a host that broke
            for seed, run in zip(missing, hosts.runs, strict=True):
                state = {
                    name: value.cpu().contiguous().clone()
                    for name, value in run.model.host.state_dict().items()
                }
                stores[seed].save(
                    {"epochs": epochs},
                    {"host": NewFile(f"seed-{seed}.safetensors", partial(save_file, state))},
                )
                self.weights[seed] = state

    def _watch(self, epoch: int, events: Sequence[Event]) -> None:
        if self.should_stop():
            raise Stopped

    def _store(self, folder: str, kind: str, arm: str, rate: float) -> Store:
        slug = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in arm)
        if slug != arm:  # other names may look the same
            slug = f"{slug[-100:]}-{crc32(arm.encode()):08x}"
        shown = (
            f"{rate:g}" if float(f"{rate:g}") == rate else repr(rate)
        )  # no two rates share a file
        return Store(
            self.config.out / folder / f"{slug}-{shown}.json",
            kind,
            bound_to=f"{self.config.digest()} {arm} {rate}",
        )

    def _is_known(self, arm: str, rate: float) -> bool:
        store = self._store(*_KEPT, arm, rate)
        if (arm, rate) not in self.done and (save := _newest(store, "its arm is run again")):
            with fitting(store.manifest):
                trials = TypeAdapter(Trials).validate_python(save.facts)
                TypeAdapter(tuple[_Row, ...]).validate_python(trials.rows)
                _describe(trials)  # values of another type are refused here
                self.done[arm, rate] = trials
        return (arm, rate) in self.done


def _batches(values: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    return (values[start : start + most] for start in range(0, len(values), most))


def _newest(store: Store, consequence: str) -> Generation | None:
    try:
        return store.newest()
    except SaveError as problem:
        raise SaveError(f"{problem} If you delete {store.manifest}, {consequence}.") from problem


def summarise(config: CompareConfig, done: Mapping[tuple[str, float], Trials]) -> dict[str, Any]:
    """Every arm at the rate that its validation accuracy chose, and how it stands to every other
    arm.
    """
    chosen: dict[str, Trials] = {}
    for (arm, _), trials in done.items():
        name = ORACLE if arm.startswith(f"{ORACLE} ") else arm
        chosen[name] = max(
            chosen.get(name, trials), trials, key=lambda tried: tried.mean("validation_accuracy")
        )
    arms = {name: _describe(trials) for name, trials in chosen.items()}
    for name, trials in chosen.items():
        arms[name]["minus"] = {
            other: _differ(trials, than) for other, than in chosen.items() if other != name
        }
    rows = [{**row, "rate": trials.rate} for trials in done.values() for row in trials.rows]
    return {
        "config": config.model_dump(mode="json", exclude={"out", "data_root"}),
        "arms": arms,
        "rows": rows,
    }


def _describe(trials: Trials) -> dict[str, Any]:
    found: dict[str, Any] = {
        "arm": trials.arm,
        "rate": trials.rate,
        "seeds": [row["seed"] for row in trials.rows],
    }
    found |= {"episodes": trials.episodes} | ({} if trials.plan is None else {"plan": trials.plan})
    found |= {
        name: asdict(estimate_mean(trials.column(name)))
        for name in (*METRICS, "validation_accuracy")
    }
    return found | {name: trials.mean(name) for name in _COSTS}


def _differ(trials: Trials, than: Trials) -> dict[str, Any]:
    """Paired by seed; the verdict says which way the interval excludes zero, if it does."""
    found = {}
    for name, sign in METRICS.items():
        difference = compare_pairs(trials.column(name), than.column(name))
        verdict = difference.verdict
        found[name] = {
            **asdict(difference),
            "verdict": verdict if sign > 0 else _OPPOSITE.get(verdict, verdict),
        }
    return found


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(
        out, [key for key in rows[0] if key != "type"], extrasaction="ignore", lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
