"""Trained hosts to go on from: trained here and kept, or taken from a finished run of `never`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from esper.episodes import Episodes
from esper.kasmina.harvesting import WEIGHTS
from esper.leyline.errors import SaveError, SettingError
from esper.leyline.files import digest
from esper.runtime.population import Population
from esper.runtime.tasks import Task, get_task
from esper.telemetry import runfolder
from esper.telemetry.store import Store
from esper.trials.arms import Settings, Watch


def trained_hosts(
    out: Path,
    task: Task,
    seeds: Sequence[int],
    epochs: int,
    source: Path | None,
    settings: Settings,
    tell: Callable[[str], None],
    watch: Watch,
) -> tuple[dict[int, Mapping[str, Tensor]], int]:
    """Each seed's weights and the epochs they cost; none where arms begin from scratch."""
    if source is not None:
        return _from_run(source, task, seeds)
    if not epochs:
        return {}, 0
    stores = {seed: _store(out, seed) for seed in seeds}
    kept = {seed: _load(store) for seed, store in stores.items()}
    found: dict[int, Mapping[str, Tensor]] = {seed: state for seed, state in kept.items() if state is not None}
    missing = [seed for seed in seeds if seed not in found]
    if missing:
        tell(f"training {len(missing)} hosts alone for {epochs} epochs")
        hosts = Population(
            replace(task, epochs=epochs),
            missing,
            [settings.device],
            executor=settings.executor,
            amp=settings.amp,
            splits=settings.splits,
        )
        episodes = Episodes(hosts)
        for epoch in range(epochs):
            watch(epoch, ())
            episodes.train()  # rolls back a host that broke
        for seed, run in zip(missing, hosts.runs, strict=True):
            state = {name: value.cpu().contiguous() for name, value in run.model.host.state_dict().items()}
            stores[seed].save({"epochs": epochs}, {"host": (f"seed-{seed}.safetensors", partial(save_file, state))})
            found[seed] = state
    return found, epochs


def _store(out: Path, seed: int) -> Store:
    return Store(out / runfolder.PRETRAINED / f"seed-{seed}.json", "trained host", names=f"seed-{seed}")


def _load(store: Store) -> dict[str, Tensor] | None:
    try:
        trained = store.newest()
    except SaveError as problem:
        raise SaveError(f"{problem} If you delete {store.manifest}, its host is trained again.") from problem
    return None if trained is None else load(store.path(trained, "host").read_bytes())


def _from_run(run: Path, task: Task, seeds: Sequence[int]) -> tuple[dict[int, Mapping[str, Tensor]], int]:
    """The hosts of a finished `esper run --policy never`, assigned to the seeds in order."""
    try:
        config = runfolder.read_json(run / runfolder.CONFIG)
        policy, name, hosts = config["policy"], config["task"]["name"], int(config["hosts"])
        epochs = int(config["task"]["epochs"] or get_task(name).epochs)
    except (OSError, ValueError, LookupError, TypeError) as problem:
        raise SaveError(f"--from {run} is not a run of esper run ({problem}).") from problem
    if policy != "never" or name != task.name or hosts < len(seeds):
        raise SettingError(
            f"--from {run} holds {hosts} hosts of {name} under {policy}, but {len(seeds)} hosts of {task.name} under "
            f"never are needed: esper run --task {task.name} --policy never --hosts {len(seeds)} --out NEW"
        )
    return {seed: _read(run, host) for host, seed in enumerate(seeds)}, epochs


def _read(run: Path, host: int) -> dict[str, Tensor]:
    folder = run / runfolder.NETWORKS
    path = folder / f"host-{host}" / WEIGHTS
    try:
        is_whole = digest(path) == runfolder.read_json(folder / runfolder.DIGESTS)[f"host-{host}"]
        weights = load(path.read_bytes())
    except (OSError, LookupError, SafetensorError) as problem:
        raise SaveError(f"the trained host {path} cannot be read ({problem}). Finish its run.") from problem
    if not is_whole:
        raise SaveError(f"{path} was changed after it was written. Restore it.")
    return weights
