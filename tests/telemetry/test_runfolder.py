"""A run on disk: one writer, nothing half-written, nothing followed, nothing left behind by a refused start."""

import errno
import json
import os
import re

import pytest

from cli.test_cli import call
from esper.leyline.errors import SaveError, SettingError
from esper.telemetry import runfolder
from simic.tiny_runs import Forked, command


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


# -- one writer --------------------------------------------------------------------------------------------------------


def test_a_second_writer_is_refused_while_the_first_is_there(folder):
    with runfolder.only_writer(folder):
        (folder / "work").touch()
        with pytest.raises(SaveError, match="process"), runfolder.only_writer(folder):
            pytest.fail("two writers at once")
        with pytest.raises(SaveError), runfolder.only_writer(folder):
            pytest.fail("being refused must not free the lock")
    with runfolder.only_writer(folder):
        pass


def test_a_second_command_is_refused_and_changes_nothing(folder, tmp_path):
    with runfolder.only_writer(folder):
        (folder / "work").touch()
        before = sorted(folder.iterdir())
        code, out, err = Forked(tmp_path / "child", [*command(folder), "--resume"]).wait()
    assert (code, out) == (2, "")
    assert re.fullmatch(f"esper: .*process .*{folder}.*--out.*\n", err)
    assert sorted(folder.iterdir()) == before


def test_the_lock_goes_with_the_process_that_held_it(folder, tmp_path):
    def hold_and_die():
        with runfolder.only_writer(folder):
            (folder / "work").touch()
            os._exit(7)

    assert Forked(tmp_path / "child", [], hold_and_die).wait()[0] == 7
    with runfolder.only_writer(folder):
        assert (folder / "lock").exists()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SaveError, match=r"/run: Not a directory.*--out"):
        runfolder.only_writer(tmp_path / "file" / "run").__enter__()
    with pytest.raises(SaveError, match="File exists"):
        runfolder.only_writer(tmp_path / "file").__enter__()


def test_a_link_in_place_of_the_lock_is_not_followed(folder, tmp_path):
    folder.mkdir()
    (tmp_path / "precious").write_text("mine")
    (folder / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(SaveError, match=f"{folder}: "):
        runfolder.only_writer(folder).__enter__()
    assert (tmp_path / "precious").read_text() == "mine"


# -- beginnings --------------------------------------------------------------------------------------------------------


def test_a_folder_with_anything_in_it_is_not_begun_anew(folder):
    with runfolder.only_writer(folder):
        runfolder.require_fresh(folder)
        (folder / "notes.txt").touch()
        with pytest.raises(SaveError, match=r"--resume.*--out"):
            runfolder.require_fresh(folder)


def start(folder, problem, work=lambda: None):
    """A start that is refused, as the command does it."""

    def begin():
        with (
            runfolder.only_writer(folder),
            runfolder.begun(folder, {"rounds": 1}),
            open(folder / runfolder.EVENTS, "a"),
        ):
            assert json.loads((folder / runfolder.CONFIG).read_text()) == {"rounds": 1}
            work()
            raise problem

    with pytest.raises(type(problem)):
        begin()


@pytest.mark.parametrize("is_new", [True, False])
def test_a_start_that_is_refused_leaves_nothing_behind(folder, is_new):
    if not is_new:
        folder.mkdir()
    start(folder, SettingError("no such blueprint"))
    assert folder.exists() == (not is_new)
    assert is_new or list(folder.iterdir()) == []


@pytest.mark.parametrize("work", [runfolder.TWINS, runfolder.CHECKPOINTS, "notes.txt"])
def test_a_start_that_did_some_work_keeps_it_and_what_it_was_started_with(folder, work):
    start(folder, SaveError("the disk is full"), lambda: (folder / work).mkdir())
    assert {path.name for path in folder.iterdir()} == {"lock", runfolder.CONFIG, runfolder.EVENTS, work}


def test_events_are_work_too(folder):
    start(folder, SaveError("the disk is full"), lambda: (folder / runfolder.EVENTS).write_text("{}\n"))
    assert (folder / runfolder.CONFIG).exists()


def test_an_error_of_ours_keeps_everything_to_be_looked_at(folder):
    start(folder, ZeroDivisionError())
    assert (folder / runfolder.CONFIG).exists()


def test_what_a_run_was_started_with_stays_when_going_on_is_refused(folder):
    folder.mkdir()
    runfolder.write_json(folder / runfolder.CONFIG, {"rounds": 9})
    with pytest.raises(SettingError), runfolder.begun(folder, {"rounds": 1}):
        raise SettingError("another layout")
    assert json.loads((folder / runfolder.CONFIG).read_text()) == {"rounds": 9}


def test_a_name_that_no_file_can_have_is_refused_in_one_line(tmp_path, capsys):
    name = "x" * 300
    with (
        pytest.raises(SaveError, match=r"xxx: File name"),
        runfolder.only_writer(tmp_path / name),
    ):
        pass
    code, _, err = call(capsys, "ppo", "--out", str(tmp_path / name), "--resume")
    assert (code, "cannot read" in err, "File name too long" in err) == (2, True, True)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"seed": 1}', '{"seed": 0, "more": 1}'])
