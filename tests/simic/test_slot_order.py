"""Slots come in the order of the run's configuration, whatever dict their reports lie in."""

from dataclasses import replace

import numpy as np
import pytest

from esper.leyline.factored_actions import OP_CULL, OP_GERMINATE, ActionSpace
from esper.leyline.slots import SlotConfig
from esper.leyline.stages import SeedStage
from esper.runtime.population import Population
from esper.tamiyo.masks import MaskSeedInfo, compute_action_masks
from esper.tamiyo.observation import feature_names, signals_to_features
from simic.growths import MLP, POINTS, WAIT, grow
from tamiyo.observed_episodes import epoch_signals, reports_of, tracker_after

SLOTS = SlotConfig(("r0c0", "r0c2", "r0c10"))
PLANTED = {"stage": SeedStage.BLENDING, "blueprint_id": "norm", "alpha": 0.5, "seed_age_epochs": 4}
ORDERS = [("r0c10", "r0c2", "r0c0"), ("r0c0", "r0c10", "r0c2"), ("r0c2", "r0c0", "r0c10")]


def reordered(by_slot, order):
    return {slot: by_slot[slot] for slot in order}


@pytest.mark.parametrize("order", ORDERS)
def test_features_follow_the_configuration_and_not_the_dict(order):
    reports = reports_of(SLOTS, r0c2=PLANTED)
    tracker = tracker_after(epoch_signals(), slots=SLOTS, reports=reports)
    expected = signals_to_features(tracker.tracked, reports, SLOTS, 1.0)
    shuffled = reordered(reports, order)
    assert np.array_equal(signals_to_features(tracker.tracked, shuffled, SLOTS, 1.0), expected)
    seen = dict(zip(feature_names(SLOTS), expected.tolist(), strict=True))
    assert [seen[f"{slot}.occupied"] for slot in SLOTS.slot_ids] == [0.0, 1.0, 0.0]
    assert [seen[f"{slot}.seed_age"] > 0 for slot in SLOTS.slot_ids] == [False, True, False]
    later = tracker_after(epoch_signals(), slots=SLOTS, reports=shuffled)
    again = signals_to_features(later.tracked, later.reports, SLOTS, 1.0)
    assert np.array_equal(again, expected)


@pytest.mark.parametrize("order", ORDERS)
def test_masks_follow_the_configuration_and_not_the_dict(order):
    states = dict.fromkeys(order) | {"r0c2": MaskSeedInfo(SeedStage.BLENDING, 1)}
    for space in (None, ActionSpace(SLOTS)):
        masks = compute_action_masks(states, 1, None, space=space)
        assert masks["slot"][OP_CULL].tolist() == [False, True, False]
        assert masks["slot"][OP_GERMINATE].tolist() == [True, False, True]
        assert masks["blueprint"][:, 1:].any(axis=1).tolist() == [True, False, True]


def test_an_environment_shows_slots_in_the_same_order_whatever_a_model_reports_first(
    tmp_path, monkeypatch
):
    look = Population.views

    def views_backwards(population):
        views = look(population)
        return [
            replace(view, reports=reordered(view.reports, reversed(list(view.reports))))
            for view in views
        ]

    lived = []
    for views in (look, views_backwards):
        monkeypatch.setattr(Population, "views", views)
        env = grow(POINTS, 1, tmp_path)
        env.reset(seed=0)
        for action in ((OP_GERMINATE, 1, MLP, 0), WAIT, WAIT):
            obs, *_, info = env.step([action])
        assert list(info["reports"][0]) == sorted(info["reports"][0], reverse=views is not look)
        lived.append((obs, info["action_mask"]))
    (obs, masks), (obs_backwards, masks_backwards) = lived
    assert np.array_equal(obs, obs_backwards)
    assert masks["slot"][0, OP_CULL].tolist() == [False, True]
    assert all(np.array_equal(masks[head], masks_backwards[head]) for head in masks)
