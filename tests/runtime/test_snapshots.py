"""A restored host goes on as if nothing had happened in between, to the bit."""

from copy import deepcopy

import pytest

from esper.runtime.population import Population
from runtime.episodes import (
    BLOBS,
    BLOBS_GROWTH,
    CULL,
    GERMINATE,
    GROWTH,
    IMAGES,
    act,
    differing,
    epochs,
    play,
    print_of,
    replace,
)

TEXT = replace(BLOBS, optimizer="adamw", lr=0.01, epoch_examples=100)
TASKS = pytest.mark.parametrize(
    ("task", "script"), [(IMAGES, GROWTH), (TEXT, BLOBS_GROWTH)], ids=["sgd", "adamw"]
)


@TASKS
@pytest.mark.parametrize("epoch", range(6))
def test_an_episode_goes_on_from_a_snapshot_as_it_went_on_uninterrupted(task, script, epoch):
    """Whatever the epoch: before and after germinating, blending, fossilizing and culling."""
    population = Population(task, [7, 8])
    by_host = {0: script, 1: script}
    play(population, epoch, by_host)
    snapshot = population.snapshot()
    play(population, 7 - epoch, by_host, start=epoch)
    expected = [print_of(population, host) for host in range(2)]
    population.restore(snapshot)
    play(population, 7 - epoch, by_host, start=epoch)
    assert [differing(expected[host], print_of(population, host)) for host in range(2)] == [[], []]


@TASKS
@pytest.mark.parametrize("epoch", [0, 1, 2, 3, 5])
def test_restoring_brings_tensors_states_and_the_stream_back(task, script, epoch):
    population = epochs(task, [7], epochs=epoch, script={0: script})
    before, snapshot = print_of(population), population.snapshot()
    play(population, 7 - epoch, {0: script}, start=epoch)
    population.restore(snapshot)
    assert set(differing(before, print_of(population))) <= {"reports"}


@pytest.mark.parametrize("epoch", [0, 3])
def test_restoring_brings_back_what_the_reports_said(epoch):
    """A policy that goes on from a snapshot must not see readings of a future that never was."""
    population = epochs(TEXT, [7], epochs=epoch, script={0: BLOBS_GROWTH})
    before, snapshot = population.reports(), population.snapshot()
    play(population, 7 - epoch, {0: BLOBS_GROWTH}, start=epoch)
    population.restore(snapshot)
    assert population.reports() == before


def test_a_snapshot_can_be_restored_twice():
    population = epochs(IMAGES, [7], epochs=2)
    snapshot = population.snapshot()
    prints = []
    for _ in range(2):
        population.restore(snapshot)
        play(population, 3, {0: GROWTH}, start=2)
        prints.append(print_of(population))
    assert differing(*prints) == []


def test_a_snapshot_survives_another_turn_of_events():
    """Restored after an episode with other seeds in other places, it still says the same."""
    population = epochs(IMAGES, [7], epochs=2)
    snapshot = population.snapshot()
    play(population, 5, {0: GROWTH}, start=2)
    expected = print_of(population)
    population.restore(snapshot)
    play(population, 1, {0: {2: [(CULL, "r0c0"), (CULL, "r0c1")]}}, start=2)
    play(population, 3, {0: {4: [(GERMINATE, "r0c1", "depthwise")]}}, start=3)
    population.restore(snapshot)
    play(population, 5, {0: GROWTH}, start=2)
    assert differing(expected, print_of(population)) == []


def test_a_snapshot_goes_on_right_after_a_cull():
    """The culled seed comes back with its momentum, although the optimiser has forgotten it."""
    population = epochs(IMAGES, [7], epochs=3, script={0: {0: GROWTH[0]}})
    snapshot = population.snapshot()
    play(population, 2)
    expected = print_of(population)
    population.restore(snapshot)
    act(population, 0, CULL)
    population.restore(snapshot)
    play(population, 2)
    assert differing(expected, print_of(population)) == []


def test_a_snapshot_is_not_changed_by_what_follows():
    population = epochs(IMAGES, [7], epochs=2)
    (snapshot,) = population.snapshot()
    before = deepcopy(snapshot.host.tensors)
    play(population, 2, {0: GROWTH}, start=2)
    assert differing(before, snapshot.host.tensors) == []


def test_restoring_one_population_needs_as_many_snapshots_as_hosts():
    population = Population(BLOBS, [1, 2])
    with pytest.raises(ValueError, match="shorter"):
        population.restore(population.snapshot()[:1])
