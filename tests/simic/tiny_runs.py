"""Training runs that take a fraction of a second, what they leave behind, and runs that are killed
on the way.
"""

import json
import os
import signal
import sys
import traceback
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch

from esper.cli import main
from esper.runtime.devices import limited_threads
from esper.simic.config import TrainingConfig
from esper.simic.trainer import train_ppo_vectorized
from esper.storage import runfolder
from esper.storage.files import digest
from esper.tamiyo.policy_files import read as read_policy
from esper.telemetry.escalation import TelemetryConfig
from esper.telemetry.sink import Sink

TINY = {
    "task": {"name": "blobs", "epochs": 4, "epoch_examples": 64},
    "initial_wait": 0.5,
    "hosts": 2,
    "host_pool": 3,
    "rounds": 2,
    "threads": 1,
    "ppo": {
        "epochs": 2,
        "minibatches": 2,
        "hidden_dim": 8,
        "head_dim": 8,
        "lr": 0.02,
        "entropy": 0.02,
    },
}
KILLED = -signal.SIGKILL
"""exit code of a process that was killed"""
DECISIONS = 2 * (4 - 1)
"""of one round: hosts times epochs of an episode that are decided about"""


def tiny(out, **changes):
    """A small configuration; `changes` are dotted keys with __ for the dot."""
    config = TrainingConfig.of({**TINY, "out": str(out)})
    dotted = [(key.replace("__", "."), value) for key, value in changes.items()]
    return config.with_changes(dotted, "the test") if dotted else config


@contextmanager
def open_sink(config):
    telemetry = TelemetryConfig(config.telemetry.level, config.telemetry.escalation_rounds)
    config.out.mkdir(parents=True, exist_ok=True)
    with Sink(config.out / runfolder.EVENTS, telemetry) as sink:
        yield sink


def train(config, **options):
    """Train in `config.out`; returns the agent."""
    with open_sink(config) as sink:
        return train_ppo_vectorized(config, sink=sink, **options)


def lines_of(folder):
    """Every event of rank 0 as it stands in the files."""
    files = runfolder.event_files(Path(folder))
    text = "".join(path.read_text() for (rank, _), path in files.items() if rank == 0)
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def events_of(folder, *kinds):
    """Events of a run, or those of some types, without the wall clock."""
    rows = [
        {key: value for key, value in row.items() if key != "seconds"} for row in lines_of(folder)
    ]
    return [row for row in rows if not kinds or row["type"] in kinds]


def remains_of_round(config, number):
    """What ends of episodes left, in the round of this number."""
    rows, played = [], None
    for row in events_of(config.out, "RoundBegan", "RemainsMeasured"):
        played = row["round"] if row["type"] == "RoundBegan" else played
        rows += [row] if row["type"] == "RemainsMeasured" and played == number else []
    return rows


def manifest_of(folder):
    """What the manifest of a run lists:

    facts and first file of each checkpoint, the best among them, whole rounds.
    """
    body = json.loads((Path(folder) / runfolder.MANIFEST).read_text())["body"]
    listed = {save["number"]: _entry(save) for save in body["generations"]}
    rounds = max((entry.get("rounds", 0) for entry in listed.values()), default=0)
    return {
        "checkpoints": list(listed.values()),
        "best": listed.get(body["best"]),
        "rounds": rounds,
    }


def _entry(save):
    file = next(iter(save["files"].values()))
    return {**save["facts"], "file": file["name"], "sha256": file["sha256"]}


def is_whole(folder, entry):
    """Whether a checkpoint is there, byte for byte."""
    return digest(Path(folder) / runfolder.CHECKPOINTS / entry["file"]) == entry["sha256"]


def checkpoints_in(folder):
    return sorted(path.name for path in (Path(folder) / runfolder.CHECKPOINTS).iterdir())


def end_of(folder):
    """What the newest checkpoint holds and the events say; byte offsets follow the wall clock's
    digits, so not them.
    """
    newest = manifest_of(folder)["checkpoints"][-1]
    tensors, plain = read_policy(Path(folder) / runfolder.CHECKPOINTS / newest["file"])
    facts = {key: value for key, value in plain["facts"].items() if key != "events"}
    best = {
        key: value
        for key, value in manifest_of(folder)["best"].items()
        if key not in ("sha256", "file")
    }
    return (
        tensors,
        {**plain, "facts": facts, "best": best},
        [_without_file(row) for row in events_of(folder)],
    )


