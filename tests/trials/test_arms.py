"""One arm of a comparison: the same twice, controls that are controls, and one plan of learning rates for all."""

from dataclasses import replace

import pytest
import torch

from esper.kasmina.slot import count_parameters
from esper.runtime.data import DataSet, Split
from esper.telemetry.events import ActionTaken, EpochMeasured
from esper.trials.arms import Recipe, build_arm, run_arm

RECIPE = Recipe(epochs=10, batch=32)


@pytest.fixture(scope="module")
def data():
    """Small images whose class is the brighter half, with noise."""

    def split(count, seed):
        draw = torch.Generator().manual_seed(seed)
        images = torch.randn(count, 1, 8, 8, generator=draw)
        labels = torch.randint(2, (count,), generator=draw)
        images[labels == 1, :, :4] += 0.3
        return Split(images, labels)

    return DataSet("halves", split(128, 1), split(64, 2), split(64, 3))


@pytest.fixture(scope="module")
def heuristic(data):
    return run_arm(data, "heuristic", 1, RECIPE)


@pytest.fixture(scope="module")
def never(data):
    return run_arm(data, "never", 1, RECIPE)


def same(run, other):
    weights = run.network.state_dict(), other.network.state_dict()
    return weights[0].keys() == weights[1].keys() and all(torch.equal(v, weights[1][k]) for k, v in weights[0].items())


def test_an_arm_is_the_same_twice(data, heuristic):
    torch.manual_seed(77)
    again = run_arm(data, "heuristic", 1, RECIPE)
    assert replace(again.result, seconds=0) == replace(heuristic.result, seconds=0)
    assert again.events == heuristic.events
    assert same(again, heuristic)


def test_another_seed_is_another_host(data, never):
    assert not same(run_arm(data, "never", 2, RECIPE), never)


def test_every_arm_starts_from_the_same_host(data):
    first, second = (build_arm(data, RECIPE, 3, "cpu").host.state_dict() for _ in range(2))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_the_never_arm_grows_nothing(never):
    result = never.result
    assert result.start_params == result.final_params
    assert (result.germinated, result.fossilized, result.culled) == (0, 0, 0)


def test_the_heuristic_arm_grows_within_its_budget(heuristic):
    result = heuristic.result
    assert result.germinated > 0
    sizes = [event.params for event in heuristic.events if isinstance(event, EpochMeasured)]
    assert max(sizes) > result.start_params
    assert max(sizes) <= RECIPE.budget * result.start_params
    assert result.final_params == count_parameters(heuristic.network)


def test_the_sham_arm_replays_another_arm_and_equals_the_host_alone_to_the_bit(data, heuristic, never):
    sham = run_arm(data, "sham", 1, RECIPE, replayed=heuristic.events)

    def planted(run):
        return [(e.epoch, e.slot) for e in run.events if isinstance(e, ActionTaken) and e.op == "GERMINATE"]

    assert planted(sham) == planted(heuristic)
    assert sham.result.final_params == sham.result.start_params
    assert same(sham, never)
    assert sham.result.test_loss == never.result.test_loss


def test_whoever_watches_sees_every_epoch_and_every_event(data, heuristic):
    seen = []
    run_arm(data, "heuristic", 1, RECIPE, watch=seen.append)
    assert len(seen) == RECIPE.epochs
    assert tuple(event for events in seen for event in events) == heuristic.events


def test_a_result_counts_what_the_events_say(heuristic):
    actions = [e.op for e in heuristic.events if isinstance(e, ActionTaken)]
    assert heuristic.result.germinated == actions.count("GERMINATE")
    assert heuristic.result.epochs == RECIPE.epochs


def test_the_rate_is_constant_and_then_falls_to_zero_along_a_cosine():
    recipe = Recipe(constant_share=0.5)
    assert [recipe.rate(p) for p in (0.0, 0.3, 0.5)] == [1.0] * 3
    assert recipe.rate(0.75) == pytest.approx(0.5)
    assert recipe.rate(1.0) == pytest.approx(0.0)


def test_an_arm_plants_only_in_the_first_part_of_its_life(heuristic):
    planted = [e.epoch for e in heuristic.events if isinstance(e, ActionTaken) and e.op == "GERMINATE"]
    assert max(planted) < 0.4 * RECIPE.epochs
