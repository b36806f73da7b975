"""Which rule deserves to be the default: paired by host seed; seeds that choose never judge.

    python benchmarks/rules.py choose --arms heuristic heuristic:share=0.5 --device cuda:0 --data-root DATA
    python benchmarks/rules.py judge --arms heuristic random --device cuda:0 --data-root DATA
    python benchmarks/rules.py judge --arms heuristic random --tasks digits python_text --workers 16 --chunk 2
    python benchmarks/rules.py judge --arms heuristic --tasks python_text_plain --judge 70000 20 --device cuda:0
    python benchmarks/rules.py judge --arms heuristic random --table

Each task, arm and chunk of seeds is one `esper compare` with a folder of its own under
OUT/STAGE/TASK, so that an interrupted call continues and further arms can be added. `choose` reads
validation only; test scores stay in the folders. The first arm is what the others are compared
with. OUT/STAGE.json has what was found and the seeds of both stages.
"""

import argparse
import datetime
import json
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any
from zlib import crc32

from hardware import hardware
from rich.console import Console

from esper.cli.compare import run_compare
from esper.storage import runfolder
from esper.tamiyo.policy_names import Search, parse
from esper.telemetry.statistics import compare_pairs, estimate_mean
from esper.trials.config import CompareConfig

TASKS: dict[str, dict[str, Any]] = {
    "cifar10": {
        "name": "cifar10",
        "epoch_examples": 3125,
        "batch": 512,
        "epochs": 30,
        "held_out": 1250,
    },
    "cifar10_full": {"name": "cifar10", "epochs": 20},
    "cifar10_deep": {
        "name": "cifar10_deep",
        "epoch_examples": 3125,
        "batch": 512,
        "epochs": 30,
        "held_out": 1250,
    },
    "fashion_mnist": {
        "name": "fashion_mnist",
        "epoch_examples": 6000,
        "epochs": 20,
        "held_out": 1500,
    },
    "digits": {"name": "digits", "epoch_examples": 512, "epochs": 16},
    "python_text": {"name": "python_text", "epoch_examples": 1024, "epochs": 20},
}
TASKS["python_text_plain"] = TASKS["python_text"] | {
    "blueprints": ["lora", "mlp_small", "mlp", "attention", "norm"]
}
"""Episodes as in the presets; `cifar10_full` has whole epochs, text has episodes long enough to keep seeds in, and
`python_text_plain` has no copies in its list: what is judged of rules with random seeds alone."""
METRICS = {
    "choose": ("validation_accuracy",),
    "judge": ("test_accuracy", "test_loss", "validation_accuracy"),
}
COSTS = ("final_params", "flops", "germinated", "fossilized", "culled")
Job = tuple[dict[str, Any], str]


