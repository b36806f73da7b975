"""Hosts whose batch norm sees one value per channel, through every command that trains."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from cli.test_cli import call
from esper.kasmina.hosts import ChainHost, build_cnn_host
from esper.runtime.tasks.registry import TASKS

TINY_PPO = ["hosts=2", "host_pool=2", "ppo.epochs=1", "ppo.minibatches=1", "ppo.hidden_dim=8"]
COMMANDS = {
    "run": (),
    "compare": ("--policies", "heuristic", "--static", "final", "--seeds", "1"),
    "ppo": ("--set", "rounds=1", *(part for pair in TINY_PPO for part in ("--set", pair))),
}


def vector_host(keeps_statistics=True):
    """Batch norm over vectors: with one example it sees one value per channel."""
    blocks = []
    for inputs in (2, 4):
        norm = nn.BatchNorm1d(4, track_running_stats=keeps_statistics)
        blocks.append(nn.Sequential(nn.Linear(inputs, 4), norm, nn.ReLU()))
    return ChainHost(blocks, nn.Linear(4, 2), torch.zeros(2, 2))


HOSTS = {
    "vectors": ("blobs", vector_host),
    "vectors, statistics of the batch alone": ("blobs", partial(vector_host, False)),
    "five blocks on 8 x 8": (
        "digits",
        partial(build_cnn_host, blocks=5, base_channels=2, in_channels=1, image_size=8),
    ),
}


@pytest.fixture(params=HOSTS)
def task(request, monkeypatch):
    name, build_host = HOSTS[request.param]
    built = replace(TASKS[name], name="one_value", build_host=build_host, epochs=4, budget=3.0)
    monkeypatch.setitem(TASKS, "one_value", replace(built, epoch_examples=128))
    return built


@pytest.mark.parametrize("command", COMMANDS)
def test_one_value_per_channel_trains_in_every_command(task, command, capsys, tmp_path):
    arguments = [command, "--task", "one_value", *COMMANDS[command], "--out", str(tmp_path / "run")]
    code, _, problem = call(capsys, *arguments)
    assert (code, problem) == (0, "")


def test_steps_of_one_example_are_refused_in_one_line(monkeypatch, capsys, tmp_path):
    blobs = replace(TASKS["blobs"], name="one_value", build_host=vector_host, batch=1, epochs=2)
    monkeypatch.setitem(TASKS, "one_value", replace(blobs, epoch_examples=8))
    code, _, problem = call(capsys, "run", "--task", "one_value", "--out", str(tmp_path / "bn"))
    assert code
    assert problem.startswith("esper: task one_value: each step learns from one example")
    assert "Raise batch" in problem
    assert problem.count("\n") == 1


def test_steps_of_one_example_train_a_host_that_can(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(TASKS, "one_value", replace(TASKS["blobs"], name="one_value", batch=1))
    options = ["--epochs", "2", "--set", "task.epoch_examples=8", "--json"]
    code, out, _ = call(
        capsys, "run", "--task", "one_value", *options, "--out", str(tmp_path / "run")
    )
    assert code == 0
    assert json.loads(out)
