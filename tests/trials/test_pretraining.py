"""The second scenario:

every policy goes on from the same trained host, networks of fixed size begin from scratch.
"""

import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from esper.leyline.errors import SaveError
from esper.runtime.population import Population
from esper.runtime.tasks.registry import TASKS
from esper.storage import runfolder
from esper.trials.arms import Entry, Stopped, prepare_host
from esper.trials.comparison import Comparison
from runtime.episodes import IMAGES
from trials.grown_runs import asked_at
from trials.test_comparison import all_timeless, compare, configured, timeless

PICTURES = replace(IMAGES, name="pictures", epochs=3)
"""A host with batch norm."""
OF_PICTURES = {"task__name": "pictures", "task__epoch_examples": None, "task__held_out": None}
EPOCHS = 3


@pytest.fixture(autouse=True)
def _pictures(monkeypatch):
    monkeypatch.setitem(TASKS, "pictures", PICTURES)


def trained_host(seed, task=None, epochs=EPOCHS):
    """A host of `blobs` that was trained alone, by hand."""
    population = Population(replace(task or configured("runs").task.build(), epochs=epochs), [seed])
    for _ in range(epochs):
        population.train_epoch()
    return population.runs[0].model.host.state_dict()


def beginnings(config):
    """What every arm's hosts were before their first step, by arm and seed; and what the comparison
    found.
    """
    found, prepare = {}, prepare_host

    def kept(population, host, entry):
        prepare(population, host, entry)
        state = population.runs[host].model.host.state_dict()
        found[entry.arm, entry.seed] = {name: value.clone() for name, value in state.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("esper.trials.arms.prepare_host", kept)
        done = compare(config)
    return found, done


def equal(state, other):
    return state.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in state.items()
    )


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """The same static arms without any pretraining."""
    config = configured(
        tmp_path_factory.mktemp("scratch"), policies=["never"], static=["start"], seeds=2
    )
    return compare(config)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained")
    static = ["start", "final", "final-whole"]
    config = configured(
        folder, policies=["never", "sham", "heuristic"], static=static, seeds=2, pretrain=EPOCHS
    )
    begun, done = beginnings(config)
    return SimpleNamespace(config=config, begun=begun, done=done)


def test_every_policy_goes_on_from_the_seeds_own_trained_host(found):
    for seed in range(2):
        expected = trained_host(seed)
        for arm in ("never", "sham", "heuristic"):
            assert equal(found.begun[arm, seed], expected), arm
    assert not equal(found.begun["never", 0], found.begun["never", 1])


def test_networks_of_fixed_size_begin_from_scratch(found, scratch):
    for seed in range(2):
        fresh = Population(found.config.task.build(), [seed]).runs[0].model.host.state_dict()
        for arm in ("start", "final of heuristic", "final-whole of heuristic"):
            assert equal(found.begun[arm, seed], fresh), arm
    assert timeless(found.done["start", 1.0]) == timeless(scratch["start", 1.0])


def test_trained_hosts_get_as_many_more_epochs_as_the_others(found, scratch):
    assert {row.epochs for row in found.done["never", 1.0].rows} == {8}
    assert {row.epochs for row in found.done["final-whole of heuristic", 1.0].rows} == {8 + EPOCHS}
    ours, theirs = found.done["never", 1.0], scratch["never", 1.0]
    assert [row.flops for row in ours.rows] == [row.flops for row in theirs.rows]
    assert [row.test_loss for row in ours.rows] != [row.test_loss for row in theirs.rows]


def test_the_oracles_placements_go_on_from_trained_hosts_too(found, tmp_path):
    few = {"task__slots": ["r0c1"], "task__blueprints": ["lora"], "task__epochs": 2}
    begun, _ = beginnings(
        configured(tmp_path, policies=["never"], oracle=True, seeds=1, pretrain=EPOCHS, **few)
    )
    assert len(begun) == 3
    assert all(equal(state, found.begun["never", 0]) for state in begun.values())


