"""FOSSILIZE, CULL and WAIT have three outcomes; rules keep what was measured, others decide."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

import esper
from esper.episodes import keepable
from esper.leyline.errors import IllegalActionError, OptimizerError, SaveError
from esper.leyline.factored_actions import OP_CULL, OP_FOSSILIZE, OP_GERMINATE
from esper.leyline.lifecycle import StageLengths
from esper.runtime.population import Population
from esper.runtime.tasks.registry import get_task
from esper.tamiyo.policies import RulePolicy
from esper.tamiyo.rules import replay
from esper.telemetry.events import ActionTaken, StageChanged
from esper.trials.arms import Entry, run_entries
from runtime.episodes import BLOBS, GERMINATE, act, play
from user_models import (
    CNN,
    KEEP_FIRST,
    PLANT_FIRST,
    grow_cnn,
    losses_of,
    made_up,
    random_images,
    script,
    stage_of,
    train_epoch,
    walk_to,
)

MLP = 2
"""The blueprint of `blobs`, by its place in the action space."""
IMAGES = random_images(16)


class PlantsOnce:
    """A policy of one's own: it plants an mlp, and does `op` as soon as the seed was measured."""

    def __init__(self, op=None):
        self.op = op

    def decide(self, observation, masks, reports, memory, signals):
        decision = memory or 0
        choice = (0, 0, 0, 0)
        if decision == 1:
            choice = (OP_GERMINATE, 0, MLP, 0)
        elif self.op is not None and masks["op"][0][OP_FOSSILIZE]:
            choice = (self.op, 0, 0, 0)
        return np.array([choice]), decision + 1


def played(policy, lines=None):
    say = (lambda line: None) if lines is None else lines.append
    (run,) = run_entries(get_task("blobs"), [Entry("own", 3, lambda facts: policy)], say=say)
    return run


# -- three outcomes --------------------------------------------------------------------------------


def test_fossilize_cull_and_wait_have_three_outcomes():
    kept, culled, undecided = (played(PlantsOnce(op)) for op in (OP_FOSSILIZE, OP_CULL, None))
    assert kept.result.test_accuracy > 0.95
    assert culled.result.test_accuracy < 0.6
    assert undecided.result.test_accuracy < 0.6
    assert len({run.result.test_loss for run in (kept, culled, undecided)}) == 3
    counts = [(run.result.fossilized, run.result.culled) for run in (kept, culled, undecided)]
    assert counts == [(1, 0), (0, 1), (0, 0)]


def test_a_line_names_what_a_policy_left_undecided():
    lines = []
    played(PlantsOnce(), lines)
    (line,) = lines
    assert line.startswith("own left undecided")
    assert "mlp in r0c0 of random seed 3 (+" in line
    kept = []
    played(PlantsOnce(OP_FOSSILIZE), kept)
    assert kept == []


def test_a_seed_on_probation_is_measured_every_epoch_and_its_slot_stays_closed():
    population = Population(BLOBS, [1])
    play(population, 5, {0: {0: [(GERMINATE, "r0c0", "mlp")]}}, keeps=False)
    before = population.reports()[0]["r0c0"].metrics.counterfactual_contribution
    for _ in range(4):
        play(population, 1, keeps=False)
        report = population.reports()[0]["r0c0"]
        assert report.stage.name == "PROBATIONARY"
        assert report.metrics.counterfactual_contribution != before
        before = report.metrics.counterfactual_contribution
        with pytest.raises(IllegalActionError, match="PROBATIONARY"):
            act(population, 0, GERMINATE, "r0c0", "lora")


