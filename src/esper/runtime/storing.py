"""Hosts between two epochs as plain facts and tensor files: everything that decides how each goes on."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from esper.kasmina.randomness import own_randomness
from esper.kasmina.saving import describe_network, rebuild_network, restore_optimizer
from esper.leyline.errors import SaveError
from esper.leyline.files import Content
from esper.runtime.governor import Governor
from esper.runtime.host import EpochReading, HostRun, build_optimizer
from esper.runtime.ledger import Ledger, PhaseCost
from esper.runtime.population import Population


def can_be_stored(population: Population) -> bool:
    """Whether every governor's last good state is the present one, so that it need not be stored as well."""
    return all(governor.bad_checks == 0 for governor in population.governors)


def describe_population(population: Population) -> tuple[list[dict[str, Any]], dict[str, Content]]:
    """Facts per host and what the files hold, for hosts that are measured and not yet decided about."""
    assert can_be_stored(population)  # a governor's earlier good state would be lost
    facts: list[dict[str, Any]] = []
    contents: dict[str, Content] = {}
    for number, (run, governor) in enumerate(zip(population.runs, population.governors, strict=True)):
        host, files = _describe(run, governor)
        facts.append(host)
        contents |= {f"host-{number}-{role}": content for role, content in files.items()}
    return facts, contents


def restore_population(population: Population, facts: Sequence[dict[str, Any]], paths: Mapping[str, Path]) -> None:
    """Put fresh hosts of the same seeds back to where they were."""
    for number, run in enumerate(population.runs):
        start = f"host-{number}-"
        own = {role.removeprefix(start): path for role, path in paths.items() if role.startswith(start)}
        governor_state = _restore(run, facts[number], own)
        governor = Governor(run)
        governor.load(governor_state)
        population.governors[number] = governor


def _describe(run: HostRun, governor: Governor) -> tuple[dict[str, Any], dict[str, Content]]:
    best_accuracy, best_loss, _, rollbacks = governor.state()
    facts, contents = describe_network(run.model)
    facts |= {
        "seed": run.seed,
        "epoch": run.epoch,
        "reading": None if run.reading is None else _spell(asdict(run.reading)),
        "slots": [(slot.gradient_norm, slot.greedy_score) for slot in run.slots],
        "ledger": {name: asdict(cost) for name, cost in run.ledger.phases.items()},
        "peak_params": run.ledger.peak_params,
        "position": run.plan.stream.position,
        "governor": [best_accuracy, None if math.isinf(best_loss) else best_loss, 0, rollbacks],
        "scaler": None if run.scaler is None else run.scaler.state_dict(),
    }
    stream = run.plan.stream
    tensors = {"generator": stream.generator.get_state(), "permutation": stream.permutation}
    contents["stream"] = lambda path: save_file(tensors, path)
    return facts, contents


def _restore(run: HostRun, facts: dict[str, Any], paths: Mapping[str, Path]) -> tuple[float, float, int, int]:
    """Put one host back; returns its governor's state."""
    place = paths["model"].parent
    if facts["seed"] != run.seed:
        raise SaveError(f"{place} holds the host of seed {facts['seed']}, not {run.seed}; use the run's own settings.")
    with own_randomness(run.seed):
        host = run.task.build_host()
    loaded = rebuild_network(host.to(run.device), facts, paths, place)
    assert loaded.optimizer is not None
    run.model = loaded.model
    run.optimizer = build_optimizer(run.task, run.model, run.device)
    run.link = run.model.attach(run.optimizer, follows_rates=False)
    rates = [group["lr"] for group in run.optimizer.param_groups]
    restore_optimizer(run.model, run.link, loaded.optimizer)
    for group, rate in zip(run.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate  # on a GPU a tensor, which every epoch fills anew
    for state in run.optimizer.state.values():
        if "step" in state and run.device.type == "cuda":
            state["step"] = state["step"].to(run.device)  # a captured step counts on the device
    run.slots = [run.model.slot(slot_id) for slot_id in run.model.slot_config.slot_ids]
    for slot, (norm, score) in zip(run.slots, facts["slots"], strict=True):
        slot.gradient_norm, slot.greedy_score = norm, score
    run.prime()
    run.epoch = facts["epoch"]
    run.reading = None if facts["reading"] is None else EpochReading(**_unspell(facts["reading"]))
    run.ledger = Ledger({name: PhaseCost(**cost) for name, cost in facts["ledger"].items()}, facts["peak_params"])
    if run.scaler is not None:
        run.scaler.load_state_dict(facts["scaler"])
    run.plan.stream.load({**load_file(paths["stream"]), "position": facts["position"]})
    best_accuracy, best_loss, bad_checks, rollbacks = facts["governor"]
    return best_accuracy, math.inf if best_loss is None else best_loss, bad_checks, rollbacks


def _spell(values: dict[str, Any]) -> dict[str, Any]:
    """Numbers that JSON has no signs for as words: the reading of a host that was rolled back may hold such."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _unspell(values: dict[str, Any]) -> dict[str, Any]:
    return {name: float(value) if isinstance(value, str) else value for name, value in values.items()}
