"""Hosts on disk, between two epochs: everything that decides how each goes on, in a folder per host."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from esper.kasmina.randomness import own_randomness
from esper.kasmina.saving import load_network, restore_optimizer, save_network
from esper.leyline.errors import SaveError
from esper.runtime.governor import Governor
from esper.runtime.host import EpochReading, HostRun, build_optimizer
from esper.runtime.ledger import Ledger, PhaseCost
from esper.runtime.population import Population

_STREAM = "stream.safetensors"


def can_be_stored(population: Population) -> bool:
    """Whether every governor's last good state is the present one, so that it need not be stored as well."""
    return all(governor.bad_checks == 0 for governor in population.governors)


def store_population(population: Population, folder: Path) -> None:
    """Write every host after it has been measured and before anything is decided."""
    assert can_be_stored(population)  # a governor's earlier good state would be lost
    for number, (run, governor) in enumerate(zip(population.runs, population.governors, strict=True)):
        _store(run, governor, folder / f"host-{number}")


def restore_population(population: Population, folder: Path) -> None:
    """Put fresh hosts of the same seeds back to where they were."""
    for number, run in enumerate(population.runs):
        extra = _restore(run, folder / f"host-{number}")
        governor = Governor(run)
        governor.load(tuple(extra["governor"]))
        population.governors[number] = governor


def _store(run: HostRun, governor: Governor, folder: Path) -> None:
    best_accuracy, best_loss, _, rollbacks = governor.state()
    extra = {
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
    save_network(run.model, folder, extra)
    stream = run.plan.stream
    save_file({"generator": stream.generator.get_state(), "permutation": stream.permutation}, folder / _STREAM)


def _restore(run: HostRun, folder: Path) -> dict[str, Any]:
    with own_randomness(run.seed):
        host = run.task.build_host()
    loaded = load_network(folder, host.to(run.device))
    extra = loaded.extra
    if extra["seed"] != run.seed:
        raise SaveError(f"{folder} holds the host of seed {extra['seed']}, not {run.seed}; use the run's own settings.")
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
    for slot, (norm, score) in zip(run.slots, extra["slots"], strict=True):
        slot.gradient_norm, slot.greedy_score = norm, score
    run.prime()
    run.epoch = extra["epoch"]
    run.reading = None if extra["reading"] is None else EpochReading(**_unspell(extra["reading"]))
    run.ledger = Ledger({name: PhaseCost(**cost) for name, cost in extra["ledger"].items()}, extra["peak_params"])
    if run.scaler is not None:
        run.scaler.load_state_dict(extra["scaler"])
    run.plan.stream.load({**_read_stream(folder / _STREAM), "position": extra["position"]})
    best = extra["governor"][1]
    extra["governor"][1] = float("inf") if best is None else best
    return extra


def _spell(values: dict[str, Any]) -> dict[str, Any]:
    """Numbers that JSON has no signs for as words: the reading of a host that was rolled back may hold such."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _unspell(values: dict[str, Any]) -> dict[str, Any]:
    return {name: float(value) if isinstance(value, str) else value for name, value in values.items()}


def _read_stream(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as problem:
        raise SaveError(f"{path} is missing or damaged ({problem}); use another checkpoint.") from problem