def test_undecided_seeds_count_for_the_seeds_and_the_budget():
    garden = grow_cnn({0: PLANT_FIRST}, keeps=False, max_seeds=1)
    walk_to(garden, "PROBATIONARY")
    garden.step(made_up(garden))
    with pytest.raises(IllegalActionError, match="1 seeds and fossils exist, max_seeds is 1"):
        garden.plant("r0c1", "norm")
    price = garden.model.costs["r0c0", "conv_light", "linear"]
    tight = grow_cnn({0: PLANT_FIRST}, keeps=False, budget=garden.model.host_params + price)
    walk_to(tight, "PROBATIONARY")
    tight.step(made_up(tight))
    with pytest.raises(IllegalActionError, match="are used"):
        tight.plant("r0c1", "norm")
    tight.cull("r0c0")
    tight.plant("r0c1", "norm")


# -- the standing order ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Plants:
    """A rule that plants at the second decision."""

    keeps_measured: bool = True

    def choose(self, masks, reports, memory, signals):
        return ((OP_GERMINATE, 0, MLP, 0) if memory["epoch"] == 1 else (0, 0, 0, 0)), memory


def test_a_rule_keeps_what_was_measured_in_the_same_decision():
    run = played(RulePolicy(Plants()))
    ops = [(event.epoch, event.op) for event in run.events if isinstance(event, ActionTaken)]
    assert ops == [(2, "GERMINATE"), (4, "FOSSILIZE")]
    ends = [event.epoch for event in run.events if getattr(event, "after", "") == "FOSSILIZED"]
    opened = [
        event.epoch
        for event in run.events
        if isinstance(event, StageChanged) and event.after == "DORMANT"
    ]
    assert (ends, opened) == ([4], [5])
    assert run.result.test_accuracy > 0.95


@pytest.mark.parametrize(("policy", "kept"), [(PlantsOnce(), 0), (RulePolicy(Plants()), 1)])
def test_a_sham_waits_where_its_arm_waited(policy, kept):
    arm = played(policy)
    task = replace(get_task("blobs"), blueprints=("sham",))
    (sham,) = run_entries(task, [Entry("sham", 3, replay(arm.events))])
    assert (arm.result.fossilized, sham.result.fossilized) == (kept, kept)
    assert (arm.result.germinated, sham.result.germinated) == (1, 1)


def test_a_rule_that_says_so_keeps_nothing():
    run = played(RulePolicy(Plants(keeps_measured=False)))
    assert run.result.fossilized == 0
    assert run.result.test_accuracy < 0.6


def test_what_is_measured_in_the_last_epoch_is_kept():
    (run,) = run_entries(
        replace(get_task("blobs"), epochs=4),
        [Entry("rule", 3, lambda facts: RulePolicy(Plants()))],
    )
    assert run.result.fossilized == 1


def test_a_garden_of_a_rule_keeps_and_one_of_a_policy_does_not():
    for keeps in (True, False):
        garden = walk_to(grow_cnn({0: PLANT_FIRST}, keeps=keeps), "PROBATIONARY")
        assert not keepable(garden.model.view())
        garden.step(made_up(garden))
        assert stage_of(garden) == ("FOSSILIZED" if keeps else "PROBATIONARY")


# -- by hand ---------------------------------------------------------------------------------------


def test_a_seed_is_planted_kept_and_culled_by_hand():
    garden = grow_cnn()
    garden.step(made_up(garden))
    events = garden.plant("r0c0", "conv_light")
    assert [event.op for event in events if isinstance(event, ActionTaken)] == ["GERMINATE"]
    assert {event.module for event in events if hasattr(event, "module")} == {"layer1"}
    assert garden.history[-len(events) :] == events
    assert stage_of(garden) == "BLENDING"
    with pytest.raises(IllegalActionError, match="r0c0 is BLENDING"):
        garden.plant("r0c0", "norm")
    with pytest.raises(IllegalActionError, match="is BLENDING"):
        garden.keep("r0c0")
    with pytest.raises(IllegalActionError, match="no live seed"):
        garden.cull("r0c1")
    garden.plant("r0c1", "norm", "gated")
    for _ in range(4):
        garden.step(made_up(garden))
    assert (stage_of(garden), stage_of(garden, "r0c1")) == ("PROBATIONARY", "PROBATIONARY")
    garden.keep("r0c0")
    garden.cull("r0c1")
    assert (stage_of(garden), stage_of(garden, "r0c1")) == ("FOSSILIZED", "EMBARGOED")
    garden.step(made_up(garden))
    assert stage_of(garden) == "DORMANT"


