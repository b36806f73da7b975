"""What is remembered of a host's readings:

history, records, plateaus, and nothing that was not measured.
"""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline.errors import SettingError
from esper.leyline.slots import SlotConfig
from esper.tamiyo.signals import Signals, SignalTracker, measure_trend
from tamiyo.observed_episodes import THREE, epoch_signals, reports_of, tracker_after


def followed(losses, scale=1.0):
    return tracker_after(*(epoch_signals(loss) for loss in losses), scale=scale).tracked


# -- one reading after the other -------------------------------------------------------------------


def test_the_first_epoch_is_its_own_record():
    tracked = followed([0.5])
    assert (tracked.losses, tracked.accuracies) == ((0.5,), (0.7,))
    assert (tracked.best_loss, tracked.best_accuracy, tracked.plateau_epochs) == (0.5, 0.7, 0)


def test_the_last_five_held_out_readings_are_kept_oldest_first():
    tracker = tracker_after(*(epoch_signals(loss / 10, loss / 20) for loss in range(1, 9)))
    assert tracker.tracked.losses == (0.4, 0.5, 0.6, 0.7, 0.8)
    assert tracker.tracked.accuracies == (0.2, 0.25, 0.3, 0.35, 0.4)


def test_records_are_the_smallest_loss_and_the_largest_accuracy():
    pairs = [(0.5, 0.6), (0.2, 0.9), (0.8, 0.3)]
    tracked = tracker_after(*(epoch_signals(*pair) for pair in pairs)).tracked
    assert (tracked.best_loss, tracked.best_accuracy) == (0.2, 0.9)


def test_update_returns_what_is_tracked():
    tracker = SignalTracker(THREE, 1.0)
    assert tracker.update(epoch_signals(), reports_of()) is tracker.tracked
    assert tracker.tracked.last == epoch_signals()


# -- plateaus --------------------------------------------------------------------------------------


def test_a_plateau_counts_epochs_since_the_loss_got_better():
    losses = [0.5, 0.6, 0.5, 0.5, 0.4, 0.45]
    assert [followed(losses[:count]).plateau_epochs for count in range(1, 7)] == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize("scale", [0.1, 1.0, 7.0])
@pytest.mark.parametrize(("part", "expected"), [(0.0009, 1), (0.0011, 0)])
def test_a_thousandth_of_the_loss_scale_is_progress_and_less_is_not(scale, part, expected):
    assert followed([scale, scale - part * scale], scale).plateau_epochs == expected


def test_a_record_follows_even_where_the_progress_is_too_small_to_count():
    tracked = followed([0.5, 0.4999])
    assert (tracked.best_loss, tracked.plateau_epochs) == (0.4999, 1)


# -- not measured ----------------------------------------------------------------------------------


@pytest.mark.parametrize("nothing", [None, math.nan, math.inf, -math.inf])
def test_what_was_not_measured_leaves_history_records_and_plateau_alone(nothing):
    before = followed([0.5, 0.6])
    tracker = tracker_after(
        epoch_signals(0.5), epoch_signals(0.6), epoch_signals(nothing, nothing, progress=0.5)
    )
    after = tracker.tracked
    assert (after.last.held_out_loss, after.last.held_out_accuracy, after.last.progress) == (
        None,
        None,
        0.5,
    )
    for name in ("losses", "accuracies", "best_loss", "best_accuracy", "plateau_epochs"):
        assert getattr(after, name) == getattr(before, name)


def test_a_host_that_broke_does_not_spoil_its_records():
    tracked = followed([0.5, math.nan, 0.4])
    assert (tracked.best_loss, tracked.losses) == (0.4, (0.5, 0.4))


@pytest.mark.parametrize(
    "name", ["train_loss", "train_accuracy", "held_out_loss", "held_out_accuracy"]
)
def test_a_broken_reading_is_not_measured_and_the_others_are(name):
    last = tracker_after(replace(epoch_signals(), **{name: math.nan})).tracked.last
    readings = ("train_loss", "train_accuracy", "held_out_loss", "held_out_accuracy")
    assert [each for each in readings if getattr(last, each) is None] == [name]


# -- slots -----------------------------------------------------------------------------------------


def test_a_slot_without_a_report_is_refused_by_name():
    reports = reports_of()
    del reports["r0c0"], reports["r0c2"]
    tracker = SignalTracker(THREE, 1.0)
    with pytest.raises(SettingError, match=r"report .*r0c0, r0c2"):
        tracker.update(epoch_signals(), reports)
    assert tracker.tracked is None


