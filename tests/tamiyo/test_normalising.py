"""Running statistics are those of all rows at once and change only when told to; rescaling changes
no value.
"""

import pytest
import torch

from esper.tamiyo.normalising import RunningMeanStd
from tamiyo.policy_cases import STATE_DIM, build


def filled(rows, width=None):
    stats = RunningMeanStd(rows.shape[1] if width is None else width)
    stats.update(rows)
    return stats


def assert_describes(stats, rows):
    rows = rows.double()
    torch.testing.assert_close(stats.mean, rows.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(stats.var, rows.var(0, unbiased=False), rtol=1e-9, atol=1e-12)
    assert stats.count == len(rows)


@pytest.mark.parametrize("cuts", [(100,), (1, 99), (40, 60), (7, 1, 30, 62), (25, 0, 75)])
def test_pooled_pieces_are_all_rows_at_once(cuts):
    rows = torch.randn(100, 3) * torch.tensor([1.0, 50.0, 1e-3]) + torch.tensor([0.0, 1000.0, -3.0])
    stats = RunningMeanStd(3)
    for piece in rows.split(cuts):
        stats.update(piece)
    assert_describes(stats, rows)


@pytest.mark.parametrize("seen", [0, 20])
def test_no_rows_change_nothing(seen):
    stats = filled(torch.randn(seen, 3), 3)
    before = {name: value.clone() for name, value in stats.state_dict().items()}
    stats.update(torch.zeros(0, 3))
    assert all(torch.equal(value, before[name]) for name, value in stats.state_dict().items())


def test_statistics_are_float64_and_survive_a_large_offset():
    rows = torch.randn(1000, 1, dtype=torch.float64) + 1e7
    stats = RunningMeanStd(1)
    for piece in rows.split(10):
        stats.update(piece)
    assert {value.dtype for value in stats.state_dict().values()} == {torch.float64}
    assert float(stats.var) == pytest.approx(float(rows.var(unbiased=False)), rel=1e-6)


def test_float32_rows_are_summed_in_float64():
    rows = torch.full((30_000, 1), 0.1)
    assert float(filled(rows).mean) == pytest.approx(float(rows[0].double()), rel=1e-14)


def test_normalised_rows_have_mean_zero_and_deviation_one():
    rows = torch.randn(400, 2) * 5 + 20
    scaled = filled(rows).normalise(rows)
    assert scaled.dtype == torch.float32
    torch.testing.assert_close(scaled.mean(0), torch.zeros(2), rtol=0, atol=1e-5)
    torch.testing.assert_close(scaled.std(0, unbiased=False), torch.ones(2), rtol=0, atol=1e-4)


def test_normalising_clamps_on_both_sides():
    stats = filled(torch.tensor([[0.0], [2.0]]))
    assert stats.normalise(torch.tensor([[1e9], [-1e9], [1.0]])).tolist() == [
        [10.0],
        [-10.0],
        [0.0],
    ]
    assert stats.normalise(torch.tensor([[1e9], [-1e9]]), limit=3.0).tolist() == [[3.0], [-3.0]]


def test_fresh_statistics_leave_ordinary_values_as_they_are():
    values = torch.linspace(-9, 9, 19)[:, None]
    torch.testing.assert_close(RunningMeanStd(1).normalise(values), values)


def test_a_feature_that_never_varies_stays_finite():
    stats = filled(torch.full((10, 1), 3.0))
    assert stats.normalise(torch.tensor([[3.0], [3.1]])).tolist() == [[0.0], [10.0]]


def test_normalising_does_not_change_the_statistics():
    stats = filled(torch.randn(30, 2))
    before = {name: value.clone() for name, value in stats.state_dict().items()}
    stats.normalise(torch.randn(30, 2) * 100)
    assert all(torch.equal(value, before[name]) for name, value in stats.state_dict().items())


# -- in the network --------------------------------------------------------------------------------


@torch.no_grad()
def judge(net, states):
    return net.look(states, net.get_initial_hidden(len(states)))


@pytest.mark.parametrize(
    ("scale", "offset"), [(1.0, 0.0), (25.0, 90.0), (1e-3, 0.0), (40.0, -300.0)]
)
def test_taking_in_returns_changes_no_value(scale, offset):
    net, states = build(), torch.randn(64, STATE_DIM)
    for batch in range(3):
        before = judge(net, states)
        net.update_return_stats(torch.randn(200) * scale * (batch + 1) + offset)
        unit = max(
            1.0, abs(offset), scale
        )  # float32 knows a value only to a share of the returns' size
        assert float((judge(net, states) - before).abs().max()) <= 1e-5 * unit
    assert net.return_stats.count == 600


def test_after_taking_in_returns_the_value_layer_works_in_their_units():
    net = build()
    net.update_return_stats(torch.tensor([90.0, 110.0]))
    assert float(net.return_stats.mean) == 100.0
    states = torch.randn(16, STATE_DIM)
    with torch.no_grad():
        net.value_head[-1].weight.zero_()
        net.value_head[-1].bias.fill_(1.0)
    torch.testing.assert_close(judge(net, states), torch.full((16,), 110.0))


def test_no_returns_leave_every_weight_as_it_is():
    net = build()
    net.update_return_stats(torch.tensor([1.0, 5.0]))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    net.update_return_stats(torch.zeros(0))
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=1e-6, atol=1e-7)


def test_the_network_sees_observations_through_its_statistics():
    net, states = build(), torch.randn(32, STATE_DIM) * 3 + 5
    raw = judge(net, (states - states.mean(0)) / states.std(0, unbiased=False))
    net.observation_stats.update(states)
    torch.testing.assert_close(judge(net, states), raw, rtol=0, atol=1e-4)


def test_acting_and_evaluating_leave_both_statistics_as_they_are():
    net, states = build(), torch.randn(4, 6, STATE_DIM) * 9
    before = {name: value.clone() for name, value in net.state_dict().items()}
    actions, *_ = net.get_action(states)
    net.evaluate_actions(states, actions, hidden=net.get_initial_hidden(4))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
