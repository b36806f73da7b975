"""Several processes at one folder: one writes at a time, and whoever reads gets one save.

What lies in the folder and is not the store's stays as it is.
"""

import os
import re
import threading

import pytest
import torch

import esper
from esper.kasmina import saving
from esper.leyline.errors import SaveError
from esper.storage import claims, files
from esper.storage.store import NewFile, Store
from user_models import CNN, grow_cnn, script

OWNED = re.compile("part-[a-z]")


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def store_in(folder):
    return Store(folder / "manifest.json", "test", owned=OWNED)


def save(folder, number, before=lambda: None):
    """Save two files that hold a number; `before` is called while the first is written."""

    def write(path):
        before()
        path.write_text(str(number))

    parts = {"a": NewFile("part-a.bin", write), "b": NewFile("part-b.bin", str(number).encode())}
    store_in(folder).save({"number": number}, parts)


def held(folder):
    """The number that all parts of the newest save hold."""
    newest = store_in(folder).newest()
    assert {int(content) for content in newest.contents.values()} == {newest.facts["number"]}
    return newest.facts["number"]


@pytest.mark.parametrize("opened", [1, 2, "all"])
def test_a_garden_that_is_read_while_it_is_saved_is_one_of_the_saves(tmp_path, opened, monkeypatch):
    """Two saves come before a file is opened, or after the last: names are used again by then."""
    garden = grow_cnn(attach=False)

    def save_garden(number):
        garden.epoch = number
        with torch.no_grad():
            for parameter in garden.model.host.parameters():
                parameter.fill_(number)
        garden.save(tmp_path)

    calls = []

    def interrupted(work, number=1):
        def call(*args):
            calls.append(args)
            if len(calls) == number:
                save_garden(2)
                save_garden(3)
            return work(*args)

        return call

    save_garden(1)
    if opened == "all":
        monkeypatch.setattr(saving, "rebuild_network", interrupted(saving.rebuild_network))
    else:
        monkeypatch.setattr(files, "open_plain", interrupted(files.open_plain, opened))
    loaded = esper.load(tmp_path, CNN(), policy=script({}))
    weights = {
        float(value) for p in loaded.model.host.parameters() for value in p.detach().flatten()
    }
    assert weights == {loaded.epoch}


def test_a_second_writer_waits_for_the_first(tmp_path):
    save(tmp_path, 1)
    second = threading.Thread(target=save, args=(tmp_path, 3))

    def meanwhile():
        second.start()
        second.join(0.05)
        assert second.is_alive()

    save(tmp_path, 2, meanwhile)
    second.join()
    assert held(tmp_path) == 3
    assert sorted(os.listdir(tmp_path)) == sorted(
        ["manifest.json", *store_in(tmp_path).newest().names]
    )


def test_a_second_writer_that_waits_too_long_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "PATIENCE", 0.02)
    refused = []

    def meanwhile():
        with pytest.raises(SaveError, match="another process is writing to") as caught:
            save(tmp_path, 2)
        refused.append(str(caught.value))

    save(tmp_path, 1, meanwhile)
    assert held(tmp_path) == 1
    assert len(refused) == 1
    assert "\n" not in refused[0]


def test_many_writers_leave_one_whole_save(tmp_path):
    def work(first):
        for number in range(first, first + 10):
            save(tmp_path, number)
            held(tmp_path)

    writers = [threading.Thread(target=work, args=(first,)) for first in (0, 10, 20)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert held(tmp_path) in (9, 19, 29)
    assert len(os.listdir(tmp_path)) == 3


def test_files_of_the_user_stay_whatever_they_are_called(tmp_path):
    own = {
        "garden-model-1.txt": b"notes on the first garden",
        "garden-model-7.safetensors": b"a copy that was made by hand",
        "garden-model.safetensors": b"of something else",
    }
    for name, content in own.items():
        (tmp_path / name).write_bytes(content)
    garden = grow_cnn()
    for _ in range(3):
        garden.save(tmp_path)
        assert {name: (tmp_path / name).read_bytes() for name in own} == own
    esper.load(tmp_path, CNN(), policy=script({}))
    assert len(os.listdir(tmp_path)) == len(own) + 3


def test_what_a_manifest_lists_under_another_name_is_not_deleted(tmp_path):
    store = Store(tmp_path / "manifest.json", "test", owned=re.compile("part-[a-z]|thesis"))
    store.save({}, {"a": NewFile("thesis.txt", b"years of work")})
    save(tmp_path, 2)
    assert (tmp_path / "thesis.txt").read_bytes() == b"years of work"


@pytest.mark.parametrize("make", [os.symlink, os.link])
def test_a_link_in_place_of_the_lock_is_not_written_through(tmp_path, make):
    (tmp_path / "mine").write_bytes(b"mine")
    make(tmp_path / "mine", tmp_path / "manifest.json.lock")
    with pytest.raises(SaveError, match=r"manifest\.json"):
        save(tmp_path, 1)
    assert (tmp_path / "mine").read_bytes() == b"mine"


def test_what_a_killed_save_has_left_is_removed_by_the_next_one(tmp_path):
    class Killed(BaseException):
        pass

    def kill():
        raise Killed

    save(tmp_path, 1)
    with pytest.raises(Killed):
        save(tmp_path, 2, kill)
    assert held(tmp_path) == 1
    save(tmp_path, 3)
    assert held(tmp_path) == 3
    assert len(os.listdir(tmp_path)) == 3


def test_a_file_of_somebody_elses_with_the_name_of_a_lock_stays_and_is_named(tmp_path):
    lock = claims.lock_of(tmp_path / "manifest.json")
    lock.write_text("mine")
    with pytest.raises(SaveError, match=r"manifest.json.lock is not a lock of Esper's"):
        store_in(tmp_path).save({})
    assert lock.read_text() == "mine"


@pytest.mark.parametrize("left", [b"", b'["a.safet', bytes(12)], ids=["empty", "cut", "zeros"])
def test_what_a_power_cut_leaves_of_a_lock_is_taken_over(left, tmp_path):
    lock = claims.lock_of(tmp_path / "manifest.json")
    lock.write_bytes(left)
    store_in(tmp_path).save({})
    assert not lock.exists()
