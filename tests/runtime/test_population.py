"""Hosts know nothing of each other:

who is beside a host, and what happens to it, changes not one bit.
"""

import pytest
import torch
from torch import nn

from esper.kasmina.hosts import ChainHost
from esper.leyline.errors import DataError, IllegalActionError, SettingError
from esper.runtime.population import Population
from runtime.episodes import (
    BLOBS,
    BLOBS_GROWTH,
    CULL,
    FOSSILIZE,
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

TEXT = replace(BLOBS, optimizer="adamw", lr=0.01)


@pytest.fixture(scope="module")
def alone():
    return print_of(epochs(IMAGES, [7]))


def test_the_scripted_episode_has_every_kind_of_change():
    population = epochs(IMAGES, [7])
    first, second = (report for report in population.reports()[0].values())
    assert (first.fossil_count, first.blueprint_id, first.is_live) == (1, "conv_small", True)
    assert (second.fossil_count, second.is_live) == (0, False)


def test_the_same_seed_has_the_same_episode_twice(alone):
    torch.manual_seed(123)
    assert differing(alone, print_of(epochs(IMAGES, [7]))) == []


def test_another_seed_plays_another_episode(alone):
    assert len(differing(alone, print_of(epochs(IMAGES, [8])))) > 10


@pytest.mark.parametrize(
    "seeds", [[7, 8], [8, 7], [1, 2, 7, 3], pytest.param([7, 7], marks=pytest.mark.slow)], ids=str
)
def test_neighbours_leave_a_host_bit_identical(alone, seeds):
    assert differing(alone, print_of(epochs(IMAGES, seeds), seeds.index(7))) == []


def test_what_happens_to_a_neighbour_leaves_a_host_bit_identical(alone):
    population = epochs(
        IMAGES,
        [8, 7],
        script={1: GROWTH, 0: {2: [(GERMINATE, "r0c1", "depthwise")], 4: [(CULL, "r0c1")]}},
    )
    assert differing(alone, print_of(population, 1)) == []


@pytest.mark.parametrize(
    "task",
    [
        BLOBS,
        pytest.param(TEXT, marks=pytest.mark.slow),
        replace(BLOBS, batch=37, epoch_examples=101),
    ],
    ids=["sgd", "adamw", "odd"],
)
def test_order_leaves_hosts_bit_identical(task):
    forward, backward = (
        epochs(task, seeds, script=dict.fromkeys(range(3), BLOBS_GROWTH))
        for seeds in ([1, 2, 3], [3, 2, 1])
    )
    for host in range(3):
        assert differing(print_of(forward, host), print_of(backward, 2 - host)) == []


def test_a_population_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    epochs(IMAGES, [7], epochs=2)
    assert torch.equal(torch.get_rng_state(), before)


class Dropping(ChainHost):
    """A host that draws random numbers while it trains."""

    def __init__(self):
        super().__init__(
            [nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5))], nn.Linear(8, 2), torch.zeros(2, 2)
        )


def test_a_host_that_draws_random_numbers_is_independent_too():
    task = replace(BLOBS, build_host=Dropping)
    alone, among = epochs(task, [1], epochs=2, script={}), epochs(task, [2, 1], epochs=2, script={})
    assert differing(print_of(alone), print_of(among, 1)) == []


def test_an_epoch_trains_every_host():
    population = Population(BLOBS, [1, 2])
    before = [print_of(population, host) for host in range(2)]
    population.train_epoch()
    for host in range(2):
        weights = set(dict(population.runs[host].model.named_parameters()))
        assert weights <= set(differing(before[host], print_of(population, host)))


def test_host_and_seed_are_clipped_apart():
    """A seed's gradient, however large, does not shrink the host's step."""
    population = Population(replace(BLOBS, clip_norm=1e-3), [1])
    play(population, 1, {0: {0: [(GERMINATE, "r0c0", "mlp")]}})
    run = population.runs[0]
    inputs, targets = run.splits.train.gather(torch.arange(64))
    run.begin_epoch()
    run._forward(inputs, targets)[0].mean().backward()
    norms = run.clip_gradients()
    seed = list(run.model.slot("r0c0").seed.parameters())
    host = [p for p in run.model.parameters() if not any(p is own for own in seed)]
    for own in (host, seed):
        assert float(torch.nn.utils.get_total_norm([p.grad for p in own])) == pytest.approx(
            1e-3, rel=1e-2
        )
    assert all(float(norm) > 1e-3 for norm in norms[:2])


def test_a_seed_learns_at_the_hosts_rate_of_the_epoch():
    task = replace(BLOBS, epochs=6)
    population = Population(task, [1])
    play(population, 1, {0: {0: [(GERMINATE, "r0c0", "mlp")]}})
    for epoch in range(1, 6):
        population.train_epoch()
        run = population.runs[0]
        assert {group["lr"] for group in run.optimizer.param_groups} == {task.rate(epoch)}
        population.evaluate()
        population.tick()
    assert run.link.groups["r0c0"][0] > 0


