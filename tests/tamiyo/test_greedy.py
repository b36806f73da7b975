"""The greedy policy: what is proven is kept, the highest score is planted; in made-up reports and in whole episodes."""

import math
from dataclasses import dataclass, replace

import pytest
import torch

from esper.episodes import Episodes
from esper.kasmina.hosts import build_cnn_host
from esper.kasmina.model import MorphogeneticModel
from esper.leyline.errors import MeasurementError
from esper.leyline.factored_actions import OP_GERMINATE
from esper.leyline.stages import SeedStage
from esper.runtime.population import Population
from esper.tamiyo import Heuristic, HostFacts, RulePolicy, compute_action_masks
from esper.tamiyo.masks import build_slot_states
from esper.tamiyo.rules import RULES, Greedy, make_policy
from esper.telemetry.events import ActionTaken, HostEpoch, HostRolledBack, StageChanged
from esper.trials.arms import make_decider, play_epoch
from runtime.episodes import IMAGES
from tamiyo.observed_episodes import TASKS, reports_of
from trials.one_arm import run_arm

BLUEPRINTS = ("conv_light", "norm", "conv_small", "sham")
WAIT = (0, 0, 0, 0)


def facts_of(horizon=None, **limits):
    host = build_cnn_host(blocks=3, base_channels=4, in_channels=1, image_size=8, classes=3)
    model = MorphogeneticModel(host, blueprints=BLUEPRINTS, **limits)
    return HostFacts(model.space, model.costs, model.host_params, model.budget, horizon)


FACTS = facts_of()


def scored(*scores, **given):
    """Dormant slots with these scores, except for what is said."""
    slots = {f"r0c{i}": {"greedy_score": score, "host_param_count": 1000} for i, score in enumerate(scores)}
    return reports_of(**{slot: {**values, **given.get(slot, {})} for slot, values in slots.items()})


def choose(reports, *, rule=None, epoch=0, costs=None):
    rule = rule or Greedy(FACTS)
    costs = FACTS.costs if costs is None else costs
    masks = compute_action_masks(build_slot_states(reports), 0, None, space=FACTS.space, costs=costs)
    return rule.choose(masks, reports, {"epoch": epoch, "host": 0})[0]


# -- where -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("best", [0, 1, 2])
def test_the_highest_score_is_planted(best):
    scores = [0.4, 0.3, 0.2]
    scores[best] = 0.5
    assert choose(scored(*scores))[:2] == (OP_GERMINATE, best)


@pytest.mark.parametrize(
    ("scores", "expected"), [((0.5, 0.5, 0.5), 2), ((0.5, 0.5, 0.1), 1), ((0.5, 0.1, 0.5), 2), ((0.0, 0.0, 0.0), 2)]
)
def test_of_equal_scores_the_later_slot_is_planted(scores, expected):
    assert choose(scored(*scores))[1] == expected


@pytest.mark.parametrize("stage", sorted(set(SeedStage) - {SeedStage.DORMANT}))
def test_a_slot_that_is_not_open_does_not_compete(stage):
    assert choose(scored(0.1, 0.9, 0.2, r0c1={"stage": stage}))[:2] == (OP_GERMINATE, 2)


def test_a_slot_that_is_not_open_needs_no_score():
    assert choose(scored(0.1, None, 0.2, r0c1={"stage": SeedStage.EMBARGOED}))[1] == 2


def test_where_nothing_can_be_planted_it_waits_without_asking_for_scores():
    closed = {slot: {"stage": SeedStage.EMBARGOED} for slot in ("r0c0", "r0c1", "r0c2")}
    assert choose(scored(None, None, None, **closed)) == WAIT


# -- what and when -----------------------------------------------------------------------------------------------------


def test_a_sham_is_never_planted():
    only_sham = {key: cost for key, cost in FACTS.costs.items() if key[1] == "sham"}
    assert choose(scored(0.1, 0.2, 0.3), costs=only_sham) == WAIT


def test_a_slot_for_which_only_a_sham_is_left_does_not_compete():
    costs = {key: cost for key, cost in FACTS.costs.items() if key[0] != "r0c2" or key[1] == "sham"}
    assert choose(scored(0.1, 0.2, 0.9), costs=costs)[:2] == (OP_GERMINATE, 1)


@pytest.mark.parametrize("share", [{}, {"share": 0.0}, {"share": 0.2}, {"share": 0.5}, {"share": 1.0}])
def test_what_is_planted_is_what_the_heuristic_would_plant_there(share):
    for room in range(30, 3000, 30):
        facts = replace(FACTS, host_params=1000, budget=1000 + room)
        closed = {slot: {"stage": SeedStage.EMBARGOED} for slot in ("r0c0", "r0c1")}
        reports = scored(0.1, 0.2, 0.9, **closed)
        greedy, heuristic = (
            rule.choose(masks_of(reports), reports, {"epoch": 0, "host": 0})[0]
            for rule in (Greedy(facts, **share), Heuristic(facts, **share))
        )
        assert greedy == heuristic


def masks_of(reports):
    return compute_action_masks(build_slot_states(reports), 0, None, space=FACTS.space, costs=FACTS.costs)