def _without_file(row):
    """What is saved in place of a damaged checkpoint has another name, so that nothing is written
    over.
    """
    return {
        key: value
        for key, value in row.items()
        if (row["type"], key) != ("CheckpointSaved", "file")
    }


def assert_same_end(folder, other):
    """Weights, optimiser, statistics, random numbers, counters and events, to the bit."""
    (tensors, plain, events), (tensors2, plain2, events2) = end_of(folder), end_of(other)
    assert tensors.keys() == tensors2.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], tensors2[name])] == []
    assert plain == plain2
    assert events == events2


# -- a command in a process of its own -------------------------------------------------------------


def command(out, **changes):
    """`esper ppo` with the tiny settings, as arguments."""
    values = tiny(out, **changes).model_dump(mode="json", exclude_none=True)
    leaves = {"out": values.pop("out")}
    for key, value in values.items():
        leaves |= (
            {f"{key}.{name}": inner for name, inner in value.items()}
            if isinstance(value, dict)
            else {key: value}
        )
    settings = [f"{key}={json.dumps(value)}" for key, value in leaves.items() if key != "out"]
    return [
        "ppo",
        "--preset",
        "digits",
        "--out",
        str(out),
        *(part for text in settings for part in ("--set", text)),
    ]


class Forked:
    """`esper` in a forked process: no imports to wait for. `prepare` is called in it first."""

    def __init__(self, folder, arguments, prepare=lambda: None):
        folder.mkdir(parents=True, exist_ok=True)
        self.out, self.err = folder / "stdout", folder / "stderr"
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._live(arguments, prepare)

    def _live(self, arguments, prepare):
        code = 99
        try:
            sys.stdout = open(self.out, "w", buffering=1)  # noqa: SIM115
            sys.stderr = open(self.err, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115  # as the real one
            prepare()
            with limited_threads(1):
                main(arguments)
            code = 0
        except SystemExit as leaving:
            code = leaving.code or 0
        except BaseException:
            with suppress(OSError):
                traceback.print_exc()
        finally:
            with suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def wait(self):
        """Exit code, standard output and standard error; the code of a killed process is minus the
        signal.
        """
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status), self.out.read_text(), self.err.read_text()


def run_until_it_ends(folder, first, again, kills, prepare):
    """A command and then its continuation, with a death at each of `kills`, at last no more.

    Args:
        folder: for what the processes say.
        first: arguments of the command.
        again: arguments with which it continues.
        kills: moments, counted by `Ticks` in each process.
        prepare: is called in each process with its `Ticks`.

    Returns:
        How many deaths there were.
    """
    deaths = 0
    for number, moment in enumerate([*kills, None]):
        ticks = Ticks(moment, kill_self)
        child = Forked(folder, again if number else first, partial(prepare, ticks))
        code, _, err = child.wait()
        assert code in (0, KILLED), err
        deaths += code == KILLED
    assert code == 0
    return deaths


class Ticks:
    """Counts the moments between which a run can be cut: steps, updates, writes, renames,
    deletions.

    Args:
        act: is called when the `at`-th moment comes.
    """

    def __init__(self, at=None, act=lambda: None):
        self.count, self.at, self.act = 0, at, act

    def tick(self):
        self.count += 1
        if self.count == self.at:
            self.act()

    def watch(self, owner, name):
        wrapped = getattr(owner, name)

        def ticking(*args, **kwargs):
            self.tick()
            result = wrapped(*args, **kwargs)
            self.tick()
            return result

        setattr(owner, name, ticking)

    def install(self):
        """In a process that ends soon: what is wrapped stays so."""
        from esper.simic.environment import GrowthVectorEnv
        from esper.simic.ppo.agent import PPOAgent

        for owner, name in (
            (os, "replace"),
            (os, "fsync"),
            (os, "truncate"),
            (os, "unlink"),
            (os, "mkdir"),
            (GrowthVectorEnv, "step_wait"),
            (GrowthVectorEnv, "reset_wait"),
            (PPOAgent, "update"),
            (Sink, "write_record"),
        ):
            self.watch(owner, name)


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)
