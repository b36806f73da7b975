"""Does the default rule harm a host that lacks data? Eighteen digits hosts that differ in data and width.

    python benchmarks/harm.py choose --many 4 --arms never heuristic:held_out_part=0.2 heuristic heuristic:held_out_part=0.45
    python benchmarks/harm.py judge --workers 16
    python benchmarks/harm.py judge --table

80, 300 or 1,000 training examples (a quarter more is given, of which 15 % are held out), none or 30 % of their
labels drawn at random (held-out ones too; test labels are clean), CNNs of 2 blocks and width 2, 4 or 8; 40 epochs
in batches of 32, budget 8 times the host. Each host seed draws its own examples and its own wrong labels, so a
result is about the variation and not about one data set. Arms of one host seed share them and are paired by it.
Seeds that chose settings never judge.

The default rule passes if it is on no variation behind `never` by more than 1.5 points and two standard errors at
once, and in the mean over variations not behind `heuristic:held_out_part=0`, which is the rule of 0.2.0. The JSON
is written as results come; what it has is not played again.
"""

import argparse
import datetime
import itertools
import json
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import records
import torch
from hardware import hardware
from sklearn.datasets import load_digits

import esper
from esper.kasmina.hosts import build_cnn_host
from esper.runtime.tasks.task import Task
from esper.telemetry.events import ActionTaken
from esper.trials.arms import Entry, run_entries

NEVER = "never"
BEFORE = "heuristic:held_out_part=0"
"""The rule of 0.2.0."""
NOW = "heuristic"
FIRST_SEED = {"choose": 7000, "judge": 9000}
MOST_BEHIND = 1.5
"""points that a rule may be behind the host alone, if that is beyond two standard errors"""
TRAIN_AND_HELD_OUT = slice(0, 1300)
"""where examples to learn from are drawn from, of all in the order that the seed draws; the rest are for the test"""


class Variation(NamedTuple):
    """What one kind of host has: training examples, share of wrong labels, width."""

    examples: int
    noise: float
    width: int

    def __str__(self) -> str:
        return f"{self.examples} examples, noise {self.noise}, width {self.width}"


VARIATIONS = [
    Variation(*values) for values in itertools.product((80, 300, 1000), (0.0, 0.3), (2, 4, 8))
]


Results = dict[str, dict[str, Any]]
"""What each arm came to, by the arm's name."""


class Job(NamedTuple):
    """One host seed of a variation, and the arms that it still has to play."""

    variation: Variation
    seed: int
    arms: tuple[str, ...]


def main() -> None:
    options = read_options()
    if not options.table:
        play(options)
    show(json.loads(options.out.read_text(encoding="utf-8"))[options.stage])


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=FIRST_SEED)
    parser.add_argument(
        "--arms", nargs="+", default=[NEVER, BEFORE, NOW], help="policies as esper run has them"
    )
    parser.add_argument(
        "--few", type=int, default=24, help="host seeds of a variation with 80 examples"
    )
    parser.add_argument("--many", type=int, default=8, help="host seeds of any other")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--workers", type=int, default=1, help="processes side by side")
    parser.add_argument("--table", action="store_true", help="only read what is there")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/harm.json"))
    return parser.parse_args()


# -- playing ---------------------------------------------------------------------------------------


def play(options: argparse.Namespace) -> None:
    """Play what the record lacks, several host seeds at a time where there are workers."""
    record = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    stage = record.setdefault(options.stage, {"variations": {}})
    stage |= {
        "epochs": options.epochs,
        "hardware": hardware("cpu"),
        "date": datetime.date.today().isoformat(),
    }
    jobs = list(find_jobs(options, stage["variations"]))
    # longest first, so that no worker ends with a long one alone
    jobs.sort(key=lambda job: -job.variation.examples)
    for number, (job, results) in enumerate(play_all(jobs, options), 1):
        arms = stage["variations"].setdefault(str(job.variation), {})
        for arm, result in results.items():
            arms.setdefault(arm, {})[str(job.seed)] = result
        records.write(options.out, record)
        print(f"{number} of {len(jobs)}: {job.variation}, host seed {job.seed}", flush=True)


def play_all(jobs: Sequence[Job], options: argparse.Namespace) -> Iterator[tuple[Job, Results]]:
    """Every job with its results, as they come."""
    if options.workers == 1:
        for job in jobs:
            yield job, play_one(job, options.epochs)
        return
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(play_one, job, options.epochs): job for job in jobs}
        for done in as_completed(waiting):
            yield waiting[done], done.result()


def find_jobs(options: argparse.Namespace, known: dict[str, Any]) -> Iterator[Job]:
    """What is not played yet."""
    first = FIRST_SEED[options.stage]
    for variation in VARIATIONS:
        count = options.few if variation.examples == 80 else options.many
        for seed in range(first, first + count):
            played = known.get(str(variation), {})
            arms = tuple(arm for arm in options.arms if str(seed) not in played.get(arm, {}))
            if arms:
                yield Job(variation, seed, arms)


