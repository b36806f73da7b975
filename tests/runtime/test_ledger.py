"""What a host has cost:

FLOPs as torch counts them on a real forward pass, examples and seconds that add up.
"""

from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from cases import with_slow
from esper.kasmina.blueprints import REGISTRY
from esper.kasmina.pricing import HostFlops, count_flops
from esper.kasmina.switches import bypassed
from esper.leyline.lifecycle import StageLengths
from esper.leyline.stages import SeedStage
from esper.runtime import population as populations
from esper.runtime.charges import ablation_flops, learning_flops, network_flops, score_flops
from esper.runtime.ledger import PHASES, Charge, Ledger, PhaseCost
from esper.runtime.population import Population
from esper.runtime.splits import SealedSplit, Splits, TensorSplit, TokenSplit
from esper.runtime.tasks.registry import TASKS, get_task
from runtime.clocked import TEXT
from runtime.episodes import BLOBS, FOSSILIZE, GERMINATE, IMAGES, act, epochs, image_splits, play

SHAPES = {
    "digits": (1, 8),
    "digits_varied": (1, 8),
    "fashion_varied": (1, 14),
    "cifar10_varied": (3, 16),
    "fashion_mnist": (1, 28),
    "cifar10": (3, 32),
    "cifar10_deep": (3, 32),
    "cifar10_resnet": (3, 32),
}


def made_up(name):
    """Splits of the task's form, without its data."""
    if name in SHAPES:
        channels, size = SHAPES[name]
        return image_splits(count=40, size=size, channels=channels)
    if name == "blobs":
        parts = [TensorSplit(torch.rand(30, 2), torch.randint(2, (30,))) for _ in range(3)]
    else:
        context = {"code": 256, "code_tiny": 32}.get(name, 64)
        parts = [
            TokenSplit(torch.randint(256, (16 * context,), dtype=torch.uint8), context)
            for _ in range(3)
        ]
    return Splits(parts[0], parts[1], SealedSplit(parts[2]))


def population_of(name, **changes):
    small = {"batch": 8, "epoch_examples": 16, "held_out": 2, "augment": False}
    task = replace(get_task(name), varies=None)
    task = replace(task, load=lambda root: made_up(name), **small, **changes)
    return Population(task, [1])


def counted(call):
    """By torch, which does not know how to count the fused attention of the CPU."""
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        call()
    return counter.get_total_flops()


def forward_flops(run):
    """Of one real example through the network as it stands."""
    run.model.eval()
    return counted(lambda: run.model(run.splits.train.example()[:1]))


@pytest.mark.parametrize("name", with_slow(TASKS, {"cifar10_deep", "fashion_mnist"}))
def test_a_hosts_flops_are_those_of_a_real_forward_pass(name):
    population = population_of(name)
    assert population.runs[0].flops.whole > 0
    assert population.runs[0].flops.whole == forward_flops(population.runs[0])


@pytest.mark.parametrize("name", TASKS)
def test_what_follows_a_slot_is_counted_from_that_slot_on(name):
    population = population_of(name)
    host = population.runs[0].model.host
    for slot_id, flops in population.runs[0].flops.after.items():
        features = host.forward_to_segment(slot_id, population.runs[0].splits.train.example()[:1])
        assert flops == counted(
            lambda slot_id=slot_id, features=features: host.forward_from_segment(slot_id, features)
        )
    assert (
        set(population.runs[0].model.slot_config.slot_ids) <= population.runs[0].flops.after.keys()
    )


KINDS = {"image": "cifar10", "sequence": "python_text", "vector": "blobs"}
NAMES = [
    (kind, name)
    for kind in KINDS
    for name in REGISTRY.names(kind)
    if not REGISTRY.get(kind, name).inherits
]


@pytest.mark.parametrize("blend", ["linear", "gated"])
@pytest.mark.parametrize(("kind", "blueprint"), NAMES)
def test_a_grown_networks_flops_are_those_of_a_real_forward_pass(kind, blueprint, blend):
    population = population_of(KINDS[kind], budget=100.0, blueprints=(blueprint,))
    act(population, 0, GERMINATE, "r0c1", blueprint, blend)
    population.tick()
    run = population.runs[0]
    assert (
        network_flops(run.model, population.runs[0].flops)
        == forward_flops(run)
        >= population.runs[0].flops.whole
    )