def test_an_illegal_action_raises_its_refusal_and_changes_nothing():
    population = epochs(BLOBS, [1], epochs=1, script={})
    before = print_of(population)
    with pytest.raises(IllegalActionError):
        act(population, 0, FOSSILIZE)
    assert differing(before, print_of(population)) == []


# -- resetting -------------------------------------------------------------------------------------


def test_a_reset_host_equals_one_in_a_fresh_population(alone):
    population = epochs(IMAGES, [1, 2], epochs=3)
    population.reset(1, 7)
    play(population, 7, {1: GROWTH})
    assert differing(alone, print_of(population, 1)) == []


def test_a_reset_leaves_other_hosts_bit_identical():
    population = Population(IMAGES, [7, 2])
    play(population, 3, dict.fromkeys(range(2), GROWTH))
    population.reset(1, 9)
    play(population, 4, {0: GROWTH}, start=3)
    assert differing(print_of(epochs(IMAGES, [7])), print_of(population, 0)) == []


def test_readings_keep_their_places_after_a_reset():
    population = epochs(BLOBS, [1, 2], epochs=1, script={})
    second = population.readings()[1]
    population.reset(0, 3)
    assert population.readings()[1] == second


# -- the end ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ended():
    population = epochs(BLOBS, [1, 2], epochs=2, script={})
    return population, population.final_scores()


@pytest.mark.parametrize("call", ["train_epoch", "evaluate", "final_scores"])
def test_after_the_final_report_an_episode_is_over(ended, call):
    with pytest.raises(DataError, match="test split"):
        getattr(ended[0], call)()


def test_after_the_final_report_nothing_can_be_planted(ended):
    with pytest.raises(DataError, match="test split"):
        act(ended[0], 0, GERMINATE, blueprint="mlp")


def test_the_final_report_scores_the_test_split(ended):
    population, finals = ended
    test = population.runs[0].splits.test.open_for_final_report()
    inputs, targets = test.gather(torch.arange(len(test)))
    for run, final in zip(population.runs, finals, strict=True):
        with torch.no_grad():
            outputs = run.model.eval()(inputs)
        assert final.accuracy == pytest.approx(float((outputs.argmax(1) == targets).float().mean()))
        assert final.loss == pytest.approx(
            float(torch.nn.functional.cross_entropy(outputs, targets))
        )
        assert final.params == run.model.host_params


def test_the_final_report_leaves_unfinished_seeds_out():
    population = epochs(BLOBS, [1], epochs=3, script={0: {0: [(GERMINATE, "r0c0", "mlp")]}})
    assert population.runs[0].model.total_params > population.runs[0].model.host_params
    assert population.final_scores()[0].params == population.runs[0].model.host_params


def test_the_final_validation_score_is_the_harvested_networks():
    """An unfinished seed counts in the last reading, but is not there any more."""
    population = epochs(BLOBS, [1], epochs=3, script={0: {0: [(GERMINATE, "r0c0", "mlp")]}})
    run = population.runs[0]
    alone = dict(run.model.host.state_dict())
    for parameter in run.model.slot("r0c0").seed.parameters():
        torch.nn.init.normal_(parameter, std=30.0)
    population.evaluate()
    (final,) = population.final_scores()
    fresh = Population(BLOBS, [1]).runs[0].model.host
    fresh.load_state_dict(alone)
    inputs, targets = run.splits.validation.gather(torch.arange(len(run.splits.validation)))
    expected = float((fresh.eval()(inputs).argmax(1) == targets).float().mean())
    assert final.validation_accuracy == pytest.approx(expected)
    assert run.reading.held_out_accuracy != pytest.approx(expected, abs=0.05)


def test_measuring_before_training_is_refused():
    with pytest.raises(SettingError, match="train_epoch"):
        Population(BLOBS, [1]).evaluate()


# -- several devices -------------------------------------------------------------------------------

TWO_DEVICES = ["cpu", "cpu:0"]
"""Two names of one device, which serve as two GPUs."""


def test_hosts_of_every_device_are_trained_and_measured_as_on_one():
    both = epochs(IMAGES, [7, 8], devices=TWO_DEVICES)
    assert [str(run.device) for run in both.runs] == TWO_DEVICES
    for host, seed in enumerate([7, 8]):
        assert differing(print_of(epochs(IMAGES, [seed])), print_of(both, host)) == []


def test_every_device_gets_its_share_of_the_hosts_and_all_of_them_learn():
    population = Population(BLOBS, [1, 2, 3, 4], devices=TWO_DEVICES)
    assert [str(run.device) for run in population.runs] == ["cpu", "cpu", "cpu:0", "cpu:0"]
    before = [print_of(population, host) for host in range(4)]
    readings = population.train_epoch()
    population.evaluate()
    for host, reading in enumerate(readings):
        assert population.runs[host].epoch == 1
        assert reading.train_loss > 0
        assert len(differing(before[host], print_of(population, host))) > 4
