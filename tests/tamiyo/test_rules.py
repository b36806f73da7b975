"""Rules of thumb and controls:

what they choose from given masks and reports, and how ties are broken.
"""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import esper
from esper.episodes import facts_of as known_facts
from esper.kasmina.blueprints import BlueprintCost
from esper.kasmina.hosts import build_cnn_host, build_transformer_host
from esper.kasmina.model import MorphogeneticModel
from esper.leyline.errors import SettingError, UnknownNameError
from esper.leyline.factored_actions import OP_CULL, OP_FOSSILIZE, OP_GERMINATE
from esper.leyline.reports import SeedMetrics, SeedStateReport
from esper.leyline.stages import SeedStage
from esper.tamiyo.masks import compute_action_masks
from esper.tamiyo.policies import RulePolicy
from esper.tamiyo.policy_names import make_policy
from esper.tamiyo.rules import (
    RULES,
    Heuristic,
    HostFacts,
    Never,
    Random,
    Schedule,
    Sham,
)
from esper.tamiyo.scripts import ScriptedOp, script_of
from esper.tamiyo.signals import Signals
from esper.telemetry.events import ActionTaken, GrowthHint, StageChanged

BLUEPRINTS = ("conv_light", "norm", "conv_small", "sham")
WAIT = (0, 0, 0, 0)


def facts_of(horizon=None, **limits):
    host = build_cnn_host(blocks=3, base_channels=4, in_channels=1, image_size=8, classes=3)
    model = MorphogeneticModel(host, blueprints=BLUEPRINTS, **limits)
    return HostFacts(model.space, model.costs, model.host_params, model.budget, horizon)


FACTS = facts_of()


@pytest.fixture
def facts():
    return FACTS


def report(
    slot, stage=SeedStage.DORMANT, *, age=3, epochs=2, mean=None, error=0.1, fossils=0, params=0
):
    metrics = SeedMetrics(
        mean,
        None if mean is None else error,
        seed_param_count=params,
        host_param_count=1000,
    )
    return SeedStateReport(slot, stage, epochs, age, fossil_count=fossils, metrics=metrics)


def reports_of(**given):
    slots = {slot: report(slot) for slot in ("r0c0", "r0c1", "r0c2")}
    return {**slots, **{slot: report(slot, **options) for slot, options in given.items()}}


def masks_for(facts, reports):
    return compute_action_masks(reports, 0, None, space=facts.space, costs=facts.costs)


def choose(rule, facts, reports=None):
    reports = reports or reports_of()
    return rule.choose(masks_for(facts, reports), reports, {"epoch": 1, "host": 0}, Signals())[0]


def choices_of(rule, facts, epochs, reports=None):
    """The choices of one host over many epochs in which the slots never change."""
    reports = reports or reports_of()
    masks = {head: mask[None] for head, mask in masks_for(facts, reports).items()}
    policy, memory, choices = RulePolicy(rule), None, []
    for _ in range(epochs):
        actions, memory = policy.decide(None, masks, [reports], memory, [Signals()])
        choices.append(tuple(actions[0].tolist()))
    return choices


# -- never, schedule, random -----------------------------------------------------------------------


def test_never_waits_whatever_is_possible(facts):
    assert choices_of(Never(), facts, 30) == [WAIT] * 30


def test_the_schedule_plants_at_its_epochs_and_at_no_other(facts):
    choices = choices_of(Schedule(facts, epochs=(2, 5)), facts, 8)
    assert [epoch for epoch, choice in enumerate(choices) if choice != WAIT] == [2, 5]


def test_the_schedule_takes_slots_in_turn_and_the_first_blueprint_that_fits(facts):
    planted = [c for c in choices_of(Schedule(facts, epochs=range(5)), facts, 5) if c != WAIT]
    assert planted == [(OP_GERMINATE, slot, 1, 0) for slot in (0, 1, 2, 0, 1)]


def test_the_schedule_passes_over_a_slot_that_is_taken(facts):
    reports = reports_of(r0c1={"stage": SeedStage.BLENDING})
    planted = choices_of(Schedule(facts, epochs=range(3)), facts, 3, reports)
    assert [slot for _, slot, *_ in planted] == [0, 2, 0]


def test_the_schedule_plants_the_blueprint_it_was_told(facts):
    assert choose(Schedule(facts, blueprint_id="norm"), facts)[2] == 2


