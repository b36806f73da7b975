"""How close hosts come to a hand-written loop over the same network: compiled, bf16, one CUDA graph per step.

    python benchmarks/throughput.py --device cuda --ceiling --steps 150 --out benchmarks/results/ceiling_h200.json

Greedy scores come once per epoch of `--steps`; 150 is what `code` has. An arm that fails becomes a row with its error;
the file is written after every arm. Ours and theirs take turns, and a ratio is the median over turns.
`--tiny` runs the same arms on small networks, on a CPU as well.
"""

import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from hardware import hardware
from torch import Tensor, nn

from esper.kasmina.hosts import build_cnn_host, build_resnet_host, build_transformer_host
from esper.runtime.executors import compiling
from esper.runtime.population import Population
from esper.runtime.splits import SealedSplit, Split, Splits, TensorSplit, TokenSplit
from esper.runtime.tasks.task import Task, get_task


@dataclass(frozen=True)
class Workload:
    """A task, its data, and how many units (bytes or images) an example has."""

    task: Task
    splits: Splits
    unit: str
    units: int


def byte_model(tiny: bool, blocks: int = 8) -> Workload:
    """The GPT that `code` grows to: width 256, context 256, batches of 64."""
    width, context, batch = (32, 32, 4) if tiny else (256, 256, 64)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(
        0, 256, ((64 if tiny else 4096) * context + 1,), dtype=torch.uint8, generator=draw
    )
    held_out = TokenSplit(tokens[: batch * context + 1], context)
    task = replace(
        get_task("python_text"),
        build_host=partial(
            build_transformer_host,
            vocabulary=256,
            width=width,
            layers=blocks,
            context=context,
            slots=blocks,
        ),
        batch=batch,
        lr=1e-3,
        blueprints=("copy",),
        budget=5.0,
    )
    return Workload(
        task, Splits(TokenSplit(tokens, context), held_out, SealedSplit(held_out)), "bytes", context
    )


def images(tiny: bool, count: int, classes: int = 10) -> Splits:
    draw = torch.Generator().manual_seed(0)
    parts = [
        TensorSplit(
            torch.randint(0, 256, (size, 3, 32, 32), dtype=torch.uint8, generator=draw),
            torch.randint(0, classes, (size,), generator=draw),
            scale=1 / 64,
            shift=-2.0,
        )
        for size in (count, 8 if tiny else 512)
    ]
    return Splits(parts[0], parts[1], SealedSplit(parts[1]))


def resnet(tiny: bool) -> Workload:
    build = partial(build_resnet_host, width=4, blocks=1) if tiny else build_resnet_host
    changes: dict[str, Any] = {"build_host": build, "batch": 8 if tiny else 256}
    if tiny:
        changes["slots"] = None
    task = replace(get_task("cifar10_resnet"), **changes)
    return Workload(task, images(tiny, 64 if tiny else 50_000), "images", 1)


def small(tiny: bool, batch: int) -> Workload:
    task = replace(get_task("cifar10"), build_host=build_cnn_host, batch=batch)
    return Workload(task, images(tiny, 256 if tiny else 50_000), "images", 1)


class HandWritten:
    """What somebody would write for one network of fixed size: the whole step compiled and captured."""

    def __init__(self, work: Workload, device: torch.device, steps: int):
        task, self.device, self.steps = work.task, device, steps
        torch.manual_seed(0)
        self.model = task.build_host().to(device)
        if work.unit == "images":
            self.model = self.model.to(memory_format=torch.channels_last)
        on_gpu = device.type == "cuda"
        options: dict[str, Any] = {"lr": 1e-3, "fused": on_gpu or None}
        if task.optimizer == "adamw":
            self.optimizer: Any = torch.optim.AdamW(
                self.model.parameters(), capturable=on_gpu, **options
            )
        else:
            self.optimizer = torch.optim.SGD(
                self.model.parameters(), momentum=0.9, nesterov=True, **options
            )
        self.split: Split = work.splits.train.to(device)
        if task.augment:
            self.split = self.split.with_border().to(device)
        self.batch, self.clip = task.batch, task.clip_norm
        self.drawn = torch.zeros(4, steps * self.batch, dtype=torch.long, device=device)
        self.cursor = torch.zeros((), dtype=torch.long, device=device)
        self.places = torch.arange(self.batch, device=device)
        self.loss = torch.compile(self._loss, backend=compiling.BACKEND, dynamic=False)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.draw()
        if on_gpu:
            self._capture()
        else:
            self.step()

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            outputs = self.model(inputs)
        return nn.functional.cross_entropy(outputs.float().flatten(0, -2), targets.flatten())

    def draw(self) -> None:
        count = self.drawn.shape[1]
        rows = torch.randint(0, len(self.split), (1, count))
        offsets = torch.cat([torch.randint(0, 9, (2, count)), torch.randint(0, 2, (1, count))])
        self.drawn.copy_(torch.cat([rows, offsets]))
        self.cursor.zero_()

    def step(self) -> None:
        now = self.drawn[:, self.cursor + self.places]
        self.cursor += self.batch
        self.loss(*self.split.gather(now[0], now[1:])).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()

    def train(self) -> None:
        """One epoch."""
        self.draw()
        for _ in range(self.steps):
            self.graph.replay() if self.graph is not None else self.step()


