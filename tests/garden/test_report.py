"""Was it worth it?

What `garden.report` measures is true, in words, and leaves everything as it was.
"""

from copy import deepcopy

import pytest
import torch

import esper
from esper.leyline.errors import MeasurementError
from esper.leyline.lifecycle import StageLengths
from esper.telemetry.events import GrowthReported
from user_models import CNN, PLANT_FIRST, grow_cnn, losses_of, random_images, script, train_epoch

IMAGES, HELD_OUT = random_images(32, seed=1), random_images(24, seed=2)
PLAN = {0: PLANT_FIRST, 1: (1, 1, 2, 0), 5: (1, 0, 3, 0)}
"""two fossils, and a live seed after seven epochs"""


def grown(epochs=7, **options):
    torch.manual_seed(7)
    garden = grow_cnn(PLAN, max_seeds=4, scale=0.5, host=CNN(dropout=0.2), **options)
    for epoch in range(epochs):
        learn(garden, epoch)
    return garden


def learn(garden, epoch):
    train_epoch(garden.model, garden.model.link.optimizer, epoch, IMAGES)
    garden.step(lambda: losses_of(garden.model, HELD_OUT))


@pytest.fixture(scope="module")
def garden():
    return grown()


@pytest.fixture(scope="module")
def report(garden):
    return garden.report()


def measured(garden, *removed, is_bare=False):
    """Losses of a copy that never had some fossils, or nothing that grew."""
    model = deepcopy(garden.model).eval()
    for slot_id in model.slot_config.slot_ids if is_bare else removed:
        for number in reversed(range(len(model.slot(slot_id).fossils))):
            model.remove_fossil(slot_id, number)
    if is_bare:
        for slot in model.slots.values():
            slot.alpha.fill_(0.0)
    with torch.no_grad():
        return losses_of(model, HELD_OUT).double()


def test_it_measures_with_everything_and_without_all(garden, report):
    whole, bare = measured(garden), measured(garden, is_bare=True)
    assert (report.epoch, report.examples, report.measure) == (7, 24, "loss")
    assert report.whole == pytest.approx(float(whole.mean()), abs=1e-6)
    assert report.without_all == pytest.approx(float(bare.mean()), abs=1e-6)
    assert report.gain == pytest.approx(float((bare - whole).mean()), abs=1e-6)
    assert report.standard_error == pytest.approx(float((bare - whole).std() / 24**0.5), abs=1e-6)


def test_every_fossil_and_live_seed_is_a_part(garden, report):
    parts = [
        (part["slot"], part["module"], part["blueprint"], part["stage"]) for part in report.parts
    ]
    assert parts == [
        ("r0c0", "layer1", "conv_light", "fossil"),
        ("r0c0", "layer1", "conv_small", "PROBATIONARY"),
        ("r0c1", "layer2", "norm", "fossil"),
    ]
    for part in report.parts[::2]:
        without = measured(garden, part["slot"])
        assert part["without"] == pytest.approx(float(without.mean()), abs=1e-6)
        assert part["gain"] == pytest.approx(part["without"] - report.whole, abs=1e-6)
    with garden.model.slot_off("r0c0"), torch.no_grad():
        losses = losses_of(garden.model.eval(), HELD_OUT)
    assert report.parts[1]["without"] == pytest.approx(float(losses.mean()), abs=1e-6)
    assert len({part["without"] for part in report.parts} | {report.whole, report.without_all}) == 5


def test_sizes_and_costs_add_up(garden, report):
    assert report.params == garden.model.total_params
    assert report.params == report.host_params + sum(part["params"] for part in report.parts)
    assert report.flops == report.host_flops + sum(part["flops"] for part in report.parts)
    assert report.spent == {name: c.flops for name, c in garden.ledger.phases.items() if c.examples}
    assert report.seconds["training"] > 0


def test_it_is_an_event_and_ends_the_summary(garden, report, tmp_path):
    assert isinstance(garden.history[-1], GrowthReported)
    assert garden.history[-1] == report
    assert garden.summary().endswith(str(report))
    assert "(layer2) norm, fossil" in garden.summary()
    garden.save(tmp_path)
    assert esper.load(tmp_path, CNN(), policy=script(PLAN)).summary() == garden.summary()


