"""A garden that becomes a saved one in place, and what it refuses."""

import json
import sys

import pytest
import torch

import esper
from esper.garden import keeping
from esper.integrations import require
from esper.leyline.errors import SaveError, SettingError
from esper.telemetry.events import HostEpoch, to_record
from user_models import CNN, PLANT_FIRST, grow_cnn, losses_of, random_images, script, train_epoch

IMAGES, HELD_OUT = random_images(32), random_images(16, seed=2)
PLAN = {0: (1, 0, 1, 0), 1: (1, 1, 2, 0), 3: (2, 0, 0, 0)}


def play(garden, epochs):
    for epoch in epochs:
        train_epoch(garden.model, garden.model.link.optimizer, epoch, IMAGES)
        garden.step(lambda: losses_of(garden.model, HELD_OUT))
    return garden


def weights_of(garden):
    return {name: value.clone() for name, value in garden.model.state_dict().items()}


def is_same(first, second):
    return first.keys() == second.keys() and all(
        torch.equal(value, second[name]) for name, value in first.items()
    )


@pytest.mark.parametrize("here", [0, 1, 5])
def test_a_restored_garden_goes_on_as_the_saved_one_wherever_it_was(here, tmp_path):
    garden = play(grow_cnn(PLAN, max_seeds=4, scale=0.5), range(2))
    garden.save(tmp_path)
    expected = weights_of(play(garden, range(2, 6)))
    other = play(grow_cnn(PLAN, host=CNN(), max_seeds=4, scale=0.5), range(here))
    model = other.model
    other.restore(tmp_path)
    assert is_same(weights_of(play(other, range(2, 6))), expected)
    assert other.model is model
    assert other.history == garden.history


def test_time_before_a_restore_is_not_booked_as_training_after_it(tmp_path):
    garden = play(grow_cnn(PLAN), range(1))
    garden.save(tmp_path)
    garden.books.resumed -= 1000.0  # so long ago was the last step
    garden.restore(tmp_path)
    assert play(garden, range(1, 2)).ledger.phases["training"].seconds < 500.0


class Drops:
    """A schedule for LambdaLR that remembers a tuple, which JSON makes a list of."""

    def __init__(self):
        self.at = (1, 3)

    def __call__(self, epoch):
        return 0.5 ** sum(epoch >= at for at in self.at)


def test_a_schedule_that_is_an_object_is_restored(tmp_path):
    garden = grow_cnn({0: PLANT_FIRST}, attach=False)
    optimizer = torch.optim.SGD(garden.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, Drops())
    garden.attach(optimizer, scheduler)
    rates = []
    for epoch in range(4):
        if epoch == 2:
            garden.save(tmp_path)
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    garden.restore(tmp_path)
    assert optimizer.param_groups[0]["lr"] == rates[1]
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == rates[2] < rates[1]


def test_an_average_that_was_not_saved_begins_anew(tmp_path):
    garden = play(grow_cnn(PLAN), range(1))
    garden.save(tmp_path)
    average = garden.ema(0.9)
    play(garden, range(1, 3))
    garden.restore(tmp_path)
    assert average.tensors().keys() == dict(garden.model.named_parameters()).keys()
    assert all(
        torch.equal(average.tensors()[name], p) for name, p in garden.model.named_parameters()
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"blueprints": ["norm"], "policy": script({})}, "blueprints"),
        ({"slots": ["layer1"]}, "modules"),
        ({"policy": "never"}, "never"),
        ({"host": CNN(width=5)}, r"head\.weight"),
    ],
)
def test_a_save_that_does_not_fit_is_refused_with_all_as_it_was(options, named, tmp_path):
    play(grow_cnn(PLAN), range(2)).save(tmp_path)
    other = play(grow_cnn(**options), range(1))
    before = weights_of(other)
    with pytest.raises(SaveError, match=named):
        other.restore(tmp_path)
    assert is_same(weights_of(other), before)
    play(other, range(1, 2))


def with_other_optimizer(garden):
    garden.attach(torch.optim.Adam(garden.parameters(), lr=0.01))


@pytest.mark.parametrize("change", [with_other_optimizer, lambda garden: garden.ema(0.9)])
def test_an_optimiser_or_average_that_does_not_fit_is_refused_with_all_as_it_was(change, tmp_path):
    saved = grow_cnn(PLAN)
    saved.ema(0.99)
    play(saved, range(3)).save(tmp_path)
    other = grow_cnn(PLAN)
    change(other)
    play(other, range(1))
    before, groups = (
        weights_of(other),
        [len(g["params"]) for g in other.model.link.optimizer.param_groups],
    )
    with pytest.raises(esper.EsperError, match=r"SGD|0\.99"):
        other.restore(tmp_path)
    assert is_same(weights_of(other), before)
    assert [len(group["params"]) for group in other.model.link.optimizer.param_groups] == groups
    assert (
        other.epoch == len([event for event in other.history if isinstance(event, HostEpoch)]) == 1
    )
    play(other, range(1, 2))


def test_a_save_without_an_optimiser_is_refused_by_a_garden_with_one(tmp_path):
    grow_cnn(attach=False).save(tmp_path)
    with pytest.raises(SaveError, match=str(tmp_path)):
        grow_cnn().restore(tmp_path)


@pytest.mark.parametrize("name", ["prices", "description"])
def test_a_save_of_an_older_version_is_refused_in_one_line(name, tmp_path):
    garden = play(grow_cnn(PLAN), range(1))
    describe = keeping.describe
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeping, "describe", lambda garden: _without(name, describe(garden)))
        garden.save(tmp_path)
    before = weights_of(garden)
    for read in (
        lambda: esper.load(tmp_path, CNN(), policy=script({})),
        lambda: garden.restore(tmp_path),
    ):
        with pytest.raises(SaveError, match=f"no '{name}'.*older version") as caught:
            read()
        assert "\n" not in str(caught.value)
    assert is_same(weights_of(garden), before)


def _without(name, facts):
    return {key: value for key, value in facts.items() if key != name}


def test_a_framework_that_is_missing_is_named_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(SettingError, match="install accelerate") as caught:
        require("accelerate")
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, esper.EsperError)


def test_the_run_folder_of_a_restored_garden_holds_what_it_remembers(tmp_path):
    garden = grow_cnn(PLAN)
    garden.record(tmp_path / "run")
    play(garden, range(2)).save(tmp_path / "save")
    play(garden, range(2, 4))
    garden.restore(tmp_path / "save")
    play(garden, range(2, 3))
    told = [
        json.loads(line) for line in (tmp_path / "run" / "events-0.jsonl").read_text().splitlines()
    ]
    assert told == [json.loads(json.dumps(to_record(event))) for event in garden.history]
    assert max(event["epoch"] for event in told) == 3
