"""A host that breaks is brought back alone; a healthy one is left in peace."""

import math
import re
from dataclasses import replace

import pytest
import torch

from esper.leyline.stages import SeedStage
from esper.runtime.governor import Governor
from esper.runtime.host import EpochReading
from esper.runtime.population import Population
from esper.runtime.tasks.registry import get_task
from runtime.episodes import (
    BLOBS,
    CULL,
    FOSSILIZE,
    GERMINATE,
    GROWTH,
    IMAGES,
    QUICK,
    act,
    differing,
    epochs,
    play,
    print_of,
)

HEALTHY = EpochReading(0, 1.0, 0.5, 1.0, 0.1, held_out_loss=1.0, held_out_accuracy=0.5)


@pytest.fixture
def governor():
    return Governor(Population(IMAGES, [1]).runs[0])


def poison(population, host, value=math.nan):
    with torch.no_grad():
        next(population.runs[host].model.host.parameters()).fill_(value)


def weights(population, host=0):
    return {
        name: value
        for name, value in print_of(population, host).items()
        if isinstance(value, torch.Tensor)
    }


def host_only(tensors):
    return {name: value for name, value in tensors.items() if name.startswith("host.")}


# -- judging ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("train_loss", "training loss"),
        ("host_gradient_norm", "gradient"),
        ("held_out_loss", "held-out loss"),
    ],
)
def test_a_reading_that_is_not_a_number_is_named(governor, field, words, value):
    assert f"{words} is" in governor.judge(replace(HEALTHY, **{field: value}))


def test_a_collapse_to_guessing_is_named(governor):
    assert governor.judge(replace(HEALTHY, held_out_accuracy=0.6)) is None
    assert "60.0% to guessing, 10.0%" in governor.judge(replace(HEALTHY, held_out_accuracy=0.1))


def test_guessing_is_no_collapse_before_it_was_clearly_better(governor):
    for accuracy in (0.1, 0.19, 0.1, 0.05):
        assert governor.judge(replace(HEALTHY, held_out_accuracy=accuracy)) is None


@pytest.mark.parametrize(
    ("chance", "best", "collapses"), [(0.5, 0.7, False), (0.5, 0.8, True), (1 / 256, 0.5, True)]
)
def test_clearly_better_depends_on_chance(governor, chance, best, collapses):
    governor.run.task = replace(governor.run.task, chance=chance)
    governor.judge(replace(HEALTHY, held_out_accuracy=best))
    assert (governor.judge(replace(HEALTHY, held_out_accuracy=chance)) is not None) is collapses


def test_a_loss_three_times_its_best_is_exploding_at_the_third_check(governor):
    verdicts = [
        governor.judge(replace(HEALTHY, held_out_loss=loss)) for loss in (1.0, 3.1, 4.0, 5.0)
    ]
    assert verdicts[:3] == [None] * 3
    assert re.search("5 for 3 .* 1", verdicts[3])


def test_a_loss_that_comes_back_in_time_is_not_exploding(governor):
    losses = (1.0, 3.1, 4.0, 2.9, 3.1, 4.0, 2.0)
    assert [governor.judge(replace(HEALTHY, held_out_loss=loss)) for loss in losses] == [None] * 7


def test_a_tiny_loss_that_triples_is_not_exploding(governor):
    """A host that has all but solved its task may waver; it is still far better than guessing."""
    readings = [
        replace(HEALTHY, held_out_loss=loss, held_out_accuracy=0.99)
        for loss in (1e-3, 4e-3, 4e-3, 4e-3, 4e-3)
    ]
    assert [governor.judge(reading) for reading in readings] == [None] * 5


def test_the_best_values_are_those_of_healthy_epochs(governor):
    for loss, accuracy in ((2.0, 0.3), (1.0, 0.6), (1.5, 0.5), (math.nan, 0.9)):
        governor.judge(replace(HEALTHY, held_out_loss=loss, held_out_accuracy=accuracy))
    assert (governor.best_loss, governor.best_accuracy) == (1.0, 0.6)


@pytest.mark.parametrize("task", [IMAGES, BLOBS], ids=lambda task: task.name)
def test_a_healthy_episode_is_left_in_peace(task):
    population = Population(task, [1, 2, 3])
    assert (
        play(
            population,
            8,
            {1: {0: [(GERMINATE, "r0c0", population.views()[0].space.blueprint_ids[1])]}},
        )
        == []
    )


