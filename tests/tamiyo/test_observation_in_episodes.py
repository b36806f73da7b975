"""The observation in real episodes:

random legal actions on every kind of host, every feature about one.
"""

from functools import cache

import numpy as np
import pytest
import torch

from cases import with_slow
from esper.tamiyo.observation import (
    BLUEPRINT_FEATURES,
    LARGEST,
    STATE_FEATURES,
    TELEMETRY_FEATURES,
    feature_names,
    observe,
)
from tamiyo.observed_episodes import TASKS, RandomPolicy, Watched


@cache
def episodes(task):
    """Observations of two whole episodes under random legal actions, [epochs x hosts, F], and their
    names.
    """
    watched = Watched(TASKS[task], [1, 2])
    rows = [row for row, _, _ in watched.live(RandomPolicy(7), watched.task.epochs)]
    return np.concatenate(rows), feature_names(watched.space.slots)


@pytest.mark.parametrize("task", with_slow(TASKS, {"texts"}))
def test_in_real_episodes_no_feature_leaves_minus_five_to_five_and_most_are_about_one(task):
    rows, names = episodes(task)
    assert rows.shape[1] == len(names)
    assert np.isfinite(rows).all()
    assert np.abs(rows).max() <= LARGEST
    typical = np.sqrt(np.square(rows).mean(0))
    assert typical.max() <= 1.6, names[int(typical.argmax())]
    assert 0.2 <= np.sqrt(np.square(rows).mean()) <= 1.0
    assert np.quantile(np.abs(rows), 0.95) <= 1.2


@pytest.mark.parametrize("task", TASKS)
def test_in_real_episodes_every_slot_is_seen_empty_and_taken_measured_and_not(task):
    rows, names = episodes(task)
    for slot in sorted({name.split(".")[0] for name in names if "." in name}):
        column = {
            name: rows[:, names.index(f"{slot}.{name}")]
            for name in (*STATE_FEATURES, *BLUEPRINT_FEATURES, *TELEMETRY_FEATURES)
        }
        assert set(column["occupied"]) == {0.0, 1.0}
        assert set(column["contribution_measured"]) == {0.0, 1.0}
        is_empty = column["occupied"] == 0
        nonzero = {name for name, values in column.items() if values[is_empty].any()}
        assert nonzero <= {"greedy_score", "epochs_in_stage"}
        assert (column["greedy_score"] > 0).all(), "a population measures every slot every epoch"
        assert (column["gradient_norm"][~is_empty] > 0).any()


def test_in_real_episodes_progress_runs_to_one_and_the_rate_falls_behind_it():
    rows, names = episodes("images")
    progress, rate = (rows[0::2, names.index(name)] for name in ("progress", "lr_share"))
    assert progress == pytest.approx(np.arange(1, 13) / 12)
    assert rate[0] == 1.0
    assert (np.diff(rate) <= 0).all()
    assert rate[-1] < 0.1


def test_the_observation_of_a_host_does_not_depend_on_its_neighbours():
    alone, crowd = (Watched(TASKS["vectors"], seeds) for seeds in ([2], [1, 2]))
    for _ in range(3):
        (own, _), (all_, _) = alone.train(), crowd.train()
        assert np.array_equal(own[0], all_[1])


def test_looking_does_not_change_what_is_looked_at():
    watched = Watched(TASKS["vectors"], [1])
    first, _ = watched.train()
    state = torch.get_rng_state()
    assert np.array_equal(observe(watched.trackers), first)
    assert torch.equal(torch.get_rng_state(), state)