@pytest.mark.parametrize("blend", ["linear", "gated"])
@pytest.mark.parametrize("blueprint", ["copy", "copy_zero"])
def test_a_copys_flops_are_those_of_a_real_forward_pass(blueprint, blend):
    population = population_of("python_text", budget=100.0, blueprints=("copy", "copy_zero"))
    for slot in ("r0c0", "r0c1"):
        act(population, 0, GERMINATE, slot, blueprint, blend)
    population.tick()
    run = population.runs[0]
    assert (
        network_flops(run.model, population.runs[0].flops)
        == forward_flops(run)
        > 1.8 * population.runs[0].flops.whole
    )


def test_fossils_are_counted():
    population = epochs(
        IMAGES,
        [1],
        epochs=4,
        script={0: {0: [(GERMINATE, "r0c0", "conv_light")], 3: [(FOSSILIZE, "r0c0")]}},
    )
    run = population.runs[0]
    assert run.model.fossilized_seeds == 1
    assert (
        network_flops(run.model, population.runs[0].flops)
        == forward_flops(run)
        > population.runs[0].flops.whole
    )


def test_a_seed_outside_the_output_costs_nothing_yet():
    population = population_of("cifar10")
    act(population, 0, GERMINATE, "r0c1", "conv_light")
    assert (
        network_flops(population.runs[0].model, population.runs[0].flops)
        == population.runs[0].flops.whole
    )


def grown_cifar():
    population = population_of("cifar10")
    for slot_id in ("r0c0", "r0c1", "r0c2"):
        act(population, 0, GERMINATE, slot_id, "conv_light" if slot_id != "r0c2" else "conv_small")
    population.tick()
    return population


@pytest.mark.parametrize("slot_id", ["r0c0", "r0c1", "r0c2"])
def test_a_counterfactual_costs_the_rest_of_the_network_without_the_seed(slot_id):
    population = grown_cifar()
    run = population.runs[0]
    run.model.eval()
    features = run.model.host.forward_to_segment(slot_id, run.splits.train.example()[:1])
    with bypassed(run.model.slot(slot_id)):
        expected = counted(lambda: run.model.host.forward_from_segment(slot_id, features))
    assert ablation_flops(run.model, population.runs[0].flops, slot_id) == expected


def test_a_counterfactual_is_cheap_on_the_cnn_host():
    """On average over slots below half a validation pass, at the last slot below a fifth."""
    population = grown_cifar()
    run = population.runs[0]
    whole = network_flops(run.model, population.runs[0].flops)
    shares = [
        ablation_flops(run.model, population.runs[0].flops, slot.slot_id) / whole
        for slot in run.slots
    ]
    assert sum(shares) / 3 < 0.5
    assert shares[-1] < 0.2


def test_a_counterfactual_without_segments_costs_a_whole_pass_without_the_seed():
    population = grown_cifar()
    run = population.runs[0]
    bare = HostFlops(population.runs[0].flops.whole)
    with bypassed(run.model.slot("r0c1")):
        assert ablation_flops(run.model, bare, "r0c1") == forward_flops(run)


# -- charging --------------------------------------------------------------------------------------


def test_training_a_grown_net_is_charged_forward_and_backward_for_every_example():
    population = epochs(IMAGES, [1], epochs=1, script={0: {0: [(GERMINATE, "r0c0", "conv_light")]}})
    run = population.runs[0]
    before = run.ledger.phases["training"]
    population.train_epoch()
    after = run.ledger.phases["training"]
    assert after.examples - before.examples == run.plan.examples
    charged = after.flops - before.flops
    assert charged == run.plan.examples * learning_flops(run.model, population.runs[0].flops)
    assert (
        2.5 < charged / (run.plan.examples * forward_flops(run)) < 3
    )  # the first layer's input needs no gradient


