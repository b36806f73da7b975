"""How long a run of up to a million events takes to open, and one older episode to be read back.

    python benchmarks/dashboard.py --out NEW.json

Runs are generated: a PPO run of 32 hosts and episodes of 30 epochs, and a run of one policy on 400
hosts, the worst case for memory: no episode is over before its last line. About two events of seeds
per epoch beside the epoch's own. Each opening is a process of its own on one core. Writes one JSON
file: command, hardware, seconds and peak memory.
"""

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from records import add_options, claim, keep

from esper.telemetry.events import (
    ActionTaken,
    CheckpointSaved,
    Event,
    GateJudged,
    HostEpoch,
    RoundBegan,
    RoundFinished,
    SeedMeasured,
    StageChanged,
    to_record,
)

HOSTS, EPOCHS, GROWN_HOSTS = 32, 30, 400
HEADS = ("op", "slot", "blueprint", "blend")


def live_epoch(
    number: int, host: int, epoch: int, seeds: dict[str, list], draws: random.Random
) -> Iterator[Event]:
    """One host's events of one epoch; `seeds` holds blueprint and age of what episodes in each slot."""
    slot = f"r0c{draws.randrange(3)}"
    if slot not in seeds and draws.random() < 0.3:
        seeds[slot] = ["conv_light", 0]
        yield ActionTaken(host, epoch, "GERMINATE", slot, "conv_light", "linear")
        yield GateJudged(
            host, epoch, slot, "G0", draws.random(), "same shape, finite output", "passed", "fits"
        )
        yield StageChanged(host, epoch, slot, "DORMANT", "GERMINATED", "conv_light", 0.0)
        yield StageChanged(host, epoch, slot, "GERMINATED", "BLENDING", "conv_light", 1.0)
    elif slot in seeds and seeds[slot][1] == 2:
        yield GateJudged(host, epoch, slot, "G3", 1.0, "alpha 1", "passed", "alpha is 1")
        yield StageChanged(host, epoch, slot, "BLENDING", "PROBATIONARY", seeds[slot][0], 1.0)
    elif slot in seeds and seeds[slot][1] > 4:
        del seeds[slot]
        fate = draws.choice(("FOSSILIZED", "CULLED"))
        yield ActionTaken(
            host, epoch, "CULL" if fate == "CULLED" else "FOSSILIZE", slot, None, None
        )
        yield StageChanged(
            host, epoch, slot, "PROBATIONARY", fate, "conv_light", float(fate == "FOSSILIZED")
        )
    for name, seed in seeds.items():
        seed[1] += 1
        gain, error = draws.gauss(0.1, 0.2), draws.random() / 20
        yield SeedMeasured(
            host, epoch + 1, name, "BLENDING", seed[0], 1.0, seed[1], 424, gain, error
        )
    accuracy = 1 - 0.9 / epoch + draws.random() / 100
    parts = {
        name: draws.gauss(0, 0.1)
        for name in ("accuracy_beyond_twin", "lasting_accuracy", "rent", "churn")
    }
    losses, reward = (draws.random(), draws.random()), sum(parts.values())
    flops = 25_000_000 * epoch
    yield HostEpoch(
        host,
        epoch + 1,
        losses[1],
        438 + epoch,
        train_loss=losses[0],
        held_out_accuracy=accuracy,
        flops=flops,
        round=number,
        twin_accuracy=accuracy - 0.01,
        reward=reward,
        reward_parts=parts,
    )


def live_round(number: int, draws: random.Random) -> Iterator[Event]:
    """All events of one round."""
    yield RoundBegan(number)
    seeds: list[dict[str, list]] = [{} for _ in range(HOSTS)]
    for epoch in range(1, EPOCHS):
        for host in range(HOSTS):
            yield from live_epoch(number, host, epoch, seeds[host], draws)
    heads = {
        name: {"loss": 0.1, "entropy": draws.random(), "clip_fraction": 0.1, "steps": 120}
        for name in HEADS
    }
    update = {
        "approx_kl": 0.01,
        "clip_fraction": 0.1,
        "explained_variance": 0.5,
        "value_loss": 0.2,
        "heads": heads,
    }
    ops = {"WAIT": 700, "GERMINATE": 120, "CULL": 60, "FOSSILIZE": 48}
    parts = {"accuracy_beyond_twin": 0.1, "rent": -0.1}
    decisions = (number + 1) * HOSTS * (EPOCHS - 1)
    yield RoundFinished(
        number, decisions, draws.random(), 0.9, 0.89, 1.3, parts, ops, 120, 48, 60, 0, update, 4.0
    )
    yield CheckpointSaved(number + 1, f"round-{number + 1:06d}.safetensors")


