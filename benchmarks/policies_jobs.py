"""How `policies.py` teaches a policy, and how it judges one on hosts that it never saw.

A lesson is taught in one run folder of `esper ppo`, piece by piece. To judge it, the policy first
plays on the choosing seeds: its usual actions become plans there, validation picks one of them,
and what it measured there is what the blinded policy sees. Only then the judging seeds are played.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from policies_arms import PLANS, Blinded, KeepsAll, Means, Recorder, replays
from policies_tasks import TASKS
from rich.console import Console

from esper.cli.ppo import run_ppo
from esper.runtime.devices import limited_threads
from esper.runtime.population import Population
from esper.runtime.splits import Splits
from esper.runtime.tasks.task import Task
from esper.simic.checkpoints import saved_rounds
from esper.simic.config import TrainingConfig
from esper.storage import runfolder
from esper.storage.files import write_durably
from esper.tamiyo.policies import NetworkPolicy, Policy
from esper.tamiyo.policy_files import load_fitting
from esper.tamiyo.rules import HostFacts
from esper.telemetry.events import ActionTaken, Event, SeedMeasured
from esper.trials.arms import ArmRun, Entry, run_entries

CHOOSING = range(30_000, 30_024)
"""Host seeds on which plans are chosen and means are taken."""
JUDGING = range(40_000, 40_048)
"""Host seeds of everything that is claimed; they choose nothing."""
CHUNK = 12
"""Host seeds of one job."""

RULES = ("never", "heuristic")
OF_THE_POLICY = ("taught", "drawn", "plan", "keeps all", "blinded")
"""Arms made from a taught policy. `drawn` draws its choices, as it did while it learned."""

SMALL = {
    "hosts": 12,
    "host_pool": 48,
    "telemetry.level": "minimal",
    "keep_checkpoints": 1,
    "ppo.hidden_dim": 64,
    "ppo.head_dim": 32,
    "ppo.epochs": 8,
    "ppo.minibatches": 4,
}
"""As in the preset `digits`, with more hosts to learn from."""


@dataclass(frozen=True)
class Lesson:
    """What is taught: a task, for so many rounds, by which rewards, and what it is judged against."""

    start: str
    rounds: int
    families: tuple[str, ...] = ("contribution",)
    arms: tuple[str, ...] = (*RULES, *OF_THE_POLICY)
    is_preset: bool = False
    changes: tuple[tuple[str, Any], ...] = ()

    def config(self, family: str, seed: int, out: Path) -> TrainingConfig:
        """The whole training run."""
        if self.is_preset:
            config = TrainingConfig.from_preset(self.start)
        else:
            config = TrainingConfig.of({"task": {"name": self.start}})
        changes: list[tuple[str, Any]] = [*SMALL.items(), *self.changes]
        changes += [("rounds", self.rounds), ("seed", seed), ("out", str(out))]
        changes.append(("reward.family", family))
        return config.with_changes(changes, "benchmarks/policies.py")

    def task(self) -> Task:
        """The episodes that it learns from and is judged on."""
        return self.config("loss", 0, Path("runs")).task.build()


def pairs_lesson(task: Task) -> Lesson:
    """About five minutes; where the useful slots differ, it matters what a policy measures."""
    assert task.slots is not None
    is_shuffled = task.name.startswith("shuffled")
    return Lesson(
        task.name,
        rounds=100 if len(task.slots) < 8 else 60,
        families=("contribution", "lead"),
        arms=("never", *(OF_THE_POLICY if is_shuffled else ("taught", "drawn"))),
    )


LESSONS = {
    "digits": Lesson("digits", rounds=300, is_preset=True),
    # a budget for one seed: what is planted first has to be culled before anything else grows
    "blobs": Lesson("blobs", rounds=120, changes=(("task.max_seeds", 1),)),
    **{name: pairs_lesson(task) for name, task in TASKS.items()},
}


@dataclass(frozen=True)
class Pupil:
    """One policy: what it is taught, what its rewards are, and the random seed of its training."""

    lesson: str
    family: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.lesson}-{self.family}-{self.seed}"

    def folder(self, keep: Path) -> Path:
        """Its run folder."""
        return keep / "taught" / self.name

    def checkpoint(self, keep: Path) -> Path:
        """The policy after its last round; not the best one, which its own rewards would choose."""
        manifest = read_json(self.folder(keep) / runfolder.MANIFEST)
        newest = manifest["body"]["generations"][-1]
        name: str = newest["files"]["policy"]["name"]
        return self.folder(keep) / runfolder.CHECKPOINTS / name

    def is_taught(self, keep: Path) -> bool:
        """Whether its training is over."""
        folder = self.folder(keep)
        if not (folder / runfolder.MANIFEST).is_file():
            return False
        config = TrainingConfig.of(_without_notes(runfolder.read_json(folder / runfolder.CONFIG)))
        return saved_rounds(folder) >= config.rounds


def _without_notes(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in TrainingConfig.model_fields}


# -- teaching --------------------------------------------------------------------------------------


def teach(pupil: Pupil, keep: Path, rounds: int | None, deadline: float | None) -> str:
    """Teach until the training is over or time is, from where the pupil stands; how far it is."""
    folder = pupil.folder(keep)
    lesson = LESSONS[pupil.lesson]
    if rounds is not None:
        lesson = replace(lesson, rounds=rounds)
    config = lesson.config(pupil.family, pupil.seed, folder)
    if deadline is not None:
        seconds = deadline - time.monotonic()
        config = config.with_changes([("time_limit", seconds)], "--minutes")
    is_begun = (folder / runfolder.CONFIG).is_file()
    run_ppo(config, is_begun, Console(quiet=True))
    return f"{pupil.name}: {saved_rounds(folder)} of {config.rounds} rounds"


# -- judging ---------------------------------------------------------------------------------------


@cache
def splits_of(lesson: str) -> Splits:
    """The data of a lesson, once for all jobs of a process."""
    return LESSONS[lesson].task().load(None)


def load_policy(pupil: Pupil, keep: Path) -> NetworkPolicy:
    """The taught policy."""
    task = LESSONS[pupil.lesson].task()
    probe = Population(task, [0], splits=splits_of(pupil.lesson))
    return load_fitting(pupil.checkpoint(keep), probe.runs[0].model.space)


def play(
    lesson: str, arm: str, seeds: Sequence[int], policy: str | Callable[[HostFacts], Policy]
) -> list[ArmRun]:
    """Whole episodes of a lesson's task under one policy."""
    task = LESSONS[lesson].task()
    entries = [Entry(arm, seed, policy) for seed in seeds]
    with limited_threads(1):
        return run_entries(task, entries, partial(Population, splits=splits_of(lesson)))


