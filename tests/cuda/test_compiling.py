"""Compiled blocks in captured graphs have the losses of uncompiled ones, to a tolerance, and
compile nothing twice.
"""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from cuda.test_executors import COPIED, no_waiting
from esper.kasmina.hosts import build_resnet_host, build_transformer_host
from esper.runtime.executors import compiling
from esper.runtime.host import HostRun
from esper.runtime.population import Population
from esper.runtime.tasks.registry import get_task
from runtime.episodes import COPIES, GERMINATE, act, image_splits, play

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TEXT = replace(
    COPIED,
    build_host=partial(
        build_transformer_host, vocabulary=256, width=64, layers=3, context=64, slots=3
    ),
    held_out=16,
)
PHOTOS = replace(
    get_task("cifar10_resnet"),
    load=lambda root: image_splits(256, 32, 3, 20),
    build_host=partial(build_resnet_host, blocks=1, stages=2),
    slots=None,
    epoch_examples=128,
    batch=32,
    lr=0.02,
    blueprints=("conv_small", "copy"),
)
SHAPES = 3 * 2 + 1
"""Stem, block and head, in training and in measuring, and the score of training."""


def losses(task, script, compile, hosts=2, **options):
    population = Population(
        task, list(range(hosts)), ["cuda"], executor="graphed", compile=compile, **options
    )
    play(population, 6, dict.fromkeys(range(hosts), script))
    return [
        value for one in population.readings() for value in (one.train_loss, one.held_out_loss)
    ], population


@pytest.mark.parametrize(("amp", "tolerance"), [("off", 2e-3), ("bf16", 2e-2)])
def test_losses_are_those_of_uncompiled_blocks_and_every_shape_is_compiled_once(amp, tolerance):
    expected, _ = losses(TEXT, COPIES, "off", amp=amp)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiling._compiled.clear()
    found, population = losses(TEXT, COPIES, "on", amp=amp)
    print(f"{compiling.compiled_so_far()} compiled; {found} against {expected}")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == SHAPES
    assert found == pytest.approx(expected, rel=tolerance)
    with no_waiting():
        population.executor.train(population.runs)
        population.executor.settle(population.runs)


@pytest.mark.parametrize("compiled", ["on", "off"])
def test_a_residual_network_in_bf16_with_channels_last_grows_as_without(compiled, monkeypatch):
    script = {
        0: [(GERMINATE, "r0c0", "conv_small", "linear")],
        1: [(GERMINATE, "r0c1", "conv_small", "gated")],
    }
    with monkeypatch.context() as without:
        without.setattr(compiling, "lay_out", lambda optimizer: None)
        expected, _ = losses(PHOTOS, script, "off", amp="bf16")
    found, population = losses(PHOTOS, script, compiled, amp="bf16")
    assert found == pytest.approx(expected, rel=5e-2)
    weights = [weight for weight in population.runs[0].model.parameters() if weight.dim() == 4]
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)


def test_a_new_episode_and_a_copy_in_another_slot_compile_nothing():
    _, population = losses(TEXT, {}, "on", hosts=1)
    before = compiling.compiled_so_far()[0]
    population.reset(0, 9)
    play(population, 1)
    act(population, 0, GERMINATE, "r0c2", "copy")
    population.tick()
    play(population, 2)
    assert compiling.compiled_so_far()[0] == before
    assert population.readings()[0].held_out_loss < 6


def test_compiled_hosts_run_once_before_a_capture_only_where_something_is_new(monkeypatch):
    calls, learn = [], HostRun.learn
    monkeypatch.setattr(
        HostRun, "learn", lambda run, *batch: (calls.append(run.seed), learn(run, *batch))[1]
    )
    script = {0: [(GERMINATE, "r0c0", "conv_small", "linear")]}
    found, _ = losses(PHOTOS, script, "on", hosts=3, amp="bf16")
    assert (
        calls == [0, 0, 1, 2] * 2
    )  # the first host runs and is captured, others are captured; then with the seed
    assert all(map(math.isfinite, found))
