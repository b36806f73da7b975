"""The yardstick:

how a host would do without growing. Computed once per host seed and kept on disk.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import nn

from esper.episodes import Episodes
from esper.leyline.errors import SaveError
from esper.runtime.host import EpochReading
from esper.runtime.population import Population
from esper.runtime.storing import spell_reading
from esper.runtime.tasks.task import Task, training_fields
from esper.storage.store import Store, fitting

# Fields of a task that a fingerprint describes in another way than by their value.
_DESCRIBED = ("load", "build_host", "score", "lr", "constant_share", "reference")


def fingerprint(task: Task, population: dict[str, Any]) -> str:
    """Name the settings of a twin by a digest that changes when the twin would.

    These are the training settings, the host's layout, the data's size and how hosts are run. Every
    field of a task counts that is not marked as one of growth.
    """
    facts: dict[str, Any] = {"steps": "of one size"}
    for name in training_fields():
        if name not in _DESCRIBED:
            facts[name] = getattr(task, name)
    facts["host"] = _layout(task.build_host)
    facts["score"] = getattr(task.score, "__qualname__", "")
    facts["rates"] = [task.rate(epoch) for epoch in range(task.epochs)]
    if task.reference is not None:
        build_reference, examples = task.reference
        facts["reference"] = [_layout(build_reference), examples]
    for key in ("executor", "amp", "compile"):
        if key in population:
            facts[key] = str(population[key])
    devices = population.get("devices", ["cpu"])
    facts["devices"] = sorted({str(name).partition(":")[0] for name in devices})
    splits = population.get("splits")
    if splits is not None:
        facts["examples"] = [len(splits.train), len(splits.validation), splits.corpus]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _layout(build: Callable[[], nn.Module]) -> list[Any]:
    """A network's modules and the shapes of its tensors."""
    with torch.device("meta"):
        network = build()
    shapes = {name: list(value.shape) for name, value in network.state_dict().items()}
    return [str(network), shapes]


def twin_readings(
    task: Task,
    seeds: Sequence[int],
    folder: Path,
    should_stop: Callable[[], bool] = lambda: False,
    **population: Any,
) -> dict[int, list[EpochReading]] | None:
    """Every seed's never-grown episode, from `folder` or computed; None if `should_stop`, asked
    each epoch, ends it.
    """
    population["splits"] = population.get("splits") or task.load(population.get("data_root"))
    key = fingerprint(task, population)
    paths = {seed: folder / f"twin-{task.name}-{key}-{seed}.json" for seed in dict.fromkeys(seeds)}
    # one for each seed: ranks write at the same time, and no two the same one; the name tells seed
    # and settings
    stores = {
        seed: Store(path, "never-grown twin", bound_to=path.stem) for seed, path in paths.items()
    }
    found = {
        seed: kept
        for seed, store in stores.items()
        if (kept := _read(store, task.epochs)) is not None
    }
    if missing := [seed for seed in paths if seed not in found]:
        hosts = Population(task, missing, **population)
        for run in hosts.runs:
            run.is_static = True
        found |= {seed: [] for seed in missing}
        episodes = Episodes(hosts)
        for _ in range(task.epochs):
            episodes.train()
            for seed, reading in zip(missing, hosts.readings(), strict=True):
                assert reading is not None
                found[seed].append(reading)
            if should_stop():
                return None
        for seed in missing:
            stores[seed].save({"readings": [spell_reading(reading) for reading in found[seed]]})
    return {seed: found[seed] for seed in seeds}


def _read(store: Store, epochs: int) -> list[EpochReading] | None:
    """The readings of a twin; what is damaged, incomplete or of an older format is computed
    anew.
    """
    try:
        kept = store.newest()
        with fitting(store.manifest):
            readings = TypeAdapter(list[EpochReading]).validate_python(
                [] if kept is None else kept.facts["readings"]
            )
    except SaveError:
        return None
    return readings if len(readings) == epochs else None
