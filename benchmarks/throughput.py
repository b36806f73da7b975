"""How fast hosts train side by side.

Examples per second by executor, hosts, batch and seeds; and whole decisions.

    python benchmarks/throughput.py --device cuda --out benchmarks/results/throughput.json --name "grid, today"
    python benchmarks/throughput.py --device cuda --decisions --out benchmarks/results/throughput.json --name NAME
    python benchmarks/throughput.py --device cpu --against-plain --out benchmarks/results/throughput.json --name NAME

The host is cifar10's, on generated images; crop, mirror, clipping and readings are on. Rows are
printed as a table and written as JSON.
"""

import argparse
import json
import resource
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import torch
from hardware import hardware
from records import add_options, claim, keep
from rich.console import Console
from rich.table import Table
from torch import nn

from esper.episodes import Episodes
from esper.kasmina.hosts import ChainHost, build_cnn_host
from esper.leyline.factored_actions import OP_GERMINATE
from esper.runtime.batches import shared_batches
from esper.runtime.counterfactuals import greedy_scores
from esper.runtime.executors import eager
from esper.runtime.executors.graphs import GraphedExecutor
from esper.runtime.population import Population
from esper.runtime.splits import SealedSplit, Splits, TensorSplit
from esper.runtime.tasks.registry import get_task
from esper.runtime.tasks.task import Task
from esper.tamiyo.policies import WAIT, RulePolicy
from esper.tamiyo.rules import Heuristic, HostFacts
from esper.trials.arms import make_decider, play_epoch


def generated(count: int, held_out: int) -> Splits:
    draw = torch.Generator().manual_seed(0)
    parts = [
        TensorSplit(
            torch.randint(0, 256, (size, 3, 32, 32), dtype=torch.uint8, generator=draw),
            torch.randint(0, 10, (size,), generator=draw),
            scale=1 / 64,
            shift=-2.0,
        )
        for size in (count, held_out, 64)
    ]
    return Splits(parts[0], parts[1], SealedSplit(parts[2]))


def task_for(batch: int, examples: int, slots: int = 3) -> Task:
    """The cifar10 task at a benchmark's sizes."""
    task = replace(
        get_task("cifar10"), batch=batch, epoch_examples=examples, budget=50.0, epochs=1000
    )
    return task if slots == 3 else replace(task, build_host=lambda: flat_host(slots))


def flat_host(slots: int) -> ChainHost:
    """Blocks of equal cost, so that cost by number of slots can be read off."""
    widths = [3] + [16] * slots
    blocks = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
        for a, b in pairwise(widths)
    ]
    blocks[0].append(nn.MaxPool2d(2))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return ChainHost(blocks, head, torch.zeros(2, 3, 32, 32))


def plant(population: Population, blueprint: str) -> None:
    """A seed in every slot of every host, fully blended in."""
    for host, run in enumerate(population.runs):
        for index in range(run.model.slot_config.num_slots):
            population.apply(
                host, (OP_GERMINATE, index, run.model.space.blueprint_index(blueprint), 0)
            )
    population.tick()


def warm_up(population: Population, steps: int = 3) -> None:
    """A few steps that capture and allocate; the epoch that is timed starts afresh."""
    whole = population.runs[0].plan.steps
    for run in population.runs:
        run.plan.steps = steps
    population.executor.train(population.runs)
    for run in population.runs:
        run.plan.steps = whole


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def time_training(
    options: argparse.Namespace, executor: str, hosts: int, batch: int, seeds: int, slots: int = 3
) -> dict:
    steps = options.steps
    if options.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    population = Population(
        task_for(batch, batch * steps, slots),
        list(range(hosts)),
        [options.device],
        executor=executor,
        splits=options.splits,
    )
    if seeds:
        plant(population, "conv_light")
    warm_up(population)
    synchronize(options.device)
    started = time.perf_counter()
    population.executor.train(population.runs)
    synchronize(options.device)
    seconds = time.perf_counter() - started
    population.runs[0].end_epoch(population.runs[0].sums.tolist())
    peak = torch.cuda.max_memory_allocated() if options.device.startswith("cuda") else 0
    return {
        "device": options.device,
        "executor": executor,
        "hosts": hosts,
        "slots": slots,
        "batch": batch,
        "seeds": seeds,
        "steps": steps,
        "examples_per_s": hosts * batch * steps / seconds,
        "decisions_per_s": None,
        "ms_per_host_step": 1e3 * seconds / steps / hosts,
        "peak_mib": peak / 2**20
        if peak
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
    }