def write_run(folder: Path, events: int) -> dict[str, int]:
    """A run folder of about that many events."""
    draws, written, number = random.Random(0), 0, 0
    with open(folder / "events-0.jsonl", "w", encoding="utf-8") as file:
        while written < events:
            for event in live_round(number, draws):
                file.write(json.dumps(to_record(event), allow_nan=False) + "\n")
                written += 1
            number += 1
    (folder / "config.json").write_text(
        json.dumps({"task": {"name": "digits"}, "rounds": number, "hosts": HOSTS})
    )
    return {
        "events": written,
        "rounds": number,
        "bytes": (folder / "events-0.jsonl").stat().st_size,
    }


def write_grown(folder: Path, events: int) -> dict[str, int]:
    """The same of a grow run."""
    draws, written, epoch = random.Random(0), 0, 0
    seeds: list[dict[str, list]] = [{} for _ in range(GROWN_HOSTS)]
    with open(folder / "events-0.jsonl", "w", encoding="utf-8") as file:
        while written < events:
            for host in range(GROWN_HOSTS):
                for event in live_epoch(0, host, epoch + 1, seeds[host], draws):
                    if isinstance(event, HostEpoch):
                        event = replace(event, round=None, reward=None, reward_parts=None)
                    file.write(
                        json.dumps({**to_record(event), "epoch": epoch + 1}, allow_nan=False) + "\n"
                    )
                    written += 1
            epoch += 1
    config = {
        "command": "run",
        "task": {"name": "digits"},
        "policy": "heuristic",
        "hosts": GROWN_HOSTS,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return {"events": written, "epochs": epoch, "bytes": (folder / "events-0.jsonl").stat().st_size}


def open_run(folder: Path) -> dict[str, float]:
    """Open it in this process on one core, look at everything, and say what that took."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from esper.dashboard.reader import RunReader

    started, worked = time.perf_counter(), time.process_time()
    reader = RunReader(folder)
    reader.refresh()
    assert reader.view.events
    assert reader.view.log
    wall, cpu = time.perf_counter() - started, time.process_time() - worked
    started = time.perf_counter()
    past = reader.episode(int(reader.view.kind == "ppo"), 3)
    assert past is not None
    assert past.epochs.rows
    return {
        "wall_s": round(wall, 3),
        "cpu_s": round(cpu, 3),
        "older_episode_s": round(time.perf_counter() - started, 3),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def measure(
    write: Callable[[Path, int], dict[str, int]], events: int, repeats: int
) -> dict[str, object]:
    """Write a run and open it in as many processes, one after the other."""
    with tempfile.TemporaryDirectory() as name:
        size = write(Path(name), events)
        command = [sys.executable, __file__, "--open", name]
        openings = [
            subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
            for _ in range(repeats)
        ]
    return {"run": size, "openings": [json.loads(opening) for opening in openings]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--repeats", type=int, default=3)
    add_options(parser)
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.open:
        print(json.dumps(open_run(options.open)))
        return
    claim(options)
    counts = " ".join(map(str, options.events))
    record: dict[str, object] = {
        "command": f"python benchmarks/dashboard.py --events {counts} --repeats {options.repeats}",
        "hardware": f"{platform.machine()} CPU, 1 core, Python {platform.python_version()}",
    }
    for kind, write in (("ppo", write_run), ("grow", write_grown)):
        record[kind] = [measure(write, events, options.repeats) for events in options.events]
    print(json.dumps(record, indent=1))
    keep(options, record)


if __name__ == "__main__":
    main()
