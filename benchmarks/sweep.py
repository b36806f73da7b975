"""One grown run against a sweep of static sizes: what it costs to reach a target accuracy.

    python benchmarks/sweep.py --data-root DATA --device cuda:0

The grown runs and the host's own size are those of question_q1-cifar10.json (heuristic and never,
learning rate x 1); the wider hosts are trained here, from scratch, with the same seeds, orders of
data and plan. A sweep trains one size after the other, the smallest first, until one reaches the
target on validation data; sizes beyond the budget are not tried. Results go to
benchmarks/results/sweep_cifar10.json, or to --out; a file that is there stays, unless you --replace
it.
"""

import argparse
import datetime
import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from hardware import hardware
from records import claim_file, write

from esper.kasmina.hosts import build_cnn_host
from esper.runtime.population import Population
from esper.runtime.tasks.registry import get_task
from esper.telemetry.statistics import estimate_mean
from esper.trials.arms import Entry, run_entries

RESULTS = Path(__file__).parent / "results"
WIDTHS = (10, 12, 14)
"""channels of the first block; the host has 8, and 14 is the widest within three times its parameters"""
TARGETS = (0.66, 0.68, 0.70)


def cost_of_sweep(sizes: list[dict], target: float) -> tuple[float, dict | None]:
    """FLOPs of trying sizes in turn, and the first that reaches the target."""
    spent = 0.0
    for row in sizes:
        spent += row["flops"]
        if row["validation_accuracy"] >= target:
            return spent, row
    return spent, None


def judge(grown: list[dict], sweeps: list[list[dict]], target: float) -> dict:
    """Both ways to one target, seed by seed; FLOPs are compared whether the target was reached or not."""
    tried = [cost_of_sweep(sizes, target) for sizes in sweeps]
    found = [row for _, row in tried if row is not None]
    ratios = [spent / row["flops"] for (spent, _), row in zip(tried, grown, strict=True)]
    at_once = [
        found_row["flops"] / row["flops"]
        for (_, found_row), row in zip(tried, grown, strict=True)
        if found_row
    ]
    reached = [row for row in grown if row["validation_accuracy"] >= target]
    return {
        "target": target,
        "grown_reaches": len(reached) / len(grown),
        "grown_flops": sum(row["flops"] for row in grown) / len(grown),
        "grown_params": sum(row["final_params"] for row in grown) / len(grown),
        "sweep_reaches": len(found) / len(sweeps),
        "sweep_flops": sum(spent for spent, _ in tried) / len(tried),
        "sweep_params": sum(row["final_params"] for row in found) / len(found) if found else None,
        "flops_ratio": vars(estimate_mean(ratios)),
        "right_size_ratio": sum(at_once) / len(at_once) if at_once else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--question", type=Path, default=RESULTS / "question_q1-cifar10.json")
    parser.add_argument("--out", type=Path, default=RESULTS / "sweep_cifar10.json")
    parser.add_argument("--replace", action="store_true", help="replace the result in --out")
    options = parser.parse_args()
    claim_file(options.out, options.replace)
    question = json.loads(options.question.read_text())
    known = [row for row in question["rows"] if row["rate"] == 1]
    grown, start = ([row for row in known if row["arm"] == arm] for arm in ("heuristic", "never"))
    seeds = [row["seed"] for row in grown]
    task = replace(get_task("cifar10"), epochs=grown[0]["epochs"])
    populate = partial(Population, devices=[options.device], splits=task.load(options.data_root))
    columns = [start]
    for width in WIDTHS:
        wider = replace(task, build_host=partial(build_cnn_host, base_channels=width))
        runs = run_entries(
            wider, [Entry(f"width {width}", seed, "never") for seed in seeds], populate
        )
        columns.append([asdict(run.result) for run in runs])
        print(
            f"width {width}: {[round(row['validation_accuracy'], 3) for row in columns[-1]]}",
            flush=True,
        )
    sweeps = [list(sizes) for sizes in zip(*columns, strict=True)]
    record = {
        "asks": "Reach a target accuracy on CIFAR-10 within three times the host's "
        "parameters, 20 epochs per run.",
        "command": f"python benchmarks/sweep.py --device {options.device}",
        "hardware": hardware(options.device),
        "date": datetime.date.today().isoformat(),
        "targets": [judge(grown, sweeps, target) for target in TARGETS],
        "rows": [row for column in [grown, *columns] for row in column],
    }
    write(options.out, json.loads(json.dumps(record, default=str)))
    for found in record["targets"]:
        print(found)


if __name__ == "__main__":
    main()
