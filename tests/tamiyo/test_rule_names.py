"""Rules by name:

settings in the name reach the rule, mistakes are told, and plans wait for hosts that were away.
"""

import re

import numpy as np
import pytest

import esper
from esper.leyline.errors import EsperError
from esper.leyline.factored_actions import OP_GERMINATE
from esper.leyline.stages import SeedStage
from esper.tamiyo.masks import only_waiting
from esper.tamiyo.policies import RulePolicy
from esper.tamiyo.policy_names import (
    File,
    Rule,
    Search,
    Sham,
    build_policy,
    make_policy,
    parse,
    parse_rule,
)
from esper.tamiyo.rules import RULES, Heuristic, Random, Schedule
from esper.tamiyo.signals import Signals
from esper.trials.config import RunConfig
from tamiyo.test_rules import FACTS, WAIT, masks_for, reports_of
from user_models import MLP, random_vectors


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("heuristic", Heuristic(FACTS)),
        ("heuristic:share=0.5", Heuristic(FACTS, share=0.5)),
        ("heuristic:share=0.25:planting_part=1", Heuristic(FACTS, share=0.25, planting_part=1.0)),
        (
            "schedule:epochs=2+5:blueprint_id=norm",
            Schedule(FACTS, epochs=(2, 5), blueprint_id="norm"),
        ),
        ("random:seed=7:epochs=3", Random(FACTS, epochs=(3,), seed=7)),
        (
            "schedule:epochs=0+5:places=r0c1.norm+r0c0.conv_light",
            Schedule(FACTS, epochs=(0, 5), places=("r0c1.norm", "r0c0.conv_light")),
        ),
    ],
)
def test_settings_in_a_name_reach_the_rule(name, rule):
    assert parse(name) == Rule(name)
    assert make_policy(name, FACTS) == RulePolicy(rule)


MISTAKES = {
    "heuristik:share=0.5": "policy 'heuristik:share=0.5'",
    "heuristic:shared=0.5": "heuristic 'shared'.*'share'.*: copies, held_out_part, planting_part, "
    "share.*:KEY=VALUE:KEY=VALUE",
    "heuristic:facts=1": "heuristic 'facts'",
    "heuristic:": "heuristic ''",
    "never:share=1": "never 'share'.* none",
    "heuristic:share": "share of heuristic is ''.*number",
    "heuristic:share=0": "share of heuristic is '0'.* 0",
    "heuristic:share=nan": "share of heuristic is 'nan'",
    "random:seed=1.5": "seed of random is '1.5'.*integer",
    "heuristic:planting_part=1.01": "planting_part of heuristic is '1.01'.* 1",
    "schedule:epochs=": "epochs of schedule is ''.*integer",
    "schedule:epochs=1+-2": r"epochs of schedule is '1\+-2'.* 0",
    "schedule:places=r0c1": "places of schedule is 'r0c1'.*pattern",
    "random:seed=-1": "seed of random is '-1'.* 0",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_name_is_told_with_the_rule(name):
    with pytest.raises(EsperError) as refusal:
        parse_rule(name).check()
    assert re.search(MISTAKES[name], str(refusal.value))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("schedule:epochs=1+2:places=r0c1.norm", "2 epochs .*1 places"),
        ("schedule:epochs=1:places=r0c7.norm", "slot 'r0c7'"),
        ("schedule:epochs=1:places=r0c1.nrom", "blueprint 'nrom'.*'norm'"),
    ],
)
def test_a_plan_that_does_not_fit_the_network_is_refused(name, words):
    with pytest.raises(EsperError) as refusal:
        make_policy(name, FACTS)
    assert re.search(words, str(refusal.value))


PLAN = Schedule(FACTS, epochs=(3, 1, 3), places=("r0c0.norm", "r0c1.conv_light", "r0c0.conv_light"))


def plays(rule, changes):
    """What a rule plants, by epoch, where the slots are as `changes` says from an epoch on."""
    policy, memory, planted, now = RulePolicy(rule), None, {}, {}
    for epoch in range(9):
        now = changes.get(epoch, now)
        reports = reports_of(**now)
        masks = {head: np.stack([mask]) for head, mask in masks_for(FACTS, reports).items()}
        actions, memory = policy.decide(None, masks, [reports], memory, [Signals()])
        op, slot, blueprint, _ = actions[0].tolist()
        planted |= (
            {epoch: f"r0c{slot}.{FACTS.space.blueprint_ids[blueprint]}"}
            if op == OP_GERMINATE
            else {}
        )
    return planted


def test_a_plan_is_followed_in_order_one_planting_at_a_time():
    assert plays(PLAN, {}) == {1: "r0c1.conv_light", 3: "r0c0.norm", 4: "r0c0.conv_light"}


def test_a_plan_waits_until_its_slot_is_open():
    taken = {2: {"r0c0": {"stage": SeedStage.BLENDING}}, 6: {}}
    assert plays(PLAN, taken) == {1: "r0c1.conv_light", 6: "r0c0.norm", 7: "r0c0.conv_light"}


