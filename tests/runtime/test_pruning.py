"""Late pruning of populations:

when, once, to the bit around saves and rollbacks, and who is left alone.
"""

from dataclasses import replace

import pytest
import torch

from esper.episodes import Episodes
from esper.runtime.charges import network_flops
from esper.runtime.population import Population
from esper.telemetry.events import FossilJudged, HostEpoch, HostRolledBack
from runtime.episodes import GROWTH, IMAGES, act, differing, epochs, keep_measured, play, print_of
from runtime.stored import restore, store

TASK = replace(IMAGES, epochs=11, lr=0.05)
DUE = next(epoch for epoch in range(TASK.epochs + 1) if TASK.is_rate_low(epoch))


def due(task=TASK, seeds=(7,)):
    """Hosts with two fossils in r0c0 at the end of the epoch after which the rate is low, measured,
    not pruned yet.
    """
    population = epochs(task, list(seeds), epochs=DUE - 1)
    population.train_epoch()
    population.evaluate()
    assert [len(run.slots[0].fossils) for run in population.runs] == [2] * len(seeds)
    return population


@torch.no_grad()
def spoil(fossil):
    """Harm beyond doubt; the scale is what the body is multiplied by."""
    fossil.scale.copy_(torch.linspace(-30, 30, fossil.scale.numel()).view_as(fossil.scale))


def removed(population, host=0):
    return [verdict.blueprint_id for verdict in population.prune(host) if not verdict.is_kept]


def test_the_rate_is_low_from_a_tenth_of_its_peak_on_and_after_the_last_epoch():
    assert [TASK.rate(epoch) <= 0.1 * TASK.lr for epoch in range(TASK.epochs)] == [
        TASK.is_rate_low(epoch) for epoch in range(TASK.epochs)
    ]
    assert replace(TASK, constant_share=1.0).is_rate_low(TASK.epochs)
    assert not replace(TASK, constant_share=1.0).is_rate_low(TASK.epochs - 1)


@pytest.mark.parametrize("number", [0, 1])
def test_a_harmful_fossil_leaves_and_the_reading_is_of_what_is_left(number):
    population = due()
    run = population.runs[0]
    spoil(run.slots[0].fossils[number])
    harmful, name = run.slots[0].fossils[number], run.slots[0].fossil_names[number]
    before, reading = run.model.total_params, run.reading
    assert name in removed(population)
    assert harmful not in list(run.slots[0].fossils)
    assert run.model.total_params < before
    assert run.reading != reading
    population.executor.measure(population.runs, [run.splits.validation])
    loss, accuracy, *_ = population.executor.measure([run], [run.splits.validation])[0].tolist()
    assert (loss, accuracy) == pytest.approx(
        (run.reading.held_out_loss, run.reading.held_out_accuracy), rel=1e-5
    )
    assert set(run.optimizer.state) == set(run.model.parameters())
    play(population, 1, start=DUE)


def test_fossils_stay_exactly_where_their_contribution_is_above_zero():
    population = due()
    run = population.runs[0]
    verdicts = population.prune(0)
    kept = [verdict for verdict in verdicts if verdict.contribution.mean > 0]
    assert kept
    assert [verdict.is_kept for verdict in verdicts] == [verdict in kept for verdict in verdicts]
    assert len(run.slots[0].fossils) == sum(verdict.slot_id == "r0c0" for verdict in kept)


def test_it_costs_a_pass_per_fossil_and_one_of_the_whole():
    population = due()
    run = population.runs[0]
    count, whole = len(run.splits.validation), network_flops(run.model, population.runs[0].flops)
    before = run.ledger.phases["counterfactual"]
    judged = len(population.prune(0))
    cost = run.ledger.phases["counterfactual"]
    assert cost.examples - before.examples == (judged + 1) * count
    assert count * whole < cost.flops - before.flops < (judged + 1) * count * whole


