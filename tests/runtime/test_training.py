"""One epoch of training and held-out losses of one model: every example once, in an order of its own."""

import pytest
import torch
from torch import nn

from esper.runtime.splits import TensorSplit
from esper.runtime.training import held_out_losses, score, train_epoch


class Recorder(nn.Module):
    """Remembers which examples it saw; an example is its own number."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.seen, self.modes = [], []

    def forward(self, inputs):
        self.seen += inputs.flatten().int().tolist()
        self.modes.append(self.training)
        return inputs.flatten(1) * self.weight


def numbered(count):
    return TensorSplit(torch.arange(float(count)).reshape(count, 1), torch.arange(count) % 3)


def epoch_of(count, batch, seed=0):
    model = Recorder().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    loss = train_epoch(model, optimizer, numbered(count), batch, torch.Generator().manual_seed(seed))
    return model, loss


@pytest.mark.parametrize(("count", "batch"), [(12, 4), (12, 5), (7, 3), (5, 8)])
def test_an_epoch_sees_every_example_once(count, batch):
    model, _ = epoch_of(count, batch)
    assert sorted(model.seen) == list(range(count))


def test_an_epoch_trains_in_training_mode_and_returns_the_mean_loss():
    model, loss = epoch_of(12, 4)
    assert all(model.modes)
    assert loss == pytest.approx(torch.log(torch.tensor(3.0)).item(), rel=1e-3)


def test_the_order_is_drawn_from_the_generator_that_is_given():
    torch.manual_seed(1)
    first, _ = epoch_of(12, 4, seed=5)
    torch.manual_seed(2)
    again, _ = epoch_of(12, 4, seed=5)
    other, _ = epoch_of(12, 4, seed=6)
    assert first.seen == again.seen
    assert first.seen != other.seen
    assert first.seen != sorted(first.seen)


def test_two_epochs_have_two_orders():
    model = Recorder()
    order = torch.Generator().manual_seed(0)
    for _ in range(2):
        train_epoch(model, torch.optim.SGD(model.parameters(), lr=1e-6), numbered(12), 4, order)
    assert model.seen[:12] != model.seen[12:]


def test_an_epoch_changes_the_weights():
    model, _ = epoch_of(12, 4)
    assert model.weight.abs().sum() > 0


def test_held_out_losses_come_one_per_example_in_order_across_batches():
    model = Recorder().eval()
    nn.init.ones_(model.weight)
    split = TensorSplit(torch.randn(5000, 3), torch.randint(3, (5000,)))
    losses = held_out_losses(model, split)
    expected = nn.functional.cross_entropy(split.inputs, split.targets, reduction="none")
    torch.testing.assert_close(losses, expected)
    assert not losses.requires_grad


def test_a_score_is_a_fraction_and_a_mean_loss_in_evaluation_mode():
    model = Recorder().train()
    nn.init.ones_(model.weight)
    split = TensorSplit(torch.eye(3).repeat(4, 1), torch.tensor([0, 1, 0] * 4))
    accuracy, loss = score(model, split)
    assert accuracy == pytest.approx(2 / 3)
    assert loss == pytest.approx(float(held_out_losses(model, split).mean()))
    assert not any(model.modes)
