"""Which seed deepens a network best: a random one or a copy, at once or along a ramp, at which scale at birth?

    python benchmarks/inheriting.py --task python_text --device cuda:0 --out WORK
    python benchmarks/inheriting.py --task cifar10_resnet --data-root DATA --device cuda:0 --out WORK --part 2/3
    python benchmarks/inheriting.py --question rules --task python_text --device cuda:0 --out WORK
    python benchmarks/inheriting.py --report --out WORK
    python benchmarks/inheriting.py --smoke --out WORK

`--question seeds`: every arm plants as many seeds in the same slots at the same epochs and keeps all of them. Beside
the copies stand a random block of the same shape (`random_block` behind a scale, `random_block_zero` with its last
layers zeroed) and ordinary random seeds. `never` is the host alone, `static` the deep network from its first step.
Validation chooses; the test split is not written down. Where the governor rolled a host back or a plan was not carried
out to the letter, the table says so: what was kept since the last good epoch is gone, and is not planted again.
`--question rules`: does `copy` belong into a rule's list? Rules with and without it, on host seeds of their own. Both
rules prefer size, and conv_heavy is a copy's size plus a scale: a list with copies goes without it, or none is planted.

Each arm's rows go to a file of their own in --out; arms that are there are not run again. `--part 2/3` is the second
third of the populations, for processes side by side. `--list` says what would run.
"""

import argparse
import datetime
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from hardware import hardware
from inheriting_report import report
from throughput import generated
from torch import Tensor, nn

from esper.kasmina.blueprints import COPY, COPY_ZERO, REGISTRY, blueprint
from esper.kasmina.copies.copying import Copy, Site, plain_copy, silence
from esper.kasmina.hosts import build_resnet_host, build_transformer_host
from esper.kasmina.randomness import own_randomness
from esper.runtime.devices import limited_threads
from esper.runtime.population import Population
from esper.runtime.splits import SealedSplit, Split, Splits
from esper.runtime.tasks.task import Task, get_task
from esper.storage.files import write_durably
from esper.telemetry.events import ActionTaken, HostRolledBack
from esper.trials.arms import ArmRun, Entry, run_entries

RESULTS = Path(__file__).parent / "results" / "inheriting.json"
BLOCK, BLOCK_ZERO, NEVER, STATIC = "random_block", "random_block_zero", "never", "static"
SCALELESS = (BLOCK_ZERO, COPY, COPY_ZERO)
"""Kinds of seeds that no scale at birth changes."""
SPACING = 8
"""Epochs between two plantings in a slot: what a seed with the longest ramp takes until its slot is open again."""
LONGEST_RAMP = 3
VALIDATED = 8192
"""Most validation examples that a finished network is scored on."""
ORDINARY = {
    kind: tuple(n for n in REGISTRY.names(kind) if n not in (COPY, COPY_ZERO))
    for kind in ("image", "sequence")
}


@dataclass(frozen=True)
class Setup:
    """How a task is played here."""

    task: Task
    kinds: tuple[str, ...]
    """ordinary random seeds to try"""
    ordinary: tuple[str, ...]
    """what a rule may plant without copies"""
    rivals: tuple[str, ...]
    """those of them that a rule would always prefer to a copy"""
    waves: int
    """seeds for each slot"""
    deep: Callable[[], nn.Module]
    """the network that copies end with"""


@dataclass(frozen=True)
class Group:
    """Arms whose hosts train side by side in one population."""

    setup: Setup
    task: Task
    question: str
    arms: tuple[tuple[str, str], ...]
    """name and policy"""
    seeds: tuple[int, ...]


