"""Graphed equals eager to the bit, does not wait for the device inside an epoch, and captures only
what changed.
"""

import os
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from esper.leyline.lifecycle import StageLengths
from esper.runtime.executors import graphs as executors
from esper.runtime.executors.eager import EagerExecutor
from esper.runtime.executors.graphs import GraphedExecutor
from esper.runtime.executors.structure import graph_key
from esper.runtime.population import Population
from esper.runtime.splits import SealedSplit, Splits, TokenSplit
from esper.runtime.tasks.registry import get_task
from runtime.episodes import (
    COPIES,
    CULL,
    FOSSILIZE,
    GERMINATE,
    act,
    differing,
    image_splits,
    play,
    print_of,
)

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

RAMP = StageLengths(ramp=3, embargo=0, resetting=0)
PHOTOS = replace(
    get_task("cifar10"),
    load=lambda root: image_splits(count=800, size=32, channels=3, contrast=20),
    epoch_examples=640,
    batch=64,
    lr=0.02,
    epochs=12,
    lengths=RAMP,
)
GROWTH = {
    0: [(GERMINATE, "r0c0", "conv_light", "gated")],
    1: [(GERMINATE, "r0c1", "depthwise", "linear")],
    4: [(FOSSILIZE, "r0c0"), (CULL, "r0c1")],
    5: [(GERMINATE, "r0c1", "conv_small", "sigmoid")],
}
TEXT_GROWTH = {
    0: [(GERMINATE, "r0c0", "lora", "gated")],
    1: [(GERMINATE, "r0c1", "attention", "linear")],
    4: [(FOSSILIZE, "r0c0"), (CULL, "r0c1")],
    5: [(GERMINATE, "r0c1", "mlp_small", "sigmoid")],
}
EPOCHS = 8


def text_splits(root=None):
    """A text that repeats itself, with noise."""
    draw = torch.Generator().manual_seed(3)
    tokens = (torch.arange(30_000) * 7 % 97 + torch.randint(0, 3, (30_000,), generator=draw)).to(
        torch.uint8
    )
    parts = [TokenSplit(part, 64) for part in tokens.split([24_000, 3_000, 3_000])]
    return Splits(parts[0], parts[1], SealedSplit(parts[2]))


TEXT = replace(
    get_task("shakespeare"), load=text_splits, epoch_examples=160, batch=16, epochs=12, lengths=RAMP
)
COPIED = replace(TEXT, blueprints=("copy", "copy_zero"), budget=5.0, lengths=replace(RAMP, ramp=2))
EPISODES = {
    "sgd": (PHOTOS, GROWTH),
    "unequal": (replace(PHOTOS, epoch_examples=601), GROWTH),
    "adamw": (TEXT, TEXT_GROWTH),
    "copies": (COPIED, COPIES),
    "compute": (replace(COPIED, clock="compute", compute=2.0, held_out=8), COPIES),
    "photos by compute": (replace(PHOTOS, clock="compute", compute=2.0, held_out=16), GROWTH),
}


@pytest.fixture(scope="module", autouse=True)
def _deterministic():
    """The conditions under which the two executors promise equal bits."""
    kernels = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    attention = (
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
    )
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)  # its backward adds in no fixed order
    torch.backends.cuda.enable_cudnn_sdp(False)
    yield
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = kernels
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_flash_sdp(attention[0])
    torch.backends.cuda.enable_mem_efficient_sdp(attention[1])
    torch.backends.cuda.enable_cudnn_sdp(True)


def build(task=PHOTOS, seeds=(7, 8), executor="graphed", **options):
    return Population(task, list(seeds), ["cuda"], executor=executor, **options)


@contextmanager
def no_waiting():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def captured(monkeypatch):
    """Seeds of the hosts for which a graph was captured, in order."""
    made = []

    capture = executors.GraphedExecutor._captured

    def counted(self, run, name, call):
        before = self._device(run).graphs(run).get(name)
        found = capture(self, run, name, call)
        if found is not before:
            made.append(run.seed)
        return found

    monkeypatch.setattr(executors.GraphedExecutor, "_captured", counted)
    return made