def choose(pupil: Pupil, keep: Path) -> dict[str, Any]:
    """Play on the choosing seeds: the plan that validation likes most, and what was seen."""
    taught = load_policy(pupil, keep)
    recorders: list[Recorder] = []

    def record(facts: HostFacts) -> Recorder:
        recorders.append(Recorder(taught))
        return recorders[-1]

    played = play(pupil.lesson, "taught", CHOOSING, record)
    episodes = [recorder.episode for recorder in recorders]
    plans = {}
    for name, read_plan in PLANS.items():
        script = read_plan(episodes)
        runs = play(pupil.lesson, name, CHOOSING, lambda facts, script=script: replays(script))
        plans[name] = {"script": script, "validation_accuracy": _validation(runs)}
    best = max(plans, key=lambda name: plans[name]["validation_accuracy"])
    return {
        "seeds": list(CHOOSING),
        "validation_accuracy": _validation(played),
        "plans": plans,
        "plan": best,
        "seen": [row.tolist() for episode in episodes for row in episode.seen],
    }


def _validation(runs: Sequence[ArmRun]) -> float:
    return sum(run.result.validation_accuracy for run in runs) / len(runs)


def judge(pupil: Pupil, arm: str, seeds: Sequence[int], keep: Path) -> dict[str, Any]:
    """An arm's episodes on some of the judging seeds."""
    recorders: list[Recorder] = []
    policy = arm if arm in RULES else _policy_of(pupil, arm, keep, recorders)
    runs = play(pupil.lesson, arm, seeds, policy)
    rows = [row_of(run) for run in runs]
    for row, recorder in zip(rows, recorders, strict=False):
        row["stays_when_blinded"] = recorder.agreed
    return {"arm": arm, "rows": rows}


