"""Hosts of a family side by side: each is what it would be alone, bit for bit."""

from dataclasses import replace

import pytest
import torch

from esper.kasmina.hosts import build_cnn_host
from esper.leyline.errors import SettingError, UnknownNameError
from esper.runtime.executors.choosing import choose_executor, find_eager_only
from esper.runtime.executors.eager import EagerExecutor
from esper.runtime.population import Population
from esper.runtime.tasks.families import Span, variation_of
from esper.runtime.tasks.registry import get_task
from runtime.episodes import GERMINATE, play

FAMILY = replace(get_task("digits_varied"), epochs=4)


def build(width, depth):
    return build_cnn_host(blocks=depth, base_channels=width, in_channels=1, image_size=8)


DEEP = replace(
    FAMILY,
    varies=replace(
        FAMILY.varies,
        examples=Span(60, 200, "log"),
        depth=Span(2, 3),
        lr=Span(0.02, 0.2, "log"),
        budget=Span(4, 8),
        build_host=build,
    ),
)
MOVES = {0: [(GERMINATE, "r0c0", "conv_light")]}


def tensors(population, host):
    return population.runs[host].tensors()


def same(left, right):
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


def different_seeds(task, count=3):
    """Seeds of hosts of different width."""
    seeds = {}
    for seed in range(100):
        seeds.setdefault((variation_of(task, seed).width, variation_of(task, seed).depth), seed)
    return list(seeds.values())[:count]


@pytest.mark.parametrize("task", [FAMILY, DEEP], ids=["width", "depth"])
def test_a_host_beside_others_is_what_it_is_alone(task):
    seeds = different_seeds(task)
    together = Population(task, seeds)
    play(together, 3, dict.fromkeys(range(3), MOVES))
    assert len({run.model.host_params for run in together.runs}) == 3
    for host, seed in enumerate(seeds):
        alone = Population(task, [seed])
        play(alone, 3, {0: MOVES})
        assert same(tensors(together, host), tensors(alone, 0))
        assert together.readings()[host] == alone.readings()[0]
        assert together.runs[host].ledger.counts() == alone.runs[0].ledger.counts()


def test_a_host_that_begins_in_the_place_of_another_is_what_it_is_alone():
    first, second, third = different_seeds(DEEP)
    population = Population(DEEP, [first, second])
    play(population, 2, {0: MOVES})
    beside = {name: value.clone() for name, value in tensors(population, 1).items()}
    population.reset(0, third)
    assert same(tensors(population, 1), beside)
    alone = Population(DEEP, [third])
    assert population.runs[0].variation == variation_of(DEEP, third)
    for _ in range(2):
        population.train_epoch()
        population.evaluate()
        alone.train_epoch()
        alone.evaluate()
    assert same(tensors(population, 0), tensors(alone, 0))
    assert population.readings()[0] == alone.readings()[0]


def test_a_host_that_begins_again_gets_nothing_of_before():
    seed = different_seeds(DEEP)[0]
    population = Population(DEEP, [seed])
    play(population, 2, {0: MOVES})
    before = population.readings()[0]
    population.reset(0, seed)
    assert population.runs[0].ledger.flops == 0
    assert population.readings() == [None]
    play(population, 2, {0: MOVES})
    assert population.readings()[0] == before


def test_snapshots_go_back_to_hosts_that_differ():
    population = Population(DEEP, different_seeds(DEEP))
    play(population, 1)
    snapshots = population.snapshot()
    play(population, 2)
    after = population.readings()
    population.restore(snapshots)
    play(population, 2)
    assert population.readings() == after


def test_every_host_has_its_own_prices_and_budget():
    population = Population(DEEP, different_seeds(DEEP))
    for run in population.runs:
        alone = Population(DEEP, [run.seed]).runs[0]
        assert run.flops == alone.flops
        assert run.model.budget == int(run.variation.budget * run.model.host_params)
        assert run.task.lr == run.variation.lr
    assert len({run.flops.whole for run in population.runs}) == 3


def test_a_budget_of_compute_is_the_hosts_own():
    task = replace(FAMILY, clock="compute", epochs=3, compute=8.0)
    population = Population(task, different_seeds(task))
    population.measure_left()
    budgets = [run.clock.budget for run in population.runs]
    assert len(set(budgets)) == 3
    for _ in range(task.epochs):
        population.train_epoch()
        population.evaluate()
        population.tick()
    for run in population.runs:
        assert 0.9 < run.progress <= 1
    population.reset(0, 77)
    assert population.runs[0].clock.measures_left
    assert population.runs[0].clock.budget == Population(task, [77]).runs[0].clock.budget


def test_the_space_has_the_slots_of_the_deepest_host():
    shallow = [seed for seed in range(50) if variation_of(DEEP, seed).depth == 2][:2]
    population = Population(DEEP, shallow)
    assert population.space.slots.slot_ids == ("r0c0", "r0c1", "r0c2")
    assert population.runs[0].model.space.slots.slot_ids == ("r0c0", "r0c1")
    plain = Population(get_task("blobs"), [1])
    assert plain.space is plain.runs[0].model.space


def test_a_slot_that_some_hosts_lack_cannot_be_named():
    with pytest.raises(UnknownNameError, match="r0c2"):
        Population(replace(DEEP, slots=("r0c0", "r0c2")), [1])
    assert Population(replace(DEEP, slots=("r0c0",)), [1]).space.slots.slot_ids == ("r0c0",)


def test_hosts_without_variety_share_their_examples_and_prices():
    population = Population(get_task("blobs"), [1, 2])
    first, second = population.runs
    assert first.splits is second.splits
    assert first.flops is second.flops
    assert first.variation is None


def test_augmented_hosts_keep_their_borders():
    family = replace(FAMILY, augment=True)
    population = Population(family, [1, 2])
    for run in population.runs:
        assert run.splits.train.padded
        assert not run.splits.validation.padded
    play(population, 1)


def test_a_family_runs_eagerly():
    assert "family" in find_eager_only(FAMILY, "off")
    assert isinstance(choose_executor("auto", "off", [torch.device("cpu")], FAMILY), EagerExecutor)
    cuda = [torch.device("cuda", 0)]
    assert isinstance(choose_executor("auto", "off", cuda, FAMILY), EagerExecutor)
    with pytest.raises(SettingError, match="family"):
        choose_executor("graphed", "off", cuda, FAMILY)


def test_a_family_says_what_varies():
    lines = []
    Population(FAMILY, [1]).describe(lines.append)
    assert lines == [f"digits_varied: {FAMILY.varies}"]
    lines.clear()
    Population(get_task("blobs"), [1]).describe(lines.append)
    assert lines == []