# -- graphed equals eager --------------------------------------------------------------------------


@pytest.fixture(scope="module", params=EPISODES)
def both(request):
    """Epoch by epoch, every host under both executors; one host grows and one does not."""
    task, script = EPISODES[request.param]
    found = {}
    for executor in ("eager", "graphed"):
        population, found[executor] = build(task, executor=executor), []
        for epoch in range(EPOCHS):
            play(population, 1, {0: script}, start=epoch)
            found[executor].append([print_of(population, host) for host in range(2)])
    return found


def tensors_of(found):
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("host", [0, 1], ids=["growing", "alone"])
def test_parameters_buffers_and_optimiser_state_are_bit_identical_through_a_whole_episode(
    both, host
):
    pairs = zip(both["eager"], both["graphed"], strict=True)
    wrong = [
        differing(tensors_of(eager[host]), tensors_of(graphed[host])) for eager, graphed in pairs
    ]
    assert wrong == [[]] * EPOCHS


@pytest.mark.parametrize("host", [0, 1], ids=["growing", "alone"])
def test_readings_contributions_and_scores_are_bit_identical_through_a_whole_episode(both, host):
    names = ("reading", "reports", "states", "epoch")
    pairs = zip(both["eager"], both["graphed"], strict=True)
    wrong = [
        [name for name in names if eager[host][name] != graphed[host][name]]
        for eager, graphed in pairs
    ]
    assert wrong == [[]] * EPOCHS


def test_the_episode_that_is_compared_trains_fifty_steps_and_has_every_change(both):
    last = both["graphed"][-1][0]
    steps = next(
        value for name, value in last.items() if name.endswith(("num_batches_tracked", "|step"))
    )
    states = {
        slot_id: (state.is_live, fossils) for slot_id, (state, fossils) in last["states"].items()
    }
    assert int(steps) >= 50
    assert states["r0c0"][1] != []
    assert states["r0c1"] == (True, [])


def test_a_measurement_of_a_grown_host_is_the_same_under_both_executors():
    population = build(seeds=[7])
    script = {0: {epoch: GROWTH[epoch] for epoch in (0, 1)}}
    play(population, 5, script, keeps=False)  # both seeds are on probation
    splits = [population.runs[0].splits.validation]
    graphed = population.executor.measure(population.runs, splits)[0].clone()
    eager = EagerExecutor().measure(population.runs, splits)[0]
    assert [bool(number) for number in eager[2:]] == [True] * 4 + [
        False
    ] * 2  # the third slot is empty
    assert torch.equal(graphed, eager)


def test_auto_is_graphed_on_a_gpu():
    assert isinstance(build(executor="auto").executor, GraphedExecutor)


# -- capturing -------------------------------------------------------------------------------------


def test_only_a_change_of_structure_captures_again_and_only_for_that_host(captured):
    population = build()
    counts = []
    for epoch in range(6):
        play(population, 1, {0: GROWTH}, start=epoch)
        counts.append((captured.count(7), captured.count(8)))
        captured.clear()
    first = (3, 3)  # score, train, measure
    # planted after epochs 0 and 1; on probation in epoch 4; fossil and cull after 4, as in epoch 1
    assert counts == [first, (3, 0), (3, 0), (0, 0), (0, 0), (0, 0)]


def test_an_epoch_that_is_no_multiple_of_the_batch_needs_no_further_graph(captured):
    play(build(replace(PHOTOS, epoch_examples=601), seeds=[7]), 2)
    assert len(captured) == 3


def test_a_cull_and_a_new_episode_bring_back_the_graphs_of_the_host_alone(captured):
    population = build(seeds=[7])
    play(population, 2, {0: {0: GROWTH[0]}})
    act(population, 0, CULL, "r0c0")
    population.tick()
    captured.clear()
    play(population, 1)
    assert captured == []
    play(population, 2, {0: {0: GROWTH[1]}})
    assert len(captured) == 3
    population.reset(0, 9)
    captured.clear()
    play(population, 2)
    assert captured == []
    fresh = build(seeds=[9])
    play(fresh, 2)
    assert differing(print_of(fresh), print_of(population)) == []


