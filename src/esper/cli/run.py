"""`esper run` and `esper export`:

a policy on built-in tasks, and the network that it leaves. The loop is elsewhere.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from esper.cli.console import arms_table
from esper.cli.options import HOSTS, Asked, options_of
from esper.cli.session import assemble, read_started, stop_on_signals, teller, way_on
from esper.kasmina.exporting import SOURCE, WEIGHTS
from esper.leyline.errors import SaveError
from esper.runtime.devices import describe_map, map_hosts, parse_devices
from esper.storage import runfolder
from esper.storage.files import copy_files, digest
from esper.tamiyo.policy_names import Rule, parse
from esper.telemetry.curve_export import TrackingSink, require_trackers
from esper.telemetry.escalation import TelemetryConfig
from esper.telemetry.events import (
    ActionTaken,
    ArmFinished,
    Event,
    FossilJudged,
    HostRolledBack,
    StageChanged,
)
from esper.trials.arms import Stopped
from esper.trials.config import RunConfig
from esper.trials.running import run_hosts

CONFIG = RunConfig
OPTIONS = {**options_of("policy", "hosts"), **HOSTS}


def play(asked: Asked) -> None:
    config = assemble(asked, "run", RunConfig, may_change=("data_root", "telemetry.track"))
    results = run_policy(config, asked.resume, Console(stderr=asked.as_json))
    if results is None:
        raise typer.Exit(130)
    if asked.as_json:
        print(json.dumps([asdict(result) for result in results], indent=1))
    else:
        Console().print(arms_table(results, f"{config.policy} on {config.task.name}"))


def run_policy(config: RunConfig, resume: bool, console: Console) -> list[ArmFinished] | None:
    """Run the policy in `config.out`; a result per host, or None if somebody stopped it."""
    require_trackers(config.telemetry.track)
    say, level = teller(console), TelemetryConfig(config.telemetry.level)
    values = {"command": "run", **config.settled().model_dump(mode="json")}
    if not isinstance(parse(config.policy), Rule) and Path(config.policy).is_file():
        values["files"] = {config.policy: digest(Path(config.policy).resolve())}
    places = map_hosts(config.hosts, parse_devices(config.devices))
    with runfolder.only_writer(config.out, fresh=not resume):
        say(f"{config.policy} on {describe_map(places)}")

        def watch(epoch: int, events: Sequence[Event]) -> None:
            for event in events:
                match event:
                    case (
                        ActionTaken()
                        | FossilJudged()
                        | HostRolledBack()
                        | StageChanged(after="CULLED")
                    ):
                        say(f"  host {event.host}, {event}")

        try:
            with (
                runfolder.begun(config.out, values),
                TrackingSink(
                    config.out / runfolder.EVENTS, level, config.telemetry.track, values
                ) as sink,
                stop_on_signals() as should_stop,
            ):
                results = run_hosts(
                    config, sink=sink, resume=resume, watch=watch, should_stop=should_stop, say=say
                )
        except Stopped as stop:
            say(f"stopped; {stop.epochs} epochs are saved. Go on with: {way_on('run', config.out)}")
            return None
        homes = [runfolder.network_folder(config.out, host) for host in range(config.hosts)]
        networks = [{name: digest(place / name) for name in (SOURCE, WEIGHTS)} for place in homes]
        values = {"results": [asdict(result) for result in results], "networks": networks}
        runfolder.write_json(config.out / runfolder.RESULTS, values)
    return results


def export_run(run: Path, folder: Path) -> dict[str, Any]:
    """Copy the best network that a finished `esper run` left, by held-out accuracy; returns its
    result.
    """
    read_started(run, "run")
    runfolder.require_plain(run)
    path = run / runfolder.RESULTS
    if not path.is_file():
        raise SaveError(
            f"{run} has no results: its episodes are not over. Finish: esper run "
            f"--out {run} --resume"
        )
    try:
        found = runfolder.read_json(path)
        results: list[dict[str, Any]] = found["results"]
        best = max(range(len(results)), key=lambda host: results[host]["validation_accuracy"])
        digests = {name: str(found["networks"][best][name]) for name in (SOURCE, WEIGHTS)}
    except (OSError, ValueError, LookupError, TypeError) as problem:
        raise SaveError(
            f"{path} is damaged ({problem}). Rewrite it: esper run --out {run} --resume"
        ) from problem
    if folder.exists():
        raise SaveError(f"{folder} already exists; choose another --to.")
    try:
        copy_files(runfolder.network_folder(run, best), folder, digests)
    except SaveError as problem:
        raise SaveError(
            f"cannot export to {folder}: {problem} Again: esper run --out {run} --resume"
        ) from problem
    return results[best]
