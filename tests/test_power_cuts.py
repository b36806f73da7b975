"""Whoever saves something goes through the store:

after a power cut it is the old save or the new one.
"""

import json
import os
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import esper
from esper.runtime.host import EpochReading
from esper.runtime.ledger import Ledger
from esper.runtime.storing import spell_reading
from esper.simic import twins
from esper.simic.checkpoints import History
from esper.simic.trainer import build_agent, build_environment
from esper.storage import runfolder
from esper.storage.store import Store
from esper.telemetry.events import ArmFinished
from esper.trials.comparison import Comparison
from esper.trials.results import COSTS, ArmRow, Trials
from esper.trials.running import EpochSaves, build
from faults.power_cuts import NOTHING, Violation, play
from null_sink import NullSink
from simic.tiny_runs import tiny
from trials import grown_runs
from user_models import CNN, PLANT_FIRST, grow_cnn, losses_of, random_images, script, walk_to


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def only(values, number):
    """The number, if every value is it."""
    if any(not torch.equal(value, torch.full_like(value, number)) for value in values):
        raise Violation(f"parts of another save than {number}")
    return number


class Listed:
    """Something whose folder holds what manifests list, and nothing else."""

    def names(self, folder):
        manifests = [path for path in folder.rglob("*.json") if "generations" in path.read_text()]
        listed = [json.loads(path.read_text())["body"]["generations"] for path in manifests]
        files = {
            file["name"]
            for generations in listed
            for one in generations
            for file in one["files"].values()
        }
        return {path.name for path in manifests} | files | self.plain

    plain = frozenset()


class Garden(Listed):
    def __init__(self):
        self.garden = walk_to(grow_cnn({0: PLANT_FIRST}, scale=1.0), "PROBATIONARY")
        losses_of(self.garden.model, random_images(8)).mean().backward()
        self.garden.model.link.optimizer.step()

    def save(self, folder, number):
        self.garden.epoch = number
        with torch.no_grad():
            for parameter in self.garden.model.host.parameters():
                parameter.fill_(number)
            for state in self.garden.model.link.optimizer.state.values():
                state["momentum_buffer"].fill_(number)
        self.garden.save(folder)

    def load(self, folder):
        if not (folder / "manifest.json").exists():
            return NOTHING
        found = esper.load(folder, CNN(), policy=script({}))
        buffers = [
            value for name, value in found.pending_optimizer.tensors.items() if "momentum" in name
        ]
        return only([*found.model.host.parameters(), *buffers], found.epoch)


class Learner(Listed):
    """The checkpoints of `esper ppo`."""

    def __init__(self, folder):
        self.config = tiny(folder / "twins", keep_checkpoints=1)
        self.agent, self.layout = build_agent(self.config, build_environment(self.config))

    def history(self, folder):
        return History(
            self.config.with_changes([("out", str(folder))], "the test"), self.layout, NullSink()
        )

    def save(self, folder, number):
        history = self.history(folder)
        history.store.newest()
        with torch.no_grad():
            for parameter in self.agent.network.parameters():
                parameter.fill_(number)
        history.save(self.agent, number + 1, float(number))

    def load(self, folder):
        rounds = self.history(folder).resume(self.agent)
        return only(self.agent.network.parameters(), rounds - 1) if rounds else NOTHING


class Epochs(Listed):
    """The epochs of a growing run."""

    def __init__(self, folder):
        config = grown_runs.configured(folder, hosts=1)
        episodes, self.deciders = build(config)
        self.population = episodes.population
        self.population.train_epoch()
        self.population.evaluate()

    def saves(self, folder):
        found = EpochSaves(folder, self.population, self.deciders, NullSink())
        found.store.keep = 1
        return found

    def save(self, folder, number):
        saves = self.saves(folder)
        saves.store.newest()
        with torch.no_grad():
            for parameter in self.population.runs[0].model.host.parameters():
                parameter.fill_(number)
        self.deciders[0].memory = tuple(torch.full((1,), float(number)) for _ in range(2))
        saves.save(number, [[]], [{"CULLED": number}])

    def load(self, folder):
        found = self.saves(folder).restore()
        if found is None:
            return NOTHING
        epoch, _, counts = found
        assert counts == [{"CULLED": epoch}]
        held = [*self.population.runs[0].model.host.parameters(), *self.deciders[0].memory]
        return only(held, epoch)


class Twin(Listed):
    path = "twin-blobs-0-7.json"

    def store(self, folder):
        return Store(folder / self.path, "never-grown twin", bound_to=Path(self.path).stem)

    def save(self, folder, number):
        readings = [spell_reading(replace(READING, epoch=number))]
        self.store(folder).save({"readings": readings, "ledger": asdict(Ledger())})

    def load(self, folder):
        """What is damaged would be computed anew, and must not be there."""
        found = twins._read(self.store(folder), 1)
        if found is None and (folder / self.path).exists():
            raise Violation("damaged")
        return NOTHING if found is None else found.readings[0].epoch


READING = EpochReading(**dict.fromkeys(EpochReading.__dataclass_fields__, 0))


class Arm(Listed):
    def arm(self, folder):
        arms = Comparison.__new__(Comparison)
        arms.config, arms.done = SimpleNamespace(out=folder, digest=lambda: "settings"), {}
        return arms

    def save(self, folder, number):
        told = {field.name: "never" if field.type is str else 0 for field in fields(ArmFinished)}
        row = {**told, **dict.fromkeys(COSTS, 0), "type": "ArmFinished", "seed": number}
        trials = Trials("never", 1.0, (ArmRow(**row),), (), ())
        self.arm(folder)._arm_store("never", 1.0).save(trials.to_record())

    def load(self, folder):
        arms = self.arm(folder)
        return arms.done["never", 1.0].rows[0].seed if arms._is_known("never", 1.0) else NOTHING


class Config(Listed):
    """A file for people that is read back."""

    plain = frozenset({runfolder.CONFIG})

    def save(self, folder, number):
        runfolder.write_json(folder / runfolder.CONFIG, {"number": number})

    def load(self, folder):
        if not (folder / runfolder.CONFIG).exists():
            return NOTHING
        return runfolder.read_json(folder / runfolder.CONFIG)["number"]


@pytest.mark.parametrize("subject", [Twin, Arm, Config])
def test_a_power_cut_leaves_old_facts_or_new_ones(subject):
    for kills in ({}, {1: "folder after the manifest"}, {1: 5}, {1: 9}):
        play(subject(), 3, kills, following=3)


def test_a_power_cut_while_a_garden_is_saved_leaves_the_old_garden_or_the_new_one():
    assert play(Garden(), 2, following=2, most=24)[1] > 50


def test_a_power_cut_while_a_learner_is_saved_leaves_the_old_one_or_the_new_one(tmp_path):
    assert play(Learner(tmp_path), 3, following=3)[1] > 30


@pytest.mark.slow
def test_a_power_cut_while_an_epoch_is_saved_leaves_the_old_one_or_the_new_one(tmp_path):
    assert play(Epochs(tmp_path), 2, following=2, most=8)[1] > 200


@pytest.mark.slow
def test_many_more_power_cuts_leave_the_old_save_or_the_new_one(tmp_path):
    play(Garden(), 3, {1: 20}, following=3, most=256)
    play(Epochs(tmp_path), 3, {1: 40}, following=3, most=16)


def test_a_garden_saved_without_a_look_at_the_folder_can_be_lost():
    """The test sees what it is to see."""
    for kind in ("file", "folder before the manifest", "manifest", "folder after the manifest"):
        with pytest.raises(Violation):
            play(Garden(), 2, without=kind, most=24)
