"""What all parts start from: finished folders of every command, and what may be said of a folder afterwards."""

import contextlib
import hashlib
import io
import json
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch

from esper.cli import main
from esper.kasmina.exporting import SOURCE, WEIGHTS
from esper.storage import runfolder
from esper.tamiyo.policy_files import read as read_policy
from esper.telemetry import sink
from faults import commands
from faults.commands import DONE, Bad
from simic.tiny_runs import command as ppo_command
from simic.tiny_runs import events_of, manifest_of
from tools.faults.driver import CLEAR, SAID, SAME
from trials.grown_runs import networks_of

KINDS = ("ppo", "run", "compare")
SEGMENT = 3000
"""bytes of events after which a save ends a segment"""
ROUNDS = 3
"""of a run of PPO that is killed on its way"""
SHORT = {"ppo": "ppo", "run": "short", "compare": "compare"}
"""the shortest run of a command that is worth its name"""


def command(kind, out, *more):
    """A tiny run of every kind of command."""
    if kind == "ppo":
        return [*ppo_command(out, rounds=ROUNDS), *more]
    if kind == "short":  # as few calls of the disk as a run can have
        return commands.command("run", out, "--hosts", "1", "--epochs", "3", *more)
    return commands.command(kind, out, *more)


@cache
def place():
    """Where the folders are that all cases start from; the process that made it removes it."""
    import atexit

    folder, owner = Path(tempfile.mkdtemp(prefix="faults-world-")), os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))
    return folder


def finished(kind, seed=0):
    """The finished folder of a command; no case may change it."""
    return _finished(kind, seed)


@cache
def _finished(kind, seed):
    """Made in this process: forks have all imports then."""
    out = place() / f"{kind}-{seed}"
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as said,
    ):
        try:
            main([str(part) for part in command(kind, out, "--seed", str(seed))])
        except SystemExit as leaving:
            if leaving.code:
                raise Bad(said.getvalue()) from leaving
    return out


def policy():
    """A checkpoint that `esper ppo` left."""
    return sorted((finished("ppo") / runfolder.CHECKPOINTS).iterdir())[-1]


def prepare():
    """Make everything that is forked off later. Segments are so short that every run has several."""
    sink.SEGMENT = SEGMENT
    for kind in KINDS:
        for seed in (0, 7):
            finished(kind, seed)
    finished("short")
    with contextlib.redirect_stdout(io.StringIO()):
        for arguments in (
            ["report", str(finished("run")), "--out", str(place() / "report.html")],
            ["export", str(finished("run")), "--to", str(place() / "exported")],
            ["runs", str(place()), "--json"],
        ):
            with contextlib.suppress(SystemExit):
                main(arguments)


def copied(kind, target, seed=0):
    return shutil.copytree(finished(kind, seed), target)


def result_of(kind, folder):
    """What a folder says in the end, without the wall clock and without events, on which no result depends."""
    if kind == "ppo":
        newest = manifest_of(folder)["checkpoints"][-1]
        tensors, plain = read_policy(Path(folder) / runfolder.CHECKPOINTS / newest["file"])
        facts = {key: value for key, value in plain["facts"].items() if key != "events"}
        digests = {
            name: hashlib.sha256(_bytes(tensor)).hexdigest() for name, tensor in tensors.items()
        }
        return {"tensors": digests, **plain, "facts": facts}
    results = runfolder.read_json(Path(folder) / runfolder.RESULTS)
    if kind == "compare":
        return _without_clock({name: results[name] for name in ("rows", "arms")})
    networks = {
        name: hashlib.sha256(content).hexdigest() for name, content in networks_of(folder).items()
    }
    own = {name: digest for name, digest in networks.items() if name.endswith((SOURCE, WEIGHTS))}
    return {"results": _without_clock(results["results"]), "networks": own}


def _bytes(tensor):
    return (
        str((tensor.dtype, tuple(tensor.shape))).encode()
        + tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    )


def _without_clock(value):
    if isinstance(value, dict):
        return {key: _without_clock(part) for key, part in value.items() if "seconds" not in key}
    return [_without_clock(part) for part in value] if isinstance(value, list) else value


@cache
def wanted(kind, seed):
    """The result of the undisturbed run."""
    return result_of(kind, finished(kind, seed))


def judge(kind, folder, ended, seed=0):
    """The verdict on a command that has ended as `commands.run` tells it."""
    how, said = ended
    if how == CLEAR:
        return CLEAR
    assert how == DONE
    found = result_of(kind, folder)
    if found != wanted(kind, seed):
        raise Bad(
            f"silently another result: {_difference(found, wanted(kind, seed))}; "
            f"said: {said[-500:]}"
        )
    return SAID if "esper: " in said else SAME


def _difference(found, expected, where=""):
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in (*found, *expected):
            if found.get(key) != expected.get(key):
                return _difference(found.get(key), expected.get(key), f"{where}.{key}")
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            if one != other:
                return _difference(one, other, f"{where}[{index}]")
    return (
        f"{where}: {json.dumps(found, default=str)[:200]} instead of "
        f"{json.dumps(expected, default=str)[:200]}"
    )


def same_events(kind, folder, seed=0):
    """Events too are those of the undisturbed run. Where segments end depends on the digits of seconds."""
    if kind != "compare" and events_of(folder) != events_of(finished(kind, seed)):
        raise Bad("events are not those of the undisturbed run")
