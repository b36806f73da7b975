"""Host kept training, sham growth and heuristic growth on the same hosts, data order and learning-rate plan.

    python benchmarks/growth.py --task digits --out benchmarks/results/growth_digits.json
    python benchmarks/growth.py --task fashion_mnist --data-root DATA --device cuda --out benchmarks/results/...

Writes one JSON file: command, hardware, recipe, every arm's result per seed, means and paired differences.
"""

import argparse
import json
import math
import platform
import statistics
from dataclasses import asdict, replace
from pathlib import Path

import torch

from esper.runtime.devices import describe_map, map_hosts, parse_devices
from esper.runtime.tasks import TASKS, get_task
from esper.telemetry.events import ArmFinished
from esper.trials.arms import Settings, run_arm


def mean_and_error(values: list[float]) -> dict[str, float]:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "standard_error": error}


def hardware(device: str) -> str:
    name = torch.cuda.get_device_name() if device.startswith("cuda") else f"{platform.machine()} CPU, 1 thread"
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}"


def summarise(rows: list[ArmFinished]) -> dict[str, object]:
    arms = {arm: [row for row in rows if row.arm == arm] for arm in dict.fromkeys(row.arm for row in rows)}
    grown = arms["heuristic"]
    return {
        "test_accuracy": {arm: mean_and_error([row.test_accuracy for row in of]) for arm, of in arms.items()},
        "test_loss": {arm: mean_and_error([row.test_loss for row in of]) for arm, of in arms.items()},
        "final_params": {arm: mean_and_error([float(row.final_params) for row in of]) for arm, of in arms.items()},
        "seconds": {arm: mean_and_error([row.seconds for row in of]) for arm, of in arms.items()},
        "heuristic_minus": {
            arm: mean_and_error([g.test_accuracy - c.test_accuracy for g, c in zip(grown, of, strict=True)])
            for arm, of in arms.items()
            if arm != "heuristic"
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = get_task(options.task)
    task = replace(task, life=options.epochs or task.life)
    seeds = list(range(options.seeds))
    settings = Settings(device=options.device, splits=task.load(options.data_root))
    print(f"{task.name}, hosts on {describe_map(map_hosts(len(seeds), parse_devices([options.device])))}")
    grown = run_arm(task, "heuristic", seeds, settings)
    sham = run_arm(task, "sham", seeds, settings, replayed=[run.events for run in grown])
    never = run_arm(task, "never", seeds, settings)
    rows = [run.result for run in (*never, *sham, *grown)]
    for row in rows:
        print(row)
    summary = summarise(rows)
    print(json.dumps(summary, indent=1))
    if options.out:
        record = {
            "command": f"python benchmarks/growth.py --task {task.name} --seeds {options.seeds} --epochs {task.life} "
            f"--device {options.device}",
            "hardware": hardware(options.device),
            "plan": f"{task.optimizer}, peak rate {task.lr}, batch {task.batch}, {task.constant_share:.0%} of "
            f"{task.life} epochs constant, then cosine; budget {task.budget} x host",
            "summary": summary,
            "rows": [asdict(row) for row in rows],
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