def main() -> None:
    options = read_options()
    seeds = {"choose": range(*ends(options.choose)), "judge": range(*ends(options.judge))}
    if shared := set(seeds["choose"]) & set(seeds["judge"]):
        raise SystemExit(
            f"host seed {min(shared)} would choose and judge; give --choose and --judge apart"
        )
    if not options.table:
        play(jobs_of(options, seeds[options.stage]), options.workers)
    found: dict[str, Any] = {
        "stage": options.stage,
        "seeds": {stage: list(used) for stage, used in seeds.items()},
        "hardware": hardware(options.device),
        "date": datetime.date.today().isoformat(),
        "tasks": {task: describe(options, task, seeds[options.stage]) for task in options.tasks},
    }
    path = stage_of(options).with_suffix(".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    show(found, options.arms)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=METRICS)
    parser.add_argument(
        "--arms",
        nargs="+",
        default=["heuristic", "random"],
        help="policies as esper compare has them",
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument(
        "--choose", nargs=2, type=int, default=[30_000, 10], metavar=("FIRST", "COUNT")
    )
    parser.add_argument(
        "--judge", nargs=2, type=int, default=[40_000, 20], metavar=("FIRST", "COUNT")
    )
    parser.add_argument("--chunk", type=int, help="seeds of one call; all by default")
    parser.add_argument("--workers", type=int, default=1, help="processes side by side")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument(
        "--shorten", type=int, help="epochs of 100 examples each, to try the script"
    )
    parser.add_argument(
        "--unpruned", action="store_true", help="without late pruning, in a folder of its own"
    )
    parser.add_argument("--table", action="store_true", help="only read what is there")
    parser.add_argument("--out", type=Path, default=Path("runs/rules"))
    return parser.parse_args()


def ends(first_and_count: Sequence[int]) -> tuple[int, int]:
    first, count = first_and_count
    return first, first + count


def stage_of(options: argparse.Namespace) -> Path:
    """Folder of the stage; shortened and unpruned episodes are kept apart."""
    kind = f"{options.stage}-short-{options.shorten}" if options.shorten else options.stage
    return Path(options.out) / (f"{kind}-unpruned" if options.unpruned else kind)


def folder_of(options: argparse.Namespace, task: str, arm: str) -> Path:
    plain = "".join(letter if letter.isalnum() else "_" for letter in arm)[:60]
    return stage_of(options) / task / f"{plain}-{crc32(arm.encode()):08x}"


def episode_of(options: argparse.Namespace, task: str) -> dict[str, Any]:
    """The settings of a task's episodes."""
    few = {"epochs": options.shorten, "epoch_examples": 100, "batch": 50}
    return (
        TASKS[task]
        | (few if options.shorten else {})
        | ({"prunes": False} if options.unpruned else {})
    )


def jobs_of(options: argparse.Namespace, seeds: range) -> list[tuple[dict[str, Any], str]]:
    """The comparisons of one arm each that are to be made, with their titles."""
    jobs = []
    for task in options.tasks:
        episode = episode_of(options, task)
        for arm in options.arms:
            count = (
                len(seeds) if isinstance(parse(arm), Search) else options.chunk or len(seeds)
            )  # one search for all seeds
            for first in range(seeds.start, seeds.stop, count):
                part = range(first, min(first + count, seeds.stop))
                out = folder_of(options, task, arm) / f"seeds-{part.start}-{part.stop - 1}"
                where = {
                    "out": str(out),
                    "data_root": options.data_root,
                    "devices": [options.device],
                }
                asked = {"task": episode, "policies": [arm], "seed": part.start, "seeds": len(part)}
                jobs.append(({**asked, **where}, f"{task}: {arm}, {out.name}"))
    return jobs


def play(jobs: Sequence[Job], workers: int) -> None:
    """Make the comparisons, several at a time where there are workers."""
    if workers == 1:
        for job in jobs:
            print(play_one(job), flush=True)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for done in pool.map(play_one, jobs):
            print(done, flush=True)


def play_one(job: Job) -> str:
    asked, title = job
    if run_compare(CompareConfig.of(asked), True, Console(quiet=True)) is None:
        raise SystemExit(130)
    return title


def rows_of(options: argparse.Namespace, task: str, arm: str, seeds: range) -> list[dict[str, Any]]:
    """An arm's episodes in the order of seeds; one that is missing is an error."""
    paths = sorted(folder_of(options, task, arm).glob(f"*/{runfolder.RESULTS}"))
    rows = {row["seed"]: row for path in paths for row in runfolder.read_json(path)["rows"]}
    if missing := [seed for seed in seeds if seed not in rows]:
        raise SystemExit(f"{task}: {arm} lacks host seeds {missing}; run it without --table")
    return [rows[seed] for seed in seeds]


def describe(options: argparse.Namespace, task: str, seeds: range) -> dict[str, Any]:
    """Every arm's scores and costs, and how it stands to the first arm, seed by seed."""
    known = {arm: rows_of(options, task, arm, seeds) for arm in options.arms}
    found: dict[str, Any] = {"task": episode_of(options, task), "arms": {}}
    for arm, rows in known.items():
        values = {name: [row[name] for row in rows] for name in (*METRICS[options.stage], *COSTS)}
        against = {
            name: [row[name] for row in known[options.arms[0]]] for name in METRICS[options.stage]
        }
        pairs = {name: compare_pairs(values[name], against[name]) for name in against}
        found["arms"][arm] = {
            **{name: asdict(estimate_mean(values[name])) for name in against},
            **{name: sum(values[name]) / len(rows) for name in COSTS},
            "minus": {name: asdict(pair) for name, pair in pairs.items()},
            "values": {name: values[name] for name in against},
        }
    return found


def show(found: dict[str, Any], arms: Sequence[str]) -> None:
    """Points of accuracy by task, and what the bars ask of each arm."""
    metric = METRICS[found["stage"]][0]
    leads: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms[1:]}
    print(f"\n{metric}, points; differences to {arms[0]}, paired by seed, 95 %")
    for task, described in found["tasks"].items():
        for arm, row in described["arms"].items():
            pair, cost = (
                row["minus"][metric],
                f"{row['final_params']:,.0f} parameters, {row['flops']:.3g} FLOPs",
            )
            low, high = (
                float("nan") if pair[end] is None else 100 * pair[end] for end in ("low", "high")
            )
            lead = "" if arm == arms[0] else f"{100 * pair['mean']:+.2f} [{low:+.2f}, {high:+.2f}]"
            print(f"{task:14s} {100 * row[metric]['mean']:6.2f}  {lead:24s} {arm}  ({cost})")
            if arm in leads:
                leads[arm].append((100 * pair["mean"], low))
    for arm, pairs in leads.items():
        ahead, worst = sum(low > 0 for _, low in pairs), min(mean for mean, _ in pairs)
        mean = sum(mean for mean, _ in pairs) / len(pairs)
        print(
            f"{arm}: lower end above 0 in {ahead} of {len(pairs)}, mean lead "
            f"{mean:+.2f}, worst {worst:+.2f}"
        )


if __name__ == "__main__":
    main()