def build_ours(
    work: Workload, device: torch.device, hosts: int, steps: int, **options: Any
) -> Callable[[], None]:
    """An epoch of our hosts; graphs are captured and blocks compiled when this returns."""
    task = replace(work.task, epoch_examples=work.task.batch * steps, epochs=1000)
    population = Population(task, list(range(hosts)), [str(device)], splits=work.splits, **options)
    for _ in range(2):  # a budget of memory may have it begin anew with fewer lanes
        population.executor.train(population.runs)

    def train() -> None:
        population.executor.train(population.runs)

    train.population = population  # type: ignore[attr-defined]  # keeps it alive
    return train


def compile_seconds() -> float:
    """All compilations of this process, hand-written loops included."""
    from torch._dynamo.utils import calculate_time_spent

    return calculate_time_spent()["total_wall_time"]


def timed(train: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    train()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def compare(
    name: str,
    makers: dict[str, tuple[Callable[[], Callable[[], None]], int]],
    unit: str,
    device: torch.device,
    turns: int,
) -> dict[str, Any]:
    """Every way in turn. `makers`: name -> what builds its epoch, and the units of one. The first is the yardstick."""
    ways, row = {}, {"arm": name, "unit": unit, "ways": {}}
    for way, (make, units) in makers.items():
        before = compile_seconds()
        started = time.perf_counter()
        try:
            ways[way] = make(), units
        except Exception as problem:  # the other ways are worth having all the same
            row["ways"][way] = {"error": "".join(traceback.format_exception(problem))[-2000:]}
            continue
        compiled = compile_seconds() - before
        row["ways"][way] = {"build_s": time.perf_counter() - started, "compile_s": compiled}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(turns):
        for way, (train, units) in ways.items():
            rates[way].append(units / timed(train, device))
    first = next(iter(makers))
    for way, found in rates.items():
        row["ways"][way] |= {f"{unit}_per_s": statistics.median(found)}
        if first in rates:
            ratios = [own / theirs for own, theirs in zip(found, rates[first], strict=True)]
            row["ways"][way] |= {"ratio": statistics.median(ratios), "ratios": ratios}
    if device.type == "cuda":
        row["reserved_mib"] = torch.cuda.memory_reserved() / 2**20
    return row


def arms(options: Any, device: torch.device) -> dict[str, Callable[[], dict[str, Any]]]:
    """Name -> what measures it."""
    tiny, steps, turns = options.tiny, options.steps, options.repeats
    bf16: dict[str, Any] = {"amp": "bf16", "compile": "on"}

    def against_hand(name: str, work: Workload) -> dict[str, Any]:
        per_host = steps * work.task.batch * work.units
        ways: dict[str, Any] = {
            "hand-written": (lambda: HandWritten(work, device, steps).train, per_host)
        }
        for hosts in (1, 4):
            ours = partial(build_ours, work, device, hosts, steps)
            ways[f"{hosts} hosts, compiled"] = (partial(ours, **bf16), hosts * per_host)
            if hosts == 4 and device.type == "cuda":  # a budget for a single lane
                ways["4 hosts, compiled, one lane"] = (
                    partial(ours, graph_memory=1e-6, **bf16),
                    hosts * per_host,
                )
        ways["1 host, not compiled"] = (
            partial(build_ours, work, device, 1, steps, amp="bf16", compile="off"),
            per_host,
        )
        return compare(name, ways, work.unit, device, turns)

    def all_at_once(hosts: int = 16, batch: int = 512) -> dict[str, Any]:
        hosts, batch = (2, 8) if tiny else (hosts, batch)
        own, together = small(tiny, batch), small(tiny, hosts * batch)
        units = steps * hosts * batch
        ours = partial(build_ours, own, device, hosts, steps)
        return compare(
            f"{hosts} small hosts, batch {batch}",
            {
                "ceiling: one host, all batches at once": (
                    lambda: HandWritten(together, device, steps).train,
                    units,
                ),
                "float32": (partial(ours, compile="off"), units),
                "bf16": (partial(ours, amp="bf16", compile="off"), units),
                "bf16, compiled": (partial(ours, **bf16), units),
            },
            "images",
            device,
            turns,
        )

    return {
        "code": lambda: against_hand("byte GPT, 8 blocks", byte_model(tiny)),
        "resnet": lambda: against_hand("cifar10_resnet", resnet(tiny)),
        "small": all_at_once,
    }


def measure_ceilings(options: Any) -> list[dict[str, Any]]:
    """All arms that were asked for; the file is written after each."""
    device, rows = torch.device(options.device), []
    if options.tiny:
        compiling.BACKEND = "aot_eager"
    for name, measure in arms(options, device).items():
        if options.arms and name not in options.arms:
            continue
        try:
            rows.append(measure() | {"steps": options.steps})
        except Exception as problem:
            rows.append(
                {"arm": name, "error": "".join(traceback.format_exception(problem))[-3000:]}
            )
        gc.collect()  # the hosts of this arm
        print(json.dumps(rows[-1], indent=1), flush=True)
        if options.out:
            record = {
                "script": "benchmarks/throughput.py --ceiling",
                "hardware": hardware(options.device),
                "rows": rows,
            }
            options.out.write_text(json.dumps(record, indent=1) + "\n")
    return rows