def _policy_of(
    pupil: Pupil, arm: str, keep: Path, recorders: list[Recorder]
) -> Callable[[HostFacts], Policy]:
    """What builds an arm of a taught policy for a host; recorders are noted."""
    taught = load_policy(pupil, keep)
    if arm == "keeps all":
        return lambda facts: KeepsAll(taught)
    if arm == "drawn":
        return lambda facts: NetworkPolicy(
            taught.network,
            deterministic=False,
            seed=facts.number,
            lacking=taught.lacking,
        )
    chosen = read_json(path_of_choice(pupil, keep))
    if arm == "plan":
        script = tuple((due, tuple(op)) for due, op in chosen["plans"][chosen["plan"]]["script"])
        return lambda facts: replays(script)
    means = Means(taught.layout, [np.asarray(row, np.float32) for row in chosen["seen"]])
    if arm == "blinded":
        return lambda facts: Blinded(taught, means)

    def record(facts: HostFacts) -> Recorder:
        recorders.append(Recorder(taught, Blinded(taught, means)))
        return recorders[-1]

    return record


def row_of(run: ArmRun) -> dict[str, Any]:
    """What an episode came to, and each keep and cull with the evidence there was."""
    result = run.result
    return {
        "seed": result.seed,
        "test_accuracy": result.test_accuracy,
        "test_loss": result.test_loss,
        "validation_accuracy": result.validation_accuracy,
        "params": result.final_params,
        "flops": result.flops,
        "germinated": result.germinated,
        "fossilized": result.fossilized,
        "culled": result.culled,
        "decided": decisions_of(run.events),
    }


def decisions_of(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Each keep and cull: what the seed was measured to contribute in the epoch before it.

    The contribution is None where the seed was not on probation yet.
    """
    measured: dict[str, SeedMeasured] = {}
    decided: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, SeedMeasured):
            measured[event.slot] = event
        if isinstance(event, ActionTaken) and event.op in ("FOSSILIZE", "CULL"):
            evidence = measured[event.slot]
            is_known = evidence.epoch == event.epoch and evidence.stage == "PROBATIONARY"
            decided.append(
                {
                    "op": event.op,
                    "epoch": event.epoch,
                    "slot": event.slot,
                    "blueprint": evidence.blueprint,
                    "contribution": evidence.contribution if is_known else None,
                    "error": evidence.standard_error if is_known else None,
                }
            )
    return decided


# -- what a queue asks -----------------------------------------------------------------------------


def path_of_choice(pupil: Pupil, keep: Path) -> Path:
    return keep / "chosen" / f"{pupil.name}.json"


def path_of_judgement(pupil: Pupil, arm: str, first: int, keep: Path) -> Path:
    """Where an arm's chunk lies; rules are played once for all pupils of a lesson."""
    owner = pupil.lesson if arm in RULES else pupil.name
    return keep / "judged" / owner / f"{arm.replace(' ', '_')}-{first}.json"


def read_json(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def keep_json(path: Path, make: Callable[[], dict[str, Any]]) -> str:
    """Make a record and write it, whole or not at all."""
    started = time.perf_counter()
    record = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    record["seconds"] = time.perf_counter() - started
    write_durably(path, (json.dumps(record) + "\n").encode())
    return f"{path.parent.name}/{path.name}: {record['seconds']:.0f} s"
