"""Running all pieces of all episodes at once gives what a loop over single steps gives, and no
episode sees another.
"""

import pytest
import torch
from torch import nn

from esper.tamiyo.recurrence import run_sequences

INPUTS, WIDTH, PATTERNS = 6, 12, 100


def loop(lstm, inputs, hidden, starts):
    """The slow reference: one step at a time, the state set to zero wherever an episode begins."""
    weights = (lstm.weight_ih_l0, lstm.weight_hh_l0, lstm.bias_ih_l0, lstm.bias_hh_l0)
    h, c = hidden[0][0], hidden[1][0]
    outputs = []
    for step in range(inputs.shape[1]):
        begins = starts[:, step, None]
        h, c = torch.lstm_cell(
            inputs[:, step], (torch.where(begins, 0.0, h), torch.where(begins, 0.0, c)), *weights
        )
        outputs.append(h)
    return torch.stack(outputs, 1), (h[None], c[None])


def a_case(count, steps):
    lstm = nn.LSTM(INPUTS, WIDTH, batch_first=True)
    hidden = (torch.randn(1, count, WIDTH), torch.randn(1, count, WIDTH))
    return lstm, torch.randn(count, steps, INPUTS), hidden


def pattern(count, steps, number):
    """From no beginning at all to one at every step."""
    return torch.rand(count, steps) < number / (PATTERNS - 1)


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 64])
@pytest.mark.parametrize("steps", [5, 27, 37])
def test_all_at_once_equals_step_by_step_for_a_hundred_patterns_of_beginnings(steps, count):
    lstm, inputs, hidden = a_case(count, steps)
    for number in range(PATTERNS):
        starts = pattern(count, steps, number)
        outputs, after = run_sequences(lstm, inputs, hidden, starts)
        expected, expected_after = loop(lstm, inputs, hidden, starts)
        torch.testing.assert_close(outputs, expected, rtol=0, atol=4e-6)
        torch.testing.assert_close(after, expected_after, rtol=0, atol=4e-6)


@pytest.mark.parametrize("number", [0, 10, 50])
def test_gradients_all_at_once_equal_those_step_by_step(number):
    lstm, inputs, hidden = a_case(9, 13)
    starts = pattern(9, 13, number)
    found = []
    for run in (run_sequences, loop):
        leaves = [
            inputs.clone().requires_grad_(),
            *(part.clone().requires_grad_() for part in hidden),
        ]
        outputs, _ = run(lstm, leaves[0], (leaves[1], leaves[2]), starts)
        outputs.square().sum().backward()
        found.append([leaf.grad for leaf in leaves] + [p.grad.clone() for p in lstm.parameters()])
        lstm.zero_grad()
    for fast, slow in zip(*found, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-4)


def test_without_a_pattern_a_row_is_one_episode_that_goes_on():
    lstm, inputs, hidden = a_case(4, 6)
    nowhere = torch.zeros(4, 6, dtype=torch.bool)
    for starts in (None, nowhere):
        outputs, after = run_sequences(lstm, inputs, hidden, starts)
        expected, expected_after = loop(lstm, inputs, hidden, nowhere)
        torch.testing.assert_close(outputs, expected, rtol=0, atol=4e-6)
        torch.testing.assert_close(after, expected_after, rtol=0, atol=4e-6)


def test_what_came_before_a_beginning_does_not_reach_beyond_it_by_one_bit():
    lstm, inputs, hidden = a_case(3, 10)
    starts = torch.zeros(3, 10, dtype=torch.bool)
    starts[:, 4] = starts[1, 8] = True
    outputs, after = run_sequences(lstm, inputs, hidden, starts)
    disturbed = inputs.clone()
    disturbed[:, :4] += torch.randn(3, 4, INPUTS)
    others, others_after = run_sequences(lstm, disturbed, (hidden[0] + 1, hidden[1] - 1), starts)
    assert torch.equal(outputs[:, 4:], others[:, 4:])
    assert all(torch.equal(a, b) for a, b in zip(after, others_after, strict=True))
    assert not torch.isclose(outputs[:, :4], others[:, :4]).any(-1).all()


def test_an_episode_that_begins_with_the_row_does_not_know_the_state_that_was_passed():
    lstm, inputs, hidden = a_case(2, 5)
    starts = torch.zeros(2, 5, dtype=torch.bool)
    starts[0, 0] = True
    outputs, _ = run_sequences(lstm, inputs, hidden, starts)
    fresh, _ = run_sequences(lstm, inputs, (hidden[0] * 0, hidden[1] * 0), None)
    kept, _ = run_sequences(lstm, inputs, hidden, None)
    torch.testing.assert_close(outputs[0], fresh[0], rtol=0, atol=4e-6)
    torch.testing.assert_close(outputs[1], kept[1], rtol=0, atol=4e-6)


def test_rows_do_not_see_each_other():
    lstm, inputs, hidden = a_case(4, 7)
    starts = torch.rand(4, 7) < 0.3
    starts[0, 3] = True
    outputs, _ = run_sequences(lstm, inputs, hidden, starts)
    disturbed = inputs.clone()
    disturbed[2] += 1
    others, _ = run_sequences(lstm, disturbed, hidden, starts)
    assert torch.equal(outputs[[0, 1, 3]], others[[0, 1, 3]])
    assert not torch.equal(outputs[2], others[2])


def test_neither_the_state_nor_the_pattern_that_was_passed_is_changed():
    lstm, inputs, hidden = a_case(4, 7)
    starts = torch.zeros(4, 7, dtype=torch.bool)
    starts[1, 3] = True
    kept = (inputs.clone(), hidden[0].clone(), hidden[1].clone(), starts.clone())
    run_sequences(lstm, inputs, hidden, starts)
    assert all(torch.equal(a, b) for a, b in zip(kept, (inputs, *hidden, starts), strict=True))


def test_a_state_that_is_not_wanted_is_not_a_number_and_costs_the_outputs_nothing():
    lstm, inputs, hidden = a_case(4, 7)
    starts = torch.rand(4, 7) < 0.3
    starts[0, 3] = True
    outputs, _ = run_sequences(lstm, inputs, hidden, starts)
    spared, unknown = run_sequences(lstm, inputs, hidden, starts, needs_state=False)
    assert torch.equal(outputs, spared)
    assert all(part.isnan().all() and part.shape == hidden[0].shape for part in unknown)


def test_where_episodes_begin_within_rows_the_last_state_carries_no_gradient():
    lstm, inputs, hidden = a_case(4, 7)
    starts = torch.zeros(4, 7, dtype=torch.bool)
    starts[0, 3] = True
    _, after = run_sequences(lstm, inputs, hidden, starts)
    assert not any(part.requires_grad for part in after)
