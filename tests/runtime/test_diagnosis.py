"""What `esper doctor` finds, and that every finding that lacks something names its cure."""

import sys
from importlib import metadata

import pytest
import torch

import esper
from esper.leyline.extras import EXTRAS
from esper.runtime import diagnosis
from esper.runtime.diagnosis import examine
from esper.runtime.tasks.fetch import SOURCES


def findings(root=None):
    return {(finding.topic, finding.name): finding for finding in examine(esper, root)}


@pytest.fixture
def installed(monkeypatch):
    """Metadata as pip writes it, whatever is installed here."""
    needs = ["torch>=2.11", "numpy>=1.26", 'wandb>=0.17; extra == "track"']
    versions = {"esper-lite": esper.__version__, "torch": "2.13.0+cpu", "numpy": "2.4.6"}

    def version(project):
        if project not in versions:
            raise metadata.PackageNotFoundError(project)
        return versions[project]

    monkeypatch.setattr(diagnosis, "requires", lambda project: needs)
    monkeypatch.setattr(diagnosis, "version", version)
    return versions


def test_a_whole_installation_is_not_broken(installed):
    there = findings()
    assert there["versions", "torch"].state == "2.13.0+cpu"
    assert ("versions", "wandb") not in there
    assert not any(finding.is_broken for finding in there.values())


@pytest.mark.parametrize(
    ("there", "state"), [("2.9.1", "2.9.1, older than 2.11"), (None, "not installed")]
)
def test_a_package_that_is_missing_or_too_old_is_broken_and_has_a_cure(installed, there, state):
    installed.pop("torch")
    if there is not None:
        installed["torch"] = there
    finding = findings()["versions", "torch"]
    assert (finding.state, finding.is_broken) == (state, True)
    assert finding.mend == "pip install 'torch>=2.11'"


def test_another_version_than_the_one_that_runs_is_broken(installed):
    installed["esper-lite"] = "0.1.0"
    finding = findings()["versions", "esper-lite"]
    assert finding.is_broken
    assert "0.1.0" in finding.state


def test_sources_that_were_never_installed_are_broken(monkeypatch):
    def missing(project):
        raise metadata.PackageNotFoundError(project)

    monkeypatch.setattr(diagnosis, "requires", missing)
    finding = findings()["versions", "esper-lite"]
    assert (finding.is_broken, finding.mend.startswith("pip install /")) == (True, True)


def test_a_missing_extra_names_its_module_and_its_command_and_breaks_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "starlette", None)
    there = findings()
    assert {name for topic, name in there if topic == "extras"} == set(EXTRAS)
    web = there["extras", "web"]
    assert web.state.endswith("no starlette")
    assert "uvicorn" in web.state
    assert (web.mend, web.is_broken) == ("pip install 'esper-lite[web]'", False)


def test_data_that_is_not_there_names_the_command_that_fetches_it(tmp_path):
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare/input.txt").write_text("To be.")
    there = findings(tmp_path)
    assert there["data", "shakespeare"].mend is None
    assert there["data", "cifar10"].mend == "esper data fetch cifar10"
    assert {name for topic, name in there if topic == "data"} == {*SOURCES, "ESPER_DATA"}
    nowhere = findings()
    assert nowhere["data", "ESPER_DATA"].mend == "export ESPER_DATA=DIR"
    assert nowhere["data", "cifar10"].mend == "esper data fetch cifar10 --data-root DIR"


def test_a_gpu_that_torch_does_not_see_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(diagnosis.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert "torch sees no GPU" in findings()["devices", "cuda"].state
    monkeypatch.setattr(diagnosis.shutil, "which", lambda name: None)
    there = findings()
    assert there["devices", "cuda"].state == "no GPU here"
    assert there["devices", "c++"].mend is not None


def test_the_namesake_is_found(monkeypatch):
    monkeypatch.setattr(diagnosis, "find_namesake", lambda: "/lib/esper-3.9.dist-info")
    assert "pip uninstall esper" in findings()["versions", "esper"].mend
