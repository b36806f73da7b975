"""What a growth policy reads:

numbers that mean the same on every host and in every loop, and flags where one is not known.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from esper.kasmina.blueprints import BlueprintCost
from esper.leyline.errors import SettingError
from esper.leyline.factored_actions import ActionSpace
from esper.leyline.legality import GrowthView
from esper.leyline.slots import SlotConfig
from esper.leyline.stages import SeedStage
from esper.tamiyo.layout import ObservationLayout
from esper.tamiyo.readings import (
    FURTHEST,
    GROUPS,
    Sight,
    draw_lacking,
    layout_for,
    observe,
    read_host,
    without,
)
from esper.tamiyo.rules import HostFacts
from tamiyo.observed_episodes import epoch_signals, reports_of, tracker_after

BLUEPRINTS = ("conv_light", "norm", "copy", "copy_zero")
PRICES = {"conv_light": 300, "norm": 20, "copy": 600, "copy_zero": 600}
WORK = {"conv_light": 9000, "norm": 1000, "copy": 9000, "copy_zero": 9000}
HOST = 1000
ON_PROBATION = {
    "stage": SeedStage.PROBATIONARY,
    "blueprint_id": "conv_light",
    "alpha": 1.0,
    "seed_age_epochs": 3,
    "seed_param_count": 300,
    "host_param_count": HOST,
    "counterfactual_contribution": 0.03,
    "counterfactual_standard_error": 0.01,
}


def sight_of(
    *epochs,
    slots=("r0c0", "r0c1"),
    guessing=1.0,
    budget=4000,
    blueprints=BLUEPRINTS,
    scale=1.0,
    **given,
):
    """What is read of a host after these epochs; slots are as the reports say."""
    config = SlotConfig(slots)
    space = ActionSpace.of(config, blueprints)
    costs = {}
    prices = {}
    for slot in slots:
        prices[slot] = {}
        for name in blueprints:
            prices[slot][name, False] = BlueprintCost(params=PRICES[name], flops=WORK[name])
            for blend in space.blends:
                costs[slot, name, blend] = int(scale * PRICES[name]) + 5 * (blend == "gated")
    host = int(scale * HOST)
    facts = HostFacts(space, costs, host, budget, prices=prices)
    tracker = tracker_after(*(epochs or [epoch_signals()]), slots=config)
    view = GrowthView(
        space=space,
        reports=reports_of(config, **given),
        seeds_used=0,
        max_seeds=None,
        params_used=host,
        budget=budget,
        costs=costs,
        ramp=1,
    )
    return Sight(tracker.tracked, view, facts, guessing)


def read(sight, lacking=(), layout=None):
    """The numbers by name."""
    layout = layout or layout_for(sight.view)
    row = read_host(without(sight, lacking), layout)
    return dict(zip(layout.names, row.tolist(), strict=True))


def falling(*losses, train=None):
    train = train or losses
    return [
        epoch_signals(loss, train_loss=of_train)
        for loss, of_train in zip(losses, train, strict=True)
    ]


# -- losses ----------------------------------------------------------------------------------------


def test_losses_are_shares_of_the_fall_from_guessing_or_from_the_first_reading():
    sight = sight_of(*falling(0.9, 0.5, 0.6), guessing=1.0)
    told = read(sight)
    assert told["host.standing"] == pytest.approx(math.asinh(0.4 / 0.5))
    assert told["host.standing_1_ago"] == pytest.approx(math.asinh(1))
    assert told["host.standing_2_ago"] == pytest.approx(math.asinh(0.1 / 0.5))
    assert (told["host.has_standing_3_ago"], told["host.standing_3_ago"]) == (0, 0)
    unknown = read(replace(sight, guessing=None))
    assert unknown["host.guessing_known"] == 0
    assert unknown["host.standing"] == pytest.approx(math.asinh(0.3 / 0.4))
    assert unknown["host.standing_2_ago"] == 0


@pytest.mark.parametrize("factor", [0.01, 1, 300])
def test_no_number_depends_on_the_unit_of_losses(factor):
    losses, train = (0.9, 0.7, 0.62, 0.6), (0.8, 0.6, 0.5, 0.45)
    plain = sight_of(*falling(*losses, train=train), r0c0=ON_PROBATION)
    told = read(plain)
    gain = {
        name: factor * ON_PROBATION[name]
        for name in ("counterfactual_contribution", "counterfactual_standard_error")
    }
    scaled = sight_of(
        *falling(*(factor * loss for loss in losses), train=[factor * loss for loss in train]),
        guessing=factor,
        r0c0={**ON_PROBATION, **gain},
    )
    assert read(scaled) == pytest.approx(told, abs=1e-5)


def test_no_number_depends_on_the_size_of_the_host():
    small, large = (sight_of(scale=scale, budget=None, blueprints=("norm",)) for scale in (1, 1000))
    assert read(small) == pytest.approx(read(large), abs=1e-3)


def test_slopes_gaps_and_contributions_are_in_their_errors_and_of_the_fall():
    told = read(
        sight_of(*falling(0.9, 0.8, 0.7, 0.5, train=(0.8, 0.6, 0.5, 0.25)), r0c0=ON_PROBATION)
    )
    assert told["host.slope"] == pytest.approx(math.asinh(10 * -0.13 / 0.5))
    assert told["host.slope_in_errors"] < -2
    assert told["host.gap"] == pytest.approx(math.asinh(0.25 / 0.5))
    assert told["host.gap_share"] == pytest.approx(2 * 0.25 / 0.75)
    assert told["slot0.contribution_in_errors"] == pytest.approx(math.asinh(3))
    assert told["slot0.contribution"] == pytest.approx(math.asinh(10 * 0.03 / 0.5))
    assert told["slot1.has_contribution"] == 0


def test_a_flat_host_divides_by_no_noise():
    told = read(sight_of(*falling(0.5, 0.5 - 1e-9, 0.5), guessing=None))
    assert abs(told["host.standing"]) < 1e-6
    assert all(math.isfinite(value) and abs(value) <= FURTHEST for value in told.values())


# -- slots, blueprints and prices ------------------------------------------------------------------


def test_scores_are_log_ratios_to_the_slots_mean():
    told = read(sight_of(r0c0={"greedy_score": 4.0}, r0c1={"greedy_score": 1.0}))
    scores = [told[f"slot{slot}.score_ratio"] for slot in range(2)]
    assert scores == pytest.approx([math.log(2), -math.log(2)])


def test_prices_are_of_the_host_and_of_the_room_left():
    told = read(sight_of())
    assert told["slot0.cheapest"] == pytest.approx(math.log1p(0.02))
    assert told["slot0.cheapest_of_room"] == pytest.approx(math.asinh(20 / 3000))
    assert told["slot1.blueprint1.size"] == pytest.approx(math.log1p(0.3))
    assert told["slot1.blueprint1.work"] > told["slot1.blueprint2.work"]
    assert [told[f"slot0.blueprint{number}.fits"] for number in range(5)] == [0, 1, 1, 1, 1]
    without_budget = read(sight_of(budget=None))
    assert without_budget["slot0.has_cheapest_of_room"] == 0
    assert without_budget["host.has_room"] == 0


def test_blueprints_are_known_by_how_they_are_described():
    told = read(sight_of())

    def of(number):
        return {name: told[f"blueprint{number}.{name}"] for name in ("spatial", "copies", "none")}

    assert of(0) == {"spatial": 0, "copies": 0, "none": 1}
    assert of(1) == {"spatial": 1, "copies": 0, "none": 0}
    assert of(3) == {"spatial": 0, "copies": 1, "none": 0}
    begins = [told[f"blueprint{number}.begins_as_identity"] for number in (1, 3, 4)]
    assert begins == [1, 0, 1]


def test_stages_places_and_kinds_are_told():
    told = read(sight_of(slots=("r0c0", "r0c1", "r0c2"), r0c1=ON_PROBATION))
    assert [told[f"slot{slot}.on_probation"] for slot in range(3)] == [0, 1, 0]
    assert [told[f"slot{slot}.place"] for slot in range(3)] == [0, 0.5, 1]
    assert (told["slot0.first"], told["slot2.last"], told["slot1.image"]) == (1, 1, 1)


# -- what is absent --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "absent"),
    [
        ("guessing", []),
        ("train_loss", ["host.train_learnt", "host.gap", "host.gap_share", "host.train_slope"]),
        ("share", ["host.share_left"]),
        ("rate", ["host.rate"]),
        ("loss", ["host.standing", "host.slope", "host.learnt", "host.gap", "slot0.contribution"]),
        ("score", ["host.score", "host.score_slope_in_errors"]),
        ("telemetry", ["slot0.gradient_ratio", "slot0.score_ratio", "slot1.score_ratio"]),
    ],
)
def test_what_a_loop_lacks_is_zero_with_its_flag_and_all_else_stays(group, absent):
    measured = {**ON_PROBATION, "seed_gradient_norm_ratio": 2.0, "greedy_score": 1.5}
    sight = sight_of(*falling(0.9, 0.8, 0.6, 0.65), r0c0=measured, r0c1={"greedy_score": 1.0})
    whole, part = read(sight), read(sight, {group})
    flags = [name.replace(".", ".has_") for name in absent]
    assert all(whole[flag] == 1 for flag in flags)
    assert not any(part[name] for name in (*absent, *flags))
    gone = [name for name in whole if whole[name] == 1 != part[name] and ".has_" in name]
    assert set(flags) <= set(gone)
    if group == "guessing":
        assert part["host.guessing_known"] == 0
    elif group != "loss":
        assert all(
            part[name] == whole[name]
            for name in whole
            if name not in absent and name.replace(".", ".has_") not in flags and name not in flags
        )


def test_groups_are_drawn_by_chance_and_a_loop_has_losses_or_scores():
    assert draw_lacking(0.0, np.random.default_rng(0)) == frozenset()
    assert draw_lacking(1.0, np.random.default_rng(0)) == set(GROUPS) - {"loss"}
    draws = [draw_lacking(0.3, np.random.default_rng(number)) for number in range(400)]
    for group in GROUPS:
        assert 60 < sum(group in drawn for drawn in draws) < 180, group
    assert not any({"loss", "score"} <= drawn for drawn in draws)
    with pytest.raises(SettingError, match="'weather'"):
        without(sight_of(), ["weather"])


# -- layouts ---------------------------------------------------------------------------------------


def test_a_larger_layout_holds_the_same_numbers_and_zeros():
    sight = sight_of(r0c1=ON_PROBATION)
    narrow, wide = layout_for(sight.view), ObservationLayout(5, 9)
    small, large = (
        layout.split(torch.as_tensor(read_host(sight, layout))) for layout in (narrow, wide)
    )
    assert torch.equal(small.base, large.base)
    assert torch.equal(small.slots, large.slots[:2])
    assert torch.equal(small.blueprints, large.blueprints[:5])
    assert torch.equal(small.pairs, large.pairs[:2, :5])
    for rest in (large.slots[2:], large.blueprints[5:], large.pairs[2:], large.pairs[:, 5:]):
        assert not rest.any()
    with pytest.raises(SettingError, match="2 slots and 5 blueprints does not fit a layout of 1"):
        read_host(sight, ObservationLayout(1, 5))


def test_hosts_of_different_sizes_share_one_layout():
    sights = [sight_of(), sight_of(slots=("r0c0", "r0c1", "r0c2"))]
    layout = ObservationLayout(3, 5)
    rows = observe(sights, layout)
    assert rows.shape == (2, layout.width)
    assert rows.dtype == np.float32
    assert np.array_equal(rows[0], read_host(sights[0], layout))


def test_names_are_as_many_as_numbers_and_all_different():
    layout = ObservationLayout(3, 4)
    assert len(layout.names) == len(set(layout.names)) == layout.width
    with pytest.raises(SettingError, match="needs 1 slot"):
        ObservationLayout(0, 4)
