"""The yardstick: how a host would do without growing.

A twin is computed once per host seed and kept on disk.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import nn

from esper.episodes import Episodes
from esper.leyline.errors import SaveError
from esper.runtime.host import EpochReading
from esper.runtime.ledger import Ledger
from esper.runtime.population import Population
from esper.runtime.storing import spell_reading
from esper.runtime.tasks.families import Variation, for_host
from esper.runtime.tasks.task import Task, training_fields
from esper.storage.store import Store, fitting

# Fields of a task that a fingerprint describes in another way than by their value.
_DESCRIBED = ("load", "build_host", "score", "lr", "constant_share", "reference", "varies")


def fingerprint(task: Task, population: dict[str, Any], variation: Variation | None = None) -> str:
    """Name the settings of a twin by a digest that changes when the twin would.

    These are the training settings, the host's layout, the data's size and how hosts are run, and
    what the host has drawn where hosts differ. Every field of a task counts that is not marked as
    one of growth.
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
    if variation is not None:
        facts["variation"] = asdict(variation)
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _layout(build: Callable[[], nn.Module]) -> list[Any]:
    """A network's modules and the shapes of its tensors."""
    with torch.device("meta"):
        network = build()
    shapes = {name: list(value.shape) for name, value in network.state_dict().items()}
    return [str(network), shapes]


@dataclass(frozen=True)
class Twin:
    """A host that never grew, as it is kept on disk."""

    readings: list[EpochReading]
    """one of each epoch"""
    ledger: Ledger
    """what its episode cost when it was computed; reading it back costs nothing"""


def raise_twins(
    task: Task,
    seeds: Sequence[int],
    folder: Path,
    should_stop: Callable[[], bool] = lambda: False,
    watch: Callable[[int, int], None] = lambda done, total: None,
    **population: Any,
) -> dict[int, Twin] | None:
    """Every seed's never-grown episode, from `folder` or computed.

    Returns None if `should_stop`, asked after each epoch, ends the computing. `watch` gets how many
    epochs are over, and how many there are.
    """
    splits = population.get("splits") or task.load(population.get("data_root"))
    population["splits"] = splits
    # where hosts are alike, they differ in their seed alone
    shared_key = fingerprint(task, population) if task.varies is None else None
    # A store for each seed, whose name says seed and settings: ranks write at the same time, and
    # no two of them the same seed.
    stores: dict[int, Store] = {}
    twins: dict[int, Twin] = {}
    missing = []
    for seed in dict.fromkeys(seeds):
        key = shared_key or _key_of_host(task, seed, population)
        path = folder / f"twin-{task.name}-{key}-{seed}.json"
        stores[seed] = Store(path, "never-grown twin", bound_to=path.stem)
        kept = _read(stores[seed], task.epochs)
        if kept is None:
            missing.append(seed)
        else:
            twins[seed] = kept
    if missing:
        played = _play(task, missing, should_stop, watch, population)
        if played is None:
            return None
        for seed, twin in played.items():
            readings = [spell_reading(reading) for reading in twin.readings]
            stores[seed].save({"readings": readings, "ledger": asdict(twin.ledger)})
        twins |= played
    return {seed: twins[seed] for seed in seeds}


def _key_of_host(task: Task, seed: int, population: dict[str, Any]) -> str:
    """The fingerprint of one host of a family."""
    host = for_host(task, seed, population["splits"])
    return fingerprint(host.task, {**population, "splits": host.splits}, host.variation)


def _play(
    task: Task,
    seeds: Sequence[int],
    should_stop: Callable[[], bool],
    watch: Callable[[int, int], None],
    population: dict[str, Any],
) -> dict[int, Twin] | None:
    """Hosts that are never grown; None if `should_stop` ends it."""
    hosts = Population(task, seeds, **population)
    for run in hosts.runs:
        run.is_static = True
    episodes = Episodes(hosts)
    readings: list[list[EpochReading]] = [[] for _ in seeds]
    for epoch in range(task.epochs):
        episodes.train()
        for of_host, reading in zip(readings, hosts.readings(), strict=True):
            assert reading is not None
            of_host.append(reading)
        watch(epoch + 1, task.epochs)
        if should_stop():
            return None
    return {
        seed: Twin(readings=of_host, ledger=run.ledger)
        for seed, of_host, run in zip(seeds, readings, hosts.runs, strict=True)
    }


def _read(store: Store, epochs: int) -> Twin | None:
    """A twin; None where it is missing, damaged or not of all epochs."""
    try:
        kept = store.newest()
        with fitting(store.manifest):
            facts: dict[str, Any] = {} if kept is None else kept.facts
            readings = TypeAdapter(list[EpochReading]).validate_python(facts["readings"])
            ledger = TypeAdapter(Ledger).validate_python(facts["ledger"])
    except SaveError:
        return None
    return Twin(readings=readings, ledger=ledger) if len(readings) == epochs else None