def test_a_schedule_of_an_unknown_blueprint_is_refused(facts):
    with pytest.raises(UnknownNameError, match=r"'nrom'.*'norm'"):
        Schedule(facts, blueprint_id="nrom")


def test_a_schedule_of_a_blueprint_that_the_budget_never_has_room_for_is_refused(facts):
    least = min(cost for (_, name, _), cost in facts.costs.items() if name == "conv_light")
    enough = facts.host_params + least
    with pytest.raises(SettingError, match=rf"conv_light.* {least} .* at least {enough:,}"):
        Schedule(replace(facts, budget=enough - 1), blueprint_id="conv_light")
    assert choose(Schedule(replace(facts, budget=enough), blueprint_id="conv_light"), facts)[2] == 1


def test_random_plants_at_the_schedules_times(facts):
    choices = choices_of(Random(facts, epochs=(1, 4)), facts, 6)
    assert [epoch for epoch, choice in enumerate(choices) if choice != WAIT] == [1, 4]


def test_random_draws_every_legal_place_and_nothing_else(facts):
    reports = reports_of(r0c1={"stage": SeedStage.BLENDING})
    drawn = {choose(Random(facts, seed=seed), facts, reports) for seed in range(300)}
    assert {slot for _, slot, *_ in drawn} == {0, 2}
    assert {blueprint for _, _, blueprint, _ in drawn} == {1, 2, 3, 4}
    assert {blend for *_, blend in drawn} == {0, 1, 2}


def test_random_waits_where_nothing_can_be_planted(facts):
    full = {slot: {"stage": SeedStage.EMBARGOED} for slot in ("r0c0", "r0c1", "r0c2")}
    assert choose(Random(facts), facts, reports_of(**full)) == WAIT


def test_random_is_the_same_twice(facts):
    runs = [choices_of(Random(facts, epochs=range(9), seed=4), facts, 9) for _ in range(2)]
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 3


def test_a_hosts_draws_do_not_depend_on_its_neighbours(facts):
    reports = reports_of()
    masks = masks_for(facts, reports)
    policy = RulePolicy(Random(facts))
    alone, crowd = (
        policy.decide(
            None,
            {head: np.stack([mask] * n) for head, mask in masks.items()},
            [reports] * n,
            [{"epoch": 1, "host": h} for h in range(n)],
            [Signals()] * n,
        )[0]
        for n in (1, 5)
    )
    assert alone[0].tolist() == crowd[0].tolist()
    assert len({tuple(row) for row in crowd.tolist()}) > 1


@pytest.mark.parametrize("name", sorted(RULES))
def test_what_a_rule_remembers_fits_into_json(facts, name):
    masks = {head: mask[None] for head, mask in masks_for(facts, reports_of()).items()}
    policy, memory = make_policy(name, facts), None
    for _ in range(4):
        _, memory = policy.decide(None, masks, [reports_of()], memory, [Signals()])
    assert json.loads(json.dumps(memory)) == memory


def test_an_unknown_policy_shows_the_nearest(facts):
    with pytest.raises(UnknownNameError, match=r"'randon'.*'random'"):
        make_policy("randon", facts)


def test_a_policy_without_prices_is_refused(facts):
    with pytest.raises(SettingError, match="price list"):
        make_policy("never", HostFacts(facts.space, {}, 10))


# -- heuristic -------------------------------------------------------------------------------------


def with_work(facts, **work):
    """The facts with FLOPs by blueprint, the same in every slot; what is not named computes
    nothing.
    """
    own = {
        (name, gated): BlueprintCost(1, work.get(name, 0))
        for _, name, _ in facts.costs
        for gated in (False, True)
    }
    return replace(facts, prices=dict.fromkeys(facts.space.slots.slot_ids, own))


def test_of_equal_seeds_the_heuristic_plants_in_the_later_slot(facts):
    same = replace(facts, costs=dict.fromkeys(facts.costs, 50), budget=100_000)
    assert choose(Heuristic(same), same)[:2] == (OP_GERMINATE, 2)


def test_of_equal_work_the_heuristic_plants_the_larger_seed():
    facts = with_work(facts_of(budget=100_000))
    slot, blueprint = choose(Heuristic(facts), facts)[1:3]
    assert facts.cheapest_blend(slot, blueprint).price == max(
        cost
        for (_, name, blend), cost in facts.costs.items()
        if name != "sham" and blend == "linear"
    )


