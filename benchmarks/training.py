"""How fast a growth policy trains, everything included.

That is hosts, twins apart, policy, update, telemetry and checkpoints.

    python benchmarks/training.py --preset cifar10 --rounds 20 --data-root DIR --out benchmarks/results/ppo_cifar10.json --name NAME
    python benchmarks/training.py --findings --hosts 16 --rounds 8 --out benchmarks/results/ppo_findings.json --name NAME
    ... --amp bf16
    ... --amp bf16 --set compile=on --rounds 80 --left-out 30
    torchrun --nproc-per-node 4 benchmarks/training.py --preset cifar10 --rounds 20 --keep RUN ...

--findings is the workload that the public system was measured on: generated images, 3,125 to train
and 625 to measure per host and decision, batch 512. The first round (capture, allocation) is left
out of the speed, or the first --left-out of them (compiled blocks); seconds_per_round has them all.
A run that is gone on with is told from where.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from hardware import hardware
from records import add_options, claim, keep
from rich.console import Console
from throughput import generated

from esper.cli.ppo import run_ppo
from esper.leyline.configuration import read_setting
from esper.runtime.batches import whole_steps
from esper.runtime.tasks.registry import get_task, register_task
from esper.simic.checkpoints import saved_rounds
from esper.simic.config import TrainingConfig
from esper.storage.runfolder import event_files

READINGS = ("mean_return", "accuracy", "twin_accuracy", "params_share")


class BusyWatch:
    """Samples how busy the first GPU is, twice a second where there is one, in one process beside this one."""

    def __init__(self) -> None:
        self.samples: list[float] = []
        self._said: subprocess.Popen[str] | None = None

    def __enter__(self) -> "BusyWatch":
        query = [
            "nvidia-smi",
            "--query-gpu=utilization.gpu",
            "--format=csv,noheader,nounits",
            "-i",
            "0",
        ]
        with suppress(OSError):
            self._said = subprocess.Popen(
                [*query, "--loop-ms=500"], stdout=subprocess.PIPE, text=True
            )
        return self

    def __exit__(self, *problem: object) -> None:
        if self._said is not None:
            self._said.terminate()
            lines = self._said.communicate()[0].splitlines()
            self.samples = [float(line) for line in lines if line.strip().isdecimal()]


def config_of(options: argparse.Namespace, folder: str) -> TrainingConfig:
    if options.findings:
        register_task(
            replace(get_task("cifar10"), name="findings", load=lambda root: generated(50_000, 625))
        )
        config = TrainingConfig.of(
            {
                "task": {"name": "findings", "epoch_examples": 3125, "batch": 512, "epochs": 30},
                "hosts": 16,
                "host_pool": 16,
                "devices": ["cuda:0"],
                "ppo": {"epochs": 4, "minibatches": 4},
            }
        )
    else:
        config = TrainingConfig.from_preset(options.preset)
    changes = [
        ("out", folder),
        ("rounds", options.rounds),
        ("amp", options.amp),
        ("telemetry.level", "normal"),
    ]
    if options.hosts:
        changes.append(("hosts", options.hosts))
    if options.data_root:
        changes.append(("data_root", str(options.data_root)))
    changes += [read_setting(text) for text in options.set]
    return config.with_changes(changes, "the command line")


def measure(options: argparse.Namespace) -> dict | None:
    """One run as `esper ppo` makes it, alone or as a rank under torchrun; what it came to, on rank 0."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.keep or temporary)
        config = config_of(options, str(folder))
        known = known_rounds(folder)
        started = time.perf_counter()
        if int(os.environ.get("RANK", "0")):
            run_ppo(config, options.resume, Console())
            return None
        with BusyWatch() as busy:
            run_ppo(config, options.resume, Console())
        whole = time.perf_counter() - started
        rounds, verdicts = rounds_in(folder), verdicts_in(folder, known)
    return {**describe(config, rounds[known:], options.left_out), "seconds": whole} | {
        "gpu_busy_percent": mean_or_none(busy.samples),
        "resumed_after_rounds": known,
        "gates": {
            f"{gate} {verdict}": count for (gate, verdict), count in sorted(verdicts.items())
        },
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "config": config.model_dump(mode="json", exclude={"out", "data_root"}),
    }


