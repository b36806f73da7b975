"""What `frontier.py` compares: tasks at its sizes, ways to spend their compute, jobs of each stage."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from random_blocks import BLOCK_ZERO  # registers it as well
from throughput import generated
from torch import nn

from esper.kasmina.blueprints import COPY, COPY_ZERO, blueprint
from esper.kasmina.copies.copying import Copy, Site, copy_module
from esper.kasmina.hosts import build_resnet_host, build_transformer_host
from esper.kasmina.slot import count_parameters
from esper.runtime.tasks.registry import get_task
from esper.runtime.tasks.task import Task

WARMUP = 0.018
"""Compute in which the rate rises, the same in every run: forks of one trunk cannot have a share of their own each. It
is the tasks' 3 % at compute 0.6."""
ELSEWHERE = "copy_elsewhere"
FIRST_SEED = {"tune": 50_000, "choose": 51_000, "judge": 60_000}
"""Seeds that choose a rate, seeds that choose a plan, and seeds for what is claimed: no host is in two of them."""


@dataclass(frozen=True)
class Setup:
    """A task at this benchmark's sizes."""

    name: str
    task: Task
    build: Callable[..., nn.Module]
    """host by number of `blocks`"""
    is_text: bool
    kind: str
    """what its plans plant"""
    depths: tuple[int, ...]
    computes: tuple[float, ...]
    plans: tuple[str, ...]
    """2-4-8@30,70: from 2 to 4 blocks when 30 % of the compute is used, to 8 at 70 %"""
    others: tuple[str, ...]
    """plans that were tried once, on the seeds that choose"""
    seconds: float
    """what 1.0 of compute takes a process of four on one H200, roughly"""
    tested: int = 4096
    """most test examples that a finished network is scored on"""

    @property
    def most(self) -> int:
        return max(self.depths)

    def slots(self, blocks: int) -> tuple[str, ...]:
        """Where a network grows: behind every block of a GPT, at the end of each stage of a ResNet."""
        places = range(blocks) if self.is_text else range(blocks - 1, 3 * blocks, blocks)
        return tuple(f"r0c{place}" for place in places)


@dataclass(frozen=True)
class Arm:
    """One way to spend the compute. Only what differs from the default is part of its name."""

    shape: str
    """static 4; direct 4 (the same without a fork); tiled 2-8 (copies of an untrained network); 2-8@30; heuristic"""
    kind: str | None = None
    ramp: int = 0
    decay: float = 0.2
    where: str | None = None
    """which of the blocks are copied, if not all: the first half, the last half, or the one at the end"""
    factor: float = 1.0
    """of the task's learning rate"""
    warmup: float = 1.0
    """times `WARMUP`"""

    @property
    def name(self) -> str:
        extras = [self.kind, self.where, self.ramp and f"ramp={self.ramp}"]
        extras += [self.decay != 0.2 and f"decay={self.decay:g}"]
        extras += [
            self.factor != 1 and f"rate={self.factor:g}",
            self.warmup != 1 and f"warmup={self.warmup:g}",
        ]
        return " ".join(filter(None, [self.shape, *extras]))

    @property
    def is_static(self) -> bool:
        return self.shape.startswith("static ")

    @property
    def start(self) -> int:
        """Blocks at birth; the default rule starts with the task's two."""
        digits = self.shape.removeprefix("static ").removeprefix("direct ").removeprefix("tiled ")
        return 2 if digits == "heuristic" else int(digits.split("-")[0])

    @property
    def end(self) -> int:
        """Blocks that a plan comes to."""
        return int(self.shape.partition("@")[0].split("-")[-1])


@dataclass(frozen=True)
class Job:
    """One trunk with its forks, or one episode."""

    setup: str
    stage: str
    role: str
    arm: Arm
    seed: int
    computes: tuple[float, ...]
    is_smoke: bool = False

    @property
    def key(self) -> str:
        computes = "+".join(f"{compute:g}" for compute in self.computes)
        parts = (
            self.setup,
            self.stage,
            self.arm.name.replace(" ", "_").replace("=", ""),
            computes,
            str(self.seed),
        )
        return "-".join(parts).replace(",", "_").replace("@", "_at_")

    @property
    def units(self) -> float:
        """Compute that is really run, in units of the reference."""
        if not self.arm.is_static:
            return sum(self.computes)
        return (1 - self.arm.decay) * max(self.computes) + self.arm.decay * sum(self.computes)