def test_only_the_first_part_of_a_known_episode_is_for_planting():
    rule = Greedy(facts_of(horizon=10), planting_part=0.4)
    planted = [choose(scored(0.1, 0.2, 0.3), rule=rule, epoch=epoch) != WAIT for epoch in range(10)]
    assert planted == [True] * 4 + [False] * 6


def test_after_its_part_of_episode_it_asks_for_no_scores():
    rule = Greedy(facts_of(horizon=10))
    assert choose(scored(None, None, None), rule=rule, epoch=9) == WAIT


def test_in_an_episode_of_unknown_length_it_plants_at_any_time():
    assert choose(scored(0.1, 0.2, 0.3), epoch=10_000)[:2] == (OP_GERMINATE, 2)


@pytest.mark.parametrize("mean", [0.3, 0.05, -0.3])
def test_a_seed_on_probation_is_left_alone_and_planting_goes_on(mean):
    seed = {"counterfactual_contribution": mean, "counterfactual_standard_error": 0.1, "stage": SeedStage.PROBATIONARY}
    assert choose(scored(0.1, 0.9, 0.2, r0c2=seed))[:2] == (OP_GERMINATE, 1)


# -- scores that are not there -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nothing", [None, math.nan])
def test_a_missing_score_is_an_error_that_names_the_slots_and_a_way_out(nothing):
    with pytest.raises(MeasurementError, match=r"greedy .*r0c0, r0c2\."):
        choose(scored(nothing, 0.3, nothing))


def test_among_the_rules_only_greedy_reads_scores():
    assert [name for name in RULES if make_policy(name, FACTS).reads_scores] == ["greedy"]
    assert RulePolicy(Greedy(FACTS, share=0.3)).reads_scores
    assert not RulePolicy(Heuristic(FACTS)).reads_scores


# -- whole episodes in populations -------------------------------------------------------------------------------------


@dataclass
class Recorded:
    """A policy that notes what it was shown and what it chose."""

    policy: object
    seen: list

    def decide(self, observation, masks, reports, memory):
        actions, memory = self.policy.decide(observation, masks, reports, memory)
        self.seen.append((masks, reports[0], tuple(actions[0].tolist())))
        return actions, memory


@pytest.mark.parametrize("task", TASKS)
def test_in_a_population_the_open_slot_with_the_highest_score_is_planted(task):
    episodes = Episodes(Population(TASKS[task], [1]))
    decider = make_decider(episodes, 0, "greedy")
    decider.policy = Recorded(decider.policy, [])
    for _ in range(6):
        play_epoch(episodes, [decider])
    assert sum(choice != WAIT for *_, choice in decider.policy.seen) > 1
    for masks, reports, choice in decider.policy.seen:
        scores = [report.metrics.greedy_score for report in reports.values()]
        open_slots = masks["slot"][0, OP_GERMINATE].nonzero()[0] if masks["op"][0, OP_GERMINATE] else []
        if choice != WAIT:
            assert choice[:2] == (OP_GERMINATE, max(open_slots, key=lambda s: scores[s]))
        assert all(score > 0 for score in scores)


@pytest.fixture(scope="module")
def arm():
    return run_arm(replace(IMAGES, epochs=10), "greedy", [1, 2])


def test_an_arm_of_greedy_hosts_leads_seeds_to_their_ends(arm):
    for run in arm:
        ends = {event.after for event in run.events if isinstance(event, StageChanged)}
        assert {"PROBATIONARY", "FOSSILIZED"} <= ends
        assert run.result.germinated > 0


def test_an_arm_of_greedy_hosts_plants_nothing_but_real_seeds_in_its_part_of_episode_and_budget(arm):
    for run in arm:
        taken = [event for event in run.events if isinstance(event, ActionTaken)]
        planted = [event for event in taken if event.op == "GERMINATE"]
        assert {event.op for event in taken} == {"GERMINATE"}
        assert "sham" not in {event.blueprint for event in planted}
        assert max(event.epoch for event in planted) < 4
        assert run.result.final_params <= IMAGES.budget * run.result.start_params


def test_an_arm_of_greedy_hosts_is_the_same_twice(arm):
    torch.manual_seed(77)
    again = run_arm(replace(IMAGES, epochs=10), "greedy", [1, 2])
    assert [run.events for run in again] == [run.events for run in arm]


def test_a_host_that_breaks_in_its_first_epoch_does_not_stop_the_others():
    population = Population(TASKS["vectors"], [1, 2])
    episodes = Episodes(population)
    deciders = [make_decider(episodes, host, "greedy") for host in range(2)]
    with torch.no_grad():
        next(population.runs[0].model.host.parameters()).fill_(math.nan)
    broken, healthy = play_epoch(episodes, deciders)
    assert [type(event) for event in broken] == [HostRolledBack, HostEpoch]
    assert any(isinstance(event, ActionTaken) for event in healthy)
    assert [decider.memory[0]["epoch"] for decider in deciders] == [1, 1]


def test_a_population_of_partly_frozen_hosts_has_all_its_scores():
    task = TASKS["vectors"]

    def build():
        host = task.build_host()
        next(iter(host.blocks)).requires_grad_(False)
        return host

    scores = []
    for each in (task, replace(task, build_host=build)):
        population = Population(each, [1])
        population.train_epoch()
        scores.append([report.metrics.greedy_score for report in population.reports()[0].values()])
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
