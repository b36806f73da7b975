"""What goes on around a training run: its folder, its lock, signals, what is printed. The training is elsewhere."""

import json
import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import torch
from rich.console import Console

from esper import __version__
from esper.cli.console.comparison import compared_figure
from esper.cli.console.progress import show_rounds
from esper.kasmina.harvesting import WEIGHTS
from esper.leyline.errors import SaveError, SettingError
from esper.runtime.devices import describe_map, map_hosts, parse_devices
from esper.simic.team import Team, code_digest, is_launched, joined_team, plain_facts, was_restarted
from esper.simic.trainer import InterruptedTraining, train_ppo_vectorized
from esper.simic.training_config import TrainingConfig, presets
from esper.tamiyo.rules import is_rule
from esper.telemetry import runfolder
from esper.telemetry.curve_export import TrackingSink, require_trackers
from esper.telemetry.escalation import TelemetryConfig
from esper.telemetry.events import ActionTaken, ArmFinished, Event, HostRolledBack, RankTimed, StageChanged
from esper.telemetry.sink import JsonlSink
from esper.trials.comparing import CompareConfig, Comparison, StoppedComparing
from esper.trials.growing import NETWORKS, GrowConfig, StoppedGrowing, grow_hosts
from esper.trials.summary import summarise, to_csv

RESULTS = "results.json"
Changes = Sequence[tuple[str, Any]]


def assemble(preset: str | None, file: Path | None, changes: Changes, resume: bool) -> TrainingConfig:
    """The effective configuration: preset or file (on resume: what the run was started with), then the changes."""
    named = dict(changes)
    saved = Path(str(named.get("out", TrainingConfig().out))) / runfolder.CONFIG
    is_saved = resume and runfolder.is_there(saved)
    if file is not None:
        config = TrainingConfig.from_json_path(file)
    elif preset is not None or not is_saved:
        known = named.get("task.name")
        config = TrainingConfig.from_preset(preset or (known if known in presets() else "digits"))
    else:
        config = TrainingConfig.from_json_path(saved)
    return config.with_changes(changes, "the command line") if changes else config


def settle(config: TrainingConfig) -> TrainingConfig:
    """The configuration with what follows from other fields written out, so that a later change cannot move it."""
    if config.ppo.anneal_decisions is not None:
        return config
    whole = config.rounds * config.hosts * (config.task.build().epochs - 1)
    return config.with_changes([("ppo.anneal_decisions", whole)], "the configuration")


