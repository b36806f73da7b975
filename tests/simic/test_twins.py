"""The never-grown yardstick:

the same as a population that never grows, computed once, read back afterwards.
"""

import math
from dataclasses import replace

import pytest

from esper.kasmina.hosts import build_mlp_host
from esper.runtime.population import Population
from esper.runtime.tasks.registry import get_task
from simic.growths import twin_readings

TASK = replace(get_task("blobs"), epochs=3)


def test_a_twin_is_the_host_that_never_grew(tmp_path):
    alone = Population(TASK, [7])
    for _ in range(3):
        alone.train_epoch()
        alone.evaluate()
    assert twin_readings(TASK, [3, 7], tmp_path)[7][-1] == alone.readings()[0]


def test_a_twin_is_computed_once(tmp_path, monkeypatch):
    first = twin_readings(TASK, [1, 2], tmp_path)
    monkeypatch.setattr(Population, "start_epoch", lambda self, **_: pytest.fail("trained again"))
    assert twin_readings(TASK, [2, 1], tmp_path) == first


def test_only_missing_twins_are_computed(tmp_path):
    twin_readings(TASK, [1], tmp_path)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    twin_readings(TASK, [1, 2], tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert all(path.stat().st_mtime_ns == time for path, time in written.items())


@pytest.mark.parametrize("damage", ["", "[]", "{", '[{"epoch": 1}, {}, {}]'])
def test_a_damaged_file_is_computed_anew(tmp_path, damage):
    first = twin_readings(TASK, [1], tmp_path)
    next(tmp_path.iterdir()).write_text(damage)
    assert twin_readings(TASK, [1], tmp_path) == first


def test_another_plan_has_another_twin(tmp_path):
    first = twin_readings(TASK, [1], tmp_path)
    assert twin_readings(replace(TASK, lr=0.01), [1], tmp_path) != first


def test_another_host_under_the_same_name_has_another_twin(tmp_path):
    first = twin_readings(TASK, [1], tmp_path)
    other = replace(TASK, build_host=lambda: build_mlp_host(inputs=2, widths=(4,), classes=2))
    assert twin_readings(other, [1], tmp_path) != first


def test_a_twin_that_diverges_is_kept_as_it_is(tmp_path):
    task = replace(TASK, lr=1e30, clip_norm=1e30)
    first = twin_readings(task, [1], tmp_path)[1]
    assert any(not math.isfinite(reading.train_loss) for reading in first)
    again = twin_readings(task, [1], tmp_path)[1]
    assert [reading.epoch for reading in again] == [0, 1, 2]
    assert any(math.isnan(reading.train_loss) for reading in again)
