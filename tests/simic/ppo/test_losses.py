"""The maths of one step against tables worked out by hand:

clipping, denominators, divergence, value, entropy.
"""

import math

import pytest
import torch
from torch import tensor

from esper.leyline.factored_actions import DEFAULT_SPACE, OP_CULL, OP_GERMINATE, OP_WAIT
from esper.simic.ppo.losses import (
    StepTable,
    counts_by_row,
    k3,
    mean_entropy,
    policy_loss,
    relevant_steps,
    value_loss,
)
from esper.tamiyo.heads import HeadSpec

CLIP = 0.2


def log(rows):
    return tensor(rows).log()


def steps_of(used, valid, is_open=None):
    is_open = used if is_open is None else is_open
    every = torch.arange(len(valid))
    return StepTable(used, is_open, counts_by_row(used, valid, is_open)).minibatch(every, every)


def loss_of(ratios, advantages, used=None, valid=None, mode="per_head", clip=CLIP):
    """The loss for ratios [heads][steps] of one row; unused heads are where `used` is 0."""
    new = log(ratios)[:, None].requires_grad_()
    used = torch.ones(new.shape, dtype=torch.bool) if used is None else tensor(used)[:, None].bool()
    valid = torch.ones(new.shape[1:], dtype=torch.bool) if valid is None else tensor([valid]).bool()
    steps = steps_of(used & valid, valid)
    return new, policy_loss(
        new, torch.zeros_like(new), tensor([advantages]), steps, valid, clip, mode
    )


# two heads, four steps; joint ratios are 1.43, 0.35, 0.78 and 1.95
RATIOS = [[1.1, 0.7, 1.3, 1.5], [1.3, 0.5, 0.6, 1.3]]
ADVANTAGES = [1.0, -2.0, -1.0, 3.0]


def test_each_head_is_clipped_by_itself_as_in_a_table_worked_out_by_hand():
    _, loss = loss_of(RATIOS, ADVANTAGES)
    first = -(1.1 * 1 + 0.8 * -2 + 1.3 * -1 + 1.2 * 3) / 4
    second = -(1.2 * 1 + 0.8 * -2 + 0.8 * -1 + 1.2 * 3) / 4
    torch.testing.assert_close(loss.per_head, tensor([first, second]))
    torch.testing.assert_close(loss.total, tensor(first + second))


def test_whole_decisions_are_clipped_jointly_as_in_a_table_worked_out_by_hand():
    _, loss = loss_of(RATIOS, ADVANTAGES, mode="joint")
    torch.testing.assert_close(loss.total, tensor(-(1.2 * 1 + 0.8 * -2 + 0.8 * -1 + 1.2 * 3) / 4))


def test_clipping_stops_the_gradient_only_where_more_change_would_pay():
    new, loss = loss_of(RATIOS, ADVANTAGES)
    loss.total.backward()
    pays = tensor([[True, False, True, False], [False, False, False, False]])
    expected = torch.where(pays, -tensor(RATIOS) * tensor(ADVANTAGES) / 4, 0.0)
    torch.testing.assert_close(new.grad[:, 0], expected)


def test_four_heads_at_one_point_one_five_are_clipped_jointly_but_not_by_themselves():
    four = [[1.15]] * 4
    _, alone = loss_of(four, [1.0])
    _, together = loss_of(four, [1.0], mode="joint")
    torch.testing.assert_close(alone.per_head, -tensor([1.15] * 4))
    torch.testing.assert_close(alone.log_ratios.sum().exp(), tensor(1.75), rtol=1e-3, atol=0)
    torch.testing.assert_close(together.total, tensor(-1.2))


def test_a_head_is_divided_by_the_steps_it_took_part_in():
    """Nine of ten decisions wait; the blueprint's one share is not made small by them."""
    ratios, advantages = [[1.0] * 10, [1.1] + [7.0] * 9], [2.0] * 10
    new, loss = loss_of(ratios, advantages, used=[[1] * 10, [1] + [0] * 9])
    loss.total.backward()
    torch.testing.assert_close(loss.per_head, tensor([-2.0, -2.2]))
    torch.testing.assert_close(new.grad[1, 0], tensor([-2.2] + [0.0] * 9))


@pytest.mark.parametrize("mode", ["per_head", "joint"])
def test_a_head_that_nobody_used_costs_nothing(mode):
    new, loss = loss_of([[1.1, 0.9], [5.0, 6.0]], [1.0, 1.0], used=[[1, 1], [0, 0]], mode=mode)
    loss.total.backward()
    torch.testing.assert_close(loss.total, tensor(-1.0))
    assert new.grad[1].eq(0).all()


@pytest.mark.parametrize("mode", ["per_head", "joint"])
def test_without_a_valid_step_the_loss_is_zero(mode):
    new, loss = loss_of([[1.1, 0.9]], [1.0, 1.0], valid=[False, False], mode=mode)
    loss.total.backward()
    assert loss.total == loss.kl == 0
    assert new.grad.eq(0).all()


