"""What the network reads of real episodes:

random legal actions on every kind of host, every number about one, absent where it is not known.
"""

from functools import cache

import numpy as np
import pytest
import torch

from cases import with_slow
from esper.tamiyo.readings import FURTHEST, layout_for, observe
from tamiyo.observed_episodes import TASKS, RandomPolicy, Watched


@cache
def episodes(task):
    """Observations of two whole episodes under random legal actions, [epochs x hosts, F], and their
    layout.
    """
    watched = Watched(TASKS[task], [1, 2])
    rows = [row for row, _, _ in watched.live(RandomPolicy(7), watched.task.epochs)]
    return np.concatenate(rows), layout_for(watched.population.views()[0])


@pytest.mark.parametrize("task", with_slow(TASKS, {"texts"}))
def test_in_real_episodes_no_number_leaves_minus_five_to_five_and_most_are_about_one(task):
    rows, layout = episodes(task)
    assert rows.shape[1] == layout.width == len(layout.names)
    assert np.isfinite(rows).all()
    assert np.abs(rows).max() <= FURTHEST
    typical = np.sqrt(np.square(rows).mean(0))
    assert typical.max() <= 3, layout.names[int(typical.argmax())]
    assert 0.2 <= np.sqrt(np.square(rows).mean()) <= 1.0
    assert np.quantile(np.abs(rows), 0.95) <= 2


@pytest.mark.parametrize("task", TASKS)
def test_in_real_episodes_every_slot_is_seen_empty_and_taken_measured_and_not(task):
    rows, layout = episodes(task)
    for slot in range(layout.num_slots):
        column = {
            name: rows[:, layout.names.index(f"slot{slot}.{name}")] for name in layout.slot.names
        }
        assert set(column["dormant"]) == {0.0, 1.0}
        assert set(column["has_contribution"]) == {0.0, 1.0}
        is_empty = column["seed_age"] == 0
        for name in ("alpha", "relative_size", "gradient_ratio"):
            assert not column[name][is_empty & (column["blending"] == 0)].any(), name
        assert (column["has_score_ratio"] == 1).all(), "a population measures every slot"
        for name in layout.slot.optional:
            assert not column[name][column[f"has_{name}"] == 0].any(), name


def test_in_real_episodes_the_share_left_runs_to_zero_and_the_rate_falls_behind_it():
    rows, layout = episodes("images")
    left, rate = (rows[0::2, layout.names.index(f"host.{name}")] for name in ("share_left", "rate"))
    assert left == pytest.approx(1 - np.arange(1, 13) / 12, abs=1e-6)
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
    assert np.array_equal(observe(watched.sights()), first)
    assert torch.equal(torch.get_rng_state(), state)
