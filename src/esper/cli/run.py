"""`esper run` and `esper export`: a policy on built-in tasks, and the network that it leaves.

The loop is elsewhere.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import typer
from pydantic import TypeAdapter
from rich.console import Console

from esper.cli.console import arms_table, print_json
from esper.cli.options import HOSTS, Asked, options_of
from esper.cli.progress import show_progress
from esper.cli.session import assemble, read_started, stop_on_signals, teller, way_on
from esper.kasmina.exporting import SOURCE, WEIGHTS
from esper.leyline.errors import SaveError
from esper.runtime.devices import describe_map, map_hosts, parse_devices
from esper.runtime.tasks.task import training_fields
from esper.storage import runfolder
from esper.storage.files import copy_files, digest, write_durably
from esper.storage.rows import to_csv
from esper.storage.store import digest_json
from esper.tamiyo.policy_names import File, parse
from esper.telemetry.curve_export import TrackingSink, require_trackers
from esper.telemetry.escalation import TelemetryConfig
from esper.telemetry.events import (
    ActionTaken,
    ArmFinished,
    Event,
    FossilJudged,
    HostBegan,
    HostRolledBack,
    StageChanged,
)
from esper.trials.arms import Stopped
from esper.trials.config import RunConfig
from esper.trials.running import run_hosts

CONFIG = RunConfig
OPTIONS = {**options_of("policy", "hosts"), **HOSTS}


def play(asked: Asked) -> None:
    """Run what a command line asks for, and print a result per host."""
    config = assemble(asked, "run", RunConfig, may_change=("data_root", "telemetry.track"))
    results = run_policy(config, asked.resume, Console(stderr=asked.as_json))
    if results is None:
        raise typer.Exit(130)
    if asked.as_json:
        print_json(_rows(config, results))
    else:
        title = f"{config.policy} on {config.task.name}"
        Console().print(arms_table(results, title, config.variations))


def run_policy(config: RunConfig, resume: bool, console: Console) -> list[ArmFinished] | None:
    """Run the policy in `config.out`; a result per host, or None if the run was stopped.

    A finished run that is resumed stays as it is.
    """
    require_trackers(config.telemetry.track)
    say = teller(console)
    finished = read_finished(config) if resume else None
    if finished is not None:
        say(f"{config.out} is finished: nothing is trained or written. A new run: another --out.")
        return finished
    start = describe_start(config)
    devices = map_hosts(config.hosts, parse_devices(config.devices))
    with runfolder.only_writer(config.out, fresh=not resume):
        say(f"{config.policy} on {describe_map(devices)}")
        try:
            with (
                runfolder.begun(config.out, start),
                TrackingSink(
                    config.out / runfolder.EVENTS,
                    TelemetryConfig(config.telemetry.level),
                    config.telemetry.track,
                    start,
                ) as sink,
                stop_on_signals() as should_stop,
                show_progress(console) as advance,
            ):
                results = run_hosts(
                    config,
                    sink=sink,
                    resume=resume,
                    watch=_watcher(say, partial(advance, "epochs"), config.task.build().epochs),
                    should_stop=should_stop,
                    say=say,
                )
        except Stopped as stop:
            call = way_on("run", config.out)
            say(f"stopped; {stop.epochs} epochs are saved. Continue with: {call}")
            return None
        table = to_csv(_rows(config, results))
        write_durably(config.out / runfolder.RESULTS_TABLE, table.encode())
        runfolder.write_json(config.out / runfolder.RESULTS, _describe_end(config, results))
    return results


def _rows(config: RunConfig, results: Sequence[ArmFinished]) -> list[dict[str, Any]]:
    """The results as plain rows, with what hosts that differ have drawn."""
    rows = []
    for result in results:
        row = asdict(result)
        variation = config.variations.get(result.seed)
        if variation is not None:
            row |= {"variation": variation.number, "drawn": variation.drawn}
        rows.append(row)
    return rows


def read_finished(config: RunConfig) -> list[ArmFinished] | None:
    """The results of a run that is over and whole; None where something is left to do.

    It is whole if its results can be read and the networks are those that it left.
    """
    runfolder.require_plain(config.out)
    try:
        end = runfolder.read_json(config.out / runfolder.RESULTS)
        results = TypeAdapter(list[ArmFinished]).validate_python(end["results"])
        is_whole = len(results) == config.hosts and end == _describe_end(config, results)
    except (SaveError, OSError, LookupError, TypeError, ValueError):
        return None
    return results if is_whole else None


def describe_start(config: RunConfig) -> dict[str, Any]:
    """Return what the run folder notes of a start: the settings, and what they depend on.

    `training` is equal in two runs where hosts that never grow would be trained alike. Screens
    pair runs with their controls by it.
    """
    settings = config.settled().model_dump(mode="json")
    task = settings["task"]
    felt = {name: task[name] for name in training_fields() if name in task}
    start = {"command": "run", **settings, "training": digest_json(felt)}
    name = parse(config.policy)
    if isinstance(name, File) and name.path.is_file():
        start["files"] = {config.policy: digest(name.path.resolve())}
    return start


def _describe_end(config: RunConfig, results: Sequence[ArmFinished]) -> dict[str, Any]:
    """Return the results, and the digests of the network that each host leaves."""
    networks = []
    for host in range(config.hosts):
        folder = runfolder.network_folder(config.out, host)
        networks.append({name: digest(folder / name) for name in (SOURCE, WEIGHTS)})
    return {"results": [asdict(result) for result in results], "networks": networks}


def _watcher(
    say: Callable[[str], None], advance: Callable[[int, int], None], epochs: int
) -> Callable[[int, Sequence[Event]], None]:
    """Return what prints the events of an epoch that a user wants to see."""

    def watch(epoch: int, events: Sequence[Event]) -> None:
        advance(epoch + 1, epochs)
        for event in events:
            match event:
                case (
                    ActionTaken()
                    | FossilJudged()
                    | HostBegan()
                    | HostRolledBack()
                    | StageChanged(after="CULLED")
                ):
                    say(f"  host {event.host}, {event}")

    return watch


class _Best(NamedTuple):
    """The host with the best held-out accuracy, its result, and the digests of its network."""

    host: int
    result: dict[str, Any]
    digests: dict[str, str]


def export_run(run: Path, folder: Path) -> dict[str, Any]:
    """Copy the best network that a finished `esper run` left, and return its result.

    The best is the one with the highest held-out accuracy.
    """
    read_started(run, "run")
    runfolder.require_plain(run)
    best = _read_best(run)
    if os.path.lexists(folder):
        raise SaveError(f"{folder} already exists; choose another --to.")
    try:
        copy_files(runfolder.network_folder(run, best.host), folder, best.digests)
    except SaveError as problem:
        raise SaveError(
            f"cannot export to {folder}: {problem} Again: esper run --out {run} --resume"
        ) from problem
    return best.result


def _read_best(run: Path) -> _Best:
    path = run / runfolder.RESULTS
    if not path.is_file():
        raise SaveError(
            f"{run} has no results: its episodes are not over. "
            f"Finish: esper run --out {run} --resume"
        )
    try:
        end = runfolder.read_json(path)
        results: list[dict[str, Any]] = end["results"]
        best = max(range(len(results)), key=lambda host: results[host]["validation_accuracy"])
        digests = {name: str(end["networks"][best][name]) for name in (SOURCE, WEIGHTS)}
        return _Best(host=best, result=results[best], digests=digests)
    except (OSError, ValueError, LookupError, TypeError) as problem:
        raise SaveError(
            f"{path} is damaged ({problem}). Rewrite it: esper run --out {run} --resume"
        ) from problem