@dataclass(frozen=True)
class Watchful:
    """The heuristic without its hands: it reads all reports and masks, does nothing, and every epoch costs the same."""

    heuristic: Heuristic
    keeps_measured: ClassVar[bool] = False  # probation does not end while we measure

    def choose(self, masks, reports, memory, signals):
        return WAIT, self.heuristic.choose(masks, reports, memory, signals)[1]


def watchful(facts: HostFacts) -> RulePolicy:
    return RulePolicy(Watchful(Heuristic(facts)))


def time_decisions(
    options: argparse.Namespace, executor: str, hosts: int, batch: int, seeds: int
) -> dict:
    """The whole loop: train 3,125 examples, validate on 625, counterfactuals, readings, masks, heuristic, tick."""
    task = task_for(batch, 3125)
    population = Population(
        task, list(range(hosts)), [options.device], executor=executor, splits=options.splits
    )
    episodes = Episodes(population)
    deciders = [make_decider(episodes, host, watchful) for host in range(hosts)]
    if seeds:
        plant(population, "conv_light")
    times = []
    for _ in range(options.epochs):
        synchronize(options.device)
        started = time.perf_counter()
        play_epoch(episodes, deciders)
        synchronize(options.device)
        times.append(time.perf_counter() - started)
    steady = statistics.median(times[2:])
    score = time_scores(population, options.device)
    return {
        "device": options.device,
        "executor": executor,
        "hosts": hosts,
        "batch": batch,
        "seeds": seeds,
        "decisions_per_s": hosts / steady,
        "examples_per_s": hosts * 3125 / steady,
        "score_share": score / steady,
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20
        if options.device.startswith("cuda")
        else None,
    }


def time_scores(population: Population, device: str) -> float:
    """Seconds that the greedy scores of all hosts take, on the executor's own graphs where it has them."""
    executor = population.executor
    synchronize(device)
    started = time.perf_counter()
    for run in population.runs:
        if isinstance(executor, GraphedExecutor):
            executor._replay([[executor._device(run).graphs(run)["score"]]])
        else:
            greedy_scores(run)
    synchronize(device)
    return time.perf_counter() - started


class PlainLoop:
    """A hand-written loop over the same models: gather, crop, mirror, forward, backward, clip, SGD."""

    def __init__(self, options: argparse.Namespace, hosts: int, batch: int):
        self.split = options.splits.train.with_border().to(options.device)
        self.batch, self.draw, self.seconds = batch, torch.Generator().manual_seed(0), 0.0
        self.models = []
        for seed in range(hosts):
            torch.manual_seed(seed)
            model = build_cnn_host().to(options.device)
            self.models.append(
                (
                    model,
                    torch.optim.SGD(model.parameters(), 0.2, 0.9, weight_decay=5e-4, nesterov=True),
                )
            )

    def step(self) -> None:
        started = time.perf_counter()
        for model, optimizer in self.models:
            rows = torch.randint(0, len(self.split), (self.batch,), generator=self.draw)
            inputs, targets = self.split.gather(
                rows, self.split.draw_offsets(self.batch, self.draw)
            )
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
        self.seconds += time.perf_counter() - started


def against_plain(options: argparse.Namespace, hosts: int = 4, batch: int = 128) -> list[dict]:
    """An epoch of ours with a step of the hand-written loop between any two of its steps: both see the same machine."""
    plain = PlainLoop(options, hosts, batch)

    class TakingTurns(shared_batches):
        def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for examples in super().__iter__():
                yield examples
                plain.step()

    task = task_for(batch, batch * options.steps)
    population = Population(
        task, list(range(hosts)), [options.device], executor="eager", splits=options.splits
    )
    eager.shared_batches = TakingTurns
    warm_up(population)
    ours_s, plain_s = [], []
    for _ in range(options.repeats):
        plain.seconds = 0.0
        started = time.perf_counter()
        population.executor.train(population.runs)
        ours_s.append(time.perf_counter() - started - plain.seconds)
        plain_s.append(plain.seconds)
    eager.shared_batches = shared_batches
    ratios = [theirs / own for own, theirs in zip(ours_s, plain_s, strict=True)]
    examples = hosts * batch * options.steps
    row = {
        "device": options.device,
        "hosts": hosts,
        "batch": batch,
        "seeds": 0,
        "decisions_per_s": None,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
    }
    return [
        row | {"executor": "plain loop", "examples_per_s": examples / statistics.median(plain_s)},
        row
        | {"executor": "eager", "examples_per_s": examples / statistics.median(ours_s)}
        | {"median_ratio": statistics.median(ratios), "ratios": ratios},
    ]


