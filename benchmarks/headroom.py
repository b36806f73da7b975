"""How much is there to read? Hosts of a family differ: many plans for each variation, and the best of them.

    python benchmarks/headroom.py play digits_varied --variations 24
    python benchmarks/headroom.py table digits_varied

A policy that reads its host can win at most what the best plan of each variation wins over the best plan for all.
Each variation is played on host seeds of two kinds: on the *choosing* ones its best plan is found, on the *judging*
ones that plan is compared with the best fixed plan (the best in the mean over all choosing hosts), with the default
rule and with the host left alone. Plans of one host seed share its examples, wrong labels and first weights. Two host
seeds choose badly where a plan's error is several points, so a second reader knows what was drawn: a regression over
all other variations tells it the best plan.

A result is one number per host, test accuracy in points; errors are those of the mean over variations, which are
what a new host draws first. The JSON is written as results come; what it has is not played again.
"""

import argparse
import datetime
import itertools
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import records
import torch
from hardware import hardware

from esper.runtime.population import Population
from esper.runtime.tasks.families import variation_of
from esper.runtime.tasks.registry import get_task
from esper.runtime.tasks.task import Task
from esper.trials.arms import Entry, run_entries

RULE = "heuristic"
RULE_BEFORE = "heuristic:held_out_part=0"
"""The rule of 0.2.0."""
FIRST_VARIATION = 3000
"""training of the shipped policy never draws variations from here on"""


def calendar(epochs: str, places: str) -> str:
    """A plan of `schedule`: at each of the epochs the place of the same number."""
    return f"schedule:epochs={epochs}:places={places}"


HEAVY = ("r0c0.conv_heavy", "r0c1.conv_heavy")
PLANS = {
    "never": "never",
    "rule": RULE,
    "rule of 0.2.0": RULE_BEFORE,
    "heavy early": calendar("1", HEAVY[0]),
    "both early": calendar("1+2", "+".join(HEAVY)),
    "four early": calendar("1+2+3+4", "+".join(HEAVY * 2)),
    "four at 8": calendar("8+9+10+11", "+".join(HEAVY * 2)),
    "both at 16": calendar("16+17", "+".join(HEAVY)),
    "attention": calendar("1+2", "r0c0.attention+r0c1.attention"),
    "norm": calendar("1+2", "r0c0.norm+r0c1.norm"),
}
FIXED = tuple(name for name in PLANS if not name.startswith("rule"))
"""Plans that read nothing."""


def main() -> None:
    options = read_options()
    if options.stage == "play":
        play(options)
    show(json.loads(options.out.read_text(encoding="utf-8"))[options.family]["hosts"])


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=("play", "table"))
    parser.add_argument("family", help="a task with a variety, as digits_varied")
    parser.add_argument("--variations", type=int, default=24)
    parser.add_argument("--choosing", type=int, default=2, help="host seeds that choose a plan")
    parser.add_argument("--judging", type=int, default=2, help="host seeds that judge it")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/headroom.json"))
    return parser.parse_args()


# -- playing ---------------------------------------------------------------------------------------


def play(options: argparse.Namespace) -> None:
    """Play every plan on every host that the record lacks; all plans of a host side by side."""
    torch.set_num_threads(1)
    task = get_task(options.family)
    splits = task.load(options.data_root)
    record = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    part = record.setdefault(options.family, {"hosts": {}})
    part |= {
        "plans": PLANS,
        "hardware": hardware("cpu"),
        "date": datetime.date.today().isoformat(),
    }
    for number in range(FIRST_VARIATION, FIRST_VARIATION + options.variations):
        seeds = itertools.islice(seeds_of(task, number), options.choosing + options.judging)
        for index, seed in enumerate(seeds):
            if str(seed) in part["hosts"]:
                continue
            entries = [Entry(name, seed=seed, policy=policy) for name, policy in PLANS.items()]
            runs = run_entries(task, entries, partial(Population, splits=splits))
            part["hosts"][str(seed)] = {
                "variation": number,
                "drawn": variation_of(task, seed).drawn,  # type: ignore[union-attr]
                "judges": index >= options.choosing,
                "accuracy": {run.result.arm: run.result.test_accuracy for run in runs},
                "params": {run.result.arm: run.result.final_params for run in runs},
            }
            records.write(options.out, record)
            print(f"variation {number}, host seed {seed}", flush=True)


def seeds_of(task: Task, number: int) -> Iterator[int]:
    """Host seeds that play this variation."""
    for seed in itertools.count():
        variation = variation_of(task, seed)
        if variation is not None and variation.number == number:
            yield seed


# -- reading ---------------------------------------------------------------------------------------

Points = dict[str, float]
"""Test accuracy in points, by plan."""


class Row(NamedTuple):
    """What the plans came to on one variation, on hosts that choose and on hosts that judge."""

    drawn: dict[str, float]
    chosen: Points
    judged: Points