def test_no_rule_keeps_what_was_planted_by_hand(tmp_path):
    garden = grow_cnn(policy="never")
    garden.plant("r0c0", "norm")
    garden.save(tmp_path)
    again = esper.load(tmp_path, CNN())
    assert again.by_hand == garden.by_hand == {"r0c0"}
    for _ in range(4):
        garden.step(made_up(garden))
    assert stage_of(garden) == "PROBATIONARY"
    garden.cull("r0c0")
    garden.step(made_up(garden))
    assert garden.by_hand == set()


def test_nothing_is_planted_by_hand_without_an_optimiser():
    garden = grow_cnn(attach=False)
    with pytest.raises(OptimizerError, match=r"attach\(optimizer\)"):
        garden.plant("r0c0", "norm")
    assert garden.model.active_seeds == 0


def test_a_harvest_names_undecided_seeds_and_the_call_that_keeps_them():
    garden = grow_cnn({0: PLANT_FIRST}, keeps=False, scale=0.5)
    optimizer = garden.model.link.optimizer
    for epoch in range(4):
        train_epoch(garden.model, optimizer, epoch, IMAGES)
        garden.step(lambda: losses_of(garden.model, IMAGES))
    expected = r'conv_light in r0c0 \(layer1\), last contribution [^;]* garden\.keep\("r0c0"\)'
    with pytest.warns(UserWarning, match=expected):
        plain = garden.harvest()
    assert sum(p.numel() for p in plain.parameters()) == garden.model.host_params
    garden.keep("r0c0")
    assert sum(p.numel() for p in garden.harvest().parameters()) > garden.model.host_params


def test_a_save_of_the_lifecycle_of_0_2_0_is_refused_in_one_line(tmp_path):
    garden = grow_cnn({0: PLANT_FIRST, 2: KEEP_FIRST})
    garden.save(tmp_path)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 3', '"format": 2', 1))
    with pytest.raises(SaveError, match=r"^[^\n]*format 2, [^\n]*$"):
        esper.load(tmp_path, CNN(), policy=script({}))


@pytest.mark.parametrize("lengths", [{"training": 1}, {"ramp": 3}, {"ramp": 1}], ids=str)
def test_a_seed_planted_before_the_step_is_not_ticked_twice(lengths):
    """Else it would be judged, or blended in, before it was trained."""
    stages = []
    for is_late in (False, True):
        garden = grow_cnn(policy="never", lengths=StageLengths(**lengths))
        if is_late:
            train_epoch(garden.model, garden.model.link.optimizer, 0, IMAGES)
            garden.plant("r0c0", "conv_light")
            garden.step(lambda garden=garden: losses_of(garden.model, IMAGES))
        else:
            train_epoch(garden.model, garden.model.link.optimizer, 0, IMAGES)
            garden.step(lambda garden=garden: losses_of(garden.model, IMAGES))
            garden.plant("r0c0", "conv_light")
        state = garden.model.slot("r0c0").state
        stages.append((state.stage, state.alpha, state.age))
    assert stages[0] == stages[1]


def test_an_op_that_is_refused_leaves_the_standing_order():
    @dataclass(frozen=True)
    class AlwaysPlants:
        facts: object

        def choose(self, masks, reports, memory, signals):
            return PLANT_FIRST, memory

    garden = grow_cnn(policy=lambda facts: RulePolicy(AlwaysPlants(facts)))
    for _ in range(4):
        garden.step(made_up(garden))
    assert garden.model.fossilized_seeds == 1