def test_running_statistics_of_a_host_come_along(tmp_path):
    config = configured(
        tmp_path, policies=["never"], pretrain=2, seeds=1, task__epochs=2, **OF_PICTURES
    )
    begun, _ = beginnings(config)
    state = begun["never", 0]
    assert equal(state, trained_host(0, config.task.build(), 2))
    counted = [name for name in state if name.endswith("num_batches_tracked")]
    assert counted
    assert all(state[name] > 0 for name in counted)


def test_a_trained_host_is_trained_once_and_read_again(found, monkeypatch):
    monkeypatch.setattr(
        Population, "start_epoch", lambda population, **_: pytest.fail("trained again")
    )
    assert all_timeless(compare(found.config)) == all_timeless(found.done)


def test_a_host_that_is_missing_is_trained_anew_and_is_the_same(found, tmp_path):
    shutil.copytree(
        found.config.out / runfolder.PRETRAINED, tmp_path / "copy" / runfolder.PRETRAINED
    )
    config = configured(tmp_path / "copy", policies=["never"], seeds=2, pretrain=EPOCHS)
    path = config.out / runfolder.PRETRAINED / "seed-1.safetensors"
    before = load_file(path)
    path.unlink()
    path.with_suffix(".json").unlink()
    compare(config)
    assert equal(load_file(path), before)


def test_a_damaged_trained_host_is_named(found, tmp_path):
    shutil.copytree(found.config.out / runfolder.PRETRAINED, tmp_path / runfolder.PRETRAINED)
    path = tmp_path / runfolder.PRETRAINED / "seed-1.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(SaveError, match=r"seed-1\.safetensors .*altered.* delete .*seed-1\.json"):
        compare(configured(tmp_path, policies=["never"], seeds=2, pretrain=EPOCHS))


def test_a_host_that_breaks_while_it_is_trained_is_brought_back(tmp_path, monkeypatch):
    train, epochs = Population.start_epoch, []

    def break_the_first(population, **options):
        train(population, **options)
        epochs.append(len(epochs))
        if len(epochs) == 2:
            with torch.no_grad():
                next(population.runs[0].model.host.parameters()).fill_(torch.nan)

    monkeypatch.setattr(Population, "start_epoch", break_the_first)
    compare(configured(tmp_path, policies=["never"], seeds=2, pretrain=EPOCHS, task__epochs=2))
    for seed in (0, 1):
        state = load_file(tmp_path / runfolder.PRETRAINED / f"seed-{seed}.safetensors")
        assert all(torch.isfinite(value).all() for value in state.values())


def test_training_hosts_can_be_stopped_between_epochs(found, tmp_path):
    config = configured(tmp_path, policies=["never"], seeds=2, pretrain=EPOCHS)
    told = []
    tmp_path.mkdir(exist_ok=True)
    with pytest.raises(Stopped):
        Comparison(config, told.append, asked_at(2)).run()
    (line,) = told
    assert re.search("2 hosts .*3 epochs", line)
    assert timeless(compare(config)["never", 1.0]) == timeless(found.done["never", 1.0])


def test_weights_are_copied_and_not_shared():
    """An arm that trains must not change where the next one starts."""
    weights = trained_host(0)
    before = {name: value.clone() for name, value in weights.items()}
    population = Population(configured("runs").task.build(), [0])
    prepare_host(population, 0, Entry("never", 0, "never", weights=weights))
    population.train_epoch()
    assert equal(weights, before)
    assert not equal(population.runs[0].model.host.state_dict(), before)


def test_a_host_with_tied_weights_is_pretrained_and_kept(monkeypatch, tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.middle, self.leave = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
            self.leave.weight = self.enter.weight

        def forward(self, points):
            return self.leave(torch.relu(self.middle(torch.relu(self.enter(points)))))

    monkeypatch.setitem(
        TASKS, "tied", replace(TASKS["blobs"], name="tied", build_host=Tied, slots=("middle",))
    )
    found = compare(
        configured(tmp_path, policies=("never",), pretrain=1, seeds=1, task__name="tied")
    )
    assert len(found["never", 1.0].rows) == 1
