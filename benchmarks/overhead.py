"""What wrapping costs while nothing is planted.

    python benchmarks/overhead.py --out NEW.json

Training steps of a CNN of 1 M parameters, bare and wrapped in turn. Each pair times one step of
both, in alternating order, on the same batch; the result is the median of paired ratios.
"""

import argparse
import copy
import json
import statistics
import time
from itertools import pairwise

import torch
from hardware import hardware
from records import add_options, claim, keep
from torch import nn

import esper


def build() -> nn.Module:
    widths = (3, 64, 128, 256, 288)
    layers = [
        nn.Sequential(
            nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)
        )
        for a, b in pairwise(widths)
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(288, 10))


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor
) -> float:
    started = time.perf_counter()
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=300)
    add_options(parser)
    options = parser.parse_args()
    claim(options)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    bare = build()
    garden = esper.grow(copy.deepcopy(bare), slots="[0-3]", example=torch.randn(2, 3, 32, 32))
    arms = [(bare, torch.optim.SGD(bare.parameters(), 0.01, momentum=0.9))]
    arms.append((garden.model, torch.optim.SGD(garden.parameters(), 0.01, momentum=0.9)))
    garden.attach(arms[1][1])
    images, labels = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    ratios, seconds = [], [[], []]
    for pair in range(options.pairs + 10):
        order = (0, 1) if pair % 2 else (1, 0)
        times = {arm: step(*arms[arm], images, labels) for arm in order}
        if pair >= 10:  # the first steps allocate
            ratios.append(times[1] / times[0])
            for arm in order:
                seconds[arm].append(times[arm])
    low, middle, high = statistics.quantiles(ratios, n=4)
    record = {
        "command": f"python benchmarks/overhead.py --pairs {options.pairs}",
        "hardware": hardware("cpu"),
        "parameters": sum(p.numel() for p in bare.parameters()),
        "slots": len(garden.model.slot_config.slot_ids),
        "median_step_ms": {
            "bare": 1e3 * statistics.median(seconds[0]),
            "wrapped": 1e3 * statistics.median(seconds[1]),
        },
        "median_overhead": middle - 1,
        "quartiles": [low - 1, high - 1],
    }
    print(json.dumps(record, indent=1))
    keep(options, record)


if __name__ == "__main__":
    main()