INCUBATION = {
    "cnn": (IMAGES, [("r0c0", "conv_light"), ("r0c1", "conv_small")]),
    "cnn with a gate": (IMAGES, [("r0c1", "attention", "gated")]),
    "text": (TEXT, [("r0c0", "copy"), ("r0c1", "copy_zero")]),
    "text with seeds of its own": (TEXT, [("r0c0", "attention"), ("r0c1", "mlp", "gated")]),
    "points": (BLOBS, [("r0c0", "mlp"), ("r0c1", "lora")]),
}


@pytest.mark.parametrize("plan", INCUBATION)
def test_an_epoch_with_incubating_seeds_is_charged_what_torch_counts(plan):
    task, seeds = INCUBATION[plan]
    names = {blueprint for _, blueprint, *_ in seeds}
    lengths = StageLengths(training=3)
    changes = {"clock": "epochs", "lengths": lengths, "budget": 100.0, "blueprints": tuple(names)}
    population = Population(replace(task, **changes), [1])
    play(population, 1)
    for seed in seeds:
        act(population, 0, GERMINATE, *seed)
    population.tick()
    run = population.runs[0]
    assert {slot.state.stage for slot in run.slots if slot.seed} == {SeedStage.TRAINING}
    for call in (population.train_epoch, population.evaluate):
        before = run.ledger.flops
        counter = FlopCounterMode(display=False)
        with sdpa_kernel(SDPBackend.MATH), counter:
            call()
        assert run.ledger.flops - before == pytest.approx(counter.get_total_flops(), rel=0.001)


def test_an_epoch_of_a_text_is_charged_what_torch_counts():
    population = population_of("python_text")
    run = population.runs[0]
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        population.train_epoch()
        population.evaluate()
    assert run.ledger.flops == pytest.approx(counter.get_total_flops(), rel=0.001)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.Conv2d(8, 16, 3, stride=2, groups=4),
        nn.ConvTranspose2d(8, 4, 3, groups=2),
        nn.Conv1d(8, 8, 5, groups=8),
    ],
    ids=str,
)
def test_the_gradients_of_a_grouped_convolution_cost_two_forward_passes(layer):
    """Torch would count the weights' gradient once for each group."""
    sides = [9] * (layer.weight.dim() - 2)
    inputs = torch.rand(2, 8, *sides, requires_grad=True)
    outputs = layer(inputs)
    forward = count_flops(lambda: layer(inputs))
    assert (
        count_flops(lambda: outputs.sum().backward())
        == 2 * forward
        == 2 * counted(lambda: layer(inputs))
    )


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(8, 6, 3, stride=2), nn.ConvTranspose1d(8, 4, 3)], ids=str
)
@pytest.mark.parametrize("needs_input", [False, True])
def test_the_gradients_of_other_convolutions_are_counted_as_torch_does(layer, needs_input):
    sides = [9] * (layer.weight.dim() - 2)
    outputs = layer(torch.rand(2, 8, *sides, requires_grad=needs_input))
    counter = FlopCounterMode(display=False)
    with counter:
        outputs.sum().backward(retain_graph=True)
    assert count_flops(lambda: outputs.sum().backward()) == counter.get_total_flops()


def test_an_evaluation_is_charged_for_validation_and_for_each_counterfactual():
    population = epochs(IMAGES, [1], epochs=3, script={0: {0: [(GERMINATE, "r0c0", "conv_light")]}})
    run = population.runs[0]
    population.train_epoch()
    before = dict(run.ledger.phases)
    population.evaluate()
    count = len(run.splits.validation)
    charged = {name: run.ledger.phases[name].flops - before[name].flops for name in PHASES}
    whole, extra = (
        f(run.model, population.runs[0].flops, *rest)
        for f, rest in ((network_flops, ()), (ablation_flops, ("r0c0",)))
    )
    assert (charged["validation"], charged["counterfactual"]) == (count * whole, count * extra)


