"""Trained hosts to go on from: trained here and kept, or taken from a finished run of `never`."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from esper.episodes import Episodes
from esper.kasmina.harvesting import WEIGHTS
from esper.leyline.errors import SaveError, SettingError
from esper.runtime.population import Population
from esper.runtime.tasks import Task, get_task
from esper.telemetry.runfolder import CONFIG, write_atomically
from esper.trials.arms import Settings, Watch
from esper.trials.running import NETWORKS

FOLDER = "pretrained"


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
    paths = {seed: out / FOLDER / f"seed-{seed}.safetensors" for seed in seeds}
    missing = [seed for seed, path in paths.items() if not path.is_file()]
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
            write_atomically(paths[seed], save(state))
    return {seed: _load(path) for seed, path in paths.items()}, epochs


def _from_run(run: Path, task: Task, seeds: Sequence[int]) -> tuple[dict[int, Mapping[str, Tensor]], int]:
    """The hosts of a finished `esper run --policy never`, assigned to the seeds in order."""
    try:
        config = json.loads((run / CONFIG).read_text(encoding="utf-8"))
        policy, name, hosts = config["policy"], config["task"]["name"], int(config["hosts"])
        epochs = int(config["task"]["epochs"] or get_task(name).epochs)
    except (OSError, ValueError, LookupError, TypeError) as problem:
        raise SaveError(f"--from {run} is not a run of esper run ({problem}).") from problem
    if policy != "never" or name != task.name or hosts < len(seeds):
        raise SettingError(
            f"--from {run} holds {hosts} hosts of {name} under {policy}, but {len(seeds)} hosts of {task.name} under "
            f"never are needed: esper run --task {task.name} --policy never --hosts {len(seeds)} --out NEW"
        )
    return {seed: _load(run / NETWORKS / f"host-{host}" / WEIGHTS) for host, seed in enumerate(seeds)}, epochs


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as problem:
        raise SaveError(
            f"the trained host {path} cannot be read ({problem}). Delete it, or finish its run."
        ) from problem