def test_the_oldest_of_many_structures_are_captured_again_and_the_first_is_not(
    captured, monkeypatch
):
    monkeypatch.setattr(executors, "_SPARE", 4)
    population = build(seeds=[7])
    run = population.runs[0]
    bare = graph_key(run)
    for _ in range(8):
        play(population, 2, {0: {0: [(GERMINATE, "r0c0", "norm", "linear")], 1: [(CULL, "r0c0")]}})
    kept = population.executor._device(run)._kept
    assert len(kept) == 1 + 1 + 4  # its first, the one of the last epoch, and spare ones
    assert (run, bare) in kept
    assert len(captured) == 3 * (1 + 8)


def test_restoring_the_same_structure_captures_nothing(captured):
    population = build(seeds=[7])
    play(population, 2, {0: GROWTH})
    population.train_epoch()
    population.evaluate()
    snapshot = population.snapshot()
    captured.clear()
    play(population, 1)
    population.restore(snapshot)
    play(population, 1)
    assert captured == []


def test_a_reset_host_equals_a_fresh_one():
    population = build()
    play(population, 2, {0: GROWTH, 1: GROWTH})
    population.reset(1, 9)
    play(population, 3, {1: GROWTH})
    fresh = build(seeds=[9])
    play(fresh, 3, {0: GROWTH})
    assert differing(print_of(fresh), print_of(population, 1)) == []


# -- waiting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["eager", "graphed"])
@pytest.mark.parametrize("episode", EPISODES)
def test_no_step_of_an_epoch_waits_for_the_device(executor, episode):
    task, script = EPISODES[episode]
    population = build(task, executor=executor)
    play(population, 3, {0: script})
    population.train_epoch()  # graphs of this structure exist from here on
    with no_waiting():
        population.executor.train(population.runs)
        population.executor.wait(population.runs)
    assert all(float(run.sums[0]) > 0 for run in population.runs)


@pytest.mark.parametrize("executor", ["eager", "graphed"])
def test_measuring_does_not_wait_for_the_device(executor):
    population = build(executor=executor)
    play(population, 4, {0: GROWTH})  # a seed is on probation
    population.train_epoch()
    population.evaluate()
    with no_waiting():
        population.executor.measure(
            population.runs, [run.splits.validation for run in population.runs]
        )


def test_waiting_would_be_noticed():
    with pytest.raises(RuntimeError, match="synchron"), no_waiting():
        torch.ones(1, device="cuda").item()


# -- snapshots and independence --------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [0, 2, 4])
def test_an_episode_goes_on_from_a_snapshot_as_it_went_on_uninterrupted(epoch):
    population = build()
    play(population, epoch, {0: GROWTH})
    snapshot = population.snapshot()
    play(population, EPOCHS - epoch, {0: GROWTH}, start=epoch)
    expected = [print_of(population, host) for host in range(2)]
    population.restore(snapshot)
    play(population, EPOCHS - epoch, {0: GROWTH}, start=epoch)
    assert [differing(expected[host], print_of(population, host)) for host in range(2)] == [[], []]


def test_a_snapshot_goes_on_right_after_a_cull():
    """The graph must not write into optimiser state that the cull threw away."""
    population = build(seeds=[7])
    play(population, 3, {0: {0: GROWTH[0]}})
    snapshot = population.snapshot()
    play(population, 2)
    expected = print_of(population)
    population.restore(snapshot)
    population.train_epoch()  # the graphs now know the seed again
    population.restore(snapshot)
    act(population, 0, CULL)
    population.restore(snapshot)
    play(population, 2)
    assert differing(expected, print_of(population)) == []


def test_neighbours_on_other_streams_leave_a_host_bit_identical():
    alone, among = build(seeds=[7]), build(seeds=[1, 7, 2])
    play(alone, 4, {0: GROWTH})
    play(among, 4, dict.fromkeys(range(3), GROWTH))
    assert differing(print_of(alone), print_of(among, 1)) == []


