"""`esper ppo`: trains a growth policy, alone or as one rank of several. The training is elsewhere."""

import json
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import typer
from rich.console import Console

from esper import __version__
from esper.cli.beside import watch_beside
from esper.cli.console.progress import show_rounds
from esper.cli.options import HOSTS, Asked, options_of
from esper.cli.session import assemble, stop_on_signals, teller
from esper.leyline.errors import SettingError
from esper.runtime.devices import describe_map, map_hosts, parse_devices
from esper.simic.checkpoints import saved_rounds
from esper.simic.config import TrainingConfig
from esper.simic.team import Team, code_digest, is_launched, joined_team, plain_facts, was_restarted
from esper.simic.trainer import InterruptedTraining, train_ppo_vectorized
from esper.telemetry import runfolder
from esper.telemetry.curve_export import TrackingSink, require_trackers
from esper.telemetry.escalation import TelemetryConfig
from esper.telemetry.events import RankTimed

CONFIG = TrainingConfig
OPTIONS = {**HOSTS, **options_of("hosts", "rounds", "reward.family")}


def play(asked: Asked) -> None:
    if is_launched():
        if any(argument.startswith("--devices") for argument in asked.arguments):
            raise SettingError("under torchrun every rank has its own device; omit --devices.")
        if asked.watch or asked.as_json:
            raise SettingError("ranks share one terminal; omit --watch and --json. Use: esper watch RUN")
    config = assemble(asked, "ppo", TrainingConfig)
    if asked.watch:
        watch_beside(asked, config.out)
    if not run_ppo(config, asked.resume, Console(stderr=asked.as_json)):
        raise typer.Exit(130)
    if asked.as_json:
        saves = json.loads((config.out / runfolder.MANIFEST).read_text(encoding="utf-8"))["body"]
        print(json.dumps({"rounds": saved_rounds(config.out), **saves}, indent=1))


def run_ppo(config: TrainingConfig, resume: bool, console: Console) -> bool:
    """Train in `config.out`, alone or as one rank of a team; True if it finished, False if it was stopped."""
    require_trackers(config.telemetry.track)
    with joined_team(config.devices[0].startswith("cuda")) as team, ExitStack() as stack:
        console = console if team.rank == 0 else Console(quiet=True)
        resume, is_restart = team.any(resume), team.any(was_restarted())  # each torchrun counts its own ranks' only
        with team.together():
            config = _placed(config, team).settled()
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
                TrackingSink(config.out / runfolder.events_of(team.rank), telemetry, track, values) as sink,
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
                    tell=teller(console),
                    team=team,
                )
        except InterruptedTraining as stop:
            again = f"esper ppo --out {config.out} --resume"
            teller(console)(f"stopped; {stop.rounds} whole rounds are saved. Go on with: {again}")
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
    tell = teller(console)
    tell("configuration: " + json.dumps(values))
    if team.size == 1:
        tell(describe_map(map_hosts(config.hosts, parse_devices(config.devices))))
        return
    shared = "; some share a GPU" if team.shares_gpu else ""
    ranks = zip(team.gather(str(team.device)), team.assign(config.hosts), strict=True)
    places = ", ".join(f"rank {rank} on {device}: {len(hosts)}" for rank, (device, hosts) in enumerate(ranks))
    tell(f"hosts by rank: {places}{shared}")


def _tell_ranks(ranks: Sequence[RankTimed], console: Console) -> None:
    """Each rank's speed and the one that all wait for, where there are several."""
    if len(ranks) > 1:
        speeds = ", ".join(f"{rank.hosts / rank.seconds:.1f} ({rank.hosts} hosts)" for rank in ranks)
        slowest = max(ranks, key=lambda rank: rank.seconds)
        share = slowest.seconds / (sum(rank.seconds for rank in ranks) / len(ranks))
        teller(console)(f"episodes/s by rank: {speeds}; all wait for rank {slowest.rank}, {share:.2f} x the mean")
