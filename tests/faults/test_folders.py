"""Somebody else's run folder: nothing in it leads out of it, nothing in it makes a command wait for ever."""

import stat

import pytest

from faults.commands import CLEAR, DONE, command, run
from faults.damage import discard, link_away, link_hard, pipe, tree
from user_models import PLANT_FIRST, grow_cnn

FOLDERS = [
    ("run", "checkpoints"),
    ("run", "networks/host-0"),
    ("ppo", "twins"),
    ("compare", "arms"),
]
MORE = [("run", "networks"), ("ppo", "checkpoints"), ("compare", "pretrained")]
FOLDERS += [pytest.param(*more, marks=pytest.mark.slow) for more in MORE]


@pytest.mark.parametrize(("kind", "name"), FOLDERS)
def test_a_link_in_place_of_a_folder_is_refused_and_nothing_behind_it_is_touched(
    copy_of, tmp_path, kind, name
):
    folder, outside = copy_of(kind), copy_of(kind, "outside")
    link_away(folder / name, outside / name)
    discard(folder / "manifest.json")  # what no manifest lists would be deleted
    before = tree(outside)
    assert run(tmp_path / "process", command(kind, folder, "--resume"))[0] == CLEAR
    assert tree(outside) == before


@pytest.mark.parametrize("damage", [link_away, link_hard], ids=["symbolic", "hard"])
@pytest.mark.parametrize("name", ["events-0.jsonl", "lock"])
def test_a_link_in_place_of_a_file_that_is_written_in_place_is_refused(
    copy_of, tmp_path, name, damage
):
    folder, outside = copy_of("run"), tmp_path / "precious"
    outside.write_text("mine\n")
    damage(folder / name, outside)
    assert run(tmp_path / "process", command("run", folder, "--resume"))[0] == CLEAR
    assert outside.read_text() == "mine\n"


@pytest.mark.parametrize("name", ["manifest.json", "results.json", "networks/host-0/grown.py"])
def test_a_link_in_place_of_another_file_is_replaced_or_refused(copy_of, tmp_path, name):
    folder, outside = copy_of("run"), tmp_path / "precious"
    outside.write_text("mine\n")
    link_away(folder / name, outside)
    run(tmp_path / "process", command("run", folder, "--resume"))
    assert outside.read_text() == "mine\n"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("run", "events-0.jsonl"),
        ("run", "manifest.json"),
        ("run", "lock"),
        ("compare", "arms/never-1.json"),
    ],
)
def test_a_pipe_in_place_of_a_file_does_not_hang(copy_of, tmp_path, kind, name):
    folder = copy_of(kind)
    (folder / "results.json").unlink()  # of a finished run nothing else is read
    pipe(folder / name)
    assert run(tmp_path / "process", command(kind, folder, "--resume"), seconds=20)[0] == CLEAR


def test_a_run_folder_may_itself_be_behind_a_link(copy_of, tmp_path):
    link_away(tmp_path / "link", copy_of("run"))
    assert run(tmp_path / "process", command("run", tmp_path / "link", "--resume"))[0] == DONE


def test_all_files_may_be_read_by_the_same_people(finished, tmp_path):
    grow_cnn({0: PLANT_FIRST}).save(tmp_path / "garden")
    for folder in (finished("run"), finished("ppo"), finished("compare"), tmp_path / "garden"):
        modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}
        assert len(modes) == 1, modes