def test_only_enabled_slots_are_kept_in_numeric_order():
    enabled = SlotConfig(("r0c10", "r0c2"))
    shuffled = reports_of(SlotConfig(("r0c10", "r0c2", "r0c1")))
    tracker = tracker_after(
        epoch_signals(), slots=enabled, reports=dict(reversed(shuffled.items()))
    )
    assert list(tracker.reports) == ["r0c2", "r0c10"]


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan])
def test_a_loss_scale_that_is_not_above_zero_is_refused(scale):
    with pytest.raises(SettingError, match=r"loss_scale .* 0"):
        SignalTracker(THREE, scale)


# -- any readings ----------------------------------------------------------------------------------

READING = st.none() | st.floats(0, 10) | st.sampled_from([math.nan, math.inf])
EPISODES = st.lists(st.tuples(READING, READING, READING, READING), max_size=12)


def signals_of(epochs):
    return [
        epoch_signals(loss, accuracy, train_loss=train, train_accuracy=right, progress=index / 12)
        for index, (loss, accuracy, train, right) in enumerate(epochs)
    ]


def measured(values):
    return [value for value in values if value is not None and math.isfinite(value)]


def plateau_of(losses, scale):
    """Written out:

    look back for the last epoch that beat all before it by a thousandth of the scale.
    """
    better = [i for i in range(len(losses)) if i == 0 or losses[i] < min(losses[:i]) - 1e-3 * scale]
    return len(losses) - 1 - better[-1] if losses else 0


@given(EPISODES, st.sampled_from([0.5, 2.3]))
def test_any_episode_is_followed_as_a_slow_reference_would(epochs, scale):
    tracked = tracker_after(*signals_of(epochs), scale=scale).tracked
    if not epochs:
        assert tracked is None
        return
    losses, accuracies = measured(row[0] for row in epochs), measured(row[1] for row in epochs)
    assert tracked.losses == tuple(losses[-5:])
    assert tracked.accuracies == tuple(accuracies[-5:])
    assert tracked.best_loss == min(losses, default=None)
    assert tracked.best_accuracy == max(accuracies, default=None)
    assert tracked.plateau_epochs == plateau_of(losses, scale)


@given(EPISODES, st.data())
def test_a_saved_tracker_goes_on_as_if_nothing_had_happened(epochs, data):
    epochs = signals_of(epochs)
    cut = data.draw(st.integers(0, len(epochs)))
    saved = json.loads(json.dumps(tracker_after(*epochs[:cut]).state(), allow_nan=False))
    resumed = SignalTracker(THREE, 1.0).load(saved)
    for signals in epochs[cut:]:
        resumed.update(signals, reports_of())
    assert resumed.tracked == tracker_after(*epochs).tracked


def test_loading_nothing_is_a_fresh_start():
    tracker = tracker_after(epoch_signals())
    assert SignalTracker(THREE, 1.0).state() is None
    assert tracker.load(None).tracked is None


# -- what rules are given --------------------------------------------------------------------------


def test_rules_are_given_the_last_epoch_the_slope_and_what_guessing_loses():
    losses = (0.9, 0.7, 0.5)
    signals = tracker_after(*(epoch_signals(loss) for loss in losses), scale=2.3).signals
    assert signals.slope == pytest.approx(-0.2)
    assert signals.error == pytest.approx(0, abs=1e-9)
    assert replace(signals, slope=None, error=None) == Signals(
        held_out_loss=0.5, train_loss=0.4, share=0.25, rate=1.0, guessing=2.3
    )


def test_nothing_is_known_before_the_first_epoch():
    assert SignalTracker(THREE, 1.0).signals == Signals()


def test_what_broke_is_not_known_and_leaves_the_slope_of_the_others():
    losses = (0.9, 0.7, 0.5, math.nan)
    signals = tracker_after(*(epoch_signals(loss) for loss in losses)).signals
    assert signals.held_out_loss is None
    assert signals.slope == pytest.approx(-0.2)


@given(st.lists(st.floats(-10, 10), min_size=3, max_size=9))
def test_the_slope_and_its_error_are_those_of_a_least_squares_line(losses):
    recent = losses[-5:]
    epochs = np.arange(len(recent))
    line = np.polyfit(epochs, recent, 1)
    residuals = np.array(recent) - np.polyval(line, epochs)
    variance = (residuals**2).sum() / (len(recent) - 2)
    error = math.sqrt(variance / ((epochs - epochs.mean()) ** 2).sum())
    assert measure_trend(losses) == pytest.approx((line[0], error), abs=1e-9)