def records_in(folder: Path) -> Iterator[tuple[int, dict]]:
    """Every rank's records, each with the round it belongs to."""
    for path in event_files(folder).values():
        number = 0
        for line in path.open():
            record = json.loads(line)
            number = record["round"] if record["type"] == "RoundBegan" else number
            yield number, record


def known_rounds(folder: Path) -> int:
    """Whole rounds that a run to go on with has behind it."""
    return saved_rounds(folder)


def rounds_in(folder: Path) -> list[dict]:
    return [record for _, record in records_in(folder) if record["type"] == "RoundFinished"]


def verdicts_in(folder: Path, first: int) -> Counter:
    """What gates said from this round on."""
    judged = (
        r for number, r in records_in(folder) if r["type"] == "GateJudged" and number >= first
    )
    return Counter((record["gate"], record["verdict"]) for record in judged)


def mean_or_none(values: list[float]) -> float | None:
    return statistics.mean(values) if values else None


def describe(config: TrainingConfig, rounds: list[dict], left_out: int) -> dict:
    """The rounds of this call; their speed without the first ones."""
    task = config.task.build()
    rates = [sum(event["ops"].values()) / event["seconds"] for event in rounds[left_out:]]
    steps, size = whole_steps(task.epoch_examples, task.batch) if task.epoch_examples else (0, 0)
    alive = [event["germinated"] - event["fossilized"] - event["culled"] for event in rounds]
    return {
        "task": task.name,
        "amp": config.amp,
        "hosts": config.hosts,
        "rounds": len(rounds),
        "left_out": left_out,
        "epochs": task.epochs,
        "epoch_examples": task.epoch_examples,
        "held_out": task.held_out,
        "decisions_per_s": statistics.median(rates),
        "decisions_per_s_range": [min(rates), max(rates)],
        "seconds_per_round": [event["seconds"] for event in rounds],
        "examples_per_s": statistics.median(rates) * steps * size,
        "germinated_per_life": [event["germinated"] / config.hosts for event in rounds],
        "alive_per_life": [count / config.hosts for count in alive],
        "fossilized_per_life": [event["fossilized"] / config.hosts for event in rounds],
        **{name: [event[name] for event in rounds] for name in READINGS},
        "explained_variance": [event["update"]["explained_variance"] for event in rounds],
        "first_ratio_gap": max(
            max(event["update"]["first_ratio_gap"].values()) for event in rounds
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="digits")
    parser.add_argument("--findings", action="store_true")
    parser.add_argument("--hosts", type=int)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--left-out", type=int, default=1, help="rounds at the beginning that do not count"
    )
    parser.add_argument("--amp", default="off")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE of the configuration")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--keep", type=Path, help="run folder to leave behind")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --keep")
    add_options(parser)
    options = parser.parse_args()
    claim(options)
    if options.resume and options.keep is None:
        parser.error("--resume needs --keep, the run to go on with")
    if options.left_out < 1:
        parser.error("the first round captures graphs, so at least that one does not count")
    if options.rounds - (known_rounds(options.keep) if options.resume else 0) <= options.left_out:
        parser.error(f"the first {options.left_out} rounds do not count, so more are needed")
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    row = measure(options)
    if row is None:
        return
    print(
        json.dumps({key: value for key, value in row.items() if not isinstance(value, list | dict)})
    )
    device = row["config"]["devices"][0]
    keep(
        options,
        {"script": "benchmarks/training.py", "hardware": hardware(device), "rows": [row]},
    )


if __name__ == "__main__":
    main()
