"""Intervals keep their promise:

against scipy, in closed form, and by counting how often they hold the truth.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from esper.leyline.errors import SettingError
from esper.telemetry.statistics import Estimate, compare_pairs, estimate_mean, student_quantile

SCORES = [0.91, 0.88, 0.93, 0.90, 0.89, 0.95, 0.92, 0.90, 0.87, 0.94]
samples = st.lists(st.integers(-1000, 1000).map(lambda value: value / 8), min_size=2, max_size=12)


@pytest.mark.parametrize("share", [0.6, 0.95, 0.975])
@pytest.mark.parametrize("freedom", [1, 2, 4, 9, 30, 200])
def test_students_quantile_is_scipys(freedom, share):
    assert student_quantile(share, freedom) == pytest.approx(stats.t.ppf(share, freedom), rel=2e-3)


# -- one mean --------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_interval_and_another_a_close_one():
    values = np.random.default_rng(3).normal(size=10)
    found, other = estimate_mean(values), estimate_mean(values, seed=1)
    assert estimate_mean(values) == found != other
    assert [other.low, other.high] == pytest.approx([found.low, found.high], abs=0.1)


@given(samples, st.sampled_from([0.25, 1, 8]), st.integers(-64, 64))
def test_shifted_and_scaled_values_have_the_shifted_and_scaled_interval(values, scale, shift):
    plain, moved = estimate_mean(values), estimate_mean([scale * value + shift for value in values])
    expected = [scale * number + shift for number in (plain.mean, plain.low, plain.high)]
    assert [moved.mean, moved.low, moved.high] == pytest.approx(
        expected, abs=1e-9 * (1 + max(map(abs, expected)))
    )


@given(samples)
def test_an_interval_holds_its_mean_and_stays_within_the_data(values):
    found = estimate_mean(values)
    slack = 1e-9 * (1 + max(map(abs, values)))
    assert found.mean == pytest.approx(math.fsum(values) / len(values), abs=slack)
    assert min(values) - slack <= found.low <= found.mean + slack
    assert found.mean - slack <= found.high <= max(values) + slack
    assert found.count == len(values)


def test_two_values_are_their_own_interval():
    assert estimate_mean([3.0, 1.0]) == Estimate(2.0, 1.0, 3.0, 2)


def test_one_value_has_no_interval():
    assert estimate_mean([0.7]) == Estimate(0.7, None, None, 1)


def test_equal_values_have_an_interval_of_no_width():
    assert estimate_mean([0.5] * 6) == Estimate(0.5, 0.5, 0.5, 6)


@pytest.mark.parametrize("count", [8, 20, 60])
def test_on_bell_shaped_values_it_is_about_students_interval(count):
    values = stats.norm.ppf((np.arange(count) + 0.5) / count)
    low, high = stats.t.interval(0.95, count - 1, values.mean(), stats.sem(values))
    found = estimate_mean(values)
    assert [found.low, found.high] == pytest.approx([low, high], rel=0.06)


@pytest.mark.parametrize("draw", ["normal", pytest.param("laplace", marks=pytest.mark.slow)])
def test_an_interval_of_ten_values_holds_the_truth_about_95_times_in_100(draw):
    """Plain percentiles of resampled means hold it about 90 times."""
    dice = np.random.default_rng(7)
    found = [estimate_mean(getattr(dice, draw)(size=10), seed=trial) for trial in range(1500)]
    held = np.mean([estimate.low <= 0 <= estimate.high for estimate in found])
    assert 0.93 <= held <= 0.965


@pytest.mark.parametrize(
    "values", [[], [0.5, math.nan], [math.inf, 1.0], [[1.0, 2.0], [3.0, 4.0]]], ids=str
)
def test_what_is_no_list_of_finite_numbers_is_refused(values):
    with pytest.raises(SettingError, match="finite numbers"):
        estimate_mean(values)


# -- pairs -----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(-99, 99), st.integers(-99, 99)), min_size=1, max_size=9))
def test_a_comparison_is_the_estimate_of_the_differences(pairs):
    values, others = zip(*pairs, strict=True)
    assert compare_pairs(values, others) == estimate_mean([value - other for value, other in pairs])


def test_who_is_paired_with_whom_matters():
    """Seeds differ much and arms little:

    the pairs show it, the same numbers in another order do not.
    """
    values, others = [score + 0.005 for score in SCORES], SCORES
    paired, shuffled = compare_pairs(values, others), compare_pairs(values, others[::-1])
    assert paired.mean == pytest.approx(shuffled.mean)
    assert (paired.verdict, shuffled.verdict) == ("ahead", "unsupported")


def test_the_other_way_round_the_interval_is_mirrored():
    one, other = compare_pairs(SCORES, SCORES[::-1]), compare_pairs(SCORES[::-1], SCORES)
    assert [one.mean, one.low, one.high] == pytest.approx([-other.mean, -other.high, -other.low])


def test_lists_of_different_length_are_no_pairs():
    with pytest.raises(SettingError, match=r"3 values .* 2"):
        compare_pairs([1, 2, 3], [1, 2])


# -- claims ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([1.0, 1.1, 0.9, 1.2, 0.8], "ahead"),
        ([-1.0, -1.1, -0.9, -1.2, -0.8], "behind"),
        ([1.0, -1.1, 0.9, -1.2, 0.8], "unsupported"),
        ([0.0] * 5, "unsupported"),
        ([1.0, 1.1, 0.9, 1.2], "fewer than 5 seeds"),
        ([1.0], "fewer than 5 seeds"),
    ],
    ids=str,
)
def test_a_claim_needs_an_interval_off_zero_and_five_seeds(values, verdict):
    assert estimate_mean(values).verdict == verdict