def play_one(job: Job, epochs: int) -> Results:
    """All arms of one host seed, on the same data, from the same weights."""
    torch.set_num_threads(1)
    entries = [Entry(arm, seed=job.seed, policy=arm) for arm in job.arms]
    results: Results = {}
    for arm, run in zip(
        job.arms, run_entries(make_task(job.variation, job.seed, epochs), entries), strict=True
    ):
        planted = [
            event.epoch
            for event in run.events
            if isinstance(event, ActionTaken) and event.op == "GERMINATE"
        ]
        results[arm] = {
            "test_accuracy": run.result.test_accuracy,
            "final_params": run.result.final_params,
            "planted": planted,
        }
    return results


def make_task(variation: Variation, seed: int, epochs: int) -> Task:
    """The task of one host: its examples and its wrong labels are drawn by its seed."""
    digits = load_digits()
    images = torch.tensor(digits.images).float()[:, None] / 16
    labels = torch.tensor(digits.target).long()
    generator = np.random.default_rng([seed, variation.examples, round(100 * variation.noise)])
    order = torch.tensor(generator.permutation(len(images)))
    train = order[TRAIN_AND_HELD_OUT][: variation.examples * 5 // 4]
    test = order[TRAIN_AND_HELD_OUT.stop :]
    noisy = labels[train].clone()
    is_wrong = torch.tensor(generator.random(len(noisy)) < variation.noise)
    noisy[is_wrong] = torch.tensor(generator.integers(0, 10, int(is_wrong.sum())))
    build = partial(
        build_cnn_host, blocks=2, base_channels=variation.width, in_channels=1, image_size=8
    )
    return esper.task_from_datasets(
        "digits_varied",
        list(zip(images[train], noisy.tolist(), strict=True)),
        list(zip(images[test], labels[test].tolist(), strict=True)),
        build,
        classes=10,
        batch=32,
        epochs=epochs,
        budget=8.0,
    )


# -- judging ---------------------------------------------------------------------------------------


class Lead(NamedTuple):
    """A mean difference in points of test accuracy, and its standard error."""

    mean: float
    error: float

    @property
    def is_harm(self) -> bool:
        """Whether it is behind by more than is allowed, beyond doubt."""
        return self.mean < -max(MOST_BEHIND, 2 * self.error)

    def __str__(self) -> str:
        return f"{self.mean:+.1f} ± {self.error:.1f}"


def lead_of(arms: dict[str, Any], arm: str, other: str) -> Lead:
    """How far one arm is ahead of another on the seeds that both have."""
    seeds = [seed for seed in arms[arm] if seed in arms[other]]
    points = [
        100 * (arms[arm][seed]["test_accuracy"] - arms[other][seed]["test_accuracy"])
        for seed in seeds
    ]
    error = float(np.std(points, ddof=1) / len(points) ** 0.5) if len(points) > 1 else float("nan")
    return Lead(float(np.mean(points)), error)


def show(stage: dict[str, Any]) -> None:
    """Every variation as a row, and what the bars ask of each arm."""
    variations = stage["variations"]
    rivals = [arm for arm in next(iter(variations.values())) if arm != NEVER]
    print(
        "| examples | noise | width | seeds | never | "
        + " | ".join(f"{arm} - never" for arm in rivals)
        + " |"
    )
    print("|---" * (5 + len(rivals)) + "|")
    leads: dict[str, dict[str, Lead]] = {arm: {} for arm in rivals}
    for variation in VARIATIONS:
        if (arms := variations.get(str(variation))) is None:
            continue
        for arm in rivals:
            if arm in arms:
                leads[arm][str(variation)] = lead_of(arms, arm, NEVER)
        alone = 100 * np.mean([result["test_accuracy"] for result in arms[NEVER].values()])
        cells = [str(leads[arm].get(str(variation), "")) for arm in rivals]
        head = [
            f"{variation.examples:,}",
            variation.noise,
            variation.width,
            len(arms[NEVER]),
            f"{alone:.1f}",
        ]
        print("| " + " | ".join(map(str, [*head, *cells])) + " |")
    for arm in rivals:
        print(summary_of(arm, leads[arm]))
    if {BEFORE, NOW} <= set(rivals):
        pairs = [lead_of(arms, NOW, BEFORE) for arms in variations.values()]
        print(f"{NOW} - {BEFORE}, mean over variations: {mean_of(pairs)}")


def summary_of(arm: str, leads: dict[str, Lead]) -> str:
    """An arm's mean lead over the host alone, and where it harms."""
    harmed = [variation for variation, lead in leads.items() if lead.is_harm]
    return f"{arm} - {NEVER}, mean over {len(leads)} variations: {mean_of(list(leads.values()))}; harms: {'; '.join(harmed) or 'none'}"


def mean_of(leads: Sequence[Lead]) -> Lead:
    """The mean over variations; each has host seeds of its own data, so errors add up by squares."""
    error = float(np.sqrt(sum(lead.error**2 for lead in leads)) / len(leads))
    return Lead(float(np.mean([lead.mean for lead in leads])), error)


if __name__ == "__main__":
    main()