@contextmanager
def stop_on_signals(patient: bool = False) -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM ask for an orderly end; a second one ends at once, unless `patient`.

    torchrun passes on what the terminal has sent already, so its ranks get everything twice.
    """
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        if asked and not patient:
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_ppo(config: TrainingConfig, resume: bool, console: Console) -> bool:
    """Train in `config.out`, alone or as one rank of a team; True if it came to its end, False if it was stopped."""
    require_trackers(config.telemetry.track)
    with joined_team(config.devices[0].startswith("cuda")) as team, ExitStack() as stack:
        console = console if team.rank == 0 else Console(quiet=True)
        resume, is_restart = team.any(resume), team.any(was_restarted())  # each torchrun counts its own ranks' only
        with team.together():
            config = settle(_placed(config, team))
            values = config.model_dump(mode="json")
            if team.rank == 0:
                stack.enter_context(runfolder.only_writer(config.out))
                resume = resume or (is_restart and runfolder.is_begun_with(config.out, values))
                if not resume:
                    runfolder.require_fresh(config.out)
        resume = team.any(resume)
        facts = {**plain_facts(values), "version": __version__, "code": code_digest(), "torch": torch.__version__}
        team.require_same({name: value for name, value in facts.items() if name not in ("devices", "policy_device")})
        _tell_start(config, values, team, console)
        with team.together():
            if team.rank == 0:
                stack.enter_context(runfolder.begun(config.out, values))
        track = config.telemetry.track if team.rank == 0 else ()
        telemetry = TelemetryConfig(config.telemetry.level, config.telemetry.escalation_rounds)
        until = math.inf if config.time_limit is None else time.monotonic() + config.time_limit
        try:
            with (
                JsonlSink(config.out / runfolder.events_of(team.rank), telemetry) as disk,
                closing(TrackingSink(disk, track, config.out, values)) as sink,
                stop_on_signals(patient=is_launched()) as is_asked,
                show_rounds(config.rounds, console) as watch,
            ):
                train_ppo_vectorized(
                    config,
                    sink=sink,
                    resume=resume,
                    watch=watch,
                    watch_ranks=lambda ranks: _tell_ranks(ranks, console),
                    should_stop=lambda: is_asked() or time.monotonic() > until,
                    team=team,
                )
        except InterruptedTraining as stop:
            done = f"stopped; {stop.rounds} whole rounds are saved. Go on with: esper ppo --out {config.out} --resume"
            console.print(done, markup=False, highlight=False, soft_wrap=True)
            return False
    return True


def _placed(config: TrainingConfig, team: Team) -> TrainingConfig:
    """The configuration with the devices that there are; a rank of a team has its own."""
    if len(parse_devices([config.policy_device])) > 1:
        raise SettingError(f"policy_device is {config.policy_device!r}, but a policy runs on one device.")
    if team.size == 1:
        map_hosts(config.hosts, parse_devices(config.devices))
        return config
    if len(config.devices) > 1:
        named = ", ".join(config.devices)
        raise SettingError(f"a rank has one device, but devices are {named}; leave them to torchrun.")
    team.assign(config.hosts)  # refuses more ranks than hosts
    places: list[tuple[str, Any]] = [("devices", [str(team.device)])]
    if config.policy_device.startswith("cuda"):
        if team.device.type == "cpu":
            raise SettingError("policy_device is on a GPU, but ranks are on the CPU; leave it at cpu.")
        places.append(("policy_device", str(team.device)))
    return config.with_changes(places, "torchrun")


def _tell_start(config: TrainingConfig, values: dict[str, Any], team: Team, console: Console) -> None:
    console.print("configuration: " + json.dumps(values), markup=False, highlight=False, soft_wrap=True)
    if team.size == 1:
        places = describe_map(map_hosts(config.hosts, parse_devices(config.devices)))
        console.print(places, markup=False, highlight=False)
        return
    shared = "; some share a GPU" if team.shares_gpu else ""
    ranks = zip(team.gather(str(team.device)), team.assign(config.hosts), strict=True)
    places = ", ".join(f"rank {rank} on {device}: {len(hosts)}" for rank, (device, hosts) in enumerate(ranks))
    console.print(f"hosts by rank: {places}{shared}", markup=False, highlight=False, soft_wrap=True)


def _tell_ranks(ranks: Sequence[RankTimed], console: Console) -> None:
    """Each rank's speed and the one that all wait for, where there are several."""
    if len(ranks) > 1:
        speeds = ", ".join(f"{rank.hosts / rank.seconds:.1f} ({rank.hosts} hosts)" for rank in ranks)
        slowest = max(ranks, key=lambda rank: rank.seconds)
        share = slowest.seconds / (sum(rank.seconds for rank in ranks) / len(ranks))
        line = f"episodes/s by rank: {speeds}; all wait for rank {slowest.rank}, {share:.2f} x the mean"
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def run_grow(config: GrowConfig, resume: bool, console: Console) -> list[ArmFinished] | None:
    """Grow in `config.out`; a result per host, or None if somebody stopped it."""
    require_trackers(config.track)
    task = config.task.build()
    settled = config.task.model_copy(update={"epochs": task.epochs, "budget": task.budget})
    values = {"command": "grow", **config.model_copy(update={"task": settled}).model_dump(mode="json")}
    places = map_hosts(config.hosts, parse_devices(config.devices))
    with runfolder.only_writer(config.out):
        if not resume:
            runfolder.require_fresh(config.out)
        console.print(f"{config.policy} on {describe_map(places)}", markup=False, highlight=False)

        def tell(epoch: int, events: Sequence[Event]) -> None:
            for event in events:
                if isinstance(event, ActionTaken | HostRolledBack | StageChanged) and _is_news(event):
                    console.print(f"  host {event.host}, {event}", markup=False, highlight=False)

        try:
            with (
                runfolder.begun(config.out, values),
                JsonlSink(config.out / runfolder.EVENTS, TelemetryConfig(config.telemetry)) as disk,
                closing(TrackingSink(disk, config.track, config.out, values)) as sink,
                stop_on_signals() as should_stop,
            ):
                results = grow_hosts(config, sink=sink, resume=resume, watch=tell, should_stop=should_stop)
        except StoppedGrowing as stop:
            console.print(
                f"stopped; {stop.epochs} epochs are saved. Go on with: esper grow --out {config.out} --resume",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
            return None
        runfolder.write_json(config.out / RESULTS, {"results": [asdict(result) for result in results]})
    return results


def run_compare(config: CompareConfig, resume: bool, console: Console) -> dict[str, Any] | None:
    """Compare in `config.out`; what was found, or None if somebody stopped it."""
    values = {"command": "compare", **config.model_dump(mode="json", exclude={"out", "data_root"})}
    files = [Path(name) for name in config.policies if not is_rule(name)]
    if config.source is not None:
        files += [config.source / runfolder.CONFIG, *sorted((config.source / NETWORKS).rglob(f"*{WEIGHTS}"))]
    values["files"] = {str(path): runfolder.digest(path) for path in files if path.is_file()}
    values["code"] = code_digest()
    with runfolder.only_writer(config.out):
        if not resume:
            runfolder.require_fresh(config.out)
        elif (saved := config.out / runfolder.CONFIG).is_file() and (begun := _read_json(config.out)) != values:
            is_older = isinstance(begun, dict) and {**begun, "code": values["code"]} == values
            other = "code of Esper" if is_older else "settings or files"
            raise SettingError(f"{config.out} was begun with other {other} (see {saved}); choose another --out.")

        def tell(line: str) -> None:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

        try:
            with runfolder.begun(config.out, values), stop_on_signals() as should_stop:
                results = summarise(config, Comparison(config, tell, should_stop).run())
        except StoppedComparing:
            tell(f"stopped; finished arms are kept. Go on with the same command and --resume (--out {config.out}).")
            return None
        runfolder.write_json(config.out / RESULTS, results)
        runfolder.write_atomically(config.out / "results.csv", to_csv(results["rows"]).encode())
        runfolder.write_atomically(config.out / "figure.svg", compared_figure(results).encode())
    return results


def _is_news(event: ActionTaken | HostRolledBack | StageChanged) -> bool:
    return not isinstance(event, StageChanged) or event.after == "CULLED"


def export_run(run: Path, folder: Path) -> dict[str, Any]:
    """Copy the best network that a finished `esper grow` left, by held-out accuracy; returns its result."""
    _read_config(run)
    path = run / RESULTS
    if not path.is_file():
        raise SaveError(f"{run} has no results: its episodes are not over. Finish: esper grow --out {run} --resume")
    try:
        results: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["results"]
        best = max(range(len(results)), key=lambda host: results[host]["validation_accuracy"])
    except (OSError, ValueError, LookupError, TypeError) as problem:
        raise SaveError(f"{path} is damaged ({problem}). Write it anew: esper grow --out {run} --resume") from problem
    if folder.exists():
        raise SaveError(f"{folder} is there already; choose another --to.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent, prefix=".export-") as part:
            copied = shutil.copytree(run / NETWORKS / f"host-{best}", Path(part) / "network", symlinks=True)
            copied.rename(folder)
    except OSError as problem:
        raise SaveError(f"cannot export to {folder}: {problem}.") from problem
    return results[best]


def grow_config_of(run: Path) -> GrowConfig:
    """What a run was started with."""
    return GrowConfig.of({**_read_config(run), "out": str(run)})


def _read_config(run: Path) -> dict[str, Any]:
    values = _read_json(run)
    if not isinstance(values, dict) or values.pop("command", None) != "grow":
        raise SaveError(f"{run} is not a run of esper grow.")
    return values


def _read_json(run: Path) -> Any:
    path = run / runfolder.CONFIG
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise SaveError(f"{run} is not a run folder: {path.name} cannot be read ({problem}).") from problem
