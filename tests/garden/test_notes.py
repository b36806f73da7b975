"""What a garden notes of a loop of one's own:

gradients, and examples, FLOPs and seconds by phase.
"""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import esper
from esper.leyline.lifecycle import StageLengths
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


def test_an_epoch_is_charged_three_passes_per_example_and_its_evaluation_one():
    host = flops_of(CNN())
    garden = play(grow_cnn({}))
    charged = {"training": (96, 96 * 3 * host), "validation": (24, 24 * host), "policy": (1, 0)}
    assert costs(garden) == {**dict.fromkeys(costs(garden), (0, 0)), **charged}
    assert told_flops(garden) == [garden.ledger.flops] == [96 * 3 * host + 24 * host]


def test_a_seed_is_charged_with_its_counterfactual_on_probation_and_not_on_its_ramp():
    garden = play(grow_cnn({0: PLANT_FIRST}, lengths=StageLengths(ramp=2)))
    before = costs(garden)
    grown = flops_of(garden.model)
    after = costs(play(garden, epochs=2))
    assert grown > flops_of(CNN())
    assert after["training"][1] - before["training"][1] == 2 * 96 * 3 * grown
    assert after["counterfactual"] == (0, 0)
    assert costs(play(garden))["counterfactual"] == (24, 24 * grown)
    assert garden.ledger.peak_params == garden.model.total_params


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


def test_a_live_seeds_gradients_are_compared_with_the_hosts():
    """Against the gradients of the epoch's only step, with a fossil on the host's side."""
    garden = grow_cnn({0: PLANT_FIRST}, scale=0.5, max_seeds=2)
    model, optimizer = garden.model, garden.model.link.optimizer
    model.build_in("r0c1", "conv_light")
    garden.step(lambda: losses_of(model, HELD_OUT))
    optimizer.zero_grad()
    losses_of(model, IMAGES).mean().backward()
    seed = list(model.slot("r0c0").seed.parameters())
    host = [*model.host.parameters(), *model.slot("r0c1").fossils.parameters()]
    roots = [
        sum(float(p.grad.square().sum()) for p in own) / sum(p.numel() for p in own)
        for own in (seed, host)
    ]
    optimizer.step()
    garden.step(lambda: losses_of(model, HELD_OUT))
    ratio = model.get_slot_reports()["r0c0"].metrics.seed_gradient_norm_ratio
    assert ratio == pytest.approx((roots[0] / roots[1]) ** 0.5, rel=1e-4)


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