def test_a_plan_that_is_asked_again_has_several_ops_for_one_decision():
    plan, reports = (
        RulePolicy(Schedule(FACTS, epochs=(0, 0), places=("r0c1.norm", "r0c0.norm"))),
        reports_of(),
    )
    masks = {head: np.stack([mask]) for head, mask in masks_for(FACTS, reports).items()}
    first, memory = plan.decide(None, masks, [reports], None, [Signals()])
    second, memory = plan.decide(None, masks, [reports], plan.ask_again(memory), [Signals()])
    third, memory = plan.decide(None, masks, [reports], plan.ask_again(memory), [Signals()])
    assert [actions[0, 1] for actions in (first, second)] == [1, 0]
    assert third[0].tolist() == list(WAIT)
    assert memory[0]["epoch"] == 1


def test_a_slots_queue_does_not_hold_up_another_slot():
    plan = Schedule(FACTS, epochs=(0, 0, 0), places=("r0c0.norm", "r0c0.norm", "r0c1.norm"))
    taken = {1: {"r0c0": {"stage": SeedStage.BLENDING}}, 4: {}}
    assert plays(plan, taken) == {0: "r0c0.norm", 1: "r0c1.norm", 4: "r0c0.norm"}


class Bare:
    """No dataclass, so it takes nothing."""


@pytest.mark.parametrize(
    ("build", "said"), [(Bare, "mine.*facts"), (lambda facts: Bare(), "mine.*choose")]
)
def test_what_cannot_be_a_rule_is_told_in_one_line(monkeypatch, build, said):
    monkeypatch.setitem(RULES, "mine", build)
    with pytest.raises(EsperError, match=said):
        make_policy("mine", FACTS)


def test_a_rule_that_takes_no_signals_is_told_how_to_in_one_line(monkeypatch):
    class Old:
        def choose(self, masks, reports, memory):
            return WAIT, memory

    monkeypatch.setitem(RULES, "mine", lambda facts: Old())
    said = r"Old\.choose\(masks, reports, memory\).*memory, signals\); add the parameters"
    with pytest.raises(EsperError, match=said) as problem:
        make_policy("mine", FACTS)
    assert "\n" not in str(problem.value)


def test_a_policy_of_ones_own_that_takes_no_signals_is_told_how_to_in_one_line():
    class Old:
        def decide(self, observation, masks, reports, memory):
            raise AssertionError("never asked")

    with pytest.raises(EsperError, match=r"Old\.decide\(.*memory\).*memory, signals\); add"):
        build_policy(lambda facts: Old(), FACTS)


@pytest.mark.parametrize("found", [0, WAIT, (WAIT, None)])
def test_a_choice_without_its_memory_is_told_in_one_line(monkeypatch, found):
    class Mine(Heuristic):
        def choose(self, masks, reports, memory, signals):
            return found

    policy = RulePolicy(Mine(FACTS))
    with pytest.raises(EsperError, match=r"Mine\.choose gave .*, memory"):
        policy.decide(
            None,
            {name: mask[None] for name, mask in masks_for(FACTS, reports_of()).items()},
            [reports_of()],
            None,
            [Signals()],
        )


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("never", Rule),
        ("sham", Sham),
        ("search", Search),
        ("search:episodes=100", Search),
        ("runs/first/policy.safetensors", File),
        ("heuristic.safetensors", File),
    ],
)
def test_a_name_stands_for_one_kind_of_policy(text, kind):
    assert type(parse(text)) is kind


def test_only_sham_growth_needs_a_blueprint_of_its_own():
    assert parse("sham").blueprints() == ("sham",)
    for text in ("never", "heuristic:share=0.5", "search", "policy.safetensors"):
        assert parse(text).blueprints() == ()


def test_a_mistake_is_found_before_a_host_is_built(tmp_path):
    with pytest.raises(EsperError, match="heuristic is '0'"):
        RunConfig.of({"policy": "heuristic:share=0", "out": str(tmp_path / "run")})


def test_a_garden_is_loaded_with_the_settings_of_its_policy(tmp_path):
    garden = esper.grow(
        MLP(), slots=["middle"], example=random_vectors(), policy="heuristic:share=0.3"
    )
    garden.save(tmp_path / "garden")
    loaded = esper.load(tmp_path / "garden", MLP())
    assert (loaded.policy.rule.share, loaded.policy_name) == (0.3, "heuristic:share=0.3")


@pytest.mark.parametrize(
    "rule", [Schedule(FACTS, epochs=(1, 2, 4)), Random(FACTS, epochs=(1, 2, 4))], ids=str
)
@pytest.mark.parametrize(
    ("away", "planted"),
    [([], [1, 2, 4]), ([0], [2, 3, 5]), ([1, 2], [3, 4, 6]), ([2], [1, 3, 5]), ([3], [1, 2, 5])],
)
def test_a_plan_waits_where_nothing_can_be_done(rule, away, planted):
    """As when the governor has brought the host back:

    otherwise a control may miss its only chances to plant.
    """
    reports, policy, memory, chosen = reports_of(), RulePolicy(rule), None, []
    masks = {head: np.stack([mask]) for head, mask in masks_for(FACTS, reports).items()}
    for epoch in range(8):
        now = only_waiting(masks) if epoch in away else masks
        actions, memory = policy.decide(None, now, [reports], memory, [Signals()])
        chosen.append(tuple(actions[0].tolist()))
    assert [epoch for epoch, choice in enumerate(chosen) if choice != WAIT] == planted
