"""`esper ppo`: trains a growth policy, alone or as one rank of several.

The training is elsewhere.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import typer
from rich.console import Console

from esper.cli.console import print_json, show_rounds
from esper.cli.options import HOSTS, Asked, options_of
from esper.cli.progress import Meter
from esper.cli.session import assemble, stop_on_signals, teller, way_on
from esper.leyline.errors import SettingError
from esper.runtime.devices import describe_map, map_hosts, parse_devices
from esper.simic.checkpoints import saved_rounds
from esper.simic.config import TrainingConfig
from esper.simic.team import Team, is_launched, joined_team
from esper.simic.trainer import InterruptedTraining, train_ppo_vectorized
from esper.simic.training import opened
from esper.storage import runfolder
from esper.telemetry.events import RankTimed

CONFIG = TrainingConfig
OPTIONS = {**HOSTS, **options_of("suite", "hosts", "rounds", "reward.family")}
HAS_VERBOSE = True


def play(asked: Asked) -> None:
    """Train what a command line asks for."""
    if is_launched():
        if any(argument.startswith("--devices") for argument in asked.arguments):
            raise SettingError("under torchrun every rank has its own device; omit --devices.")
        if asked.as_json:
            raise SettingError("ranks share one terminal; omit --json. Use: esper watch RUN")
    config = assemble(asked, "ppo", TrainingConfig)
    console = Console(stderr=asked.as_json)
    if not run_ppo(config, asked.resume, console, verbose=asked.verbose):
        raise typer.Exit(130)
    if asked.as_json:
        saves = json.loads((config.out / runfolder.MANIFEST).read_text(encoding="utf-8"))["body"]
        print_json({"rounds": saved_rounds(config.out), **saves})


def run_ppo(
    config: TrainingConfig, resume: bool, console: Console, *, verbose: bool = False
) -> bool:
    """Train in `config.out`, alone or as one rank of a team.

    It begins with one line; with `verbose` the configuration, the policy's sizes and what the twins
    cost follow.

    Returns True if it finished, and False if it was stopped.
    """
    wants_cuda = config.devices[0].startswith("cuda")
    meter = Meter()
    with joined_team(wants_cuda) as team, opened(config, resume, team) as opening:
        settings, is_resumed, sink = opening
        console = console if team.rank == 0 else Console(quiet=True)
        details = teller(console if verbose else Console(quiet=True))
        _tell_start(settings, team, teller(console))
        details("configuration: " + json.dumps(settings.model_dump(mode="json")))
        try:
            with (
                stop_on_signals(patient=is_launched()) as is_asked,
                show_rounds(settings.rounds, console, meter) as watch,
            ):
                asks: dict[str, Any] = {
                    "should_stop": is_asked,
                    "watch": watch,
                    "tell": details,
                    "advance": meter.advance,
                }
                asks["watch_ranks"] = lambda ranks: _tell_ranks(ranks, console)
                train_ppo_vectorized(settings, sink=sink, resume=is_resumed, team=team, **asks)
        except InterruptedTraining as stop:
            teller(console)(
                f"stopped; {stop.rounds} whole rounds are saved. Continue with: "
                f"{way_on('ppo', settings.out)}"
            )
            return False
    return True


def _tell_start(config: TrainingConfig, team: Team, tell: Callable[[str], None]) -> None:
    """Say in one line what is trained, where and for how long."""
    task = config.task.build()
    if team.size == 1:
        where = describe_map(map_hosts(config.hosts, parse_devices(config.devices)))
    else:
        ranks = zip(team.gather(str(team.device)), team.assign(config.hosts), strict=True)
        places = ", ".join(
            f"rank {rank} on {device}: {len(hosts)}" for rank, (device, hosts) in enumerate(ranks)
        )
        where = f"hosts by rank: {places}{'; some share a GPU' if team.shares_gpu else ''}"
    lessons = ""
    if config.imitation.rounds:
        lessons = f", the first {config.imitation.rounds} imitate {config.imitation.policy}"
    steps = "decisions" if task.clock == "compute" else "epochs"
    what = f"{task.name}: {config.rounds} rounds of {task.epochs} {steps}"
    if config.suite is not None:
        played = [f"{share.hosts} x {share.task.name}" for share in config.shares_of_hosts]
        what = f"suite of {', '.join(played)}: {config.rounds} rounds"
    tell(f"{what}{lessons}, reward {config.family}, {where}, in {config.out}")


def _tell_ranks(ranks: Sequence[RankTimed], console: Console) -> None:
    """Each rank's speed and the one that all wait for, where there are several."""
    if len(ranks) > 1:
        speeds = ", ".join(
            f"{rank.hosts / rank.seconds:.1f} ({rank.hosts} hosts)" for rank in ranks
        )
        slowest = max(ranks, key=lambda rank: rank.seconds)
        share = slowest.seconds / (sum(rank.seconds for rank in ranks) / len(ranks))
        teller(console)(
            f"episodes/s by rank: {speeds}; all wait for rank {slowest.rank}, "
            f"{share:.2f} x the mean"
        )
