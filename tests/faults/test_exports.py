"""Networks that are handed out: durable, and the ones that were grown or an error."""

import importlib.util
import json
import os
import random
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file

from esper.cli.run import export_run
from esper.kasmina.exporting import SOURCE, WEIGHTS, export_network
from esper.leyline.errors import SaveError
from esper.storage import runfolder
from esper.storage.files import copy_files, digest
from faults.damage import change_digit, delete, flip, link_away, pipe, tree, truncate, zero
from faults.power_cuts import NOTHING, RUN, play
from user_models import CNN, PLANT_FIRST, grow_cnn, walk_to


def grafted(folder):
    """The network that an export gives back."""
    spec = importlib.util.spec_from_file_location(f"grown_{random.random()}", folder / SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.graft(CNN())


@pytest.fixture(scope="module")
def garden():
    return walk_to(grow_cnn({0: PLANT_FIRST}, scale=1.0), "FOSSILIZED")


@pytest.mark.parametrize("damage", [zero, flip, truncate])
def test_an_export_does_not_take_weights_that_are_not_its_own(garden, tmp_path, damage):
    garden.export(tmp_path)
    grafted(tmp_path)
    damage(tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=WEIGHTS):
        grafted(tmp_path)


def test_of_an_export_that_was_cut_off_while_it_replaced_another_nothing_is_made(garden, tmp_path):
    garden.export(tmp_path / "old")
    with torch.no_grad():
        garden.model.host.head.bias.add_(1.0)
    garden.export(tmp_path / "new")
    (tmp_path / "old" / WEIGHTS).write_bytes((tmp_path / "new" / WEIGHTS).read_bytes())
    with pytest.raises(ValueError, match=WEIGHTS):
        grafted(tmp_path / "old")


@dataclass
class Finished:
    """The end of `esper run`, as far as it is written: the network, then the results that name it."""

    model: object

    def save(self, folder, number):
        network = folder / runfolder.NETWORKS / "host-0"
        export_network(self.model, network)
        digests = {name: digest(network / name) for name in (SOURCE, WEIGHTS)}
        results = {"results": [{"validation_accuracy": 0.5}], "networks": [digests]}
        runfolder.write_json(folder / runfolder.CONFIG, {"command": "run"})
        runfolder.write_json(folder / runfolder.RESULTS, results)

    def load(self, folder):
        if not (folder / runfolder.RESULTS).exists():
            return NOTHING
        export_run(folder, folder.parent / "out")
        return 0


def test_a_power_cut_while_a_run_ends_leaves_no_result_or_its_network(garden):
    assert play(Finished(garden.model), 1, most=16)[1] > 20


class Copied:
    """An export of a run, which is a new folder."""

    def __init__(self, source):
        self.source, self.digests = source, {path.name: digest(path) for path in source.iterdir()}

    def save(self, folder, number):
        copy_files(self.source, folder, self.digests)

    def load(self, folder):
        if not folder.exists():
            return NOTHING
        return 0 if tree(folder) == tree(self.source) else "torn"


def test_a_power_cut_while_a_network_is_exported_leaves_all_of_it_or_no_folder(tmp_path):
    (tmp_path / "source").mkdir()
    for name in (SOURCE, WEIGHTS):
        (tmp_path / "source" / name).write_text(name * 9)
    disk, count = play(Copied(tmp_path / "source"), 1, most=64)
    assert count > 20
    assert set(disk.written()) == {RUN, f"{RUN}/{SOURCE}", f"{RUN}/{WEIGHTS}"}


@pytest.mark.parametrize("name", [SOURCE, WEIGHTS, "results.json"])
@pytest.mark.parametrize("damage", [zero, flip, truncate])
def test_a_damaged_network_is_not_exported(copy_of, tmp_path, name, damage):
    folder = copy_of("run")
    for path in folder.rglob(name):
        damage(path)
    with pytest.raises(SaveError, match=str(folder)):
        export_run(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_accuracy_that_was_changed_is_not_told(copy_of, tmp_path):
    folder = copy_of("run")
    change_digit(folder / "results.json")
    with pytest.raises(SaveError, match=str(folder)):
        export_run(folder, tmp_path / "out")


def test_networks_of_two_hosts_are_not_mixed_up(copy_of, tmp_path):
    folder = copy_of("run")
    for name in (SOURCE, WEIGHTS):
        first, second = (folder / "networks" / host / name for host in ("host-0", "host-1"))
        content = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)
    with pytest.raises(SaveError, match="networks"):
        export_run(folder, tmp_path / "out")


def test_a_network_behind_a_link_is_not_exported(copy_of, tmp_path):
    folder, other = copy_of("run"), copy_of("run", "other")
    for name in ("host-0", "host-1"):
        link_away(folder / "networks" / name, other / "networks" / name)
    with pytest.raises(SaveError, match="host-"):
        export_run(folder, tmp_path / "out")


def blow_up(path):
    os.truncate(path, 2**26)


def put_folder(path):
    delete(path)
    path.mkdir()


@pytest.mark.parametrize("damage", [pipe, put_folder, delete, blow_up, truncate])
def test_of_a_network_that_is_not_the_one_written_nothing_is_copied(
    copy_of, tmp_path, monkeypatch, damage
):
    folder = copy_of("run")
    for path in folder.glob(f"networks/*/{SOURCE}"):
        damage(path)
    monkeypatch.setattr(
        "esper.storage.files.write_files", lambda *given: pytest.fail("a copy was begun")
    )
    with pytest.raises(SaveError, match=SOURCE) as refused:
        export_run(folder, tmp_path / "out")
    assert "disk space" not in str(refused.value)


def test_what_is_exported_is_the_best_network_and_nothing_else(copy_of, tmp_path):
    folder = copy_of("run")
    (folder / "networks/host-0/more.py").write_text("print()")
    (folder / "networks/host-1/more.py").write_text("print()")
    result = export_run(folder, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {SOURCE, WEIGHTS}
    rows = json.loads((folder / "results.json").read_text())["results"]
    network = folder / "networks" / f"host-{[row['seed'] for row in rows].index(result['seed'])}"
    own, copied = load_file(network / WEIGHTS), load_file(tmp_path / "out" / WEIGHTS)
    assert own.keys() == copied.keys()
    assert all(torch.equal(own[name], copied[name]) for name in own)