def test_the_heuristic_plants_what_computes_most_not_what_is_largest():
    facts = with_work(facts_of(budget=100_000), norm=9, conv_light=5)
    reports = reports_of(r0c0={"fossils": 1}, r0c1={"fossils": 1}, r0c2={"fossils": 1})
    assert facts.space.blueprint_ids[choose(Heuristic(facts), facts, reports)[2]] == "norm"


def test_a_slots_first_seed_mixes_positions_even_if_another_computes_more():
    facts = with_work(facts_of(budget=100_000), norm=9, conv_light=5)
    assert facts.space.blueprint_ids[choose(Heuristic(facts), facts)[2]] == "conv_light"


def test_in_a_text_attention_comes_before_an_mlp_and_a_copy_before_both():
    for names, expected in {
        ("norm", "mlp", "attention"): ["attention", "attention", "mlp", "mlp"],
        ("norm", "mlp"): ["mlp", "mlp", "mlp", "mlp"],
        ("norm", "mlp", "attention", "copy"): ["copy", "copy", "mlp", "mlp"],
    }.items():
        host = build_transformer_host(vocabulary=8, width=8, layers=2, context=4, slots=2)
        facts, taken = (
            known_facts(MorphogeneticModel(host, blueprints=names, budget=100_000), None),
            [],
        )
        for fossils in ((0, 0), (0, 1), (1, 1), (1, 2)):
            slots = zip(("r0c0", "r0c1"), fossils, strict=True)
            reports = {
                slot: replace(report(slot, fossils=count), kind="sequence") for slot, count in slots
            }
            taken.append(facts.space.blueprint_ids[choose(Heuristic(facts), facts, reports)[2]])
        assert taken == expected


def test_a_vector_has_no_positions_so_there_an_mlp_comes_before_a_copy():
    for names, expected in {("mlp", "copy"): "mlp", ("copy",): "copy"}.items():
        host = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        model = esper.grow(
            host, slots=["0"], example=torch.zeros(2, 8), blueprints=names, budget=20.0
        ).model
        facts = known_facts(model, None)
        assert (
            facts.space.blueprint_ids[choose(Heuristic(facts), facts, model.view().reports)[2]]
            == expected
        )


def test_the_heuristic_reads_the_works_of_a_real_network():
    model = MorphogeneticModel(build_cnn_host(), budget=20_000)
    facts = known_facts(model, None)
    slot, blueprint = choose(Heuristic(facts), facts, model.get_slot_reports())[1:3]
    works = {
        (s, b): facts.work(s, facts.space.blueprint_index(b))
        for s in range(3)
        for b in ("conv_heavy", "norm")
    }
    assert (slot, facts.space.blueprint_ids[blueprint]) == (1, "conv_heavy")
    assert works[1, "conv_heavy"] == works[2, "conv_heavy"] > works[2, "norm"]


def test_the_heuristic_prefers_the_slot_with_fewer_seeds_so_far(facts):
    reports = reports_of(r0c2={"fossils": 1}, r0c1={"fossils": 1})
    assert choose(Heuristic(facts), facts, reports)[1] == 0


def price(facts, slot, blueprint):
    return facts.cheapest_blend(slot, facts.space.blueprint_index(blueprint)).price


@pytest.mark.parametrize("name", ["schedule:epochs=99", "random:epochs=1+6", "schedule:epochs=6"])
def test_epochs_at_which_nothing_is_decided_any_more_are_refused(name):
    number = re.findall(r"\d+", name)[-1]
    with pytest.raises(SettingError, match=rf"^epochs has {number}, .* are 0 to 5\. Name earlier"):
        make_policy(name, facts_of(6))
    assert make_policy(name, facts_of(100)).rule.epochs[-1] == int(number)
    assert make_policy(name, FACTS).rule.epochs[-1] == int(number)


def test_the_usual_epochs_may_be_more_than_a_short_episode_has():
    assert make_policy("schedule", facts_of(2)).rule.epochs == (1, 2, 3)
    assert make_policy("random:epochs=1+5", facts_of(6)).rule.epochs == (1, 5)


def test_the_heuristic_plants_within_its_share_or_not_at_all():
    facts = facts_of(budget=100_000)
    costs = [
        price(facts, slot, name)
        for slot in range(3)
        for name in ("conv_light", "conv_small", "norm")
    ]
    room = facts.most_room
    for share, expected in ((1.0, max(costs)), (min(costs) / room, min(costs))):
        chosen = choose(Heuristic(facts, share=share), facts)
        assert facts.cheapest_blend(*chosen[1:3]).price == expected
    # what was planted has left too little: a share that was given is a limit
    full = reports_of(r0c0={"stage": SeedStage.BLENDING, "params": room - 1000})
    assert choose(Heuristic(facts, share=min(costs) / room), facts, full) == WAIT
    assert choose(Heuristic(facts), facts, full) != WAIT