def grid(options: argparse.Namespace) -> list[dict]:
    rows = []
    for batch in options.batches:
        for seeds in (0, 3):
            for hosts in options.hosts:
                for executor in options.executors:
                    rows.append(time_training(options, executor, hosts, batch, seeds))
                    print(json.dumps(rows[-1]), flush=True)
    return rows


def by_slots(options: argparse.Namespace) -> list[dict]:
    executor = "graphed" if options.device.startswith("cuda") else "eager"
    return [
        time_training(options, executor, options.hosts[0], 128, slots, slots)
        for slots in (1, 2, 4, 6, 8)
    ]


def by_streams(options: argparse.Namespace) -> list[dict]:
    """Time of one step of a host, all hosts in turn, spread over the lanes and on one stream."""
    rows = []
    for hosts in options.hosts:
        for has_lanes in (True, False):
            task = task_for(128, 128 * options.steps)
            population = Population(
                task,
                list(range(hosts)),
                [options.device],
                executor="graphed",
                splits=options.splits,
            )
            executor = population.executor
            assert isinstance(executor, GraphedExecutor)
            plant(population, "conv_light")
            if not has_lanes:
                shared = torch.cuda.Stream()
                for run in population.runs:
                    executor._device(run).lane(run).stream = shared
            executor.train(population.runs)
            executor.settle(population.runs)
            for run in population.runs:
                run.begin_epoch()
            calls = [[executor._device(run).graphs(run)["train"]] for run in population.runs]
            times = []
            for _ in range(options.steps):
                synchronize(options.device)
                started = time.perf_counter()
                executor._replay(calls)
                synchronize(options.device)
                times.append(1e3 * (time.perf_counter() - started) / hosts)
            p95 = statistics.quantiles(times, n=20)[18]
            rows.append(
                {
                    "hosts": hosts,
                    "has_lanes": has_lanes,
                    "median_ms": statistics.median(times),
                    "p95_ms": p95,
                }
            )
    return rows


def show(rows: list[dict]) -> None:
    table = Table()
    keys = [key for key in rows[-1] if not isinstance(rows[-1][key], list)]
    for key in keys:
        table.add_column(key, justify="right")
    for row in rows:
        table.add_row(
            *(f"{row[k]:,.1f}" if isinstance(row.get(k), float) else str(row.get(k)) for k in keys)
        )
    Console(width=160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--batches", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--executors", nargs="+")
    parser.add_argument("--decisions", action="store_true")
    parser.add_argument("--slots", action="store_true")
    parser.add_argument("--streams", action="store_true")
    parser.add_argument("--against-plain", action="store_true")
    add_options(parser)
    options = parser.parse_args()
    claim(options)
    options.executors = options.executors or (
        ["eager", "graphed"] if options.device.startswith("cuda") else ["eager"]
    )
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    options.splits = generated(50_000, 625)
    if options.decisions:
        rows = [
            time_decisions(options, executor, hosts, batch, seeds)
            for executor in options.executors
            for batch in options.batches
            for seeds in (0, 3)
            for hosts in options.hosts
        ]
    elif options.against_plain:
        rows = against_plain(options)
    else:
        rows = (
            by_slots(options)
            if options.slots
            else by_streams(options)
            if options.streams
            else grid(options)
        )
    show(rows)
    record = {
        "script": "benchmarks/throughput.py",
        "hardware": hardware(options.device),
        "rows": rows,
    }
    keep(options, record)


if __name__ == "__main__":
    main()