class Lead(NamedTuple):
    """A mean over variations, and its standard error."""

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:+.2f} ± {self.error:.2f}"


def rows_of(hosts: dict[str, Any]) -> list[Row]:
    """One row for each variation that has hosts of both kinds."""
    by_variation: dict[int, list[dict[str, Any]]] = {}
    for host in hosts.values():
        by_variation.setdefault(host["variation"], []).append(host)
    rows = []
    for number in sorted(by_variation):
        of_variation = by_variation[number]
        choosing = [host for host in of_variation if not host["judges"]]
        judging = [host for host in of_variation if host["judges"]]
        if choosing and judging:
            drawn = of_variation[0]["drawn"]
            rows.append(Row(drawn, chosen=mean_points(choosing), judged=mean_points(judging)))
    return rows


def mean_points(hosts: list[dict[str, Any]]) -> Points:
    """The mean of each plan over some hosts."""
    plans = hosts[0]["accuracy"]
    return {
        plan: 100 * float(np.mean([host["accuracy"][plan] for host in hosts])) for plan in plans
    }


def best_fixed(rows: list[Row]) -> str:
    """The plan that reads nothing and is best in the mean over all choosing hosts."""
    return max(FIXED, key=lambda plan: float(np.mean([row.chosen[plan] for row in rows])))


def lead(rows: list[Row], plans: list[str], rival: str) -> Lead:
    """How far the plan of each row is ahead of one plan for all, on the hosts that judge."""
    points = [row.judged[plan] - row.judged[rival] for row, plan in zip(rows, plans, strict=True)]
    return Lead(float(np.mean(points)), float(np.std(points, ddof=1) / len(points) ** 0.5))


def describe(drawn: dict[str, float]) -> list[float]:
    """What was drawn, as the numbers of a quadratic regression."""
    values = [np.log(drawn["examples"] / 250), 4 * drawn["noise"], np.log(drawn["width"] / 4)]
    products = [a * b for a, b in itertools.combinations_with_replacement(values, 2)]
    return [1.0, *values, *products]


def read_plans(rows: list[Row], penalty: float = 3.0) -> list[str]:
    """For each row the plan that somebody chooses who knows what was drawn, and the other rows.

    A ridge regression says by how much each plan is ahead of `never`, from both kinds of hosts of all other rows.
    """
    features = np.array([describe(row.drawn) for row in rows])
    leads = np.array(
        [
            [
                row.chosen[plan] + row.judged[plan] - row.chosen["never"] - row.judged["never"]
                for plan in PLANS
            ]
            for row in rows
        ]
    )
    ridge = penalty * np.eye(features.shape[1])
    plans = []
    for index in range(len(rows)):
        others = np.arange(len(rows)) != index
        seen = features[others]
        weights = np.linalg.solve(seen.T @ seen + ridge, seen.T @ leads[others])
        plans.append([*PLANS][int((features[index] @ weights).argmax())])
    return plans


def lead_on_all(rows: list[Row], plans: list[str], rival: str) -> Lead:
    """As `lead`, on hosts of both kinds: for plans that were chosen without them."""
    points = [
        (row.chosen[plan] + row.judged[plan] - row.chosen[rival] - row.judged[rival]) / 2
        for row, plan in zip(rows, plans, strict=True)
    ]
    return Lead(float(np.mean(points)), float(np.std(points, ddof=1) / len(points) ** 0.5))


def show(hosts: dict[str, Any]) -> None:
    """A row for each variation, and what reading could win."""
    rows = rows_of(hosts)
    names = list(PLANS)
    print("| " + " | ".join([*rows[0].drawn, *names, "chosen"]) + " |")
    print("|---" * (len(rows[0].drawn) + len(names) + 1) + "|")
    best = [max(row.chosen, key=row.chosen.__getitem__) for row in rows]
    for row, plan in zip(rows, best, strict=True):
        cells = [f"{value:g}" for value in row.drawn.values()]
        cells += [f"{row.judged[name]:.1f}" for name in names]
        print("| " + " | ".join([*cells, plan]) + " |")
    fixed = best_fixed(rows)
    means = {name: float(np.mean([row.judged[name] for row in rows])) for name in names}
    print("means: " + ", ".join(f"{name} {mean:.2f}" for name, mean in means.items()))
    for rival in (fixed, RULE_NAMES[0], RULE_NAMES[1], "never"):
        print(f"best plan of each variation - {rival}: {lead(rows, best, rival)}")
    read = read_plans(rows)
    for rival in names:
        print(f"who knows what was drawn - {rival}: {lead_on_all(rows, read, rival)}")
    for name in names:
        harmed = float(np.mean([row.judged[name] < row.judged["never"] - 2 for row in rows]))
        print(f"{name}: more than 2 points below never on {harmed:.0%} of the variations")


RULE_NAMES = [name for name in PLANS if name.startswith("rule")]


if __name__ == "__main__":
    main()
