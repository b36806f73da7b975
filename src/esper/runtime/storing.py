"""Stores hosts between two epochs: all that decides how each continues, as facts and files."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter
from safetensors.torch import load, save_file

from esper.kasmina.optimizer_saving import restore_optimizer
from esper.kasmina.randomness import own_randomness
from esper.kasmina.saving import describe_network, rebuild_network
from esper.leyline.errors import SaveError
from esper.runtime.governor import Expectations, Governor
from esper.runtime.host import EpochReading, HostRun
from esper.runtime.ledger import Ledger
from esper.runtime.population import Population
from esper.storage.files import Content
from esper.storage.store import Plain


class PopulationDescription(NamedTuple):
    """Plain facts of each host, and by role what the files of all hosts hold."""

    facts: list[Plain]
    contents: dict[str, Content]


def can_be_stored(population: Population) -> bool:
    """Say whether every governor's last good state is the present one.

    It then need not be stored as well.
    """
    return all(governor.bad_checks == 0 for governor in population.governors)


def describe_population(population: Population) -> PopulationDescription:
    """Return facts per host and what the files hold.

    Hosts must be measured and not yet decided about.
    """
    assert can_be_stored(population)  # a governor's earlier good state would be lost
    facts: list[Plain] = []
    contents: dict[str, Content] = {}
    hosts = zip(population.runs, population.governors, strict=True)
    for number, (run, governor) in enumerate(hosts):
        host, files = describe_network(run.model)
        stream = run.plan.stream.state()
        expected = governor.state()._asdict()
        host |= {
            "seed": run.seed,
            "epoch": run.epoch,
            "is_pruned": run.is_pruned,
            "reading": run.reading and spell_reading(run.reading),
            "ledger": asdict(run.ledger),
            "position": stream.pop("position"),
            "governor": {name: spell(value) for name, value in expected.items()},
            "scaler": run.scaler.state_dict(),
        }
        files["stream"] = partial(save_file, stream)
        facts.append(host)
        contents |= {f"host-{number}-{role}": content for role, content in files.items()}
    return PopulationDescription(facts, contents)


def restore_population(
    population: Population, facts: Sequence[Plain], contents: Mapping[str, bytes], path: Path
) -> None:
    """Put fresh hosts of the same seeds back to where they were; errors name `path`."""
    for number, run in enumerate(population.runs):
        start = f"host-{number}-"
        of_host = {
            role.removeprefix(start): content
            for role, content in contents.items()
            if role.startswith(start)
        }
        _restore(run, facts[number], of_host, path)
        governor = Governor(run)
        governor.load(_read_expectations(facts[number]["governor"]))
        population.governors[number] = governor


def _restore(run: HostRun, facts: Plain, contents: Mapping[str, bytes], path: Path) -> None:
    """Put one fresh host back to where it was."""
    if facts["seed"] != run.seed:
        raise SaveError(
            f"{path} holds the host of seed {facts['seed']}, not {run.seed}; use the "
            f"run's own settings."
        )
    with own_randomness(run.seed):
        host = run.task.build_host()
    model, optimizer = rebuild_network(host.to(run.device), facts, contents, path)
    assert optimizer is not None
    run.take_network(model)
    restore_optimizer(run.model, run.link, optimizer)
    run.prime()
    run.epoch = facts["epoch"]
    run.is_pruned = facts["is_pruned"]
    run.reading = TypeAdapter(EpochReading | None).validate_python(facts["reading"])
    run.ledger = TypeAdapter(Ledger).validate_python(facts["ledger"])
    run.scaler.load_state_dict(facts["scaler"])
    run.plan.stream.load({**load(contents["stream"]), "position": facts["position"]})


def _read_expectations(saved: Plain) -> Expectations:
    """What a governor expected; `spell` wrote an infinite loss as a word."""
    return Expectations(
        best_accuracy=float(saved["best_accuracy"]),
        best_loss=float(saved["best_loss"]),
        bad_checks=saved["bad_checks"],
        rollbacks=saved["rollbacks"],
    )


def spell(value: Any) -> Any:
    """A value that JSON can hold: infinite numbers and NaN become words.

    The readings of a host that was rolled back have such numbers.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def spell_reading(reading: EpochReading) -> dict[str, Any]:
    """Return a reading's fields by name, each as JSON can hold it."""
    return {name: spell(value) for name, value in asdict(reading).items()}
