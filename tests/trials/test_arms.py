"""One arm of a comparison:

the same twice, controls that are controls, results that say what happened.
"""

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from esper.episodes import Episodes
from esper.kasmina.slot import count_parameters
from esper.leyline.errors import EsperError
from esper.leyline.lifecycle import StageLengths
from esper.runtime.population import Population
from esper.telemetry.events import (
    ActionTaken,
    FossilJudged,
    HostEpoch,
    HostRolledBack,
    StageChanged,
)
from esper.trials.arms import Entry, arm_result, make_decider, play_epoch, run_entries
from runtime.episodes import IMAGES
from trials.one_arm import run_arm

TASK = replace(IMAGES, epochs=10)
SEEDS = [1, 2]


@pytest.fixture(scope="module")
def heuristic():
    return run_arm(TASK, "heuristic", SEEDS)


@pytest.fixture(scope="module")
def never():
    return run_arm(TASK, "never", SEEDS)


def same(run, other):
    weights = run.network.state_dict(), other.network.state_dict()
    return weights[0].keys() == weights[1].keys() and all(
        torch.equal(v, weights[1][k]) for k, v in weights[0].items()
    )


def planted(run):
    return [
        (e.epoch, e.slot) for e in run.events if isinstance(e, ActionTaken) and e.op == "GERMINATE"
    ]


def timeless(run):
    return replace(run.result, seconds=0)


@pytest.mark.parametrize("arm", ["heuristic", "random"])
def test_an_arm_is_the_same_twice(arm):
    first = run_arm(TASK, arm, SEEDS)
    torch.manual_seed(77)
    again = run_arm(TASK, arm, SEEDS)
    for one, other in zip(first, again, strict=True):
        assert timeless(one) == timeless(other)
        assert one.events == other.events
        assert same(one, other)


def test_a_seed_has_the_same_episode_whoever_is_beside_it(heuristic):
    """The events name another host number, all the rest is the same."""
    (alone,) = run_arm(TASK, "heuristic", SEEDS[1:])
    assert timeless(alone) == timeless(heuristic[1])
    assert [replace(event, host=1) for event in alone.events] == list(heuristic[1].events)
    assert same(alone, heuristic[1])


def test_another_seed_is_another_host(never):
    assert not same(*never)


def test_the_never_arm_grows_nothing(never):
    for run in never:
        assert run.result.start_params == run.result.final_params
        assert (run.result.germinated, run.result.fossilized, run.result.culled) == (0, 0, 0)
        assert {type(event) for event in run.events} == {HostEpoch}


def test_the_sham_arm_replays_another_arm_and_equals_the_host_alone_to_the_bit(heuristic, never):
    shams = run_arm(TASK, "sham", SEEDS, replayed=[run.events for run in heuristic])
    assert [planted(run) for run in shams] == [planted(run) for run in heuristic]
    for sham, alone in zip(shams, never, strict=True):
        assert sham.result.final_params == sham.result.start_params
        assert same(sham, alone)
        assert (sham.result.test_accuracy, sham.result.test_loss) == (
            alone.result.test_accuracy,
            alone.result.test_loss,
        )


def test_the_sham_of_a_plan_plants_as_much_in_one_decision():
    plan = "schedule:epochs=0+0:places=r0c0.norm+r0c1.norm"
    arm = run_arm(TASK, plan, SEEDS[:1])
    (sham,) = run_arm(TASK, "sham", SEEDS[:1], replayed=[run.events for run in arm])
    assert (
        [epoch for epoch, _ in planted(sham)] == [epoch for epoch, _ in planted(arm[0])] == [1, 1]
    )


def test_the_heuristic_arm_grows_within_its_budget(heuristic):
    for run in heuristic:
        assert run.result.germinated > 0
        assert run.result.final_params <= TASK.budget * run.result.start_params
        assert run.result.final_params == count_parameters(run.network)


def test_an_arm_plants_only_in_the_first_part_of_its_episode(heuristic):
    assert max(epoch for run in heuristic for epoch, _ in planted(run)) < 0.4 * TASK.epochs


def test_a_result_counts_what_the_events_say(heuristic):
    for run in heuristic:
        stages = [event.after for event in run.events if isinstance(event, StageChanged)]
        result = run.result
        assert result.germinated == len(planted(run))
        gone = sum(isinstance(event, FossilJudged) and not event.is_kept for event in run.events)
        ends = stages.count("FOSSILIZED") - gone, stages.count("CULLED") + gone
        assert (result.fossilized, result.culled) == ends


def test_a_network_that_is_built_in_is_not_pruned():
    built_in = (("r0c0", "norm", "linear"), ("r0c1", "conv_light", "linear"))
    (run,) = run_entries(TASK, [Entry("final", 1, "never", built_in=built_in)])
    assert run.architecture == built_in
    assert not [event for event in run.events if isinstance(event, FossilJudged)]


def test_with_shams_nothing_is_judged_and_the_host_is_what_it_would_be_alone(never):
    task = replace(TASK, blueprints=("sham",))
    runs = run_arm(task, "sham", SEEDS)
    assert all(run.result.fossilized for run in runs)
    assert not [event for run in runs for event in run.events if isinstance(event, FossilJudged)]
    for run, alone in zip(runs, never, strict=True):
        own, expected = run.network.state_dict(), alone.network.state_dict()
        assert all(torch.equal(value, own[name]) for name, value in expected.items())
        assert run.result.test_loss == alone.result.test_loss


