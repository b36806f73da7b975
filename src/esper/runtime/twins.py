"""The yardstick: how a host would have gone on without growing. Computed once per host seed and kept on disk."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from esper.runtime.host import EpochReading
from esper.runtime.population import Population
from esper.runtime.tasks import Task

_DECIDES_A_TWIN = (
    "name",
    "batch",
    "optimizer",
    "lr",
    "weight_decay",
    "clip_norm",
    "constant_share",
    "epoch_examples",
    "life",
    "augment",
)


def fingerprint(task: Task, population: dict[str, Any]) -> str:
    """Changes when a twin would: the task's training settings and how hosts are run."""
    facts = {name: getattr(task, name) for name in _DECIDES_A_TWIN} | {key: str(v) for key, v in population.items()}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def twin_readings(task: Task, seeds: Sequence[int], folder: Path, **population: Any) -> dict[int, list[EpochReading]]:
    """Every seed's never-grown life, epoch by epoch; what `folder` holds already is not computed again.

    Args:
        population: how to run the hosts, as `Population` takes it (devices, executor, amp, data_root, splits).
    """
    key = fingerprint(
        task, {name: value for name, value in population.items() if name in ("devices", "executor", "amp")}
    )
    paths = {seed: folder / f"twin-{task.name}-{key}-{seed}.json" for seed in dict.fromkeys(seeds)}
    found = {seed: readings for seed, path in paths.items() if (readings := _read(path, task.life)) is not None}
    missing = [seed for seed in paths if seed not in found]
    if missing:
        hosts = Population(task, missing, **population)
        for seed in missing:
            found[seed] = []
        for _ in range(task.life):
            hosts.train_epoch()
            hosts.evaluate()
            for seed, reading in zip(missing, hosts.readings(), strict=True):
                found[seed].append(reading)
        folder.mkdir(parents=True, exist_ok=True)
        for seed in missing:
            _write(paths[seed], found[seed])
    return {seed: found[seed] for seed in seeds}


def _read(path: Path, life: int) -> list[EpochReading] | None:
    """The readings in a file; a damaged or incomplete one counts as absent and is computed anew."""
    names = {field.name for field in fields(EpochReading)}
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(rows, list) or len(rows) != life or any(set(row) != names for row in rows):
        return None
    return [EpochReading(**row) for row in rows]


def _write(path: Path, readings: Sequence[EpochReading]) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps([asdict(reading) for reading in readings], allow_nan=False), encoding="utf-8")
    os.replace(temporary, path)