# -- seeds that have gone --------------------------------------------------------------------------

SOLVED = replace(HEALTHY, held_out_loss=0.1, held_out_accuracy=0.95)
GUESSING = replace(HEALTHY, held_out_loss=0.7, held_out_accuracy=0.5)


@pytest.fixture
def grown():
    """A host whose seed is on probation and measured, and that is expected to solve its task."""
    population = epochs(BLOBS, [1], epochs=3, script={0: {0: [(GERMINATE, "r0c0", "mlp")]}})
    population.train_epoch()
    population.evaluate()
    population.governors[0].judge(SOLVED)
    return population


def test_a_culled_seed_takes_what_was_expected_with_it(grown):
    act(grown, 0, CULL)
    assert grown.governors[0].judge(GUESSING) is None
    assert (grown.governors[0].best_accuracy, grown.governors[0].best_loss) == (0.5, 0.7)


def test_without_a_cull_the_same_fall_is_a_collapse(grown):
    assert "95.0% to guessing, 50.0%" in grown.governors[0].judge(GUESSING)


@pytest.mark.parametrize(
    "move", [(FOSSILIZE, "r0c0"), (GERMINATE, "r0c1", "lora")], ids=["kept", "planted"]
)
def test_a_seed_that_is_kept_or_planted_takes_nothing(grown, move):
    act(grown, 0, *move)
    assert "95.0% to guessing, 50.0%" in grown.governors[0].judge(GUESSING)


def test_after_a_cull_a_loss_above_the_old_best_is_not_exploding(grown):
    act(grown, 0, CULL)
    readings = [replace(GUESSING, held_out_loss=loss) for loss in (0.8, 0.9, 0.8, 0.9)]
    assert [grown.governors[0].judge(reading) for reading in readings] == [None] * 4


def test_after_a_cull_expectations_grow_anew(grown):
    act(grown, 0, CULL)
    assert [grown.governors[0].judge(reading) for reading in (GUESSING, SOLVED)] == [None, None]
    assert "95.0% to guessing, 50.0%" in grown.governors[0].judge(GUESSING)


def test_a_cull_before_a_save_is_a_cull_after_it(grown):
    """What was saved between the cull and the next epoch goes on like what was not."""
    act(grown, 0, CULL)
    snapshot = grown.snapshot()
    grown.restore(snapshot)
    assert grown.governors[0].judge(GUESSING) is None


def test_a_host_that_falls_to_guessing_with_its_culled_seed_is_left_in_peace():
    """Only the seed could tell the classes apart."""
    population = Population(replace(get_task("blobs"), lengths=QUICK), [1, 2])
    script = {key: {0: [(GERMINATE, "r0c0", "mlp")], 4: [(CULL, "r0c0")]} for key in range(2)}
    assert play(population, 5, script, keeps=False) == []
    assert min(reading.held_out_accuracy for reading in population.readings()) > 0.8
    assert play(population, 4, start=5) == []
    assert max(reading.held_out_accuracy for reading in population.readings()) < 0.65


# -- bringing back ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_poisoned_host_leaves_every_other_bit_identical(value):
    alone = {seed: print_of(epochs(IMAGES, [seed])) for seed in (7, 9)}
    population = Population(IMAGES, [7, 8, 9])
    script = {0: GROWTH, 2: GROWTH}
    play(population, 3, script)
    poison(population, 1, value)
    rollbacks = play(population, 4, script, start=3)
    assert [rollback.host for rollback in rollbacks] == [1]
    assert [
        differing(alone[seed], print_of(population, host)) for host, seed in ((0, 7), (2, 9))
    ] == [[], []]


@pytest.fixture
def rolled_back():
    """A host with a fossil and a live seed, good and then poisoned; with what it was and what was
    done.
    """
    population = epochs(IMAGES, [1], epochs=6)
    population.train_epoch()
    population.evaluate()
    good, epoch, flops = (
        weights(population),
        population.runs[0].epoch,
        population.runs[0].ledger.flops,
    )
    stream = population.runs[0].plan.stream.state()
    population.tick()
    poison(population, 0)
    population.train_epoch()
    return population, population.evaluate(), good, (epoch, flops, stream)


