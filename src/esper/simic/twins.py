"""The yardstick: how a host would have gone on without growing. Computed once per host seed and kept on disk."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from esper.episodes import Episodes
from esper.runtime.host import EpochReading
from esper.runtime.population import Population
from esper.runtime.tasks import Task

_DECIDES_A_TWIN = (
    "name",
    "batch",
    "optimizer",
    "weight_decay",
    "clip_norm",
    "epoch_examples",
    "epochs",
    "augment",
    "held_out",
)


def fingerprint(task: Task, population: dict[str, Any]) -> str:
    """Changes when a twin would: training settings, the host's layout, the data's size, how hosts are run."""
    facts: dict[str, Any] = {"steps": "of one size", **{name: getattr(task, name) for name in _DECIDES_A_TWIN}}
    facts |= {key: str(population[key]) for key in ("executor", "amp") if key in population}
    facts["devices"] = sorted({str(name).partition(":")[0] for name in population.get("devices", ["cpu"])})
    facts["rates"] = [task.rate(epoch) for epoch in range(task.epochs)]
    with torch.device("meta"):
        host = task.build_host()
    facts["host"] = [str(host), {name: list(value.shape) for name, value in host.state_dict().items()}]
    facts["score"] = getattr(task.score, "__qualname__", "")
    if (splits := population.get("splits")) is not None:
        facts["examples"] = [len(splits.train), len(splits.validation)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def twin_readings(
    task: Task, seeds: Sequence[int], folder: Path, should_stop: Callable[[], bool] = lambda: False, **population: Any
) -> dict[int, list[EpochReading]] | None:
    """Every seed's never-grown episode, epoch by epoch; what `folder` holds already is not computed again.

    Args:
        should_stop: asked after every epoch; True ends it, with nothing kept and None returned.
        population: how to run the hosts, as `Population` takes it (devices, executor, amp, data_root, splits).
    """
    key = fingerprint(task, population)
    paths = {seed: folder / f"twin-{task.name}-{key}-{seed}.json" for seed in dict.fromkeys(seeds)}
    found = {seed: readings for seed, path in paths.items() if (readings := _read(path, task.epochs)) is not None}
    missing = [seed for seed in paths if seed not in found]
    if missing:
        hosts = Population(task, missing, **population)
        for seed in missing:
            found[seed] = []
        episodes = Episodes(hosts)
        for _ in range(task.epochs):
            episodes.train()
            for seed, reading in zip(missing, hosts.readings(), strict=True):
                assert reading is not None
                found[seed].append(reading)
            if should_stop():
                return None
        folder.mkdir(parents=True, exist_ok=True)
        for seed in missing:
            _write(paths[seed], found[seed])
    return {seed: found[seed] for seed in seeds}


def _read(path: Path, epochs: int) -> list[EpochReading] | None:
    """The readings in a file; a damaged or incomplete one counts as absent and is computed anew."""
    names = {field.name for field in fields(EpochReading)}
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(rows, list) or len(rows) != epochs or any(set(row) != names for row in rows):
        return None
    measured = ("train_loss", "train_accuracy", "host_gradient_norm")
    return [EpochReading(**row | {name: math.nan for name in measured if row[name] is None}) for row in rows]


def _write(path: Path, readings: Sequence[EpochReading]) -> None:
    temporary = path.with_suffix(".new")
    rows = [
        {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}
        for row in map(asdict, readings)
    ]
    temporary.write_text(json.dumps(rows, allow_nan=False), encoding="utf-8")
    os.replace(temporary, path)
