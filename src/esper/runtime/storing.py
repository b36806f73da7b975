"""Stores hosts between two epochs: all that decides how each continues, as facts and files."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file

from esper.kasmina.randomness import own_randomness
from esper.kasmina.saving import describe_network, rebuild_network, restore_optimizer
from esper.leyline.errors import SaveError
from esper.runtime.governor import Governor
from esper.runtime.host import EpochReading, HostRun
from esper.runtime.ledger import Ledger
from esper.runtime.population import Population
from esper.storage.files import Content


def can_be_stored(population: Population) -> bool:
    """Say whether every governor's last good state is the present one.

    It then need not be stored as well.
    """
    return all(governor.bad_checks == 0 for governor in population.governors)


def describe_population(population: Population) -> tuple[list[dict[str, Any]], dict[str, Content]]:
    """Return facts per host and what the files hold.

    Hosts must be measured and not yet decided about.
    """
    assert can_be_stored(population)  # a governor's earlier good state would be lost
    facts: list[dict[str, Any]] = []
    contents: dict[str, Content] = {}
    for number, (run, governor) in enumerate(
        zip(population.runs, population.governors, strict=True)
    ):
        host, files = describe_network(run.model)
        stream = run.plan.stream.state()
        host |= {
            "seed": run.seed,
            "epoch": run.epoch,
            "is_pruned": run.is_pruned,
            "reading": run.reading and spell_reading(run.reading),
            "ledger": asdict(run.ledger),
            "position": stream.pop("position"),
            "governor": [spell(value) for value in governor.state()],
            "scaler": run.scaler.state_dict(),
        }
        files["stream"] = partial(save_file, stream)
        facts.append(host)
        contents |= {f"host-{number}-{role}": content for role, content in files.items()}
    return facts, contents


def restore_population(
    population: Population, facts: Sequence[dict[str, Any]], paths: Mapping[str, Path]
) -> None:
    """Put fresh hosts of the same seeds back to where they were."""
    for number, run in enumerate(population.runs):
        start = f"host-{number}-"
        own = {
            role.removeprefix(start): path for role, path in paths.items() if role.startswith(start)
        }
        _restore(run, facts[number], own)
        best_accuracy, best_loss, bad_checks, rollbacks = facts[number]["governor"]
        population.governors[number] = Governor(run)
        population.governors[number].load(
            (float(best_accuracy), float(best_loss), bad_checks, rollbacks)
        )


def _restore(run: HostRun, facts: dict[str, Any], paths: Mapping[str, Path]) -> None:
    place = paths["model"].parent
    if facts["seed"] != run.seed:
        raise SaveError(
            f"{place} holds the host of seed {facts['seed']}, not {run.seed}; use the "
            f"run's own settings."
        )
    with own_randomness(run.seed):
        host = run.task.build_host()
    model, optimizer = rebuild_network(host.to(run.device), facts, paths, place)
    assert optimizer is not None
    run.take_network(model)
    restore_optimizer(run.model, run.link, optimizer)
    run.prime()
    run.epoch = facts["epoch"]
    run.is_pruned = facts["is_pruned"]
    run.reading = TypeAdapter(EpochReading | None).validate_python(facts["reading"])
    run.ledger = TypeAdapter(Ledger).validate_python(facts["ledger"])
    run.scaler.load_state_dict(facts["scaler"])
    run.plan.stream.load({**load_file(paths["stream"]), "position": facts["position"]})


def spell(value: Any) -> Any:
    """A number that JSON has no sign for as a word: a host that was rolled back has read such."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def spell_reading(reading: EpochReading) -> dict[str, Any]:
    """Return a reading's fields by name, each as JSON can hold it."""
    return {name: spell(value) for name, value in asdict(reading).items()}
