"""What it costs to stay compiled while growing.

A small GPT plants a seed per epoch, in over eight structures.

    python benchmarks/compiled.py --out NEW.json  # --device cuda on a GPU

Arms: eager; whole (`torch.compile(garden.model)`, which the garden lets torch compile again). Each
has a process of its own, and no code compiled before. Seconds are of the processor, compilers
included.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from hardware import hardware
from records import add_options, claim, keep
from torch import nn

import esper
from esper.kasmina.hosts import build_transformer_host

ARMS = ("eager", "whole")


def now() -> float:
    """Seconds of this process and of the compilers that it waited for; on a GPU those of the clock."""
    if torch.cuda.is_available():
        return time.perf_counter()
    return time.process_time() + sum(os.times()[2:4])


def play(arm: str, structures: int, steps: int, device: str) -> dict[str, object]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = torch.randint(256, (16, 65), device=device)
    host = build_transformer_host(
        vocabulary=256, width=64, layers=2, heads=4, context=64, slots=2
    ).to(device)
    policy = "schedule:blueprint_id=mlp:epochs=" + "+".join(map(str, range(structures - 1)))
    settings = esper.GrowthSettings(lengths=esper.StageLengths(ramp=0), prunes=False)
    slots = list(host.slot_config().modules.values())
    garden = esper.grow(
        host, slots=slots, example=text[:2, :-1], budget=20.0, policy=policy, settings=settings
    )
    optimizer = torch.optim.AdamW(garden.parameters(), lr=1e-3)
    garden.attach(optimizer)
    call = torch.compile(garden.model) if arm == "whole" else garden.model

    def losses(model: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(
            model(text[:, :-1]).transpose(1, 2), text[:, 1:], reduction="none"
        ).mean(1)

    first, rest, started = [], [], now()
    for _ in range(structures):
        seconds = []
        for _ in range(steps):
            began = now()
            optimizer.zero_grad()
            losses(call).mean().backward()
            optimizer.step()
            if device != "cpu":
                torch.cuda.synchronize()
            seconds.append(now() - began)
        rest.append(1e3 * statistics.median(seconds))
        first.append(seconds[0] - statistics.median(seconds))
        garden.step(lambda: losses(garden.model))
    return {
        "seconds": now() - started,
        "compiling_seconds": first,
        "median_step_ms": rest,
        "final_loss": losses(garden.model).mean().item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--structures", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--arm", choices=ARMS)
    add_options(parser)
    options = parser.parse_args()
    if options.arm:
        print(json.dumps(play(options.arm, options.structures, options.steps, options.device)))
        return
    claim(options)
    told = f"--structures {options.structures} --steps {options.steps} --device {options.device}"
    arms = {}
    for arm in ARMS:
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, __file__, *told.split(), "--arm", arm]
            environment = {
                **os.environ,
                "TORCHINDUCTOR_CACHE_DIR": cache,
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
            }
            done = subprocess.run(
                command, env=environment, check=True, stdout=subprocess.PIPE, text=True
            )
        arms[arm] = json.loads(done.stdout.splitlines()[-1])
    record = {
        "command": f"python benchmarks/compiled.py {told}",
        "hardware": hardware(options.device),
        "arms": arms,
    }
    print(json.dumps(record, indent=1))
    keep(options, record)


if __name__ == "__main__":
    main()