def test_it_happens_once_when_the_rate_has_fallen():
    population = Population(TASK, [7])
    episodes, found = Episodes(population), []
    for epoch in range(TASK.epochs):
        happened = episodes.train()[0]
        kinds = [type(event) for event in happened]
        found += [epoch + 1] * kinds.count(FossilJudged)
        assert FossilJudged not in kinds or kinds.index(HostEpoch) < kinds.index(FossilJudged)
        (measured,) = [event for event in happened if isinstance(event, HostEpoch)]
        assert (
            measured.params
            == population.runs[0].model.total_params
            == episodes.views[0].params_used
        )
        for move in GROWTH.get(epoch, []):
            act(population, 0, *move)
        keep_measured(population)
        episodes.tick()
    assert found == [DUE] * 2


@pytest.mark.parametrize("change", [{"prunes": False}, {"epochs": TASK.epochs * 2}])
def test_without_the_setting_or_at_a_high_rate_nothing_is_judged(change):
    population = due(replace(TASK, **change))
    assert population.prune(0) == []
    assert len(population.runs[0].slots[0].fossils) == 2


def test_a_new_episode_is_pruned_anew():
    population = due()
    assert population.prune(0)
    assert population.runs[0].is_pruned
    population.reset(0, 8)
    assert not population.runs[0].is_pruned


def finished(population, done):
    """The rest of the episode, with pruning where it is due."""
    for _ in range(TASK.epochs - done):
        population.train_epoch()
        population.evaluate()
        population.prune(0)
        population.tick()
    return print_of(population)


@pytest.mark.parametrize("is_stored_first", [True, False])
def test_stored_before_or_after_the_pass_it_goes_on_to_the_bit(tmp_path, is_stored_first):
    population, again = due(), Population(TASK, [7])
    spoil(population.runs[0].slots[0].fossils[0])
    if not is_stored_first:
        assert removed(population)
    store(population, tmp_path)
    restore(again, tmp_path)
    if is_stored_first:
        assert removed(population) == removed(again) != []
    assert again.runs[0].is_pruned
    assert again.prune(0) == []
    for each in (population, again):
        each.tick()
    assert differing(finished(population, DUE), finished(again, DUE)) == []


def test_a_snapshot_knows_whether_it_happened():
    population = due()
    before = population.snapshot()
    population.prune(0)
    after = population.snapshot()
    population.restore(before)
    assert not population.runs[0].is_pruned
    assert len(population.runs[0].slots[0].fossils) == 2
    population.restore(after)
    assert population.runs[0].is_pruned


def test_a_rollback_brings_nothing_back_that_was_removed():
    population = due()
    spoil(population.runs[0].slots[0].fossils[0])
    gone = removed(population)
    assert gone
    left = [list(slot.fossils) for slot in population.runs[0].slots]
    population.tick()
    with torch.no_grad():
        next(population.runs[0].model.host.parameters()).fill_(torch.nan)
    population.train_epoch()
    assert population.evaluate()
    assert [list(slot.fossils) for slot in population.runs[0].slots] == left
    assert population.prune(0) == []


def test_a_host_that_is_rolled_back_when_it_is_due_is_pruned_an_epoch_later():
    population = epochs(TASK, [7], epochs=DUE - 1)
    episodes = Episodes(population)
    with torch.no_grad():
        next(population.runs[0].model.host.parameters()).fill_(torch.nan)
    told = []
    for _ in range(2):
        told.append({type(event) for event in episodes.train()[0]})
        episodes.tick()
    assert HostRolledBack in told[0]
    assert FossilJudged not in told[0]
    assert FossilJudged in told[1]


def test_a_host_under_suspicion_is_not_judged():
    population = due()
    population.governors[0].bad_checks = 1
    assert population.prune(0) == []
    population.governors[0].bad_checks = 0
    assert population.prune(0)


def test_hosts_are_pruned_as_if_they_were_alone():
    crowd, alone = due(seeds=(6, 7, 8)), due()
    for population in (crowd, alone):
        for run in population.runs:
            spoil(run.slots[0].fossils[1])
    assert removed(crowd, 1) == removed(alone)
    assert differing(print_of(crowd, 1), print_of(alone)) == []
