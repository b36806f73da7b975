"""After a power cut at any moment a save is the old one or the new one:

never neither, never parts of both.
"""

import os
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import with_slow
from esper.leyline.errors import SaveError
from esper.storage import files, runfolder
from esper.storage.store import NewFile, Store
from faults.power_cuts import NOTHING, Violation, play


class Subject:
    """Something that is saved:

    how to save the number-th of it, what a folder holds, and what may lie there then.
    """

    kind, keep, has_own_folder, is_given_as_bytes = "test", 1, True, True

    def __init__(self, contents):
        self.contents = contents
        """per save, role -> bytes"""

    def store(self, folder):
        files = folder / "files" if self.has_own_folder else folder
        return Store(
            folder / runfolder.MANIFEST,
            self.kind,
            folder=files,
            owned=re.compile("part-[a-z]"),
            keep=self.keep,
        )

    def save(self, folder, number):
        files = {
            role: NewFile(f"part-{role}.bin", self.given(content))
            for role, content in self.contents[number].items()
        }
        store = self.store(folder)
        store.newest()
        store.save({"number": number}, files)

    def given(self, content):
        """As bytes, or as a function that writes beside its file first, as safetensors does."""
        if self.is_given_as_bytes:
            return content

        def write(path):
            path.with_name(".tmp1").write_bytes(content)
            path.with_name(".tmp1").rename(path)

        return write

    def load(self, folder):
        """The number of the save that is there; parts of another one are a fault."""
        store = self.store(folder)
        found = store.newest()
        if found is None:
            return NOTHING
        if found.contents != self.contents[found.facts["number"]]:
            raise Violation(f"parts of several saves: {found}")
        return found.facts["number"]

    def names(self, folder):
        """What must be in the folder after a save, and nothing else."""
        listed = {
            name for generation in self.store(folder).generations() for name in generation.names
        }
        return {runfolder.MANIFEST} | listed


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    """What is laid out again need not be durable."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


# -- the store -------------------------------------------------------------------------------------

PARTS = st.dictionaries(st.sampled_from("ab"), st.binary(min_size=1, max_size=4), max_size=2)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_power_cut_at_any_moment_leaves_the_old_save_or_the_new_one(data):
    """Of any sequence of saves, some of them by processes that were killed."""
    contents = data.draw(st.lists(PARTS, min_size=1, max_size=3))
    subject = Subject([*contents, {"a": b"the next"}])
    subject.keep, subject.has_own_folder = (
        data.draw(st.sampled_from([1, 2])),
        data.draw(st.booleans()),
    )
    subject.is_given_as_bytes = data.draw(st.booleans())
    kills = {number: data.draw(st.none() | st.integers(1, 20)) for number in range(len(contents))}
    play(subject, len(contents), kills, following=len(contents), most=128)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_power_cut_leaves_the_old_save_or_the_new_one_in_long_sequences(data):
    contents = data.draw(st.lists(PARTS, min_size=1, max_size=5))
    subject = Subject([*contents, {"a": b"the next"}])
    subject.keep, subject.has_own_folder = (
        data.draw(st.sampled_from([1, 2, 3])),
        data.draw(st.booleans()),
    )
    subject.is_given_as_bytes = data.draw(st.booleans())
    kills = {number: data.draw(st.none() | st.integers(1, 30)) for number in range(len(contents))}
    play(subject, len(contents), kills, following=len(contents), most=1024)


def subject_of(*saves):
    return Subject(
        [
            {role: f"{role}{number}!".encode() for role in roles}
            for number, roles in enumerate(saves)
        ]
    )


@pytest.mark.parametrize("has_own_folder", [True, False])
def test_every_legal_folder_of_three_saves_of_three_files_is_whole(has_own_folder):
    subject = subject_of("abc", "abc", "ab", "a")
    subject.has_own_folder = has_own_folder
    disk, count = play(subject, 3, following=3, most=512)
    assert count > 100
    assert set(disk.kinds) == {*KINDS, "note"}


KINDS = (
    "file",
    "folder before the manifest",
    "manifest",
    "folder after the manifest",
    "folder above a new one",
    "folder at the beginning",
)
SLOW_KINDS = tuple(kind for kind in KINDS if kind not in ("file", "folder after the manifest"))


@pytest.mark.parametrize("kind", KINDS)
def test_without_any_one_fsync_a_save_can_be_lost(kind):
    """Each is needed:

    with one of them taken out, a legal folder is found that holds neither save.
    """
    kills = {1: "folder after the manifest"} if kind == "folder at the beginning" else {}
    saves = 3 if kills else 2
    play(subject_of("a", "a", "a", "a"), saves, kills)
    with pytest.raises(Violation):
        play(subject_of("a", "a", "a", "a"), saves, kills, without=kind)


def test_without_the_note_of_what_is_written_a_killed_save_leaves_files_for_good():
    play(subject_of("a", "a", "a"), 2, following=2)
    with pytest.raises(Violation, match="after the next save"):
        play(subject_of("a", "a", "a"), 2, following=2, without="note")


@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("kind", with_slow(KINDS, SLOW_KINDS))
def test_a_process_killed_before_any_fsync_and_a_power_cut_later_lose_nothing(kind, killed):
    """What the next process sees may not be on disk yet."""
    for is_given_as_bytes in (True, False):
        subject = subject_of("ab", "ab", "ab", "a")
        subject.is_given_as_bytes = is_given_as_bytes
        play(subject, 3, {killed: kind}, following=3, most=64)


def test_facts_without_files_survive_too():
    play(subject_of("", "", ""), 2, following=2)


def test_what_is_too_large_to_be_read_back_is_not_written(tmp_path, monkeypatch):
    store = Store(tmp_path / runfolder.MANIFEST, "test")
    store.save({"number": 1})
    monkeypatch.setattr(files, "MOST_BYTES", 1000)
    with pytest.raises(SaveError, match="bytes"):
        store.save({"number": 2, "text": "x" * 1000})
    assert store.newest().facts == {"number": 1}