class RandomBlock(nn.Module):
    """What a block of random weights adds to its input; the seed around it adds it to the features, scaled."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, features: Tensor) -> Tensor:
        added: Tensor = self.block(features) - features
        return added


def start_anew(module: nn.Module) -> None:
    """Draw every weight again, as its layer does at first."""
    device = next(module.parameters()).device
    devices = [device.index or 0] if device.type == "cuda" else []
    # a seed's own random numbers are on the CPU; the GPU's would be whatever was drawn there before
    with own_randomness(int(torch.randint(2**31, ())), devices=devices):
        for part in module.modules():
            if isinstance(reset := getattr(part, "reset_parameters", None), Callable):
                reset()
            elif part._parameters:
                raise SystemExit(
                    f"{type(part).__name__} has weights and no reset_parameters(); it "
                    f"would stay a copy."
                )


def random_block(channels: int, site: Site) -> nn.Module:
    block = site.copy()
    start_anew(block)
    return RandomBlock(block)


def random_block_zero(channels: int, site: Site) -> Copy:
    if not site.zeroed:
        raise ValueError("no layers of this block make it the identity")
    seed = plain_copy(channels, site)
    start_anew(seed.body)
    for name, value in site.zeroed.items():
        silence(seed.body.get_submodule(name), value)
    return seed


for _kind in ORDINARY:
    blueprint(_kind, BLOCK, depth=2.0)(random_block)
    blueprint(_kind, BLOCK_ZERO, depth=2.0)(random_block_zero)


def setup_of(name: str, options: argparse.Namespace) -> Setup:
    """The task at this benchmark's sizes, with what was asked for."""
    task, is_text = get_task(name), name == "python_text"
    size = {"vocabulary": 256, "width": 64, "context": 64, "slots": 2} if is_text else {}
    changed = {"epochs": 30, "epoch_examples": 2048 if is_text else 8192, "held_out": 1024}
    waves = 2
    if options.smoke:
        size = {**size, "width": 16} if is_text else {"width": 4}
        changed |= {"epochs": 12, "epoch_examples": 64, "held_out": 32, "batch": 32}
        waves = 1
        if not is_text:
            changed["load"] = lambda root: generated(256, 64)
    changed |= {
        key: value
        for key in ("epochs", "lr", "batch")
        if (value := getattr(options, key)) is not None
    }
    changed |= {"epoch_examples": options.examples} if options.examples else {}
    build = build_transformer_host if is_text else build_resnet_host
    # two groups of one layer each, or three stages of two blocks, and a slot behind each
    host, deep = (
        ({"layers": 2}, {"layers": 2 + 2 * waves})
        if is_text
        else ({"blocks": 2}, {"blocks": 2 + waves})
    )
    return Setup(
        replace(task, build_host=partial(build, **size, **host), **changed),
        kinds=("mlp", "attention") if is_text else ("conv_heavy",),
        ordinary=task.blueprints or ORDINARY["image"],
        rivals=() if is_text else ("conv_heavy",),
        waves=waves,
        deep=partial(build, **size, **deep),
    )


def planting_epochs(setup: Setup) -> list[int]:
    """When a seed is planted in every slot: around three tenths of the episode."""
    first = int(0.3 * setup.task.epochs - SPACING * (setup.waves - 1) / 2)
    times = [first + SPACING * wave for wave in range(setup.waves)]
    if first < 0 or times[-1] + SPACING >= setup.task.epochs:
        raise SystemExit(
            f"{setup.waves} seeds per slot do not fit into {setup.task.epochs} "
            f"epochs; raise --epochs."
        )
    return times


def plan(setup: Setup, kind: str, slots: Sequence[str]) -> str:
    steps = [(str(epoch), f"{slot}.{kind}") for epoch in planting_epochs(setup) for slot in slots]
    epochs, places = ("+".join(part) for part in zip(*steps, strict=True))
    return f"schedule:epochs={epochs}:places={places}"


def seed_groups(setup: Setup, options: argparse.Namespace) -> Iterator[Group]:
    """The network from its first step, then one population for each ramp and scale at birth."""
    seeds = tuple(range(options.first_seed, options.first_seed + options.seeds))
    task, host = setup.task, setup.task.build_host()
    slots = task.slots or host.slot_config().slot_ids  # type: ignore[attr-defined]
    kinds = (BLOCK, *setup.kinds, *SCALELESS)
    if not options.kinds or STATIC in options.kinds:
        static = replace(task, build_host=setup.deep, slots=None, blueprints=(COPY,))
        yield Group(setup, static, "seeds", ((STATIC, NEVER),), seeds)
    # room for every arm, so that none is stopped by it; and none loses a seed to late pruning
    grown = replace(
        task, blueprints=kinds, blends=("linear",), budget=2.0 * _growth(setup), prunes=False
    )
    for ramp in options.ramps:
        for number, scale in enumerate(options.scales):
            arms = [("never", NEVER)] if not number and ramp == options.ramps[0] else []
            for kind in kinds:
                if kind not in SCALELESS:
                    arms.append((f"{kind} ramp={ramp} scale={scale:g}", plan(setup, kind, slots)))
                elif not number:
                    arms.append((f"{kind} ramp={ramp}", plan(setup, kind, slots)))
            arms = [arm for arm in arms if not options.kinds or arm[0].split()[0] in options.kinds]
            if arms:
                lengths = replace(task.lengths, ramp=ramp)
                yield Group(
                    setup,
                    replace(grown, lengths=lengths, scale_at_birth=scale),
                    "seeds",
                    tuple(arms),
                    seeds,
                )