def read_arm(text: str) -> Arm:
    """static 4; 2-8@30; 4-6@50 last."""
    shape, _, where = text.partition(" ")
    return Arm(shape, where=where) if "@" in shape and where else Arm(text)


def copy_elsewhere(channels: int, site: Site) -> Copy:
    """A copy of a block that stands somewhere else, drawn again for each seed: as trained, at the wrong place."""
    shapes = [(name, value.shape) for name, value in site.module.state_dict().items()]
    alike = [module for module in site.network.modules() if type(module) is type(site.module)]
    alike = [
        m
        for m in alike
        if m is not site.module and [(n, v.shape) for n, v in m.state_dict().items()] == shapes
    ]
    if not alike:
        raise ValueError("no other block is built like this one")
    return Copy(*copy_module(alike[int(torch.randint(len(alike), ()))], site.network, site.held))


for _kind in ("image", "sequence"):
    blueprint(_kind, ELSEWHERE, depth=2.0)(copy_elsewhere)


def _gpt(width: int, context: int, blocks: int) -> nn.Module:
    return build_transformer_host(
        vocabulary=256, width=width, context=context, layers=blocks, slots=blocks
    )


def setups(is_smoke: bool) -> dict[str, Setup]:
    """The tasks by name. In a smoke run each is tiny, and there are few of everything."""
    found = (
        [_smoke_gpt(), _smoke_resnet()] if is_smoke else [_code(256, 8), _code(512, 12), _resnet()]
    )
    return {setup.name: setup for setup in found}


def _code(width: int, most: int) -> Setup:
    task, build = get_task("code"), partial(_gpt, width, 256)
    assert task.reference is not None
    task = replace(task, reference=(partial(build, most), task.reference[1]))
    if most == 8:
        plans, depths = ("2-4-8@30,70", "2-8@30", "2-8@50", "4-8@50"), (2, 8, 4, 3, 6, 5, 1)
        others = (
            "4-8@30",
            "4-8@70",
            "3-6@50",
            "2-4@50",
            "2-4-8@20,50",
            "2-4-8@50,80",
            "4-6@50 first",
            "4-6@50 last",
        )
        others += (
            "4-6@30 last",
            "4-6@70 last",
            "4-6@50 end",
            "4-5@50 end",
            "4-8@50 last",
            "2-4@30",
            "2-4@50 end",
        )
        others += ("2-3@50 end", "3-5@50 last", "3-5@50 end", "3-6@30", "3-6@50 end", "2-4@15")
        others += ("2-4-6@20,50", "3-5@30 last")
        return Setup(
            "code", task, build, True, COPY, depths, (0.3, 0.45, 0.6, 0.8, 1.0), plans, others, 49.0
        )
    # four processes share the GPU, as with the small one; its FLOPs are 5.9 times as many
    plans = ("3-6-12@30,70", "2-12@30", "4-12@30")
    return Setup("code_large", task, build, True, COPY, (12, 6, 4, 8, 3), (0.6,), plans, (), 250.0)


def _resnet() -> Setup:
    task = replace(
        get_task("cifar10_resnet"),
        clock="compute",
        reference=(partial(build_resnet_host, blocks=6), 40 * 45_000),
        held_out=1000,
    )
    plans = ("2-4-6@30,70", "2-6@30", "2-6@50", "4-6@50")
    return Setup(
        "cifar10_resnet",
        task,
        build_resnet_host,
        False,
        COPY_ZERO,
        (2, 6, 4, 3),
        (0.35, 0.6, 1.0),
        plans,
        (),
        60.0,
    )


def _smoke_gpt() -> Setup:
    build = partial(_gpt, 32, 32)
    tiny = replace(get_task("code_tiny"), reference=(partial(build, 4), 60 * 16), held_out=8)
    return Setup(
        "code", tiny, build, True, COPY, (2, 4), (0.5, 1.0), ("2-4@30", "2-4@50"), (), 4.0, 64
    )


