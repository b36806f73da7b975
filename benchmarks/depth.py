"""What it costs to get deeper: compiled steps, the step that grows, and the one after it.

    python benchmarks/depth.py --out NEW.json

Two parts, one core each, seconds of the processor:

- steps: the GPT of examples/pretrain_gpt.py, width 256, 6 layers, AdamW. Arms eager, whole
  (`torch.compile(model)`) and layers (`esper.compile_layers`) take turns, `--rounds` rounds of
  `--steps` steps. Then each gets a layer more, and its next step is timed, compilers included.
- growth: 100 million parameters (width 768, 14 layers), Muon and AdamW, four growths by a layer.
"""

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch
from hardware import hardware
from records import add_options, claim, keep
from torch import nn

import esper

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import pretrain_gpt

ARMS = ("eager", "whole", "layers")


def now() -> float:
    """Seconds of this process and of the compilers that it waited for."""
    return time.process_time() + sum(os.times()[2:4])


def build(layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return pretrain_gpt.GPT(layers, width, width // 64)


class Arm:
    """A model, as one arm calls it, and its schedule: one layer more after ten steps' tokens."""

    def __init__(self, name: str, layers: int, width: int):
        self.model = build(layers, width)
        self.call = self.model
        if name == "whole":
            self.call = torch.compile(self.model)
        elif name == "layers":
            esper.compile_layers(self.model, "blocks")
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=1e-3)]
        with warnings.catch_warnings(action="ignore"):
            self.depth = esper.DepthSchedule(
                self.call,
                self.optimizers,
                layers="blocks",
                to=layers + 1,
                total=2,
                plan={layers + 1: 0.5},
            )

    def step(self, tokens: torch.Tensor) -> float:
        began = now()
        pretrain_gpt.train_step(self.call, self.optimizers, tokens)
        return now() - began


def compare_steps(rounds: int, steps: int) -> dict[str, object]:
    numbers = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (8, 129), generator=numbers)
    arms = {name: Arm(name, 6, 256) for name in ARMS}
    first = {name: arm.step(tokens) for name, arm in arms.items()}
    for arm in arms.values():
        arm.step(tokens)
    medians: dict[str, list[float]] = {name: [] for name in ARMS}
    for _ in range(rounds):
        for name, arm in arms.items():
            medians[name].append(statistics.median(arm.step(tokens) for _ in range(steps)))
    ratios = [one / other for one, other in zip(medians["layers"], medians["whole"], strict=True)]
    grown: dict[str, float] = {}
    after: dict[str, float] = {}
    for name, arm in arms.items():
        began = now()
        assert arm.depth.step(tokens=1)
        grown[name] = now() - began
        after[name] = arm.step(tokens)
    return {
        "parameters": sum(p.numel() for p in arms["eager"].model.parameters()),
        "first_step_seconds": first,
        "step_ms": {name: 1e3 * statistics.median(values) for name, values in medians.items()},
        "layers_over_whole": statistics.median(ratios),
        "layers_over_whole_by_round": ratios,
        "growth_seconds": grown,
        "next_step_seconds": after,
    }


def measure_growth() -> dict[str, object]:
    model = build(14, 768)
    tokens = torch.randint(256, (1, 65))
    others = [*model.token.parameters(), *model.head.parameters()]
    optimizers = [
        torch.optim.Muon(model.blocks.parameters(), lr=0.02),
        torch.optim.AdamW(others, lr=3e-3),
    ]
    began = time.perf_counter()
    plan = {layers: (layers - 14) / 8 for layers in range(15, 19)}
    depth = esper.DepthSchedule(model, optimizers, layers="blocks", to=18, total=8, plan=plan)
    created = time.perf_counter() - began
    pretrain_gpt.train_step(model, optimizers, tokens)
    parameters = sum(p.numel() for p in model.parameters())
    clock, processor = [], []
    while depth.depth < 18:
        began, began_processor = time.perf_counter(), time.process_time()
        grew = depth.step(tokens=1)
        if grew:
            clock.append(time.perf_counter() - began)
            processor.append(time.process_time() - began_processor)
    return {
        "parameters": parameters,
        "creation_seconds": created,
        "growth_seconds_clock": clock,
        "growth_seconds_processor": processor,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=7)
    add_options(parser)
    options = parser.parse_args()
    claim(options)
    torch.set_num_threads(1)
    record = {
        "command": f"python benchmarks/depth.py --rounds {options.rounds} --steps {options.steps}",
        "hardware": hardware("cpu"),
        "steps": compare_steps(options.rounds, options.steps),
        "growth": measure_growth(),
    }
    print(json.dumps(record, indent=1))
    keep(options, record)


if __name__ == "__main__":
    main()