@pytest.mark.parametrize("mode", ["per_head", "joint"])
def test_a_step_that_is_not_valid_is_not_in_the_mean(mode):
    _, with_filler = loss_of(
        [[1.1, 0.9, 3.0]], [1.0, -1.0, 9.0], valid=[True, True, False], mode=mode
    )
    _, without = loss_of([[1.1, 0.9]], [1.0, -1.0], mode=mode)
    assert torch.equal(with_filler.total, without.total)
    assert torch.equal(with_filler.kl, without.kl)


def test_the_divergence_is_of_whole_decisions_and_leaves_unused_heads_out():
    _, loss = loss_of([[1.2, 1.0], [1.5, 9.0]], [1.0, 1.0], used=[[1, 1], [1, 0]])
    assert float(loss.kl) == pytest.approx(((1.8 - 1) - math.log(1.8)) / 2, rel=1e-5)
    assert loss.log_ratios[1, 0, 1] == 0


def test_the_divergence_is_the_mean_of_r_minus_one_minus_log_r():
    log_ratio = log([[0.5, 1.0, 3.0, 100.0]])
    valid = tensor([[True, True, True, False]])
    expected = sum(r - 1 - math.log(r) for r in (0.5, 1.0, 3.0)) / 3
    assert float(k3(log_ratio, valid, tensor(3))) == pytest.approx(expected, rel=1e-6)


def test_the_divergence_is_never_negative_where_the_plain_estimate_is():
    log_ratio = log([[1.5, 1.2]])
    assert (-log_ratio).mean() < 0 < k3(log_ratio, torch.ones(1, 2, dtype=torch.bool), tensor(2))


def test_divergence_and_log_ratios_carry_no_gradient():
    _, loss = loss_of(RATIOS, ADVANTAGES)
    assert not loss.kl.requires_grad
    assert not loss.log_ratios.requires_grad


def test_heads_take_part_where_the_op_uses_them_and_the_step_is_valid():
    spec = HeadSpec.growth(*DEFAULT_SPACE.sizes[1:])
    ops = tensor([[OP_WAIT, OP_GERMINATE, OP_CULL, OP_GERMINATE]])
    used = relevant_steps(spec, {"op": ops}, tensor([[True, True, True, False]]))
    assert used[:, 0].int().tolist() == [[1, 1, 1, 0], [0, 1, 1, 0], [0, 1, 0, 0], [0, 1, 0, 0]]


# -- value -----------------------------------------------------------------------------------------


def value_of(new, old, returns, clip=0.5, scale=1.0, valid=None):
    new = tensor([new], requires_grad=True)
    valid = torch.ones_like(new).bool() if valid is None else tensor([valid])
    loss = value_loss(
        new,
        tensor([old]),
        tensor([returns]),
        valid,
        clip,
        tensor([scale]),
        valid.sum().clamp(min=1),
    )
    loss.backward()
    return float(loss.detach()), new.grad[0].tolist()


@pytest.mark.parametrize(
    ("new", "old", "returns", "worst", "slope"),
    [
        (0.3, 0.0, 1.0, 0.7, -0.7),  # within the clip
        (
            0.9,
            0.0,
            1.0,
            0.5,
            0.0,
        ),  # went far towards the return: the clipped one is worse and stops it
        (
            -0.9,
            0.0,
            1.0,
            1.9,
            -1.9,
        ),  # went far away from it: the unclipped one is worse and pulls back
        (3.0, 0.0, 1.0, 2.0, 2.0),  # overshot
    ],
)
def test_the_value_pays_for_the_worse_of_clipped_and_unclipped(new, old, returns, worst, slope):
    loss, gradient = value_of([new], [old], [returns])
    assert loss == pytest.approx(0.5 * worst**2)
    assert gradient == pytest.approx([slope])


def test_a_large_error_keeps_its_gradient():
    """Clamping the loss itself, as another library does, would leave a value that is far off where
    it is.
    """
    loss, gradient = value_of([0.0], [0.0], [100.0])
    assert (loss, gradient) == (5000.0, [-100.0])


def test_the_value_clip_is_in_units_of_the_returns_scale():
    plain, slopes = value_of([0.3, -0.9], [0.0, 0.0], [1.0, 1.0])
    scaled, scaled_slopes = value_of([30.0, -90.0], [0.0, 0.0], [100.0, 100.0], scale=100.0)
    assert scaled == pytest.approx(plain)
    assert [100 * slope for slope in scaled_slopes] == pytest.approx(slopes)


def test_the_value_is_averaged_over_valid_steps():
    assert value_of([1.0, 50.0], [1.0, 0.0], [2.0, 7.0], valid=[True, False]) == (0.5, [-1.0, 0.0])
    assert value_of([1.0], [1.0], [2.0], valid=[False]) == (0.0, [0.0])


# -- entropy ---------------------------------------------------------------------------------------


def test_entropy_is_averaged_over_valid_steps_at_which_the_head_had_a_choice():
    entropy = tensor([[[0.2, 0.4, 0.9]], [[0.5, 0.5, 0.5]], [[0.1, 0.1, 0.1]]])
    is_open = tensor([[[True, True, True]], [[True, False, True]], [[False, False, True]]])
    valid = tensor([[True, True, False]])
    found = mean_entropy(entropy, steps_of(is_open, valid), valid)
    torch.testing.assert_close(found, tensor([0.3, 0.5, 0.0]))