def _smoke_resnet() -> Setup:
    build = partial(build_resnet_host, width=4)
    task = replace(
        get_task("cifar10_resnet"),
        load=lambda root: generated(256, 64),
        clock="compute",
        reference=(partial(build, blocks=3), 48 * 16),
        held_out=16,
        batch=16,
        epochs=10,
    )
    return Setup(
        "cifar10_resnet", task, build, False, COPY_ZERO, (2, 3), (1.0,), ("2-3@30",), (), 4.0, 64
    )


def task_of(setup: Setup, arm: Arm, compute: float) -> Task:
    """The setup's task as this arm plays it. Every arm may grow to the deepest network, and no further."""
    task, start = setup.task, partial(setup.build, blocks=arm.start)
    with torch.device("meta"):
        largest, least = (
            count_parameters(setup.build(blocks=blocks)) for blocks in (setup.most, arm.start)
        )
    slots, budget = setup.slots(arm.start), 1.005 * largest / least
    if arm.shape != "heuristic":  # which has the task's own list and stages
        # what makes a block the identity is looked for only where a zeroed copy may be planted
        names = (BLOCK_ZERO, COPY_ZERO) if arm.kind == BLOCK_ZERO else (arm.kind or setup.kind,)
        task = replace(task, blueprints=names, lengths=replace(task.lengths, ramp=arm.ramp))
    if arm.shape.split()[0] in ("static", "direct"):
        slots, budget = (
            slots[-1:],
            task.budget,
        )  # nothing is planted; the fewer slots, the less is measured in vain
    changes = {
        "warmup": WARMUP * arm.warmup / compute,
        "decay": arm.decay,
        "lr": task.lr * arm.factor,
        "compute": compute,
    }
    return replace(task, build_host=start, slots=slots, budget=budget, **changes)


def read_plan(shape: str) -> list[tuple[float, int, int]]:
    """Share of the compute, blocks before and after, of each growth in a plan."""
    sizes, _, times = shape.partition("@")
    blocks, shares = (
        [int(size) for size in sizes.split("-")],
        [int(time) / 100 for time in times.split(",")],
    )
    return list(zip(shares, blocks[:-1], blocks[1:], strict=True))


def places_of(setup: Setup, arm: Arm, before: int, after: int) -> list[str]:
    """Slots to plant in, one after the other: every block that is copied gets as many."""
    slots, half = setup.slots(arm.start), arm.start // 2
    slots = {None: slots, "first": slots[:half], "last": slots[half:], "end": slots[-1:]}[arm.where]
    each, rest = divmod(after - before, len(slots) if setup.is_text else 1)
    if rest:
        raise ValueError(
            f"{arm.shape}: {after - before} blocks cannot be shared evenly by {len(slots)}"
        )
    return [slot for _ in range(each) for slot in slots]


def policy_of(setup: Setup, arm: Arm) -> str:
    """The arm's plan as a schedule that `esper run` takes too, or the rule."""
    if "@" not in arm.shape:
        return "heuristic" if arm.shape == "heuristic" else "never"
    steps = []
    for share, before, after in read_plan(arm.shape):
        decision = (
            round(share * setup.task.epochs) - 1
        )  # decision 0 comes when the first share is used
        steps += [
            (str(decision), f"{slot}.{arm.kind or setup.kind}")
            for slot in places_of(setup, arm, before, after)
        ]
    epochs, places = ("+".join(part) for part in zip(*steps, strict=True))
    return f"schedule:epochs={epochs}:places={places}"


def settings_of(setup: Setup, job: Job) -> dict[str, Any]:
    """What a record was made with; another call must agree to take it as done."""
    task = task_of(setup, job.arm, max(job.computes))
    keys = (
        "batch",
        "epochs",
        "lr",
        "decay",
        "weight_decay",
        "beta2",
        "clip_norm",
        "held_out",
        "budget",
        "prunes",
    )
    return {
        **{key: getattr(job, key) for key in ("setup", "stage", "role", "seed", "is_smoke")},
        "computes": list(job.computes),
        "arm": job.arm.name,
        **{key: getattr(job.arm, key) for key in ("shape", "kind", "where", "factor", "is_static")},
        "policy": policy_of(setup, job.arm),
        "warmup": WARMUP * job.arm.warmup,
        "ramp": task.lengths.ramp,
        **{key: getattr(task, key) for key in keys},
    }


