"""Compiled blocks:

one compilation per shape, however many hosts and copies; results as without, to a tolerance.
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from esper.episodes import Episodes
from esper.kasmina.harvesting import harvest
from esper.kasmina.hosts import build_resnet_host, build_transformer_host
from esper.leyline.errors import NotCompiledError, UnknownNameError
from esper.leyline.lifecycle import StageLengths
from esper.runtime.executors import compiling
from esper.runtime.executors import graphs as executors
from esper.runtime.population import Population
from esper.runtime.tasks.data import load_python_text
from esper.runtime.tasks.registry import get_task
from esper.telemetry.events import BlocksCompiled
from runtime.episodes import COPIES, GERMINATE, QUICK, act, image_splits, play, print_of
from runtime.stored import restore, store

TEXT = replace(
    get_task("python_text"),
    load=lambda root: load_python_text(context=16, size=4000),
    build_host=partial(
        build_transformer_host, vocabulary=256, width=16, layers=3, heads=2, context=16, slots=3
    ),
    epoch_examples=16,
    held_out=8,
    batch=8,
    lengths=QUICK,
    epochs=12,
    blueprints=("copy", "copy_zero"),
    budget=4.0,
)
PHOTOS = replace(
    get_task("cifar10_resnet"),
    load=lambda root: image_splits(64, 16, 3, 20),
    build_host=partial(build_resnet_host, width=4, blocks=1, stages=2),
    slots=None,
    blueprints=("conv_small",),
    epoch_examples=16,
    batch=8,
    lr=0.02,
    lengths=StageLengths(ramp=1),
)
SHAPES = 3 * 2 + 1
"""Stem, block and head, in training and in measuring, and the training's score."""
TOLERANCE = 1e-4
"""Relative, of losses in float32 after a few epochs."""


@pytest.fixture(autouse=True)
def _afresh(monkeypatch):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(
        compiling, "BACKEND", "aot_eager"
    )  # compiles in seconds, without code for the device
    monkeypatch.setattr(compiling, "_compiled", {})


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def grown(task, script, compile="on", seeds=(3, 4), epochs=6, **options):
    population = Population(task, list(seeds), compile=compile, **options)
    play(population, epochs, dict.fromkeys(range(len(seeds)), script))
    return population


def compiled_modules(network):
    return [module for module in network.modules() if module._compiled_call_impl is not None]


@pytest.fixture(scope="module")
def plain():
    return grown(TEXT, COPIES, "off")


def test_every_shape_is_compiled_once_for_all_hosts_copies_and_structures(plain):
    population = grown(TEXT, COPIES)
    assert len(population.runs[0].model.slot("r0c0").fossils) == 1
    assert population.runs[0].model.slot("r0c1").seed is not None
    assert (compiling.compiled_so_far()[0], graphs()) == (SHAPES, SHAPES)
    found, expected = population.readings(), plain.readings()
    assert [one.held_out_loss for one in found] == pytest.approx(
        [one.held_out_loss for one in expected], rel=TOLERANCE
    )
    assert [one.train_loss for one in found] == pytest.approx(
        [one.train_loss for one in expected], rel=TOLERANCE
    )


@pytest.mark.slow
def test_another_population_compiles_nothing_again():
    grown(TEXT, {}, seeds=[3], epochs=1)
    before = graphs()
    grown(TEXT, COPIES, seeds=[9], epochs=3)
    assert (compiling.compiled_so_far()[0], graphs()) == (SHAPES, before)


def test_images_lie_with_channels_last_and_batch_norm_learns_the_same():
    script = {0: [(GERMINATE, "r0c0", "conv_small", "linear")]}
    plain, found = (
        grown(PHOTOS, script, compile, seeds=[3], epochs=3) for compile in ("off", "on")
    )
    run, weights = found.runs[0], [p for p in found.runs[0].model.parameters() if p.dim() == 4]
    assert len(weights) >= 5
    for weight in weights:
        assert weight.is_contiguous(memory_format=torch.channels_last)
        assert run.optimizer.state[weight]["momentum_buffer"].stride() == weight.stride()
    (seed,) = run.model.slot("r0c0").fossils
    assert {seed.body, seed.join} <= {*compiled_modules(run.model)}
    left, right = print_of(plain), print_of(found)
    names = [
        name
        for name, value in left.items()
        if isinstance(value, torch.Tensor) and "running" in name
    ]
    assert len(names) >= 8
    for name in names:
        assert torch.allclose(left[name], right[name], rtol=1e-3, atol=1e-4), name
    assert left["reading"].held_out_loss == pytest.approx(right["reading"].held_out_loss, rel=1e-3)


def test_bodies_of_seeds_and_parts_without_slots_are_compiled_and_nothing_that_holds_a_slot():
    population = grown(TEXT, {0: COPIES[0]}, seeds=[3], epochs=2)
    model = population.runs[0].model
    host, seed = model.host, model.slot("r0c0").seed
    assert compiled_modules(model) == [
        host.stem,
        *host.blocks,
        host.head,
        seed.body,
        model.slot("r0c1").seed.body,
    ]


class Scaled(nn.Linear):
    """A block whose text does not tell all that it computes with."""

    factor = 2.0

    def forward(self, points):
        return super().forward(points) * self.factor


def run_compiled(module, points):
    return compiling._compile(
        (type(module), repr(module)), compiling._run, "run_Scaled", module, (points,), {}
    )


