"""Runs of `esper run` that take a fraction of a second, what they leave behind, and moments to cut
them at.
"""

import json
import os
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from esper.kasmina import exporting, saving
from esper.runtime import storing
from esper.runtime.population import Population
from esper.storage import runfolder
from esper.storage.runfolder import NETWORKS
from esper.telemetry.escalation import TelemetryConfig
from esper.telemetry.sink import Sink
from esper.trials import running
from esper.trials.arms import Stopped
from esper.trials.config import RunConfig
from esper.trials.running import run_hosts
from simic.tiny_runs import Ticks, events_of

TINY = {"task": {"name": "blobs", "epochs": 8, "epoch_examples": 96}, "hosts": 2, "threads": 1}


def changed(settings, out, changes):
    """Settings with other values; keys of the task have `task__` in front."""
    found = {**settings, "out": str(out), "task": dict(settings["task"])}
    for key, value in changes.items():
        if key.startswith("task__"):
            found["task"][key.removeprefix("task__")] = value
        else:
            found[key] = value
    return found


def configured(out, **changes):
    """A small configuration, changed."""
    return RunConfig.of(changed(TINY, out, changes))


@contextmanager
def open_sink(config):
    config.out.mkdir(parents=True, exist_ok=True)
    with Sink(config.out / runfolder.EVENTS, TelemetryConfig(config.telemetry.level)) as sink:
        yield sink


def grow(config, **options):
    """Grow in `config.out`; a result per host."""
    with open_sink(config) as sink:
        return run_hosts(config, sink=sink, **options)


def asked_at(call):
    """Somebody who asks to stop when asked for the `call`-th time."""
    calls = count(1)
    return lambda: next(calls) >= call


def stopped(config, epochs, **options):
    """Grow and stop after some epochs; how many are saved then."""
    try:
        grow(config, should_stop=asked_at(epochs), **options)
    except Stopped as stop:
        return stop.epochs
    raise AssertionError("it came to its end")


def grow_epoch_by_epoch(config):
    """The same as `grow`, stopped after every epoch and resumed."""
    for epoch in range(1, config.task.build().epochs):
        calls = 1 if epoch == 1 else 2  # the epoch that is resumed is asked about once more
        assert stopped(config, calls, resume=epoch > 1) == epoch
    return grow(config, resume=True)


# -- what a run leaves behind ----------------------------------------------------------------------


def networks_of(folder):
    """Every file of every exported network."""
    root = Path(folder) / NETWORKS
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def tensors_of(folder):
    """Digests of the tensor files of the newest epoch:

    weights, buffers, optimisers, streams, memories.
    """
    body = json.loads((Path(folder) / runfolder.MANIFEST).read_text())["body"]
    files = body["generations"][-1]["files"]
    return {role: file["sha256"] for role, file in files.items()}


def assert_same_end(folder, other):
    """Events with results, networks and the last epoch's states are equal to the bit; the wall
    clock does not count.
    """
    assert events_of(folder) == events_of(other)
    assert events_of(folder, "ArmFinished")
    assert networks_of(folder) == networks_of(other)
    assert tensors_of(folder) == tensors_of(other)


# -- cutting ---------------------------------------------------------------------------------------


def install(ticks: Ticks):
    """Moments of a growing run, in a process that ends soon: what is wrapped stays so."""
    for owner, name in (
        (os, "replace"),
        (os, "fsync"),
        (os, "truncate"),
        (os, "mkdir"),
        (os, "unlink"),
        (saving, "save_file"),
        (exporting, "save_file"),
        (storing, "save_file"),
        (running, "save_file"),
        (running, "export_network"),
        (Population, "finish_epoch"),
        (Population, "evaluate"),
        (Population, "apply"),
        (Population, "tick"),
        (Population, "final_scores"),
        (Sink, "write_record"),
    ):
        ticks.watch(owner, name)