def test_a_run_is_begun_with_exactly_its_configuration(content, folder):
    folder.mkdir()
    if content is not None:
        (folder / runfolder.CONFIG).write_text(content)
    assert not runfolder.is_begun_with(folder, {"seed": 0})
    (folder / runfolder.CONFIG).write_text('{"seed": 0}')
    assert runfolder.is_begun_with(folder, {"seed": 0})


# -- writing -----------------------------------------------------------------------------------------------------------


def test_what_is_written_is_there_and_nothing_else(folder):
    runfolder.write_atomically(folder / "sub" / "b", b"abc")
    runfolder.write_json(folder / "a.json", {"x": [1, 2.5, None]})
    assert json.loads((folder / "a.json").read_text()) == {"x": [1, 2.5, None]}
    assert (folder / "sub/b").read_bytes() == b"abc"
    assert {path.name for path in folder.rglob("*")} == {"a.json", "sub", "b"}


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_in_the_middle_leaves_the_old_file(folder, monkeypatch, call):
    folder.mkdir()
    path = folder / "a.json"
    runfolder.write_json(path, {"x": 1})

    def fail(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(SaveError, match=r"a\.json: No space"):
        runfolder.write_json(path, {"x": 2})
    assert json.loads(path.read_text()) == {"x": 1}
    assert [found.name for found in folder.iterdir()] == ["a.json"]


def test_whoever_reads_while_it_is_written_finds_the_old_file(folder, monkeypatch):
    folder.mkdir()
    path, seen, real = folder / "a", [], os.fsync
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", lambda number: (seen.append(path.read_bytes()), real(number)))
    runfolder.write_atomically(path, b"new")
    assert (seen, path.read_bytes()) == ([b"old"], b"new")


def test_what_another_writer_left_half_done_is_written_over(folder):
    folder.mkdir()
    (folder / "a.new").write_bytes(b"half of it and mo")
    runfolder.write_atomically(folder / "a", b"new")
    assert [(path.name, path.read_bytes()) for path in folder.iterdir()] == [("a", b"new")]


def test_links_are_replaced_and_not_written_through(folder, tmp_path):
    folder.mkdir()
    (tmp_path / "precious").write_text("mine")
    for name in ("a", "a.new"):
        (folder / name).symlink_to(tmp_path / "precious")
    runfolder.write_atomically(folder / "a", b"new")
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (folder / "a").is_symlink()


def test_numbers_that_json_does_not_know_are_never_written(folder):
    folder.mkdir()
    with pytest.raises(ValueError, match="JSON compliant"):
        runfolder.write_json(folder / "a.json", {"x": float("nan")})
    assert list(folder.iterdir()) == []


# -- reading -----------------------------------------------------------------------------------------------------------


def test_without_a_manifest_there_are_no_checkpoints_yet(tmp_path):
    assert runfolder.read_manifest(tmp_path) == {"checkpoints": []}


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"checkpoints": 3}', "null"])
def test_a_manifest_that_is_none_is_refused(tmp_path, text):
    (tmp_path / runfolder.MANIFEST).write_text(text)
    with pytest.raises(SaveError, match=r"manifest\.json "):
        runfolder.read_manifest(tmp_path)


def test_a_checkpoint_is_whole_if_every_byte_is_there_and_it_is_no_link(tmp_path):
    path = tmp_path / runfolder.CHECKPOINTS / "one"
    runfolder.write_atomically(path, b"weights")
    entry = {"file": "one", "sha256": runfolder.digest(path)}
    assert runfolder.is_whole(tmp_path, entry)
    for damaged in (b"weight", b"weightz", b"", b"weights "):
        path.write_bytes(damaged)
        assert not runfolder.is_whole(tmp_path, entry)
    path.unlink()
    assert not runfolder.is_whole(tmp_path, entry)
    (tmp_path / "copy").write_bytes(b"weights")
    path.symlink_to(tmp_path / "copy")
    assert not runfolder.is_whole(tmp_path, entry)
    path.unlink()
    path.mkdir()
    assert not runfolder.is_whole(tmp_path, entry)


def test_a_checkpoint_that_cannot_be_read_is_not_whole(tmp_path, monkeypatch):
    path = tmp_path / runfolder.CHECKPOINTS / "one"
    runfolder.write_atomically(path, b"weights")
    entry = {"file": "one", "sha256": runfolder.digest(path)}

    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(runfolder, "digest", fail)
    assert not runfolder.is_whole(tmp_path, entry)
