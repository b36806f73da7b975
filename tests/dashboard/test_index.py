"""An index opens a run where the last reader stood; one that is not whole and its own is as if there were none."""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest

from dashboard.generated import as_lines, many_rounds, opened, sizes, write_run
from esper.dashboard import index
from esper.dashboard.reader import RunReader


@pytest.fixture
def kept(tmp_path):
    """A run, its cache with an index, and the index file."""
    folder = write_run(tmp_path / "run", "ppo", {0: many_rounds(3)})
    with sizes(WORTH_KEEPING=1):
        opened(folder)
    (file,) = (tmp_path / "cache").iterdir()
    return folder, file


def events_at_once(folder):
    return RunReader(folder, cache=folder.parent / "cache").view.events


def test_a_run_that_was_read_before_opens_where_the_reader_stood(kept):
    folder, _ = kept
    again = RunReader(folder, cache=folder.parent / "cache")
    assert again.view.events == len(many_rounds(3))
    assert again.refresh() == 0
    assert again.episode(1, 1).epochs.rows == 3


def test_an_index_is_plain_json_that_only_its_owner_reads(kept):
    _, file = kept
    assert json.loads(file.read_bytes()[64:])["view"]["round"] == 2
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("place", [3, 64, 200, -1])
def test_a_damaged_index_is_ignored(kept, place):
    folder, file = kept
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    assert events_at_once(folder) == 0
    assert opened(folder).view.events == len(many_rounds(3))


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff" * 99])
def test_what_is_no_index_is_ignored(kept, content):
    folder, file = kept
    file.write_bytes(content)
    assert events_at_once(folder) == 0


def test_the_index_of_another_folder_or_version_is_ignored(kept, tmp_path):
    folder, file = kept
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    shutil.copy(file, index._path(other, tmp_path / "cache"))
    assert events_at_once(other) == 0
    with mock.patch.object(index, "_code", return_value="another version"):
        assert events_at_once(folder) == 0
    assert events_at_once(folder) > 0


def test_the_index_of_a_file_that_changed_is_ignored(kept):
    folder, _ = kept
    (folder / "events-0.jsonl").write_bytes(as_lines(many_rounds(4, hosts=3)))
    assert events_at_once(folder) == 0
    (folder / "events-0.jsonl").write_bytes(as_lines(many_rounds(2)))
    assert events_at_once(folder) == 0


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path):
    folder = write_run(tmp_path / "run", "ppo", {0: many_rounds(3)})
    (tmp_path / "cache").write_text("a file")
    with sizes(WORTH_KEEPING=1):
        assert opened(folder).view.events == len(many_rounds(3))


@pytest.mark.parametrize("variable", ["ESPER_CACHE", "XDG_CACHE_HOME"])
def test_the_cache_is_where_the_environment_says(tmp_path, monkeypatch, variable):
    monkeypatch.delenv("ESPER_CACHE", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "mine"))
    folder = write_run(tmp_path / "run", "ppo", {0: many_rounds(3)})
    with sizes(WORTH_KEEPING=1):
        RunReader(folder).refresh()
    own = tmp_path / "mine" if variable == "ESPER_CACHE" else tmp_path / "mine" / "esper"
    assert [path.suffix for path in own.iterdir()] == [".json"]


def test_a_short_run_leaves_nothing_in_the_cache(tmp_path):
    opened(write_run(tmp_path / "run", "ppo", {0: many_rounds(3)}))
    assert not (tmp_path / "cache").exists()