def test_a_poisoned_host_is_brought_back_to_the_last_good_epoch(rolled_back):
    population, (rollback,), good, _ = rolled_back
    now = weights(population)
    kept = [
        name
        for name in good
        if name in now and not name.startswith("stream") and "alpha" not in name
    ]
    assert any(name.startswith("slots.r0c0.fossils") for name in kept)
    assert any("momentum" in name for name in kept)
    assert differing({k: good[k] for k in kept}, {k: now[k] for k in kept}) == []
    assert "nan" in rollback.reason


def test_a_rollback_culls_live_seeds_and_keeps_fossils(rolled_back):
    population, (rollback,), _, _ = rolled_back
    report = population.reports()[0]["r0c0"]
    assert [change.slot_id for change in rollback.changes] == ["r0c0"]
    assert (report.stage, report.fossil_count) == (SeedStage.CULLED, 1)
    assert population.runs[0].model.active_seeds == 0


def test_data_clock_and_ledger_go_on_through_a_rollback(rolled_back):
    population, _, _, (epoch, flops, stream) = rolled_back
    run = population.runs[0]
    assert run.epoch == epoch + 1
    assert run.ledger.flops > flops
    assert run.plan.stream.state()["position"] != stream["position"]


def test_a_host_that_was_brought_back_trains_on(rolled_back):
    population = rolled_back[0]
    population.tick()
    assert play(population, 2) == []
    assert population.runs[0].model.active_seeds == 0


def test_a_second_rollback_does_not_cull_the_same_seed_again(rolled_back):
    population = rolled_back[0]
    poison(population, 0)
    population.train_epoch()
    (rollback,) = population.evaluate()
    assert rollback.changes == ()
    assert population.governors[0].rollbacks == 2


def test_a_seed_that_breaks_its_host_at_once_is_culled_too():
    """The seed is younger than the last good epoch; it is a live seed all the same."""
    population = epochs(BLOBS, [1], epochs=2, script={0: {1: [(GERMINATE, "r0c0", "mlp")]}})
    poison(population, 0)
    population.train_epoch()
    (rollback,) = population.evaluate()
    assert population.runs[0].model.active_seeds == 0
    assert [change.slot_id for change in rollback.changes] == ["r0c0"]
    assert population.reports()[0]["r0c0"].stage is SeedStage.CULLED


def test_an_exploding_host_is_brought_back_to_before_it_exploded():
    population = epochs(replace(BLOBS, lr=1e-6), [1], epochs=2, script={})
    good = host_only(weights(population))
    with torch.no_grad():
        for parameter in population.runs[0].model.host.parameters():
            parameter.mul_(50.0)
    (rollback,) = play(population, 3)
    assert "3 checks" in rollback.reason
    now = host_only(weights(population))
    assert all(torch.allclose(now[name], good[name], rtol=0.01, atol=0.01) for name in good)


def test_a_fossil_made_after_the_last_good_epoch_is_gone():
    script = {0: {0: [(GERMINATE, "r0c0", "mlp")], 3: [(FOSSILIZE, "r0c0")]}}
    population = epochs(BLOBS, [1], epochs=4, script=script)
    assert population.runs[0].model.fossilized_seeds == 1
    poison(population, 0)
    population.train_epoch()
    population.evaluate()
    assert population.runs[0].model.fossilized_seeds == 0
    assert population.runs[0].model.total_params == population.runs[0].model.host_params


def test_a_restored_population_is_governed_as_it_was():
    """What the governor expects of a host belongs to the host's state."""
    population = epochs(BLOBS, [1], epochs=1, script={})
    snapshot, best = population.snapshot(), population.governors[0].best_loss
    play(population, 4)
    assert population.governors[0].best_loss < best
    population.restore(snapshot)
    assert population.governors[0].best_loss == best


def test_a_new_structure_is_kept_in_the_tensors_of_the_one_before():
    population = epochs(IMAGES, [1], epochs=1, script={0: {}})
    governor = population.governors[0]
    before = dict(governor._good.tensors)
    act(population, 0, GERMINATE, "r0c0", "conv_light")
    population.tick()
    population.train_epoch()
    population.evaluate()
    after = governor._good.tensors
    assert len(after) > len(before)
    assert all(after[name] is kept for name, kept in before.items())
    live = population.runs[0].tensors()
    assert all(
        torch.equal(kept, live[name]) and kept is not live[name] for name, kept in after.items()
    )
