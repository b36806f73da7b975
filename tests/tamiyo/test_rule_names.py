"""Rules by name: settings in the name reach the rule, mistakes are told, and plans wait for hosts that were away."""

import numpy as np
import pytest

import esper
from esper.leyline import SeedStage
from esper.leyline.errors import EsperError
from esper.leyline.factored_actions import OP_FOSSILIZE, OP_GERMINATE
from esper.tamiyo import Greedy, Heuristic, Random, RulePolicy, Schedule, is_rule, make_policy, read_rule
from esper.tamiyo.masks import only_waiting
from esper.trials.config import RunConfig
from tamiyo.test_rules import GROUND, WAIT, masks_for, reports_of
from user_models import MLP, random_vectors


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("heuristic", Heuristic(GROUND)),
        ("heuristic:share=0.5", Heuristic(GROUND, share=0.5)),
        ("heuristic:attempts=4:planting_part=1", Heuristic(GROUND, attempts=4, planting_part=1.0)),
        ("greedy:share=0.25", Greedy(GROUND, share=0.25)),
        ("schedule:epochs=2+5:blueprint_id=norm", Schedule(GROUND, epochs=(2, 5), blueprint_id="norm")),
        ("random:seed=7:epochs=3", Random(GROUND, epochs=(3,), seed=7)),
        (
            "schedule:epochs=0+5:places=r0c1.norm+r0c0.conv_light",
            Schedule(GROUND, epochs=(0, 5), places=("r0c1.norm", "r0c0.conv_light")),
        ),
    ],
)
def test_settings_in_a_name_reach_the_rule(name, rule):
    assert is_rule(name)
    assert make_policy(name, GROUND) == RulePolicy(rule)


MISTAKES = {
    "heuristik:share=0.5": "unknown policy 'heuristik:share=0.5'.",
    "heuristic:shared=0.5": "unknown setting of heuristic 'shared'. Did you mean 'share'? "
    "Known: attempts, planting_part, share. Write heuristic:KEY=VALUE:KEY=VALUE.",
    "heuristic:ground=1": "unknown setting of heuristic 'ground'.",
    "heuristic:": "unknown setting of heuristic ''.",
    "greedy:reads_scores=0": "unknown setting of greedy 'reads_scores'.",
    "never:share=1": "unknown setting of never 'share'. Known: none.",
    "heuristic:share": "share of heuristic is '': input should be a valid number",
    "heuristic:share=0": "share of heuristic is '0': input should be greater than 0.",
    "heuristic:share=nan": "share of heuristic is 'nan': input should be",
    "heuristic:attempts=1.5": "attempts of heuristic is '1.5': input should be a valid integer",
    "greedy:planting_part=1.01": "planting_part of greedy is '1.01': input should be less than or equal to 1.",
    "schedule:epochs=": "epochs of schedule is '': input should be a valid integer",
    "schedule:epochs=1+-2": "epochs of schedule is '1+-2': input should be greater than or equal to 0.",
    "schedule:places=r0c1": "places of schedule is 'r0c1': string should match pattern",
    "random:seed=-1": "seed of random is '-1': input should be greater than or equal to 0.",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_name_is_told_with_the_rule(name):
    with pytest.raises(EsperError) as refusal:
        read_rule(name)
    assert str(refusal.value).startswith(MISTAKES[name])
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("schedule:epochs=1+2:places=r0c1.norm", "a schedule has 2 epochs and 1 places; give as many."),
        ("schedule:epochs=1:places=r0c7.norm", "unknown slot 'r0c7'."),
        ("schedule:epochs=1:places=r0c1.nrom", "unknown blueprint 'nrom'. Did you mean 'norm'?"),
    ],
)
def test_a_plan_that_does_not_fit_the_network_is_refused(name, words):
    with pytest.raises(EsperError) as refusal:
        make_policy(name, GROUND)
    assert str(refusal.value).startswith(words)


PLAN = Schedule(GROUND, epochs=(3, 1, 3), places=("r0c0.norm", "r0c1.conv_light", "r0c0.conv_light"))


def plays(rule, changes):
    """What a rule plants, by epoch, where the slots are as `changes` says from an epoch on."""
    policy, memory, planted, now = RulePolicy(rule), None, {}, {}
    for epoch in range(9):
        now = changes.get(epoch, now)
        reports = reports_of(**now)
        masks = {head: np.stack([mask]) for head, mask in masks_for(GROUND, reports).items()}
        actions, memory = policy.decide(None, masks, [reports], memory)
        op, slot, blueprint, _ = actions[0].tolist()
        planted |= {epoch: f"r0c{slot}.{GROUND.space.blueprint_ids[blueprint]}"} if op == OP_GERMINATE else {}
        planted |= {epoch: f"keep r0c{slot}"} if op == OP_FOSSILIZE else {}
    return planted


def test_a_plan_is_followed_in_order_one_planting_at_a_time():
    assert plays(PLAN, {}) == {1: "r0c1.conv_light", 3: "r0c0.conv_light", 4: "r0c0.norm"}


def test_a_plan_waits_until_its_slot_is_open():
    taken = {2: {"r0c0": {"stage": SeedStage.BLENDING}}, 6: {}}
    assert plays(PLAN, taken) == {1: "r0c1.conv_light", 6: "r0c0.conv_light", 7: "r0c0.norm"}


def test_a_plan_keeps_what_has_proven_itself_before_it_plants():
    proven = {3: {"r0c1": {"stage": SeedStage.PROBATIONARY, "mean": 0.3}}, 4: {}}
    assert plays(PLAN, proven) == {1: "r0c1.conv_light", 3: "keep r0c1", 4: "r0c0.conv_light", 5: "r0c0.norm"}


def test_a_file_is_no_rule():
    assert not is_rule("runs/first/policy.safetensors")
    assert not is_rule("heuristic.safetensors")


def test_a_mistake_is_found_before_a_host_is_built(tmp_path):
    with pytest.raises(EsperError, match="attempts of heuristic is '0'"):
        RunConfig.of({"policy": "heuristic:attempts=0", "out": str(tmp_path / "run")})


def test_a_garden_is_loaded_with_the_settings_of_its_policy(tmp_path):
    garden = esper.grow(MLP(), slots=["middle"], example=random_vectors(), policy="heuristic:share=0.3")
    garden.save(tmp_path / "garden")
    loaded = esper.load(tmp_path / "garden", MLP())
    assert (loaded.policy.rule.share, loaded.policy_name) == (0.3, "heuristic:share=0.3")


@pytest.mark.parametrize("rule", [Schedule(GROUND, epochs=(1, 2, 4)), Random(GROUND, epochs=(1, 2, 4))], ids=str)
@pytest.mark.parametrize(
    ("away", "planted"), [([], [1, 2, 4]), ([0], [2, 3, 5]), ([1, 2], [3, 4, 6]), ([2], [1, 3, 5]), ([3], [1, 2, 5])]
)
def test_a_plan_waits_where_nothing_can_be_done(rule, away, planted):
    """As when the governor has brought the host back: otherwise a control may miss its only chances to plant."""
    reports, policy, memory, chosen = reports_of(), RulePolicy(rule), None, []
    masks = {head: np.stack([mask]) for head, mask in masks_for(GROUND, reports).items()}
    for epoch in range(8):
        now = only_waiting(masks) if epoch in away else masks
        actions, memory = policy.decide(None, now, [reports], memory)
        chosen.append(tuple(actions[0].tolist()))
    assert [epoch for epoch, choice in enumerate(chosen) if choice != WAIT] == planted
