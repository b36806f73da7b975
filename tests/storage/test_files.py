"""One file at a time: nothing half-written, nothing followed, nothing left behind."""

import errno
import os
import socket
import stat
from pathlib import Path

import pytest

from esper.leyline.errors import SaveError
from esper.storage.files import (
    FileKind,
    digest,
    has_mark,
    is_plain_name,
    make_folder,
    open_plain,
    read_plain,
    require_replaceable,
    sweep,
    write_durably,
    write_files,
)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


def by_name(content):
    """A function that writes a file, and another one beside it on the way, as libraries do."""

    def write(path):
        (path.parent / "scratch").write_bytes(b"half")
        path.write_bytes(content)

    return write


GIVEN = pytest.mark.parametrize("given", [bytes, by_name], ids=["bytes", "function"])


@GIVEN
def test_what_is_written_is_there_and_nothing_else(folder, given):
    written = write_durably(folder / "sub" / "b", given(b"abc"))
    assert read_plain(folder / "sub/b") == b"abc"
    assert written == digest(folder / "sub/b")
    assert {path.name for path in folder.rglob("*")} == {"sub", "b"}


@GIVEN
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_in_the_middle_leaves_the_old_file_and_one_line(folder, monkeypatch, call, given):
    write_durably(folder / "a", b"old")

    def fail(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(SaveError, match=r"^[^\n]*run/a: No space .*--resume"):
        write_durably(folder / "a", given(b"new"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"a": b"old"}


@GIVEN
def test_whoever_reads_while_it_is_written_finds_the_old_file(folder, monkeypatch, given):
    path, seen, real = folder / "a", set(), os.fsync
    write_durably(path, b"old")
    monkeypatch.setattr(
        os, "replace", lambda *pair, move=os.replace: (seen.add(path.read_bytes()), move(*pair))
    )
    monkeypatch.setattr(os, "fsync", lambda number: (seen.add(path.read_bytes()), real(number)))
    write_durably(path, given(b"new"))
    assert seen == {b"old", b"new"}  # the folder is made durable last


def leave_behind(folder, name):
    """What killed writes of a file leave: a file, and a folder with one in it."""
    (folder / f".new-{'a' * 32}-{name}").write_bytes(b"half of it and mo")
    (folder / f".new-{'b' * 32}-{name}").mkdir()
    (folder / f".new-{'b' * 32}-{name}" / name).write_bytes(b"half")


@GIVEN
def test_what_a_killed_write_left_is_removed_by_the_next_and_nothing_else_is(folder, given):
    folder.mkdir()
    leave_behind(folder, "a")
    leave_behind(folder, "another-a")
    (folder / ".new-mine-a").touch()
    others = {
        path.name
        for path in folder.iterdir()
        if not path.name.endswith("-a") or "another" in path.name
    }
    write_durably(folder / "a", given(b"new"))
    assert {path.name for path in folder.iterdir()} == {"a", ".new-mine-a", *others}


def test_sweeping_takes_what_is_ones_own(folder):
    folder.mkdir()
    leave_behind(folder, "a")
    sweep(folder, lambda name: name == "b")
    assert len(list(folder.iterdir())) == 2
    sweep(folder, lambda name: name == "a")
    assert list(folder.iterdir()) == []
    sweep(folder / "nowhere", lambda name: True)


@GIVEN
def test_a_link_is_replaced_and_not_written_through(folder, tmp_path, given):
    folder.mkdir()
    (tmp_path / "precious").write_text("mine")
    (folder / "a").symlink_to(tmp_path / "precious")
    write_durably(folder / "a", given(b"new"))
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (folder / "a").is_symlink()


def test_a_temporary_file_cannot_be_guessed_and_is_new(folder, monkeypatch):
    opened, real = [], os.open
    monkeypatch.setattr(
        os,
        "open",
        lambda path, flags, *mode: (opened.append((str(path), flags)), real(path, flags, *mode))[1],
    )
    for _ in range(2):
        write_durably(folder / "a", b"new")
    temporary = [
        (path, flags)
        for path, flags in opened
        if ".new-" in path and flags & (os.O_WRONLY | os.O_RDWR)
    ]
    assert len({path for path, _ in temporary}) == 2
    assert all(
        flags & os.O_EXCL and flags & os.O_NOFOLLOW and flags & os.O_CREAT for _, flags in temporary
    )


def test_a_file_in_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "a", tmp_path / "file" / "sub" / "a"):
        with pytest.raises(SaveError, match=f"cannot save {path}"):
            write_durably(path, b"new")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_named(folder):
    write_durably(folder / "a", b"old")
    folder.chmod(0o500)
    with pytest.raises(SaveError, match="Permission denied"):
        write_durably(folder / "a", b"new")
    folder.chmod(0o700)
    assert read_plain(folder / "a") == b"old"


def test_folders_are_made_durable_in_those_above_them(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(
        os, "fsync", lambda number: synced.append(os.readlink(f"/proc/self/fd/{number}"))
    )
    (tmp_path / "other").touch()
    make_folder(tmp_path / "a" / "b")
    assert synced == [str(tmp_path), str(tmp_path / "a")]
    make_folder(tmp_path / "a" / "b")  # an empty one may be of somebody who was killed too early
    assert synced[2:] == [str(tmp_path / "a")]
    (tmp_path / "a" / "b" / "c").touch()
    make_folder(tmp_path / "a" / "b")
    assert len(synced) == 3


def test_a_folder_may_be_as_deep_as_a_path_is_long(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("x/" * 1500 + "y")
    make_folder(folder)
    assert folder.is_dir()
    for place in (folder, *folder.parents[:-1]):  # nothing that walks down gets there
        place.rmdir()


def test_files_of_one_write_are_durable_with_one_look_at_the_folder(folder, monkeypatch):
    folder.mkdir()
    (folder / "x").touch()
    kinds, real = [], os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda number: (kinds.append(stat.S_ISDIR(os.fstat(number).st_mode)), real(number)),
    )
    write_files(folder, {"a": b"1", "b": b"2"})
    assert kinds == [False, False, True]


def test_only_regular_files_are_read(folder, tmp_path):
    folder.mkdir()
    (folder / "a").write_bytes(b"x")
    (folder / "link").symlink_to(folder / "a")
    os.mkfifo(folder / "pipe")
    for name in ("link", "pipe", "nothing", "."):
        with pytest.raises(OSError, match=r"."):
            open_plain(folder / name)
    assert read_plain(folder / "a") == b"x"


# -- what may be written ---------------------------------------------------------------------------

LEAD_ELSEWHERE = (
    *("", ".", "..", "../a", "..\\a", "a/b", "a\\b", "/etc/passwd", "a/../../b", "a..b"),
    *("C:a", "c:\\a", "\\\\host\\a", "a\0b", ".new-a", "a\nb"),
    *(None, 3, b"a", Path("a")),
)
REPORT = FileKind("a report", has_mark("<report>"))


@pytest.mark.parametrize("name", LEAD_ELSEWHERE, ids=repr)
def test_a_name_that_may_lead_elsewhere_is_not_plain_and_nothing_is_written(folder, name):
    assert not is_plain_name(name)
    with pytest.raises(SaveError, match="not a plain file name, and nothing was written"):
        write_files(folder, {"a": b"1", name: b"2"})
    assert not folder.exists()


@pytest.mark.parametrize("name", ["manifest.json", "garden-model-4.safetensors", "a b", "ä", "a.b"])
def test_a_name_in_a_folder_is_plain(folder, name):
    assert is_plain_name(name)
    write_files(folder, {name: b"1"})
    assert [path.name for path in folder.iterdir()] == [name]


def put_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


PUT = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a socket": put_socket,
    "a symbolic link": lambda path: path.symlink_to(path.with_name("old")),
    "another file": lambda path: path.write_text("mine"),
}


@pytest.mark.parametrize("found", PUT)
def test_what_a_user_names_and_is_not_of_its_kind_stays(tmp_path, monkeypatch, found):
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    (tmp_path / "old").write_text("<report> of before")
    path = Path("named")
    PUT[found](path)
    before = path.lstat()
    with pytest.raises(SaveError, match=f"^named is {found} .*only a report is .*another path"):
        require_replaceable(path, REPORT)
    assert path.lstat().st_ino == before.st_ino
    require_replaceable(tmp_path / "old", REPORT)
    require_replaceable(tmp_path / "new", REPORT)


def test_a_device_is_not_replaced():
    for kind in (None, REPORT):
        with pytest.raises(SaveError, match="/dev/null is a device and stays as it is"):
            require_replaceable(Path("/dev/null"), kind)


@GIVEN
@pytest.mark.parametrize("found", ["a pipe", "a folder", "a socket"])
def test_no_write_replaces_what_is_no_file(tmp_path, monkeypatch, given, found):
    monkeypatch.chdir(tmp_path)
    path = Path("named")
    PUT[found](path)
    form = stat.S_IFMT(path.lstat().st_mode)
    with pytest.raises(SaveError, match=f"named is {found} .*only a regular file"):
        write_durably(path, given(b"new"))
    assert stat.S_IFMT(path.lstat().st_mode) == form
    assert [left.name for left in tmp_path.iterdir()] == ["named"]