def test_a_share_that_is_too_small_for_every_seed_is_refused():
    facts = facts_of(budget=5_000)
    least = min(price(facts, slot, "norm") for slot in range(3))
    with pytest.raises(
        SettingError, match=rf"^share of heuristic is 1e-05, .* smallest seed has {least}\. Give"
    ):
        make_policy("heuristic:share=0.00001", facts)
    assert Heuristic(facts, share=least / facts.most_room)


@pytest.mark.parametrize("live", [0, 40])
def test_the_heuristics_share_is_three_quarters_of_the_room_that_is_left(facts, live):
    small = price(facts, 2, "conv_small")
    least = 1000 + live + math.ceil(small / 0.75)
    reports = reports_of(
        r0c0={"stage": SeedStage.BLENDING, "params": live},
        r0c1={"stage": SeedStage.BLENDING, "params": 0},
    )
    limits = [HostFacts(facts.space, facts.costs, 1000, budget) for budget in (least, least - 1)]
    chosen = [own.space.blueprint_ids[choose(Heuristic(own), own, reports)[2]] for own in limits]
    assert chosen == ["conv_small", "norm"]


def test_the_heuristic_never_plants_a_sham(facts):
    only_sham = {key: cost for key, cost in facts.costs.items() if key[1] == "sham"}
    reports = reports_of()
    masks = compute_action_masks(reports, 0, None, space=facts.space, costs=only_sham)
    assert Heuristic(facts).choose(masks, reports, {"epoch": 0, "host": 0}, Signals())[0] == WAIT


def test_the_heuristic_copies_a_place_once_and_then_plants_something_else():
    host = build_transformer_host(vocabulary=8, width=8, layers=2, context=4, slots=2)
    model = MorphogeneticModel(host, blueprints=("norm", "copy"), budget=100_000)
    facts, taken = known_facts(model, None), []
    for fossils in ((0, 0), (0, 1), (1, 1)):
        reports = {
            slot: report(slot, fossils=count)
            for slot, count in zip(("r0c0", "r0c1"), fossils, strict=True)
        }
        _, slot, blueprint, _ = choose(Heuristic(facts), facts, reports)
        taken.append((slot, facts.space.blueprint_ids[blueprint]))
    assert taken == [(1, "copy"), (0, "copy"), (1, "norm")]
    assert (
        facts.space.blueprint_ids[choose(Heuristic(facts, copies=2), facts, reports)[2]] == "copy"
    )


def test_in_a_known_episode_only_the_first_part_is_for_planting():
    facts = facts_of(horizon=10)
    choices = choices_of(Heuristic(facts, planting_part=0.4), facts, 10)
    assert [choice != WAIT for choice in choices] == [True] * 4 + [False] * 6


def planted_under(signals, **settings):
    """Whether the heuristic plants, decision by decision, in a network that never changes."""
    facts = facts_of()
    masks = {head: mask[None] for head, mask in masks_for(facts, reports_of()).items()}
    policy, memory, choices = RulePolicy(Heuristic(facts, **settings)), None, []
    for of_epoch in signals:
        actions, memory = policy.decide(None, masks, [reports_of()], memory, [of_epoch])
        memory = json.loads(json.dumps(memory))
        choices.append(tuple(actions[0].tolist()) != WAIT)
    return choices


def signals_of(train, held_out):
    pairs = zip(train, held_out, strict=True)
    return [Signals(train_loss=t, held_out_loss=h, guessing=math.log(10)) for t, h in pairs]


MEMORISING = signals_of([2.2, 1.9, 1.6, 1.3, 1.0, 0.7], [2.3, 2.28, 2.3, 2.2, 2.3, 2.4])


def test_the_heuristic_waits_while_data_are_missing_unless_it_is_told_not_to():
    assert planted_under(MEMORISING) == [False] * 6
    assert planted_under(MEMORISING, held_out_part=0) == [True] * 6


@pytest.mark.parametrize(("part", "first"), [(0.1, 2), (0.4, 3), (0.8, None)])
def test_the_heuristic_plants_once_the_held_out_loss_has_followed_by_its_part(part, first):
    signals = signals_of([2.2, 1.9, 1.6, 1.3, 1.0], [2.3, 2.25, 1.95, 1.6, 1.3])
    planted = planted_under(signals, held_out_part=part)
    assert planted == [first is not None and epoch >= first for epoch in range(5)]


