"""Host kept training, sham growth and heuristic growth on the same hosts, data order and learning-rate plan.

    python benchmarks/growth.py --data digits --out benchmarks/results/growth_digits.json
    python benchmarks/growth.py --data fashion_mnist --data-root DATA --device cuda --out benchmarks/results/...

Writes one JSON file: command, hardware, recipe, every arm's result per seed, means and paired differences.
"""

import argparse
import json
import math
import platform
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

from esper.runtime.data import load_digits, load_fashion_mnist
from esper.telemetry.events import ArmFinished
from esper.trials.arms import Recipe, run_arm

RECIPES = {
    "digits": Recipe(epochs=40, blocks=2, base_channels=4, batch=64, lr=0.1),
    "fashion_mnist": Recipe(epochs=20, blocks=3, base_channels=8, batch=256, lr=0.2),
}


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
    parser.add_argument("--data", choices=RECIPES, default="digits")
    parser.add_argument("--data-root", type=Path, default=Path("."))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--base-channels", type=int)
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipe = RECIPES[options.data]
    given = {"epochs": options.epochs, "base_channels": options.base_channels, "blocks": options.blocks}
    recipe = replace(recipe, **{name: value for name, value in given.items() if value is not None})
    data = load_digits() if options.data == "digits" else load_fashion_mnist(options.data_root)
    data = data.to(options.device)
    rows = []
    for seed in range(options.seeds):
        grown = run_arm(data, "heuristic", seed, recipe, device=options.device)
        sham = run_arm(data, "sham", seed, recipe, device=options.device, replayed=grown.events)
        never = run_arm(data, "never", seed, recipe, device=options.device)
        rows += [never.result, sham.result, grown.result]
        for run in (never, sham, grown):
            print(run.result, flush=True)
    summary = summarise(rows)
    print(json.dumps(summary, indent=1))
    if options.out:
        record = {
            "command": "python benchmarks/growth.py " + " ".join(a for a in sys.argv[1:] if not a.startswith("/")),
            "hardware": hardware(options.device),
            "recipe": asdict(recipe),
            "summary": summary,
            "rows": [asdict(row) for row in rows],
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
