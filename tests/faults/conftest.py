"""Finished folders of every command, made once."""

import os
import shutil

import pytest

from esper.cli import main
from faults.commands import command


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Gives the finished folder of a command; nobody may change it."""
    place, made = tmp_path_factory.mktemp("finished"), {}

    def make(kind):
        if kind not in made:
            made[kind] = place / kind
            with pytest.raises(
                SystemExit
            ) as leaving:  # in this process, so that what is forked later has all imports
                main(command(kind, made[kind]))
            assert not leaving.value.code
        return made[kind]

    return make


@pytest.fixture
def copy_of(finished, tmp_path):
    """Gives a copy of it."""
    return lambda kind, name="copy": shutil.copytree(finished(kind), tmp_path / name)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)