def test_a_poisoned_host_leaves_every_other_bit_identical():
    healthy, poisoned = build(), build()
    for population in (healthy, poisoned):
        play(population, 2, {0: GROWTH, 1: GROWTH})
    with torch.no_grad():
        next(poisoned.runs[0].model.host.parameters()).fill_(float("nan"))
    assert play(healthy, 2) == []
    assert [rollback.host for rollback in play(poisoned, 2)] == [0]
    assert differing(print_of(healthy, 1), print_of(poisoned, 1)) == []
    assert all(value.isfinite().all() for value in poisoned.runs[0].model.parameters())


@pytest.mark.parametrize("executor", ["eager", "graphed"])
def test_growing_leaves_the_devices_random_state_alone(executor):
    population = build(seeds=[7], executor=executor)
    play(population, 1)
    before = torch.cuda.get_rng_state()
    act(population, 0, *GROWTH[0][0])
    population.reset(0, 3)
    assert torch.equal(torch.cuda.get_rng_state(), before)


# -- mixed precision -------------------------------------------------------------------------------

AMP = [("bf16", "graphed"), ("bf16", "eager"), ("fp16", "eager")]
IMAGE_SEEDS = (
    "conv_light",
    "attention",
    "norm",
    "depthwise",
    "bottleneck",
    "conv_small",
    "conv_heavy",
    "inverted_bottleneck",
)
TEXT_SEEDS = ("lora", "mlp_small", "mlp", "attention", "norm")


@pytest.mark.parametrize(("amp", "executor"), AMP)
@pytest.mark.parametrize(
    ("task", "blueprint"),
    [*((PHOTOS, name) for name in IMAGE_SEEDS), *((TEXT, name) for name in TEXT_SEEDS)],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_every_seed_parameter_gets_finite_gradients_that_are_not_zero(
    amp, executor, task, blueprint
):
    """Without weight decay the optimiser's state holds past gradients and nothing else."""
    task = replace(task, weight_decay=0.0, epoch_examples=4 * task.batch)
    population = build(task, [7], executor, amp=amp)
    play(population, 2, {0: {0: [(GERMINATE, "r0c1", blueprint, "gated")]}})
    run = population.runs[0]
    key = "momentum_buffer" if task.optimizer == "sgd" else "exp_avg"
    for name, parameter in run.model.slot("r0c1").seed.named_parameters():
        past = run.optimizer.state[parameter][key]
        assert past.isfinite().all(), name
        assert past.abs().sum() > 0, name
        assert parameter.isfinite().all(), name


def overflown():
    """A host whose scaler has just become far too large, beside one whose scaler has not; and both
    untouched.
    """
    healthy, broken = (build(executor="eager", amp="fp16") for _ in range(2))
    for population in (healthy, broken):
        play(population, 1)
    broken.runs[0].scaler.update(2.0**30)
    for population in (healthy, broken):
        population.train_epoch()
    return healthy, broken


def test_an_overflow_in_one_host_leaves_others_untouched():
    healthy, broken = overflown()
    assert broken.runs[0].scaler.get_scale() < 2.0**30
    assert all(value.isfinite().all() for value in broken.runs[0].model.parameters())
    assert differing(print_of(healthy, 1), print_of(broken, 1)) == []
    assert healthy.runs[1].scaler.get_scale() == broken.runs[1].scaler.get_scale()


def test_an_overflow_that_the_scaler_skips_is_no_reason_to_bring_a_host_back():
    _, broken = overflown()
    assert broken.evaluate() == []


def test_a_snapshot_brings_the_scaler_back():
    population = build(seeds=[7], executor="eager", amp="fp16")
    play(population, 1)
    snapshot, scale = population.snapshot(), population.runs[0].scaler.get_scale()
    population.runs[0].scaler.update(scale / 4)
    population.restore(snapshot)
    assert population.runs[0].scaler.get_scale() == scale