def test_an_arm_judges_what_it_grew_and_its_architecture_is_what_is_left(heuristic):
    for run in heuristic:
        judged = [event for event in run.events if isinstance(event, FossilJudged)]
        grown = [e for e in run.events if isinstance(e, StageChanged) and e.after == "FOSSILIZED"]
        assert len(judged) == len(grown) > 0
        assert len(run.architecture) == sum(event.is_kept for event in judged)
    (kept,) = run_arm(replace(TASK, prunes=False), "heuristic", SEEDS[:1])
    assert len(kept.architecture) == kept.result.fossilized


def test_a_result_names_its_arm_seed_and_length(heuristic):
    assert [(run.result.arm, run.result.seed, run.result.epochs) for run in heuristic] == [
        ("heuristic", seed, TASK.epochs) for seed in SEEDS
    ]


def test_growing_costs_more_flops_than_not_growing(heuristic, never):
    assert all(
        grown.result.flops > alone.result.flops > 0
        for grown, alone in zip(heuristic, never, strict=True)
    )


def test_a_result_holds_the_last_validation_and_the_test_score(never):
    population = Population(TASK, SEEDS)
    for _ in range(TASK.epochs):
        population.train_epoch()
        population.evaluate()
        population.tick()
    for run, reading, final in zip(
        never, population.readings(), population.final_scores(), strict=True
    ):
        assert run.result.validation_accuracy == final.validation_accuracy
        assert final.validation_accuracy == pytest.approx(reading.held_out_accuracy)
        assert (run.result.test_accuracy, run.result.test_loss) == (final.accuracy, final.loss)


def test_whoever_watches_sees_every_epoch_and_every_event(heuristic):
    seen = []
    run_arm(TASK, "heuristic", SEEDS, watch=lambda epoch, events: seen.append((epoch, events)))
    assert [epoch for epoch, _ in seen] == list(range(TASK.epochs))
    told = [event for _, events in seen for event in events]
    for host, run in enumerate(heuristic):
        assert tuple(event for event in told if event.host == host) == run.events


def test_data_that_are_loaded_already_are_used(never):
    populate = partial(Population, splits=TASK.load(None))
    blind = replace(TASK, load=lambda root: pytest.fail("loaded again"))
    (run, _) = run_arm(blind, "never", SEEDS, populate)
    assert same(run, never[0])


def test_an_unknown_arm_is_refused():
    with pytest.raises(EsperError, match="heuristik"):
        run_arm(TASK, "heuristik", SEEDS)


def test_an_epoch_in_which_a_host_is_brought_back_tells_which_seeds_it_cost():
    population = Population(TASK, [1])
    episodes = Episodes(population)
    decider = make_decider(episodes, 0, "heuristic")
    for _ in range(3):
        play_epoch(episodes, [decider])
    live = [slot_id for slot_id, report in population.reports()[0].items() if report.is_live]
    assert live
    with torch.no_grad():
        next(population.runs[0].model.host.parameters()).fill_(float("nan"))
    (told,) = play_epoch(episodes, [decider])
    assert {e.slot for e in told if isinstance(e, StageChanged) and e.after == "CULLED"} == set(
        live
    )


def test_the_network_that_is_scored_is_the_one_that_was_measured_last():
    """A seed that is planted after the last epoch would never be trained; with a ramp of 0 it would
    be kept at once.
    """
    task = replace(TASK, epochs=3, lengths=StageLengths(ramp=0))
    (never,), (late,) = (
        run_arm(task, arm, [1]) for arm in ("never", "schedule:epochs=2:places=r0c0.norm")
    )
    assert not planted(late)
    assert same(never, late)


def test_a_seed_that_was_kept_and_undone_by_a_rollback_counts_once():
    population = Population(TASK, [1])
    episodes, told = Episodes(population), []
    decider = make_decider(episodes, 0, "schedule:epochs=0:places=r0c0.norm")
    while not population.runs[0].model.fossilized_seeds:
        told += play_epoch(episodes, [decider])[0]
    with torch.no_grad():
        next(population.runs[0].model.host.parameters()).fill_(float("nan"))
    told += play_epoch(episodes, [decider])[0]
    stages = Counter(event.after for event in told if isinstance(event, StageChanged))
    final = SimpleNamespace(params=1, validation_accuracy=0.5, accuracy=0.5, loss=1.0)
    result = arm_result("it", population.runs[0], final, stages, start_params=1, seconds=0.0)
    live = sum(slot.seed is not None for slot in population.runs[0].slots)
    assert result.germinated == 1 == result.fossilized + result.culled + live


def test_the_random_arm_draws_anew_for_every_host():
    runs = run_arm(TASK, "random", [1, 2, 3, 4])
    assert len({tuple(planted(run)) for run in runs}) > 1


def test_a_host_that_breaks_in_its_first_epoch_does_not_stop_the_others():
    population = Population(TASK, SEEDS)
    episodes = Episodes(population)
    deciders = [make_decider(episodes, host, "heuristic") for host in range(2)]
    with torch.no_grad():
        next(population.runs[0].model.host.parameters()).fill_(math.nan)
    broken, healthy = play_epoch(episodes, deciders)
    assert [type(event) for event in broken] == [HostRolledBack, HostEpoch]
    assert any(isinstance(event, ActionTaken) for event in healthy)
    assert [decider.memory[0]["epoch"] for decider in deciders] == [1, 1]
