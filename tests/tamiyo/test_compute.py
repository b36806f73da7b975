"""The rule that puts compute first: which seed it takes, and what it waits for."""

from dataclasses import replace

import pytest

from esper.kasmina import MorphogeneticModel, build_cnn_host
from esper.leyline import SeedStage
from esper.leyline.factored_actions import OP_GERMINATE
from esper.runtime.ledger import flop_prices
from esper.tamiyo.rules import Compute, HostFacts
from esper.trials.arms import Entry, run_entries
from runtime.episodes import IMAGES
from tamiyo.test_rules import WAIT, choose, masks_for, reports_of

SLOTS = ("r0c0", "r0c1", "r0c2")
SIZES = {"tiny": 10, "big": 300, "bigger": 500, "norm": 8, "attention": 20}
"""Of a host with 1,000 parameters and as many to add: large is from 250 to 600."""


def facts_of(prices=None, flops=None, **limits):
    model = MorphogeneticModel(
        build_cnn_host(blocks=3, base_channels=4, in_channels=1, image_size=8, classes=3),
        blueprints=("conv_light", "conv_small", "conv_heavy", "norm", "attention"),
    )
    ours = dict(zip(("conv_small", "conv_light", "conv_heavy", "norm", "attention"), SIZES, strict=True))
    costs = {(slot, name, blend): (prices or SIZES)[ours[name]] for slot, name, blend in model.costs}
    work = {key: (flops or {}).get(key[:2], 0) for key in costs} if flops else {}
    return HostFacts(model.space, costs, 1000, limits.pop("budget", 2000), limits.pop("horizon", None), flops=work)


def planted(rule, facts, reports=None, memory=None):
    """(slot, blueprint) that it plants, or None."""
    reports = reports or reports_of()
    (op, slot, blueprint, _), after = rule.choose(masks_for(facts, reports), reports, memory or {"epoch": 0, "host": 0})
    place = (SLOTS[slot], facts.space.blueprint_ids[blueprint]) if op == OP_GERMINATE else None
    return place, after


def test_most_flops_within_the_bounds_win_whatever_the_parameters():
    facts = facts_of(flops={("r0c1", "conv_light"): 9, ("r0c2", "conv_heavy"): 7, ("r0c0", "conv_small"): 99})
    assert planted(Compute(facts), facts)[0] == ("r0c1", "conv_light")


def test_equal_flops_go_to_more_parameters_and_then_to_the_first_place():
    facts = facts_of(flops=dict.fromkeys([("r0c2", "conv_light"), ("r0c1", "conv_heavy"), ("r0c2", "conv_heavy")], 5))
    assert planted(Compute(facts), facts)[0] == ("r0c1", "conv_heavy")


def test_where_nobody_counted_flops_parameters_take_their_place():
    facts = facts_of()
    assert planted(Compute(facts), facts)[0] == ("r0c0", "conv_heavy")


@pytest.mark.parametrize(
    ("settings", "budget", "expected"),
    [
        ({"share": 0.4}, 2000, ("r0c0", "conv_light")),
        ({"least": 0.4}, 2000, ("r0c0", "conv_heavy")),
        ({}, 1600, ("r0c0", "conv_light")),
        ({}, 1501, ("r0c0", "conv_light")),
        ({}, 1499, ("r0c0", "attention")),
        ({"least": 0.6}, 2000, ("r0c0", "conv_heavy")),
    ],
    ids=["share", "least", "budget", "just enough", "too little: every size is large", "nothing as large at all"],
)
def test_large_is_between_a_part_of_the_host_and_a_part_of_the_room(settings, budget, expected):
    facts = facts_of(budget=budget)
    assert planted(Compute(facts, **settings), facts)[0] == expected


def test_one_large_seed_at_a_time():
    facts = facts_of()
    for params, expected in ((300, None), (249, ("r0c0", "conv_light"))):
        reports = reports_of(r0c1={"stage": SeedStage.BLENDING, "params": params})
        assert planted(Compute(facts), facts, reports)[0] == expected


def test_when_no_large_one_fits_small_ones_go_to_each_slot_once():
    facts = facts_of(budget=2000)
    reports = {
        slot: replace(report, metrics=replace(report.metrics, host_param_count=1700))
        for slot, report in reports_of().items()
    }
    memory, found = {"epoch": 0, "host": 0}, []
    for _ in range(8):
        place, memory = planted(Compute(facts), facts, reports, memory)
        found.append(place)
    assert found == [(slot, name) for name in ("norm", "attention") for slot in SLOTS] + [None, None]
    chosen = Compute(facts, small=("attention", "norm"))
    assert planted(chosen, facts, reports)[0] == ("r0c0", "attention")


def test_only_the_first_part_of_an_episode_is_for_planting():
    facts = facts_of(horizon=10)
    for part, last in ((0.5, 4), (0.2, 1)):
        rule = Compute(facts, planting_part=part)
        times = [epoch for epoch in range(10) if planted(rule, facts, memory={"epoch": epoch, "host": 0})[0]]
        assert times == list(range(last + 1))


def test_it_waits_where_nothing_can_be_planted():
    facts = facts_of()
    full = {slot: {"stage": SeedStage.EMBARGOED} for slot in SLOTS}
    assert choose(Compute(facts), facts, reports_of(**full)) == WAIT


def test_it_grows_real_hosts_and_keeps_what_it_plants():
    (run,) = run_entries(replace(IMAGES, epochs=8, prunes=False), [Entry("compute", 3, "compute")])
    assert run.result.germinated > 0
    assert run.result.culled == 0
    assert run.result.fossilized == len(run.architecture) > 0


def test_flops_are_those_of_a_seed_at_its_slot():
    model = MorphogeneticModel(
        build_cnn_host(blocks=2, base_channels=4, in_channels=1, image_size=8), blueprints=("conv_small", "norm")
    )
    prices = flop_prices(model)
    assert prices.keys() == model.costs.keys()
    for slot in model.slot_config.slot_ids:
        channels, height, width = model.slot(slot).feature_shape
        assert prices[slot, "conv_small", "linear"] == 2 * channels * channels * height * width
        assert prices[slot, "norm", "linear"] == 0
