"""Whether data are missing: what training and held-out losses say together."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.tamiyo.shortage import add_losses, lacks_data
from esper.tamiyo.signals import Signals

GUESSING = math.log(10)


def losses_of(train, held_out):
    return [list(pair) for pair in zip(train, held_out, strict=True)]


# -- where guessing is known -----------------------------------------------------------------------


def test_data_are_missing_where_the_training_loss_falls_and_the_held_out_loss_does_not():
    losses = losses_of([2.2, 2.0, 1.7, 1.4, 1.1], [2.3, 2.3, 2.25, 2.3, 2.4])
    assert lacks_data(losses, GUESSING, 0.4)


def test_data_suffice_where_both_fall():
    losses = losses_of([2.2, 2.0, 1.7, 1.4, 1.1], [2.2, 2.1, 1.9, 1.6, 1.4])
    assert not lacks_data(losses, GUESSING, 0.4)


@pytest.mark.parametrize(
    ("part", "lacks"), [(0.3, False), (0.49, False), (0.51, True), (1.0, True)]
)
def test_the_held_out_loss_must_have_fallen_by_the_part_of_the_training_loss(part, lacks):
    assert lacks_data([[GUESSING - 1.0, GUESSING - 0.5]], GUESSING, part) is lacks


@pytest.mark.parametrize(("below", "lacks"), [(0.04, True), (0.06, False)])
def test_before_the_held_out_loss_is_below_guessing_it_is_too_early(below, lacks):
    losses = [[1.01 * GUESSING, (1 - below) * GUESSING]]
    assert lacks_data(losses, GUESSING, 0.4) is lacks


@pytest.mark.parametrize("epochs", [1, 2, 3, 5])
def test_a_training_loss_that_stays_near_guessing_lacks_capacity_once_two_epochs_say_so(epochs):
    losses = losses_of([0.704, 0.700, 0.696, 0.699, 0.695], [0.693] * 5)[:epochs]
    assert lacks_data(losses, math.log(2), 0.4) is (epochs < 2)


def test_a_training_loss_near_guessing_that_falls_is_no_lack_of_capacity():
    losses = losses_of([2.42, 2.27, 2.21, 2.17], [2.30, 2.29, 2.29, 2.28])
    assert lacks_data(losses, GUESSING, 0.4)


def test_a_host_that_was_trained_before_is_planted_though_its_losses_are_far_apart():
    losses = losses_of([0.020, 0.021, 0.019], [2.0, 2.1, 2.0])
    assert not lacks_data(losses, GUESSING, 0.4)


def test_one_high_reading_among_five_does_not_decide():
    losses = losses_of([1.2, 1.0, 0.9, 0.8, 0.7], [1.3, 1.1, 3.0, 0.9, 0.9])
    assert not lacks_data(losses, GUESSING, 0.4)


# -- where guessing is not known -------------------------------------------------------------------

FALLING = [1.0, 0.9, 0.8, 0.7]


@pytest.mark.parametrize(
    ("held_out", "lacks"),
    [
        ([1.2, 1.2, 1.2, 1.2], True),
        ([1.2, 1.3, 1.4, 1.5], True),
        ([1.2, 1.17, 1.14, 1.11], True),
        ([1.2, 1.15, 1.1, 1.05], False),
        ([0.5, 0.5, 0.5, 0.5], False),
    ],
    ids=["flat", "rises", "a third as fast", "half as fast", "no gap"],
)
def test_without_guessing_slopes_and_the_gap_decide(held_out, lacks):
    assert lacks_data(losses_of(FALLING, held_out), None, 0.4) is lacks


def test_without_guessing_two_epochs_have_no_slope_and_say_nothing():
    assert not lacks_data(losses_of([1.0, 0.5], [1.2, 1.4]), None, 0.4)


@pytest.mark.parametrize("held_out", [0.9, 3.0], ids=["small gap", "large gap"])
def test_a_trained_flat_host_is_planted_without_guessing_too(held_out):
    assert not lacks_data(losses_of([0.9, 0.9, 0.899], [held_out] * 3), None, 0.4)


def test_a_trained_flat_host_is_planted_where_losses_are_negative_too():
    """As those of densities are."""
    assert not lacks_data(losses_of([-2.5, -2.5, -2.501], [-2.4] * 3), None, 0.4)
    assert lacks_data(losses_of([-2.5, -2.6, -2.7], [-2.4] * 3), None, 0.4)


# -- what is known ---------------------------------------------------------------------------------


def test_no_losses_say_nothing():
    assert not lacks_data([], GUESSING, 0.4)


@pytest.mark.parametrize("name", ["train_loss", "held_out_loss"])
def test_an_epoch_with_one_loss_alone_is_not_taken_in(name):
    assert add_losses([[1.0, 2.0]], Signals(**{name: 0.5})) == [[1.0, 2.0]]


def test_the_last_five_epochs_are_remembered():
    losses = []
    for epoch in range(7):
        losses = add_losses(losses, Signals(train_loss=float(epoch), held_out_loss=epoch + 0.5))
    assert losses == [[float(epoch), epoch + 0.5] for epoch in range(2, 7)]


LOSS = st.floats(0, 20)


@given(
    st.lists(st.tuples(LOSS, LOSS), max_size=8),
    st.none() | st.floats(0.1, 6),
    st.floats(0.01, 0.98),
)
def test_any_losses_have_an_answer_and_asking_for_more_never_plants_more(pairs, guessing, part):
    losses = []
    for train, held_out in pairs:
        losses = add_losses(losses, Signals(train_loss=train, held_out_loss=held_out))
    assert json.loads(json.dumps(losses)) == losses
    if guessing is not None and lacks_data(losses, guessing, part):
        assert lacks_data(losses, guessing, part + 0.02)
