"""What a policy is given in a loop of one's own: the losses as they were measured and passed."""

import math

import numpy as np
import pytest
import torch

import esper
from esper.garden.measuring import LossMeter
from esper.leyline.errors import MeasurementError
from esper.runtime.tasks.registry import get_task
from esper.telemetry.events import HostEpoch
from esper.trials.arms import Entry, run_entries
from user_models import CNN, WAIT, grow_cnn, random_images, train_epoch

IMAGES = random_images(32)


class Noting:
    """Waits, and keeps all signals that it is given."""

    def __init__(self):
        self.signals = []

    def decide(self, observation, masks, reports, memory, signals):
        self.signals += signals
        return np.array([WAIT]), memory


def stepped(values, train_losses, rates=(), **options):
    """The signals of a garden whose `evaluate` returns these values, epoch by epoch."""
    policy = Noting()
    garden = grow_cnn(policy=lambda facts: policy, lr=0.1, **options)
    optimizer = garden.model.link.optimizer
    for epoch, (value, train_loss) in enumerate(zip(values, train_losses, strict=True)):
        train_epoch(garden.model, optimizer, epoch, IMAGES)
        for group in optimizer.param_groups:
            group["lr"] = rates[epoch] if rates else 0.1
        garden.step(lambda value=value: torch.full((8,), value), train_loss)
    return policy.signals, garden


def test_a_garden_gives_losses_their_slope_and_the_rate():
    signals, garden = stepped([3.0, 2.0, 1.0], [2.5, torch.tensor(1.5), 0.5], [0.1, 0.1, 0.05])
    assert [given.held_out_loss for given in signals] == [3.0, 2.0, 1.0]
    assert [given.train_loss for given in signals] == [2.5, 1.5, 0.5]
    assert [given.slope for given in signals] == [None, None, pytest.approx(-1.0)]
    assert [given.rate for given in signals] == [1.0, 1.0, 0.5]
    assert [given.guessing for given in signals] == [None] * 3
    measured = [event for event in garden.history if isinstance(event, HostEpoch)]
    assert [event.train_loss for event in measured] == [2.5, 1.5, 0.5]


def test_the_share_is_known_where_the_number_of_epochs_is():
    signals, _ = stepped([1.0, 1.0], [None, None])
    assert [given.share for given in signals] == [None, None]
    policy = Noting()
    garden = esper.grow(
        CNN(),
        slots=["layer1"],
        example=IMAGES,
        policy=lambda facts: policy,
        settings=esper.GrowthSettings(epochs=4),
    )
    garden.attach(torch.optim.SGD(garden.parameters(), lr=0.1))
    garden.step(lambda: torch.ones(8))
    assert policy.signals[0].share == 0.25


def test_a_score_is_no_loss_and_a_broken_training_loss_is_not_known():
    signals, _ = stepped([True, False, True], [math.nan, None, 0.5])
    assert [given.held_out_loss for given in signals] == [None] * 3
    assert [given.slope for given in signals] == [None] * 3
    assert [given.train_loss for given in signals] == [None, None, 0.5]


def test_a_training_loss_for_each_example_is_refused():
    with pytest.raises(MeasurementError, match="train_loss is a Tensor that is not one number"):
        stepped([1.0], [torch.ones(8)])


def test_a_loaded_garden_continues_the_slope(tmp_path):
    _, garden = stepped([3.0, 2.0], [None, None])
    garden.save(tmp_path / "garden")
    policy = Noting()
    loaded = esper.load(tmp_path / "garden", CNN(), policy=lambda facts: policy)
    loaded.attach(torch.optim.SGD(loaded.parameters(), lr=0.1))
    loaded.step(lambda: torch.ones(8))
    assert policy.signals[0].slope == pytest.approx(-1.0)


def test_a_run_gives_every_signal_to_its_policy():
    policy = Noting()
    (run,) = run_entries(get_task("blobs"), [Entry("own", 3, lambda facts: policy)])
    epochs = [event for event in run.events if isinstance(event, HostEpoch)]
    assert [given.held_out_loss for given in policy.signals] == [e.held_out_loss for e in epochs]
    assert [given.train_loss for given in policy.signals] == [e.train_loss for e in epochs]
    assert [given.share for given in policy.signals] == [e.share for e in epochs]
    assert {given.guessing for given in policy.signals} == {-math.log(get_task("blobs").chance)}
    assert policy.signals[0].rate == 1.0
    assert policy.signals[-1].rate < 0.1
    assert policy.signals[1].slope is None
    assert policy.signals[2].error is not None


@pytest.mark.parametrize("loss", [0.75, math.nan])
def test_what_callbacks_reported_is_saved_in_the_middle_of_an_epoch(tmp_path, loss):
    garden = grow_cnn(policy="never")
    garden.loss_meter.add(torch.tensor(loss))
    garden.loss_meter.steps += 1
    garden.save(tmp_path / "garden")
    loaded = esper.load(tmp_path / "garden", CNN())
    for meter in (garden.loss_meter, loaded.loss_meter):
        meter.add(torch.tensor(0.25))
        meter.steps += 1
    assert loaded.loss_meter.take() == pytest.approx((loss + 0.25) / 2, nan_ok=True)
    assert garden.loss_meter.take() == pytest.approx((loss + 0.25) / 2, nan_ok=True)
    assert garden.loss_meter.take() is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_many_losses_in_half_precision_keep_their_mean(dtype):
    meter = LossMeter()
    for _ in range(3000):
        meter.add(torch.tensor(2.0, dtype=dtype))
        meter.steps += 1
    assert meter.take() == 2.0