def test_after_it_everything_is_as_before_to_the_bit():
    asked, left_alone = grown(), grown()
    asked.model.train()
    asked.model.host.layer2.eval()
    losses_of(asked.model, IMAGES).mean().backward()
    state = torch.get_rng_state()
    modes = [module.training for module in asked.model.modules()]
    tensors = [*asked.model.parameters(), *asked.model.buffers()]
    before = [
        value.clone()
        for value in (*tensors, *(p.grad for p in asked.parameters() if p.grad is not None))
    ]

    def evaluate():
        asked.model.train()  # a mistake, which would spoil the statistics of batch norm
        return losses_of(asked.model, HELD_OUT) + torch.rand(1)

    asked.report(evaluate)
    after = [*tensors, *(p.grad for p in asked.parameters() if p.grad is not None)]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in asked.model.modules()] == modes
    asked.model.link.optimizer.zero_grad()
    asked.model.train()
    asked.model.examples = dict(left_alone.model.examples)
    for garden in (asked, left_alone):
        learn(garden, 7)
        learn(garden, 8)
    assert all(
        torch.equal(a, b) for a, b in zip(asked.parameters(), left_alone.parameters(), strict=True)
    )


class Counting(CNN):
    """Has a buffer that is a view of fewer numbers, and one that every forward replaces."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(4, 1).expand(4, 2), persistent=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, images):
        self.calls = self.calls + 1
        return super().forward(images) * self.mask[0, 0]


@pytest.mark.parametrize("training", [0, 1])
def test_buffers_that_are_expanded_or_replaced_are_as_before_after_a_report_or_a_shadow_pass(
    training,
):
    garden = grow_cnn({0: PLANT_FIRST}, lengths=StageLengths(training=training), host=Counting())
    learn(garden, 0)
    calls, count = garden.model.host.calls, int(garden.model.host.calls)
    if training:
        garden.shadow(lambda: losses_of(garden.model.train(), IMAGES).mean())
    else:
        garden.report()
    assert garden.model.host.calls is calls
    assert int(calls) == count
    assert torch.equal(garden.model.host.mask, torch.ones(4, 2))


def test_what_it_takes_is_not_the_loops_own_time():
    garden = grown(1)
    booked = garden.ledger.copy()
    resumed = garden.books.resumed
    report = garden.report()
    spent = sum(c.seconds - booked.phases[name].seconds for name, c in garden.ledger.phases.items())
    assert garden.books.resumed - resumed == pytest.approx(spent)
    assert garden.ledger.phases["training"] == booked.phases["training"]
    assert report.spent["validation"] == booked.phases["validation"].flops + 24 * report.flops


def test_nothing_grown_is_said_so():
    report = grow_cnn().report(lambda: torch.tensor([1.0, 2.0]))
    assert (report.whole, report.without_all, report.gain, report.parts) == (1.5, 1.5, 0.0, [])
    assert "by itself" not in str(report)


def test_scores_gain_where_they_are_higher():
    garden = grown(higher_is_better=True)
    report = garden.report(lambda: -losses_of(garden.model, HELD_OUT))
    assert report.measure == "score"
    assert report.whole < 0
    assert report.gain == pytest.approx(report.whole - report.without_all, abs=1e-6)


def test_before_the_first_step_it_asks_how_to_measure():
    with pytest.raises(MeasurementError, match=r"garden\.report\(evaluate\)"):
        grow_cnn().report()


def test_an_evaluation_that_shuffles_is_refused():
    garden, order = grown(), torch.Generator().manual_seed(0)
    with pytest.raises(MeasurementError, match="order"):
        garden.report(
            lambda: losses_of(garden.model, HELD_OUT[torch.randperm(24, generator=order)])
        )
    assert not any(isinstance(event, GrowthReported) for event in garden.history)


def test_an_evaluation_that_fails_leaves_the_network_whole():
    garden, calls = grown(), []

    def evaluate():
        calls.append(1)
        return losses_of(garden.model, HELD_OUT) * (float("nan") if len(calls) == 3 else 1.0)

    before, told = losses_of(garden.model.eval(), HELD_OUT), len(garden.history)
    with pytest.raises(MeasurementError, match="NaN"):
        garden.report(evaluate)
    assert torch.equal(losses_of(garden.model.eval(), HELD_OUT), before)
    assert len(garden.history) == told
