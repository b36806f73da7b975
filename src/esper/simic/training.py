"""`esper.train_ppo`: a training run in its folder, alone or as one rank of several.

The loop itself is in `trainer`.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import reduce
from operator import getitem
from typing import Any, NamedTuple

import torch

from esper.leyline.configuration import leaves
from esper.leyline.errors import SettingError
from esper.runtime.devices import map_hosts, parse_devices
from esper.simic.config import TrainingConfig
from esper.simic.ppo.agent import PPOAgent
from esper.simic.team import Team, code_digest, joined_team, was_restarted
from esper.simic.trainer import train_ppo_vectorized
from esper.storage import runfolder
from esper.telemetry.curve_export import TrackingSink, require_trackers
from esper.telemetry.escalation import TelemetryConfig
from esper.telemetry.sink import Sink


def train_ppo(config: TrainingConfig, *, resume: bool = False, **options: Any) -> PPOAgent:
    """Train a growth policy in `config.out`, as `esper ppo` does, and return its agent.

    The folder gets events, checkpoints and the twins of the hosts. Under torchrun this process is
    one rank of several.

    Args:
        config: all that decides the run.
        resume: continue from the newest whole checkpoint in the folder, which otherwise has to be
            empty.
        options: functions that follow the run, as `train_ppo_vectorized` takes them: `watch`,
            `should_stop`, `tell`.

    >>> import esper
    >>> config = esper.TrainingConfig.of(
    ...     {
    ...         "task": {"name": "blobs", "epochs": 3, "epoch_examples": 64},
    ...         "hosts": 2,
    ...         "host_pool": 2,
    ...         "rounds": 1,
    ...         "ppo": {"epochs": 1, "hidden_dim": 8, "head_dim": 8},
    ...         "out": "runs/example",
    ...     }
    ... )
    >>> agent = esper.train_ppo(config, watch=lambda event: print(event.decisions, "decisions"))
    4 decisions
    >>> sorted(path.name for path in config.out.glob("checkpoints/*"))
    ['round-000001.safetensors']
    """
    if not isinstance(config, TrainingConfig):
        raise SettingError(
            f"config is a {type(config).__name__}; write esper.TrainingConfig.of({{...}})."
        )
    wants_cuda = config.devices[0].startswith("cuda")
    with joined_team(wants_cuda) as team, opened(config, resume, team) as run:
        return train_ppo_vectorized(
            run.config, sink=run.sink, resume=run.is_resumed, team=team, **options
        )


class OpenRun(NamedTuple):
    """A run folder that this process holds."""

    config: TrainingConfig  # with the devices of this rank
    is_resumed: bool
    sink: Sink


@contextmanager
def opened(config: TrainingConfig, resume: bool, team: Team) -> Iterator[OpenRun]:
    """Hold the run folder; all ranks agree on the configuration and on whether it is resumed."""
    require_trackers(config.telemetry.track)
    with ExitStack() as stack:
        # each torchrun counts the restarts of its own ranks only
        resume = team.any(resume)
        is_restart = team.any(was_restarted())
        with team.together():
            config = _placed(config, team).settled()
            values = config.model_dump(mode="json")
            if team.rank == 0:
                stack.enter_context(runfolder.only_writer(config.out))
                resume = resume or (is_restart and runfolder.read_start(config.out) == values)
                if not resume:
                    runfolder.require_fresh(config.out)
        resume = team.any(resume)
        facts = {
            name: reduce(getitem, name.split("."), values)
            for name in leaves(TrainingConfig)
            if name not in ("devices", "policy_device")
        }
        team.require_same({**facts, "code": code_digest(), "torch": torch.__version__})
        with team.together():
            if team.rank == 0:
                stack.enter_context(runfolder.begun(config.out, values))
        track = config.telemetry.track if team.rank == 0 else ()
        telemetry = TelemetryConfig(config.telemetry.level, config.telemetry.escalation_rounds)
        events = config.out / runfolder.events_of(team.rank)
        sink = stack.enter_context(TrackingSink(events, telemetry, track, values))
        yield OpenRun(config=config, is_resumed=resume, sink=sink)


def _placed(config: TrainingConfig, team: Team) -> TrainingConfig:
    """The configuration with the devices that there are; a rank of a team has its own."""
    if len(parse_devices([config.policy_device])) > 1:
        raise SettingError(
            f"policy_device is {config.policy_device!r}, but a policy runs on one device."
        )
    if team.size == 1:
        map_hosts(config.hosts, parse_devices(config.devices))
        return config
    if len(config.devices) > 1:
        raise SettingError(
            f"a rank has one device, but devices are {', '.join(config.devices)}; "
            f"leave it to torchrun."
        )
    team.assign(config.hosts)  # refuses more ranks than hosts
    changes: list[tuple[str, Any]] = [("devices", [str(team.device)])]
    if config.policy_device.startswith("cuda"):
        if team.device.type == "cpu":
            raise SettingError(
                "policy_device is on a GPU, but ranks are on the CPU; leave it at cpu."
            )
        changes.append(("policy_device", str(team.device)))
    return config.with_changes(changes, "torchrun")