def test_without_seeds_there_is_no_counterfactual_to_pay_for():
    phases = epochs(BLOBS, [1], epochs=2, script={}).runs[0].ledger.phases
    assert (phases["counterfactual"].examples, phases["counterfactual"].seconds) == (0, 0.0)
    assert phases["validation"].examples == 2 * 288


def test_flops_are_the_sum_of_all_phases():
    ledger = epochs(IMAGES, [1]).runs[0].ledger
    assert ledger.flops == sum(cost.flops for cost in ledger.phases.values())
    assert all(
        ledger.phases[name].flops > 0
        for name in ("training", "validation", "counterfactual", "score")
    )


def test_the_seconds_of_all_hosts_add_up_to_the_time_that_passed(monkeypatch):
    population = Population(BLOBS, [1, 2, 3])
    play(population, 1)
    for run in population.runs:
        run.ledger.phases = {
            name: replace(cost, seconds=0.0) for name, cost in run.ledger.phases.items()
        }
    monkeypatch.setattr(populations, "time", SimpleNamespace(perf_counter=count(step=2.5).__next__))
    population.shared.charged_until = 0.0  # of the clock before
    for _ in range(4):
        population.train_epoch()
        population.evaluate()
    total = sum(cost.seconds for run in population.runs for cost in run.ledger.phases.values())
    assert total == pytest.approx(8 * 2.5)  # an epoch and its evaluation, four times


def test_every_phase_that_was_charged_has_its_share_of_the_seconds(monkeypatch):
    """By FLOPs, of which scores and shadow passes take fewer than training:

    no gradients of the host's weights.
    """
    population = Population(replace(IMAGES, lengths=StageLengths(training=2)), [1])
    play(population, 1, {0: {0: [(GERMINATE, "r0c0", "conv_light")]}})
    ledger = population.runs[0].ledger
    ledger.phases = dict.fromkeys(PHASES, PhaseCost())
    monkeypatch.setattr(populations, "time", SimpleNamespace(perf_counter=count(step=2.5).__next__))
    population.shared.charged_until = 0.0  # of the clock before
    population.train_epoch()
    trained = dict(ledger.phases)
    assert sum(cost.seconds for cost in trained.values()) == pytest.approx(2.5)
    run = population.runs[0]
    prices = [price(run.model, population.runs[0].flops) for price in (score_flops, learning_flops)]
    assert trained["score"].seconds == pytest.approx(
        trained["training"].seconds * 32 / 81 * prices[0] / prices[1]
    )
    assert (
        trained["training"].seconds > trained["shadow"].seconds > 0.5 * trained["training"].seconds
    )
    population.evaluate()
    assert (
        ledger.phases["validation"].seconds
        < ledger.phases["shadow"].seconds - trained["shadow"].seconds
        < 2.5
    )


def test_a_span_without_flops_is_shared_by_examples_and_without_those_it_is_the_firsts():
    ledger = Ledger()
    ledger.settle([Charge("training", 30, 0), Charge("shadow", 10, 0)], 8.0)
    assert (ledger.phases["training"].seconds, ledger.phases["shadow"].seconds) == (6.0, 2.0)
    ledger.settle([Charge("training", 0, 0), Charge("shadow", 0, 0)], 8.0)
    assert (ledger.phases["training"], ledger.phases["shadow"]) == (
        PhaseCost(30, 0, 14.0),
        PhaseCost(10, 0, 2.0),
    )
    ledger.settle([], 8.0)
    assert ledger.phases["training"].seconds == 14.0


def test_the_largest_size_is_remembered():
    population = epochs(BLOBS, [1], epochs=2, script={0: {0: [(GERMINATE, "r0c0", "mlp")]}})
    largest = population.runs[0].model.total_params
    population.runs[0].model.cull_seed("r0c0", at_any_age=True)
    play(population, 1)
    assert population.runs[0].model.total_params < largest == population.runs[0].ledger.peak_params


def test_counting_allocates_no_weights_and_draws_nothing():
    before = torch.get_rng_state()
    HostFlops.of_task(get_task("cifar10_deep").build_host, made_up("cifar10_deep").train.example())
    assert torch.equal(torch.get_rng_state(), before)