def jobs_of(
    setup: Setup,
    stage: str,
    seeds: range,
    computes: Sequence[float] | None = None,
    depths: Sequence[int] | None = None,
    factors: Sequence[float] | None = None,
    *,
    is_smoke: bool = False,
) -> list[Job]:
    """The jobs of a stage, seed by seed, the most telling first."""
    role = {"tune": "tune", "plans": "choose"}.get(stage, "judge")
    return [
        Job(setup.name, stage, role, arm, FIRST_SEED[role] + seed, own, is_smoke)
        for seed in seeds
        for arm, own in arms_of(setup, stage, computes, depths, factors)
    ]


def arms_of(
    setup: Setup,
    stage: str,
    computes: Sequence[float] | None,
    depths: Sequence[int] | None,
    factors: Sequence[float] | None,
) -> Iterator[tuple[Arm, tuple[float, ...]]]:
    """Arms of a stage, each with the computes of one job."""
    factors = factors or ((1.0, 0.5, 2.0, 0.25) if stage == "tune" else (1.0,))
    for factor in factors:
        for arm, own in _arms_of(setup, stage, computes, depths):
            yield replace(arm, factor=factor), own


def _arms_of(
    setup: Setup, stage: str, computes: Sequence[float] | None, depths: Sequence[int] | None
) -> Iterator[tuple[Arm, tuple[float, ...]]]:
    middle = 0.6 if 0.6 in setup.computes else setup.computes[0]
    own, once = tuple(computes or setup.computes), tuple(computes or (middle,))
    chosen = [depth for depth in setup.depths if depths is None or depth in depths]
    if stage == "tune":
        tuned = chosen if depths else setup.depths[:2]
        yield from (
            (read_arm(text), once)
            for text in (*(f"static {depth}" for depth in tuned), setup.plans[0])
        )
    elif stage == "plans":
        yield from ((arm, (compute,)) for arm in _plans(setup) for compute in once)
    elif stage == "static":
        yield from ((Arm(f"static {depth}"), own) for depth in chosen)
    elif stage == "grown":
        own = tuple(computes or (compute for compute in setup.computes if compute >= middle))
        for compute in sorted(own, key=lambda c: (c != middle, -c)):
            yield from ((read_arm(text), (compute,)) for text in (*setup.plans, "heuristic"))
        yield from ((arm, (compute,)) for arm in _variants(setup) for compute in once)
    elif stage == "why":
        yield from ((arm, (compute,)) for arm in _doubts(setup, chosen) for compute in once)
    elif stage == "large":
        shapes = [setup.plans[0], *(f"static {depth}" for depth in chosen), *setup.plans[1:]]
        yield from ((read_arm(text), (compute,)) for compute in once for text in shapes)
    elif stage == "seconds":
        shapes = [*(f"static {depth}" for depth in chosen), *setup.plans, "heuristic"]
        yield from ((read_arm(text), (min(own),)) for text in shapes)


def _plans(setup: Setup) -> Iterator[Arm]:
    """When to deepen, how often, and which blocks."""
    return map(read_arm, (*setup.plans, *setup.others))


def _variants(setup: Setup) -> Iterator[Arm]:
    """Other seeds in place of copies, and copies along a ramp: a slot with one copy to take has time for it."""
    other = COPY_ZERO if setup.kind == COPY else COPY
    for plan in map(read_arm, setup.plans[:2]):
        yield from (replace(plan, kind=kind) for kind in (BLOCK_ZERO, other))
    yield from (replace(read_arm(setup.plans[-1]), ramp=ramp) for ramp in (1, 3))


def _doubts(setup: Setup, depths: Sequence[int]) -> Iterator[Arm]:
    """What could explain the lead away."""
    one, last = (read_arm(setup.plans[number]) for number in (min(1, len(setup.plans) - 1), -1))
    yield Arm(f"tiled {one.start}-{one.end}", where=one.where)
    if setup.is_text:
        yield from (replace(plan, kind=ELSEWHERE) for plan in dict.fromkeys((one, last)))
    for decay in (0.4, 0.1):
        yield from (
            replace(arm, decay=decay)
            for arm in (one, *(Arm(f"static {depth}") for depth in depths[:4]))
        )
    yield Arm(f"direct {depths[0]}")