def _growth(setup: Setup) -> float:
    """How much larger the deep network is."""
    deep, host = (
        sum(p.numel() for p in build().parameters())
        for build in (setup.deep, setup.task.build_host)
    )
    return deep / host


def rule_groups(setup: Setup, options: argparse.Namespace) -> Iterator[Group]:
    """Rules with and without copies at the front of their list; the task's own budget, ramp and scale."""
    first = options.first_seed + 1000
    for front in ((), (COPY,), (COPY_ZERO,)):
        rest = [name for name in setup.ordinary if not front or name not in setup.rivals]
        task = replace(setup.task, blueprints=(*front, *rest))
        name = front[0] if front else "without"
        arms = tuple((f"{rule} {name}", rule) for rule in ("heuristic",))
        yield Group(setup, task, "rules", arms, tuple(range(first, first + options.seeds)))


def settings_of(group: Group, name: str) -> dict[str, object]:
    """What two runs must agree on to be one arm."""
    task = group.task
    return {
        "task": task.name,
        "question": group.question,
        "arm": name,
        "policy": dict(group.arms)[name],
        "seeds": list(group.seeds),
        "lengths": asdict(task.lengths),
        "blueprints": list(task.blueprints or ()),
        **{
            key: getattr(task, key)
            for key in ("epochs", "epoch_examples", "batch", "lr", "held_out", "budget")
        },
        "scale_at_birth": task.scale_at_birth,
        "host_params": sum(parameter.numel() for parameter in task.build_host().parameters()),
    }


def path_of(out: Path, group: Group, name: str) -> Path:
    return out / f"{group.task.name}-{group.question}-{name.replace(' ', '-')}.json"


def is_done(out: Path, group: Group, name: str) -> bool:
    path = path_of(out, group, name)
    if not path.is_file():
        return False
    known, wanted = json.loads(path.read_text())["settings"], settings_of(group, name)
    if differing := [
        key for key in wanted if known.get(key) != json.loads(json.dumps(wanted[key]))
    ]:
        raise SystemExit(
            f"{path} was run with other settings ({', '.join(differing)}); choose another --out."
        )
    return True


@torch.no_grad()
def score(
    task: Task, network: nn.Module, split: Split, device: torch.device
) -> tuple[float, float]:
    """Loss and accuracy on a split."""
    scored = []
    for rows in torch.arange(len(split), device=device).split(512):
        inputs, targets = split.gather(rows)
        scored.append(task.score(network(inputs).float(), targets))
    loss, accuracy = (float(torch.cat(parts).mean()) for parts in zip(*scored, strict=True))
    return loss, accuracy


def row_of(group: Group, run: ArmRun, validation: Split, device: torch.device) -> dict[str, object]:
    """What one host's episode came to, and whether its plan was carried out."""
    result = run.result
    loss, accuracy = score(group.task, run.network, validation, device)
    plantings = [
        event for event in run.events if isinstance(event, ActionTaken) and event.op == "GERMINATE"
    ]
    planted = [event.epoch - 1 for event in plantings]
    rolled_back = sum(isinstance(event, HostRolledBack) for event in run.events)
    rule, _, settings = dict(group.arms)[result.arm].partition(":epochs=")
    kept = len(
        run.architecture
    )  # not the times that a seed was kept: a rollback may take it out again
    planned = (
        [int(epoch) for epoch in settings.partition(":")[0].split("+")]
        if rule == "schedule"
        else planted
    )
    row = {
        "seed": result.seed,
        "loss": loss,
        "accuracy": accuracy,
        "flops": result.flops,
        "seconds": result.seconds,
        "params": result.final_params,
        "planted": len(planted),
        "copies": sum(event.blueprint in (COPY, COPY_ZERO) for event in plantings),
        "kept": kept,
        "rolled_back": rolled_back,
        "off_plan": int(planted != planned or (rule == "schedule" and kept != len(planned))),
        "fossils": [f"{slot}.{name}" for slot, name, _ in run.architecture],
    }
    if group.question == "rules":
        row |= {"test_loss": result.test_loss, "test_accuracy": result.test_accuracy}
    return row


