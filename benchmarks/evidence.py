"""What a measurement says about the end: episodes are forked, a seed is kept in one branch and culled in the other.

    python benchmarks/evidence.py --task digits --workers 8 --out runs/evidence
    python benchmarks/evidence.py --task cifar10_preset --data-root DATA --device cuda:0 --workers 2 --out runs/evidence
    python benchmarks/evidence.py --report --out runs/evidence

The realised gain of a fork is the held-out loss at the end of the episode with the seed culled minus the same with it
kept. A kept seed becomes a fossil at once, or at the end of its ramp. Both branches see the same data in the same order
at the same rates, and what the episode did to other seeds afterwards happens in both. Some forks are repeated with
other orders of data: that is the noise. Each part of a task, a few hosts, is one JSON file under --out; a part that
exists is skipped. --report writes benchmarks/results/evidence.json and docs/pictures/evidence.svg.
"""

import argparse
import datetime
import gc
import json
import multiprocessing
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from branches import KEEP, Branch, finish_branches
from evidence_report import write_report
from forks import POINTS, Fork, Recorder
from hardware import hardware

from esper.runtime.config import TaskConfig

TASKS: dict[str, dict[str, Any]] = {
    "cifar10_preset": {
        "name": "cifar10",
        "epoch_examples": 3125,
        "batch": 512,
        "epochs": 30,
        "held_out": 1250,
    },
    "cifar10_full": {"name": "cifar10", "epochs": 12},
    "digits": {"name": "digits", "epoch_examples": 512, "epochs": 16},
    "python_text": {"name": "python_text", "epoch_examples": 512, "epochs": 16, "held_out": 512},
}
HOSTS = {"cifar10_preset": 24, "cifar10_full": 16, "digits": 48, "python_text": 24}
FORKS = {"cifar10_preset": 3, "cifar10_full": 2, "digits": 3, "python_text": 3}
PART = {"cifar10_preset": 6, "cifar10_full": 4, "digits": 2, "python_text": 6}
"""Hosts of one part, whose branches run side by side."""
FIRST_SEED = {
    "cifar10_preset": 310_000,
    "cifar10_full": 320_000,
    "digits": 330_000,
    "python_text": 340_000,
}
SMOKE: dict[str, dict[str, Any]] = {
    "cifar10_preset": {"epoch_examples": 512, "epochs": 8, "batch": 128, "held_out": 256},
    "cifar10_full": {"epoch_examples": 1024, "epochs": 6, "held_out": 256},
    "digits": {"epoch_examples": 256, "epochs": 10},
    "python_text": {"epoch_examples": 64, "epochs": 8, "batch": 32, "held_out": 64},
}
REPEATED = {"cifar10_preset": 4, "cifar10_full": 4, "digits": 1, "python_text": 4}
"""One fork in so many is repeated with other orders of data."""
ORDERS = 3
"""Other orders of data of a fork that is repeated."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS)
    parser.add_argument(
        "--hosts", type=int, help="episodes to fork; two in turn, heuristic and a plan"
    )
    parser.add_argument("--forks", type=int, help="most forks of one host at one point")
    parser.add_argument(
        "--repeated", type=int, help="one fork in so many is repeated with other orders of data"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of the parts")
    parser.add_argument("--workers", type=int, default=1, help="processes that take parts in turn")
    parser.add_argument(
        "--at-once", type=int, help="branches side by side; 64 on a GPU, 16 on a CPU"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny episodes, to see that it works")
    parser.add_argument(
        "--check", action="store_true", help="what repeats its episode must equal it to the bit"
    )
    parser.add_argument(
        "--report", action="store_true", help="tables and figure of all parts under --out"
    )
    parser.add_argument(
        "--results", type=Path, help="where --report writes; the project's own files if not given"
    )
    options = parser.parse_args()
    if options.report:
        write_report(options.out, options.results, list(POINTS))
        return
    if options.task is None:
        parser.error("name a --task, or ask for the --report of what is there")
    if options.check and options.device != "cpu":
        parser.error(
            "--check is for the CPU: on a GPU two runs of the same thing may differ "
            "in their last bits"
        )
    hosts = options.hosts or (4 if options.smoke else HOSTS[options.task])
    size = min(hosts, PART[options.task])
    options.out.mkdir(parents=True, exist_ok=True)
    first = FIRST_SEED[options.task]
    parts = [
        list(range(first + start, first + min(start + size, hosts)))
        for start in range(0, hosts, size)
    ]
    todo = [seeds for seeds in parts if not part_path(options, seeds).exists()]
    print(f"{options.task}: {len(parts)} parts, {len(parts) - len(todo)} exist", flush=True)
    work = partial(run_part, options)
    if options.workers == 1:
        for seeds in todo:
            work(seeds)
        return
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for _ in pool.imap_unordered(work, todo, chunksize=1):
            pass


def part_path(options: argparse.Namespace, seeds: Sequence[int]) -> Path:
    return options.out / f"{options.task}-{seeds[0]}-{len(seeds)}{'-smoke' * options.smoke}.json"


def run_part(options: argparse.Namespace, seeds: Sequence[int]) -> None:
    """Play, fork, finish, write."""
    torch.set_num_threads(1)
    started = time.perf_counter()

    def tell(text: str) -> None:
        print(
            f"{options.task} {seeds[0]}: {text} after {time.perf_counter() - started:.0f} s",
            flush=True,
        )

    settings = {**TASKS[options.task], **(SMOKE[options.task] if options.smoke else {})}
    task = TaskConfig(**settings).build()
    splits = task.load(options.data_root)
    recorder = Recorder(task, seeds, options.device, splits)
    most = options.forks or FORKS[options.task]
    forks = choose_forks(recorder.play(), most, task.epochs)
    tell(f"{len(forks)} forks")
    recorder.predict(forks)
    tell("predictors")
    branches = plan_branches(forks, options.repeated or REPEATED[options.task])
    at_once = options.at_once or (64 if options.device.startswith("cuda") else 16)
    del recorder.population  # its graphs take memory that branches need
    gc.collect()
    finish_branches(task, branches, options.device, splits, at_once=at_once, tell=tell)
    assert recorder.measured_apart < (1e-5 if options.device == "cpu" else 1e-2), (
        recorder.measured_apart
    )
    replayed = compare_replays(recorder, branches, options.check)
    record = {
        "task": options.task,
        "smoke": options.smoke,
        "settings": settings,
        "seeds": list(seeds),
        "policies": dict(zip(map(str, seeds), recorder.policies, strict=True)),
        "broken": [seeds[host] for host in sorted(recorder.broken)],
        "hardware": hardware(options.device),
        "date": datetime.date.today().isoformat(),
        "seconds": round(time.perf_counter() - started, 1),
        "branches": len(branches),
        "replays": replayed,
        "measured_apart": recorder.measured_apart,
        "forks": [describe(fork, recorder) for fork in forks],
    }
    path = part_path(options, seeds)
    path.with_suffix(".tmp").write_text(json.dumps(record) + "\n")
    path.with_suffix(".tmp").replace(path)
    tell(f"{len(branches)} branches, replays {replayed}, done")


def choose_forks(forks: Sequence[Fork], most: int, epochs: int) -> list[Fork]:
    """At most so many of a host and point, no seed twice, live seeds and fossils in turn, drawn by lot."""
    chosen = []
    able = [fork for fork in forks if fork.moment.epoch + fork.facts["wait"] <= epochs]
    for host, point in dict.fromkeys((fork.moment.host, fork.point) for fork in able):
        own = [fork for fork in able if (fork.moment.host, fork.point) == (host, point)]
        order = np.random.default_rng(
            [11, own[0].moment.seed, list(POINTS).index(point)]
        ).permutation(len(own))
        ranked = {
            kind: [own[n] for n in order if own[n].facts["kind"] == kind]
            for kind in ("live", "fossil")
        }
        taken: list[Fork] = []
        for kind in ("live", "fossil") * len(own):
            births = {fork.birth for fork in taken}
            fitting = [fork for fork in ranked[kind] if fork.birth not in births]
            if fitting and len(taken) < most:
                taken.append(fitting[0])
        chosen += taken
    return chosen


def plan_branches(forks: Sequence[Fork], repeated: int) -> list[Branch]:
    """Two branches for every fork and order of data, equal ones once."""
    known: dict[Any, Branch] = {}
    counts: dict[str, int] = {}
    for fork in forks:
        number = counts[fork.point] = counts.get(fork.point, -1) + 1
        orders = range(1 + ORDERS) if number % repeated == 0 else range(1)
        for order in orders:
            pair = []
            for script in (fork.keep, fork.cull):
                key = id(fork.moment), script, order
                pair.append(known.setdefault(key, Branch(fork.moment, script, order)))
            if order == 0:
                pair[0].asked.add((fork.slot, fork.birth))
            fork.orders.append((pair[0], pair[1]))
    return list(known.values())


def compare_replays(
    recorder: Recorder, branches: Sequence[Branch], must_equal: bool
) -> dict[str, Any]:
    """Branches that do what their episode did must end as it did: to the bit on a CPU."""
    differences, kept_at_once = [], 0
    for branch in branches:
        host = branch.moment.host
        recorded = tuple(
            step for step in recorder.scripts[host] if step.epoch >= branch.moment.epoch
        )
        if branch.order == 0 and branch.script == recorded and not branch.rolled_back:
            differences.append(
                max(abs(branch.final[key] - value) for key, value in recorder.finals[host].items())
            )
            kept_at_once += any(
                s.op == KEEP and s.epoch == branch.moment.epoch for s in branch.script
            )
    largest = max(differences, default=None)
    assert not must_equal or (kept_at_once and largest == 0.0), (
        f"{kept_at_once} kept at once, {differences}"
    )
    return {"count": len(differences), "kept_at_once": kept_at_once, "largest_difference": largest}


def describe(fork: Fork, recorder: Recorder) -> dict[str, Any]:
    """One fork as plain data; gains are None where a branch was rolled back or the seed was never kept."""
    gains: dict[str, list[float] | None] = {}
    kept, culled = fork.orders[0]
    is_sound = not any(branch.rolled_back for pair in fork.orders for branch in pair)
    for measure, sign in (
        ("validation_loss", 1),
        ("test_loss", 1),
        ("validation_accuracy", -1),
        ("test_accuracy", -1),
    ):
        pairs = [sign * (cull.final[measure] - keep.final[measure]) for keep, cull in fork.orders]
        gains[measure] = pairs if is_sound and fork.birth in kept.kept else None
    later = kept.later.get((fork.slot, fork.birth), (None, None))
    return {
        "seed": fork.moment.seed,
        "policy": recorder.policies[fork.moment.host],
        "epoch": fork.moment.epoch,
        "point": fork.point,
        "slot": fork.slot,
        "birth": fork.birth,
        **fork.facts,
        "predictors": {**fork.predictors, "later": later[0], "later_t": later[1]},
        "kept": kept.final,
        "culled": culled.final,
        "gains": gains,
    }


if __name__ == "__main__":
    main()
