"""Growing in a loop of one's own is for one process: several are refused before anything is wrapped or attached."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed

import esper
from esper.kasmina.slot import has_slots
from esper.leyline.errors import SettingError
from user_models import CNN, grow_cnn, random_images


def join_group(monkeypatch, size):
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: size)


@pytest.mark.parametrize("join", [join_group, lambda patch, size: patch.setenv("WORLD_SIZE", str(size))])
def test_several_processes_are_refused_by_grow_attach_and_load(join, monkeypatch, tmp_path):
    garden, host = grow_cnn(policy="never"), CNN()
    garden.save(tmp_path)
    optimizer = torch.optim.SGD(garden.parameters(), lr=0.1)
    join(monkeypatch, 2)
    for call in (
        lambda: esper.grow(host, slots="layer1", example=random_images(2)),
        lambda: esper.load(tmp_path, host),
        lambda: garden.attach(optimizer),
    ):
        with pytest.raises(SettingError, match=r"2 processes.*harvest"):
            call()
    assert not has_slots(host)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("told", ["1", "", "two"])
def test_one_process_grows_whatever_the_environment_says(told, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", told)
    grow_cnn()


def test_a_group_of_one_process_grows(monkeypatch):
    join_group(monkeypatch, 1)
    monkeypatch.setenv("WORLD_SIZE", "1")
    grow_cnn()


MEMBER = """
import sys
from torch import distributed
import esper
from user_models import CNN, random_images

rank, store = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
for _ in range(2):
    try:
        esper.grow(CNN(), slots="layer1", example=random_images(2))
        print("grown")
    except esper.EsperError as problem:
        print(problem)
    distributed.barrier() if distributed.is_initialized() else None
    distributed.destroy_process_group() if distributed.is_initialized() else None
"""


@pytest.mark.ranks
def test_members_of_a_real_group_are_refused_until_it_is_over(tmp_path):
    paths = [str(Path(esper.__file__).parents[1]), str(Path(__file__).parent)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    members = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, str(rank), str(tmp_path / "store")],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for member in members:
        told, trouble = member.communicate(timeout=120)
        assert member.returncode == 0, trouble
        refused, grown = told.strip().splitlines()
        assert "2 processes" in refused
        assert grown == "grown"