def play(group: Group, options: argparse.Namespace, splits: Splits) -> None:
    """Run the arms of a group that are not there yet."""
    missing = [
        (name, policy) for name, policy in group.arms if not is_done(options.out, group, name)
    ]
    if not missing:
        return
    started, device = time.perf_counter(), torch.device(options.device)
    entries = [Entry(name, seed, policy) for name, policy in missing for seed in group.seeds]
    names = ", ".join(name for name, _ in missing)
    print(f"{group.task.name}: {names}: {len(entries)} hosts", flush=True)
    populate = partial(
        Population, devices=(options.device,), amp=options.amp, compile="off", splits=splits
    )
    runs = run_entries(group.task, entries, populate)
    validation = splits.validation.first(min(options.validated, len(splits.validation))).to(device)
    for name, _ in missing:
        rows = [row_of(group, run, validation, device) for run in runs if run.result.arm == name]
        record = {
            "settings": settings_of(group, name),
            "hardware": hardware(options.device),
            "date": datetime.date.today().isoformat(),
            "rows": rows,
        }
        write_durably(
            path_of(options.out, group, name), (json.dumps(record, indent=1) + "\n").encode()
        )
    print(f"{group.task.name}: {time.perf_counter() - started:.0f} s", flush=True)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tasks = ("python_text", "cifar10_resnet")
    parser.add_argument("--task", nargs="+", choices=tasks, default=tasks)
    parser.add_argument(
        "--question", nargs="+", choices=("seeds", "rules"), default=("seeds", "rules")
    )
    parser.add_argument("--kinds", nargs="+", help="only these kinds of arms")
    parser.add_argument(
        "--ramps", nargs="+", type=int, choices=range(LONGEST_RAMP + 1), default=(0, 1, 3)
    )
    parser.add_argument("--scales", nargs="+", type=float, default=(0.0, 0.3, 1.0))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--first-seed", type=int, default=7000, help="the rules' host seeds begin 1000 later"
    )
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--examples", type=int, help="per epoch")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--amp", default="off", choices=("off", "bf16", "fp16"))
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--part", default="1/1", help="2/3: the second third of the populations")
    parser.add_argument("--out", type=Path, required=True, help="folder for finished arms")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see whether it runs")
    parser.add_argument("--list", action="store_true", help="say what would run and leave")
    parser.add_argument("--report", action="store_true", help="tables of the arms in --out")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.validated = 64 if options.smoke else VALIDATED
    if options.smoke:
        options.seeds, options.ramps, options.scales = 1, (0, LONGEST_RAMP), (1.0,)
    return options


def main() -> None:
    options = read_options()
    if options.report:
        report(str(__doc__).splitlines()[0], options.out, options.results)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    part, parts = map(int, options.part.split("/"))
    makers = {"seeds": seed_groups, "rules": rule_groups}
    for name in options.task:
        setup = setup_of(name, options)
        groups = [
            group for question in options.question for group in makers[question](setup, options)
        ]
        own = groups[part - 1 :: parts]
        if options.list:
            for group in own:
                hosts, task = len(group.arms) * len(group.seeds), group.task
                examples = hosts * task.epochs * (task.epoch_examples or 0)
                print(
                    f"{name}: {hosts} hosts, {examples:,} examples: "
                    f"{', '.join(arm for arm, _ in group.arms)}"
                )
            continue
        splits = setup.task.load(options.data_root)
        if options.smoke:
            splits = replace(splits, test=SealedSplit(splits.validation.first(64)))
        with limited_threads(1):
            for group in own:
                play(group, options, splits)


if __name__ == "__main__":
    main()
