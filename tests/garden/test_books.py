"""What a garden's books say of a loop of one's own: examples, FLOPs and seconds by phase."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import esper
from esper.leyline.lifecycle import StageLengths
from esper.runtime.population import Population
from esper.runtime.tasks.registry import get_task
from esper.telemetry.events import HostEpoch, LedgerClosed
from user_models import CNN, PLANT_FIRST, grow_cnn, losses_of, random_images, train_epoch

IMAGES, HELD_OUT = random_images(96, seed=1), random_images(24, seed=2)


def flops_of(model):
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model.eval()(IMAGES[:1])
    return counter.get_total_flops()


def play(garden, epochs=1, call=None):
    for epoch in range(epochs):
        train_epoch(call or garden.model, garden.model.link.optimizer, epoch, IMAGES)
        garden.step(lambda: losses_of(garden.model, HELD_OUT))
    return garden


def costs(garden):
    return {name: (cost.examples, cost.flops) for name, cost in garden.ledger.phases.items()}


def told_flops(garden):
    return [event.flops for event in garden.history if isinstance(event, HostEpoch)]


def learning_flops_of(model, closure):
    """FLOPs of a forward and a backward pass of this loss, as torch counts them."""
    model.train()
    counter = FlopCounterMode(display=False)
    with counter:
        closure().backward()
    model.zero_grad()
    return counter.get_total_flops()


def mean_loss(model, images):
    return losses_of(model, images).mean()


def charged(before, after, phase):
    """Examples and FLOPs of each that a phase was charged since `before`."""
    examples, flops = (new - old for new, old in zip(after[phase], before[phase], strict=True))
    return examples, flops / examples


def test_an_epoch_is_charged_what_torch_counts_and_its_evaluation_one_pass():
    host = CNN()
    forward = flops_of(host)
    learnt = learning_flops_of(host, lambda: mean_loss(host, IMAGES[:1]))
    garden = play(grow_cnn({}))
    expected = {"training": (96, 96 * learnt), "validation": (24, 24 * forward), "policy": (1, 0)}
    assert costs(garden) == {**dict.fromkeys(costs(garden), (0, 0)), **expected}
    assert told_flops(garden) == [garden.ledger.flops] == [96 * learnt + 24 * forward]
    assert learnt < 3 * forward  # the first layer needs no gradient of the images


def test_a_seed_is_charged_with_its_counterfactual_on_probation_and_not_on_its_ramp():
    garden = play(grow_cnn({0: PLANT_FIRST}, lengths=StageLengths(ramp=2)))
    before = costs(garden)
    grown = flops_of(garden.model)
    learnt = learning_flops_of(garden.model, lambda: mean_loss(garden.model, IMAGES[:1]))
    garden.model.examples["training"] -= 1  # the one that was counted
    after = costs(play(garden, epochs=2))
    assert grown > flops_of(CNN())
    assert charged(before, after, "training") == (192, pytest.approx(learnt, rel=0.01))
    assert after["counterfactual"] == (0, 0)
    assert costs(play(garden))["counterfactual"] == (24, 24 * grown)
    assert garden.ledger.peak_params == garden.model.total_params


def test_incubation_is_charged_what_torch_counts():
    garden = play(grow_cnn({0: PLANT_FIRST}, lengths=StageLengths(training=3)))
    model = garden.model
    model.train()
    with model.shadow():
        taught = learning_flops_of(model, lambda: mean_loss(model, IMAGES[:8]))
    before = costs(garden)
    garden.step(lambda: losses_of(model, HELD_OUT))
    after = costs(garden)
    with model.at_full_strength("r0c0"):
        measured = flops_of(model)
    flops = after["shadow"][1] - before["shadow"][1]
    assert after["shadow"][0] - before["shadow"][0] == 8 + 24
    assert flops == pytest.approx(taught + 24 * measured, rel=0.01)


@pytest.mark.parametrize("name", ["digits", "blobs"])
def test_a_training_example_costs_the_same_in_esper_run_and_in_esper_grow(name):
    task = replace(get_task(name), epochs=1)
    population = Population(task, [0])
    run = population.runs[0]
    population.train_epoch()
    of_run = run.ledger.phases["training"]
    inputs, targets = run.splits.validation.gather(torch.arange(16))
    host = task.build_host()
    garden = esper.grow(host, slots=list(run.model.slot_config.modules.values()), example=inputs)
    garden.attach(torch.optim.SGD(garden.parameters(), lr=0.1))

    def evaluate():
        return task.score(garden.model(inputs).float(), targets)[0]

    garden.model.train()
    evaluate().mean().backward()
    garden.step(evaluate)
    of_garden = garden.ledger.phases["training"]
    assert of_garden.examples == 16
    assert of_garden.flops * of_run.examples == of_run.flops * of_garden.examples
    if name == "digits":
        assert of_garden.flops == 16 * 37_344


def test_shadow_passes_are_charged_apart():
    garden = play(grow_cnn({0: PLANT_FIRST}, lengths=StageLengths(training=2)))
    before = costs(garden)
    garden.model.train()
    garden.shadow(lambda: losses_of(garden.model, IMAGES[:8]).mean())
    garden.step(lambda: losses_of(garden.model, HELD_OUT))
    after = costs(garden)
    assert after["training"] == before["training"]
    assert after["shadow"][0] == 8 + 24


def test_seconds_are_where_examples_are():
    phases = play(grow_cnn({0: PLANT_FIRST}), epochs=3).ledger.phases
    timed = {name for name, cost in phases.items() if cost.seconds > 0}
    assert timed == {"training", "validation", "counterfactual", "policy"}


def test_a_harvest_closes_the_ledger_once():
    garden = play(grow_cnn({}))
    garden.harvest()
    garden.harvest()
    (closed,) = [event for event in garden.history if isinstance(event, LedgerClosed)]
    assert closed.flops["training"] == garden.ledger.phases["training"].flops > 0
    assert garden.history[-1] is closed


class Uncountable(nn.Module):
    """Runs alone and under hooks, but under no dispatch mode."""

    def __init__(self):
        super().__init__()
        self.inner = CNN()

    def forward(self, images):
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise RuntimeError("no mode here")
        return self.inner(images)


def test_a_model_whose_flops_cannot_be_counted_grows_all_the_same():
    garden = grow_cnn({0: PLANT_FIRST}, host=Uncountable(), slots=["inner.layer1", "inner.layer2"])
    play(garden, epochs=2)
    assert told_flops(garden) == [None, None]
    assert garden.ledger.phases["training"].examples == 192
    garden.harvest()
    assert garden.history[-1].flops == {}


def test_a_loop_that_calls_the_host_itself_has_no_flops_rather_than_wrong_ones():
    garden = grow_cnn({})
    assert told_flops(play(garden, call=garden.model.host)) == [None]
    assert garden.report().seconds["training"] > 0


def test_counting_is_compiled_away():
    garden = grow_cnn({})
    graphs = []

    def build(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(garden.model, backend=build, fullgraph=True)
    for _ in range(3):
        losses_of(compiled, IMAGES[:16]).mean().backward()
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_a_ledger_is_saved_with_its_garden(tmp_path):
    garden = play(grow_cnn(policy="never"), epochs=2)
    garden.save(tmp_path / "save")
    loaded = esper.load(tmp_path / "save", CNN())
    assert loaded.ledger == garden.ledger
    assert loaded.flops == garden.flops == flops_of(CNN())