def test_what_was_read_before_counts_though_nothing_could_be_planted_then(facts):
    full = reports_of(**{slot: {"stage": SeedStage.EMBARGOED} for slot in reports_of()})
    memory = {"epoch": 0, "host": 0}
    for signals in MEMORISING[:4]:
        choice, memory = Heuristic(facts).choose(masks_for(facts, full), full, memory, signals)
        assert choice == WAIT
    # this epoch alone would not hold it back
    alone = Signals(train_loss=1.2, held_out_loss=1.5, guessing=math.log(10))
    masks = masks_for(facts, reports_of())
    assert Heuristic(facts).choose(masks, reports_of(), memory, alone)[0] == WAIT
    fresh = {"epoch": 4, "host": 0}
    assert Heuristic(facts).choose(masks, reports_of(), fresh, alone)[0] != WAIT


@pytest.mark.parametrize("unknown", ["train_loss", "held_out_loss"])
def test_a_loss_that_is_not_known_holds_nothing_back(unknown):
    signals = [replace(of_epoch, **{unknown: None}) for of_epoch in MEMORISING]
    assert planted_under(signals) == [True] * 6


# -- no rule ends a seed ---------------------------------------------------------------------------

evidence = st.tuples(st.sampled_from([None, -0.3, 0.0, 0.4]), st.sampled_from([0.0, 0.2]))
seeds = st.tuples(st.sampled_from(SeedStage), evidence)


@pytest.mark.parametrize("name", sorted({*RULES} - {"sham"}))
@given(drawn=st.tuples(seeds, seeds, seeds))
def test_whatever_the_evidence_a_rule_plants_or_waits(name, drawn):
    lived = zip(("r0c0", "r0c1", "r0c2"), drawn, strict=True)
    reports = reports_of(
        **{slot: {"stage": stage, "mean": m, "error": e} for slot, (stage, (m, e)) in lived}
    )
    assert {
        choice[0] for choice in choices_of(make_policy(name, FACTS).rule, FACTS, 4, reports)
    } <= {0, OP_GERMINATE}


# -- sham ------------------------------------------------------------------------------------------


def test_sham_plants_nothing_but_shams_at_the_scripts_times(facts):
    choices = choices_of(
        Sham(facts, [ScriptedOp(1, OP_GERMINATE, 2), ScriptedOp(3, OP_GERMINATE, 0)]), facts, 5
    )
    sham = facts.space.blueprint_index("sham")
    assert choices == [WAIT, (OP_GERMINATE, 2, sham, 0), WAIT, (OP_GERMINATE, 0, sham, 0), WAIT]


def test_sham_passes_over_what_has_ended_by_itself(facts):
    assert choices_of(
        Sham(facts, [ScriptedOp(0, OP_CULL, 1), ScriptedOp(0, OP_GERMINATE, 1)]), facts, 2
    )[0][:2] == (
        OP_GERMINATE,
        1,
    )


def test_sham_without_its_blueprint_is_refused():
    host = build_cnn_host(blocks=1, base_channels=4, in_channels=1, image_size=8, classes=3)
    model = MorphogeneticModel(host, blueprints=["norm"])
    with pytest.raises(UnknownNameError, match="blueprint 'sham'"):
        Sham(HostFacts(model.space, model.costs, model.host_params), [])


def test_a_script_holds_an_arms_ops_and_the_ends_that_came_by_themselves(facts):
    events = [
        ActionTaken(0, 1, "GERMINATE", "r0c1", "norm", "linear"),
        StageChanged(0, 1, "r0c1", "DORMANT", "GERMINATED", "norm", 0.0),
        StageChanged(0, 1, "r0c1", "GERMINATED", "BLENDING", "norm", 1.0),
        GrowthHint(0, 1, "x"),
        StageChanged(0, 4, "r0c1", "PROBATIONARY", "FOSSILIZED", "norm", 1.0),
        ActionTaken(0, 4, "GERMINATE", "r0c0", "norm", "linear"),
        StageChanged(0, 6, "r0c0", "PROBATIONARY", "CULLED", "norm", 0.0),
    ]
    assert script_of(events, facts.space) == [
        (0, OP_GERMINATE, 1),
        (3, OP_FOSSILIZE, 1),
        (3, OP_GERMINATE, 0),
        (5, OP_CULL, 0),
    ]
