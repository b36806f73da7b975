"""How much GPU memory captured graphs take: many hosts at once, and many plans one after the other.

    python benchmarks/memory.py --device cuda --out NEW.json

`hosts`: 64 hosts of `cifar10` side by side, as `esper compare` runs them, each growing by the
random policy. `plans`: random plans in populations of 20 hosts, one after the other; memory after
each, until 1,000 plans or `--seconds` are over. Images are generated. `reserved` is what torch's
allocator holds, `used` what the whole device does.
"""

import argparse
import gc
import json
import time
import traceback
from dataclasses import replace
from typing import Any

import torch
from hardware import hardware
from records import add_options, claim, keep
from throughput import generated

from esper.episodes import Episodes
from esper.runtime.executors.graphs import GraphedExecutor
from esper.runtime.population import Population
from esper.runtime.tasks.registry import get_task
from esper.runtime.tasks.task import Task
from esper.trials.arms import make_decider, play_epoch

GIB = 2**30


def memory(device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {"reserved_gib": 0.0, "used_gib": 0.0}
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return {"reserved_gib": torch.cuda.memory_reserved() / GIB, "used_gib": (total - free) / GIB}


def grow(
    task: Task, splits: Any, seeds: list[int], epochs: int, device: torch.device, **options: Any
) -> dict[str, Any]:
    """Hosts that grow at random, side by side; returns memory and what the executor holds at the end."""
    started, peak, actions = time.perf_counter(), 0.0, 0
    population = Population(task, seeds, [str(device)], splits=splits, **options)
    episodes = Episodes(population)
    deciders = [make_decider(episodes, host, "random") for host in range(len(seeds))]
    for _ in range(epochs):
        happened = play_epoch(episodes, deciders)
        actions += sum(
            type(event).__name__ == "ActionTaken" for events in happened for event in events
        )
        peak = max(peak, memory(device)["used_gib"])
    found = {
        **memory(device),
        "peak_used_gib": peak,
        "actions": actions,
        "seconds": time.perf_counter() - started,
    }
    if isinstance(population.executor, GraphedExecutor):
        graphs = population.executor._device(population.runs[0])
        found |= {
            "lanes": len(graphs._lanes),
            "pools_gib": graphs.taken / GIB,
            "structures": len(graphs._kept),
        }
    return found


def many_hosts(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    hosts, examples, batch = (3, 16, 8) if options.tiny else (64, 2560, 256)
    task = replace(get_task("cifar10"), epoch_examples=examples, batch=batch, epochs=options.epochs)
    splits = generated(64, 8) if options.tiny else generated(50_000, 512)
    rows = {}
    for name, budget in {"default": None, "1 GiB": 1.0}.items():
        rows[name] = grow(
            task, splits, list(range(hosts)), options.epochs, device, graph_memory=budget
        )
        give_back(device)
    return {"part": "hosts", "hosts": hosts, "epochs": options.epochs, "graph_memory": rows}


def many_plans(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    hosts, plans = (2, 4) if options.tiny else (20, options.plans)
    task = replace(get_task("cifar10"), epoch_examples=64, batch=32, epochs=4)
    splits = generated(64, 8)
    started, rows = time.perf_counter(), []
    while len(rows) * hosts < plans and time.perf_counter() - started < options.seconds:
        seeds = [len(rows) * hosts + number for number in range(hosts)]
        rows.append(grow(task, splits, seeds, 4, device))
    return {
        "part": "plans",
        "plans": len(rows) * hosts,
        "first": rows[0],
        "second": rows[min(1, len(rows) - 1)],
        "last": rows[-1],
        "most_reserved_gib": max(row["reserved_gib"] for row in rows),
        "most_used_gib": max(row["used_gib"] for row in rows),
        "used_gib": [round(row["used_gib"], 3) for row in rows],
    }


def give_back(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--plans", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--tiny", action="store_true")
    add_options(parser)
    options = parser.parse_args()
    claim(options)
    torch.set_num_threads(1)
    device, parts = torch.device(options.device), list[dict[str, Any]]()
    for name, measure in {"hosts": many_hosts, "plans": many_plans}.items():
        try:
            parts.append(measure(options, device))
        except Exception as problem:
            parts.append(
                {"part": name, "error": "".join(traceback.format_exception(problem))[-3000:]}
            )
        give_back(device)
        print(json.dumps(parts[-1], indent=1), flush=True)
        record = {
            "script": "benchmarks/memory.py",
            "hardware": hardware(options.device),
            "parts": parts,
        }
        keep(options, record)


if __name__ == "__main__":
    main()
