"""A run on disk:

one writer, nothing half-written, nothing followed, nothing left behind by a refused start.
"""

import fcntl
import json
import os
import re
import threading

import pytest

from cli.test_cli import call
from esper.leyline.errors import SaveError, SettingError
from esper.storage import runfolder
from simic.tiny_runs import Forked, command


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


# -- one writer ------------------------------------------------------------------------------------


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
    with pytest.raises(SaveError, match=r".*--out"):
        runfolder.only_writer(tmp_path / "file" / "run").__enter__()
    with pytest.raises(SaveError, match="File exists"):
        runfolder.only_writer(tmp_path / "file").__enter__()


def test_a_link_in_place_of_the_lock_is_not_followed(folder, tmp_path):
    folder.mkdir()
    (tmp_path / "precious").write_text("mine")
    (folder / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(SaveError, match=f"{folder}/lock "):
        runfolder.only_writer(folder).__enter__()
    assert (tmp_path / "precious").read_text() == "mine"


# -- beginnings ------------------------------------------------------------------------------------


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
            assert runfolder.read_json(folder / runfolder.CONFIG) == {"rounds": 1}
            work()
            raise problem

    with pytest.raises(type(problem)):
        begin()


@pytest.mark.parametrize("has_lock", [True, False])
def test_a_folder_of_somebody_else_is_left_as_it_was(folder, has_lock):
    names = ["lock", "other"] if has_lock else ["other"]
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    with pytest.raises(SaveError, match="--out"), runfolder.only_writer(folder, fresh=True):
        pass
    assert sorted(path.name for path in folder.iterdir()) == names


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
    names = {"lock", runfolder.CONFIG, runfolder.EVENTS, work}
    assert {path.name for path in folder.iterdir()} == names


def test_events_are_work_too(folder):
    start(
        folder,
        SaveError("the disk is full"),
        lambda: (folder / runfolder.EVENTS).write_text("{}\n"),
    )
    assert (folder / runfolder.CONFIG).exists()


def test_an_error_of_ours_keeps_everything_to_be_looked_at(folder):
    start(folder, ZeroDivisionError())
    assert (folder / runfolder.CONFIG).exists()


def test_what_a_run_was_started_with_stays_when_going_on_is_refused(folder):
    folder.mkdir()
    runfolder.write_json(folder / runfolder.CONFIG, {"rounds": 9})
    with pytest.raises(SettingError), runfolder.begun(folder, {"rounds": 1}):
        raise SettingError("another layout")
    assert runfolder.read_json(folder / runfolder.CONFIG) == {"rounds": 9}


def test_a_name_that_no_file_can_have_is_refused_in_one_line(tmp_path, capsys):
    name = "x" * 300
    with (
        pytest.raises(SaveError, match=r"xxx: File name"),
        runfolder.only_writer(tmp_path / name),
    ):
        pass
    code, _, err = call(capsys, "ppo", "--out", str(tmp_path / name), "--resume")
    assert (code, "cannot read" in err, "File name too long" in err) == (2, True, True)


@pytest.mark.parametrize(
    "content", [None, "{", "[]", '{"seed": 1}', '{"seed": 0, "more": 1}', '{"seed": NaN}']
)
def test_what_a_run_was_started_with_is_read_or_nothing(content, folder):
    folder.mkdir()
    if content is not None:
        (folder / runfolder.CONFIG).write_text(content)
    assert runfolder.read_start(folder) == {}
    runfolder.write_json(folder / runfolder.CONFIG, {"seed": 0})
    assert runfolder.read_start(folder) == {"seed": 0}


# -- files that are read back ----------------------------------------------------------------------


def test_what_is_written_is_read_back(folder):
    path = folder / "a.json"
    for values in ({"x": [1, 2.5, None]}, {"x": 3}, {"x": [1, 2.5, None]}):
        runfolder.write_json(path, values)
        assert runfolder.read_json(path) == values
        assert values.items() <= json.loads(path.read_text()).items()
    assert [path.name for path in folder.iterdir()] == ["a.json"]


def test_what_was_changed_by_hand_is_refused(folder):
    path = folder / runfolder.CONFIG
    runfolder.write_json(path, {"x": 1})
    path.write_text(path.read_text().replace('"x": 1', '"x": 2'))
    with pytest.raises(SaveError, match="changed"):
        runfolder.read_json(path)


def test_a_run_folder_of_an_older_format_is_refused_in_one_line(folder):
    """As the first version of Esper left it."""
    folder.mkdir()
    (folder / runfolder.CONFIG).write_text('{"rounds": 1}')
    with pytest.raises(SaveError, match=r"^[^\n]*older format[^\n]*$"):
        runfolder.read_json(folder / runfolder.CONFIG)


ODD = ['{"sha256": "x", "a": NaN}', '{"sha256": "x", "a": 1e999}']


@pytest.mark.parametrize("content", [None, "{", "\udcff", *ODD])
def test_a_file_that_cannot_be_read_is_refused(folder, content):
    folder.mkdir()
    if content is not None:
        (folder / runfolder.CONFIG).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(SaveError, match=r"\.json"):
        runfolder.read_json(folder / runfolder.CONFIG)


def test_numbers_that_json_does_not_know_are_never_written(folder):
    folder.mkdir()
    with pytest.raises(ValueError, match="JSON compliant"):
        runfolder.write_json(folder / "a.json", {"x": float("nan")})
    assert list(folder.iterdir()) == []


# -- whether somebody writes -----------------------------------------------------------------------


def test_asking_whether_somebody_writes_makes_no_file(folder):
    folder.mkdir()
    assert not runfolder.is_being_written(folder)
    assert not runfolder.is_being_written(folder / "nowhere")
    assert list(folder.iterdir()) == []


def test_whoever_only_asks_does_not_keep_a_writer_out(folder):
    """The shared lock of a moment is waited for."""
    with runfolder.only_writer(folder):
        (folder / "work").touch()
        assert runfolder.is_being_written(folder)
    with open(folder / runfolder.LOCK) as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        later = threading.Timer(0.05, fcntl.flock, (asking, fcntl.LOCK_UN))
        later.start()
        with runfolder.only_writer(folder):
            assert runfolder.is_being_written(folder)
        later.join()
    assert not runfolder.is_being_written(folder)


# -- what people call a policy ---------------------------------------------------------------------


def test_a_checkpoint_is_called_by_its_run_and_round_and_a_rule_by_its_name():
    labels = runfolder.label_policies(
        [
            "never",
            "schedule:epochs=1+5",
            "runs/first/checkpoints/round-000040.safetensors",
            "final of /home/me/runs/second/checkpoints/round-000008.safetensors",
            "runs/digits/policy.safetensors",
            "kept/mine.safetensors",
        ]
    )
    assert list(labels.values()) == [
        "never",
        "schedule:epochs=1+5",
        "first round 40",
        "final of second round 8",
        "the policy of digits",
        "mine",
    ]


def test_two_checkpoints_that_would_be_called_alike_keep_their_paths():
    paths = [f"{folder}/first/checkpoints/round-000040.safetensors" for folder in ("a", "b")]
    assert list(runfolder.label_policies(paths).values()) == paths