def test_where_nothing_new_may_be_compiled_known_calls_run_and_others_are_refused():
    one, other, points = Scaled(3, 3), Scaled(3, 3), torch.randn(4, 3)
    run_compiled(one, points).sum().backward()
    with compiling.nothing_new():
        assert torch.allclose(run_compiled(other, points), other(points))
    other.factor = 3.0  # which only torch's own guard sees
    for given in (points, torch.randn(5, 3)):
        with (
            pytest.raises(NotCompiledError, match=r"compile off.*executor eager"),
            compiling.nothing_new(),
        ):
            run_compiled(other, given)
        assert torch.allclose(run_compiled(other, given), other(given))
        with compiling.nothing_new():
            run_compiled(other, given)


def test_memory_of_a_capture_that_is_given_up_is_counted(monkeypatch):
    """The pool keeps it, and the next capture takes it without asking for more."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    graph = SimpleNamespace(capture_begin=lambda **how: None, capture_end=lambda: None)
    stand_ins = {
        "CUDAGraph": lambda: graph,
        "current_stream": lambda: stream,
        "stream": lambda own: nullcontext(),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    sizes = iter([100, 700])
    monkeypatch.setattr(executors, "_reserved", lambda device: next(sizes))
    lane = SimpleNamespace(stream=stream, pool=(0, 1), taken=50)

    def give_up():
        raise NotCompiledError

    with pytest.raises(NotCompiledError):
        executors._Captured(lane, give_up, torch.zeros(2))
    assert lane.taken == 650


def test_where_nothing_new_may_be_compiled_other_errors_are_themselves():
    with pytest.raises(RuntimeError, match=r"^full$"), compiling.nothing_new():
        raise RuntimeError("full")


@pytest.mark.slow
def test_slots_on_blocks_themselves_leave_their_layers_to_be_compiled():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(2, 8), nn.ReLU())
            self.head = nn.Linear(8, 2)

        def forward(self, points):
            return self.head(self.body(points))

    task = replace(
        get_task("blobs"),
        build_host=Plain,
        slots=("body",),
        budget=40.0,
        epoch_examples=64,
        lengths=QUICK,
    )
    script = {0: [(GERMINATE, "r0c0", "mlp", "linear")]}
    plain, found = (grown(task, script, compile, seeds=[3], epochs=3) for compile in ("off", "on"))
    host = found.runs[0].model.host
    assert compiled_modules(host) == [host.body[0], host.head]
    assert found.readings()[0].train_loss == pytest.approx(
        plain.readings()[0].train_loss, rel=TOLERANCE
    )


@pytest.mark.slow
def test_a_harvested_network_is_not_compiled():
    population = grown(TEXT, COPIES, seeds=[3], epochs=4)
    assert compiled_modules(harvest(population.runs[0].model)) == []


def test_compiling_is_told_once_and_no_ledger_holds_its_seconds():
    population = Population(TEXT, [3], compile="on")
    episodes = Episodes(population)
    told = [
        [event for event in episodes.train()[0] if isinstance(event, BlocksCompiled)]
        for _ in range(2)
    ]
    assert [len(events) for events in told] == [1, 0]
    assert told[0][0].shapes == SHAPES
    assert told[0][0].seconds > 0.2
    assert (
        sum(cost.seconds for cost in population.runs[0].ledger.phases.values()) < told[0][0].seconds
    )


def test_auto_leaves_hosts_on_a_cpu_and_small_ones_alone():
    population = Population(TEXT, [3])
    assert compiled_modules(population.runs[0].model) == []
    cpu, gpu = [torch.device("cpu")], [torch.device("cuda")]
    large, small = int(1e12), int(1e8)
    found = [
        compiling.is_compiled("auto", *case) for case in ((cpu, large), (gpu, small), (gpu, large))
    ]
    assert found == [False, False, True]
    assert compiling.is_compiled("on", cpu, small)
    assert not compiling.is_compiled("off", gpu, large)


def test_an_unknown_way_to_compile_is_refused():
    with pytest.raises(UnknownNameError, match="sometimes"):
        Population(TEXT, [3], compile="sometimes")


@pytest.mark.slow
def test_a_reset_host_stays_compiled_and_compiles_nothing():
    population = grown(TEXT, {}, seeds=[3], epochs=1)
    before = graphs()
    population.reset(0, 8)
    play(population, 1)
    act(population, 0, GERMINATE, "r0c2", "copy")
    population.tick()
    play(population, 1)
    assert graphs() == before
    assert len(compiled_modules(population.runs[0].model)) == 3 + 3  # stem, blocks, head, the copy


@pytest.mark.slow
def test_a_stored_host_goes_on_compiled_with_state_that_lies_like_its_weights(tmp_path):
    population = grown(
        PHOTOS, {0: [(GERMINATE, "r0c0", "conv_small", "linear")]}, seeds=[3], epochs=2
    )
    population.train_epoch()
    population.evaluate()
    store(population, tmp_path)
    again = Population(PHOTOS, [3], compile="on")
    restore(again, tmp_path)
    run = again.runs[0]
    for weight in [weight for weight in run.model.parameters() if weight.dim() == 4]:
        assert run.optimizer.state[weight]["momentum_buffer"].stride() == weight.stride()
    for hosts in (population, again):
        hosts.tick()
        play(hosts, 1)
    assert compiled_modules(run.model) != []
    assert again.readings()[0].train_loss == pytest.approx(
        population.readings()[0].train_loss, rel=TOLERANCE
    )


@pytest.mark.slow
def test_code_for_the_device_has_the_losses_of_uncompiled_blocks(plain, monkeypatch):
    monkeypatch.setattr(compiling, "BACKEND", "inductor")
    found, expected = grown(TEXT, COPIES).readings(), plain.readings()
    assert [one.held_out_loss for one in found] == pytest.approx(
        [one.held_out_loss for one in expected], rel=TOLERANCE
    )
