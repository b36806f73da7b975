"""A reader keeps up with growing files, whatever they do, and never touches the run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboard.generated import (
    as_lines,
    config_of,
    folded,
    lived,
    many_rounds,
    opened,
    plain,
    runs,
    write_config,
    write_run,
)
from epoch_records import grown_epoch
from esper.dashboard import reader
from esper.dashboard.reader import RunReader, summarise
from esper.dashboard.report import write_report
from esper.dashboard.view import RunView
from esper.leyline.errors import SaveError
from esper.storage.runfolder import only_writer
from esper.telemetry.events import RoundBegan, to_record

LONGEST = 4096


def grow_files(folder, contents, cut, draw):
    """Append to some files, up to a byte that may be anywhere; returns how many whole lines each
    has.
    """
    lines = {}
    for rank, content in contents.items():
        with open(folder / f"events-{rank}.jsonl", "ab") as file:
            if cut is None or draw(st.booleans()):
                file.write(content[file.tell() : cut])
            lines[rank] = content[: file.tell()].count(b"\n")
    return lines


@given(data=st.data())
def test_folding_growing_files_in_pieces_equals_folding_all_at_once(data):
    kind, files = data.draw(runs())
    contents = {rank: as_lines(records) for rank, records in files.items()}
    cuts = data.draw(st.lists(st.integers(0, max(map(len, contents.values()))), max_size=6))
    with TemporaryDirectory() as name:
        folder = Path(name, "run")
        write_config(folder, kind)
        now = RunReader(folder)
        for cut in (*sorted(cuts), None):
            lines = grow_files(folder, contents, cut, data.draw)
            events = now.view.events
            assert now.refresh() == sum(lines.values()) - events
            whole = folded(kind, {rank: records[: lines[rank]] for rank, records in files.items()})
            assert plain(now.view, len(files)) == plain(whole, len(files))


def test_a_torn_last_line_waits_for_its_rest(tmp_path):
    records = many_rounds(2)
    content = as_lines(records)
    folder = write_run(tmp_path / "run", "ppo", {0: records})
    (folder / "events-0.jsonl").write_bytes(content[:-20])
    found = opened(folder)
    assert (found.view.events, found.view.unknown) == (len(records) - 1, 0)
    (folder / "events-0.jsonl").write_bytes(content)
    assert found.refresh() == 1
    assert plain(found.view) == plain(folded("ppo", {0: records}))


@pytest.mark.parametrize("length", [LONGEST, LONGEST + 1, 5 * LONGEST, 40 * LONGEST + 1])
def test_a_line_that_is_too_long_counts_once_and_is_never_read_whole(tmp_path, monkeypatch, length):
    monkeypatch.setattr(reader, "LONGEST_LINE", LONGEST)
    records = many_rounds(1)
    folder = write_run(tmp_path / "run", "ppo", {0: records})
    found = opened(folder)
    with open(folder / "events-0.jsonl", "ab", buffering=0) as file:
        file.write(b"x" * length)
        assert found.refresh() == 0
        assert (
            found.bookmarks[0, 0].offset >= len(as_lines(records)) + LONGEST
        )  # it is not read again
        file.write(
            as_lines([to_record(RoundBegan(7)), *records])
        )  # the end of the long line, whatever it looks like
        assert found.refresh() == 1 + len(records)
        assert found.view.round == 0
    assert found.view.unknown == 1
    assert found.view.episodes[0].epochs.rows == 3


GARBAGE = [
    b"\xff\xfe",
    b"",
    b"null",
    b"[1]",
    b'{"type": "RoundBegan", "round": 7} {}',
    b"[" * 100_000,
    b'{"a": NaN',
    b"1" * 9000,
]


@pytest.mark.parametrize("line", GARBAGE, ids=lambda line: repr(line[:20]))
def test_a_line_that_is_no_record_only_counts(tmp_path, line):
    records = many_rounds(1)
    folder = write_run(tmp_path / "run", "ppo", {0: records})
    with open(folder / "events-0.jsonl", "ab") as file:
        file.write(line + b"\n" + as_lines([lived(0, 0, 5)]))
    found = opened(folder)
    assert (found.view.unknown, found.view.events, found.view.round) == (1, len(records) + 2, 0)
    assert found.view.episodes[0].epochs.last("epoch") == 5


def test_numbers_that_json_does_not_have_are_not_measured(tmp_path):
    folder = write_run(tmp_path / "run", "ppo", {0: many_rounds(1)})
    line = as_lines([lived(0, 0, 5)]).replace(
        b'"held_out_accuracy": 0.75', b'"held_out_accuracy": NaN'
    )
    with open(folder / "events-0.jsonl", "ab") as file:
        file.write(line)
    found = opened(folder)
    assert (found.view.unknown, found.view.episodes[0].epochs.last("accuracy")) == (0, None)


def test_a_run_that_was_resumed_earlier_is_folded_anew(tmp_path):
    folder = write_run(tmp_path / "run", "ppo", {0: many_rounds(4)})
    found = opened(folder)
    resumed = [*many_rounds(2), *many_rounds(3, hosts=3)]
    for records in (many_rounds(2), resumed):
        (folder / "events-0.jsonl").write_bytes(as_lines(records))
        assert found.refresh() > 0
        assert plain(found.view) == plain(folded("ppo", {0: records}))


def test_a_file_that_was_cut_and_has_grown_longer_since_is_folded_anew(tmp_path):
    folder = write_run(tmp_path / "run", "ppo", {0: many_rounds(4)})
    found = opened(folder)
    longer = [*many_rounds(2), *(lived(1, 0, epoch) for epoch in range(9, 40))]
    (folder / "events-0.jsonl").write_bytes(as_lines(longer))
    found.refresh()
    assert plain(found.view) == plain(folded("ppo", {0: longer}))


def test_a_file_that_vanishes_takes_its_hosts_with_it_and_one_that_comes_later_is_found(tmp_path):
    folder = write_run(tmp_path / "run", "ppo", {0: many_rounds(1, hosts=1)})
    found = opened(folder)
    late = [to_record(RoundBegan(0)), lived(0, 5, 2)]
    (folder / "events-12.jsonl").write_bytes(as_lines(late))
    assert found.refresh() == 2
    assert {host: episode.rank for host, episode in found.view.episodes.items()} == {0: 0, 5: 12}
    (folder / "events-12.jsonl").unlink()
    found.refresh()
    assert sorted(found.view.episodes) == [0]


@given(runs(kinds=["ppo"]))
def test_an_older_episode_is_the_one_that_was_lived_then(run):
    kind, files = run
    seen = {}
    for rank, records in files.items():
        view = RunView(kind, config_of(kind))
        for record in records:
            view.fold(record, rank)
            seen |= {
                (episode.round, host): episode
                for host, episode in view.episodes.items()
                if episode.has_begun
            }
    with TemporaryDirectory() as name:
        found = opened(write_run(Path(name, "run"), kind, files))
        for (number, host), episode in seen.items():
            back = found.episode(number, host)
            assert (back.host, back.round, back.actions, back.rollbacks) == (
                host,
                number,
                episode.actions,
                episode.rollbacks,
            )
            assert repr(back.epochs.columns) == repr(episode.epochs.columns)
            assert [span.stages for span in back.spans] == [span.stages for span in episode.spans]
        assert found.episode(99, 0) is None
        assert found.episode(0, 99) is None


# -- the folder ------------------------------------------------------------------------------------


def test_reading_changes_nothing_in_the_run(tmp_path):
    folder = write_run(tmp_path / "run", "ppo", {0: many_rounds(3)}, rounds=3)
    (folder / "lock").touch()

    def state():
        return {
            path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()
        }

    before = state()
    found = opened(folder)
    found.episode(0, 0)
    found.status()
    assert state() == before


@pytest.mark.parametrize("kind", ["link", "broken link", "folder", "pipe"])
def test_only_regular_files_are_read(tmp_path, kind):
    folder = write_run(tmp_path / "run", "ppo", {0: many_rounds(1)})
    secret = tmp_path / "secret"
    secret.write_bytes(as_lines([lived(0, 77, 2)]))
    other = folder / "events-1.jsonl"
    makes = {
        "link": lambda: other.symlink_to(secret),
        "broken link": lambda: other.symlink_to(tmp_path / "nowhere"),
        "folder": other.mkdir,
        "pipe": lambda: os.mkfifo(other),
    }
    makes[kind]()
    assert sorted(opened(folder).view.episodes) == [0, 1]


def test_the_run_of_a_command_that_there_was_is_of_an_older_format(tmp_path):
    folder = write_run(tmp_path / "run", "run", {0: []}, hosts=1)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"run"', '"grow"', 1))
    found = opened(folder)
    assert (found.status(), str(folder) in found.problem) == ("older format", True)


def test_a_configuration_behind_a_link_is_not_read(tmp_path):
    folder = write_run(tmp_path / "run", "run", {0: []}, hosts=1)
    (folder / "config.json").rename(tmp_path / "config.json")
    (folder / "config.json").symlink_to(tmp_path / "config.json")
    found = opened(folder)
    assert found.status() == "damaged"
    assert found.view.kind == "ppo"


def test_a_configuration_that_is_mended_is_read_and_one_that_breaks_is_remembered(tmp_path):
    records = [to_record(grown_epoch(0, 1, 0.5, 0.5, 0.5, 438, 1))]
    folder = write_run(tmp_path / "run", "run", {0: records}, hosts=1)
    whole = (folder / "config.json").read_text()
    (folder / "config.json").write_text(whole[:20])
    found = opened(folder)
    assert found.status() == "damaged"
    (folder / "config.json").write_text(whole)
    found.refresh()
    assert (found.status(), found.view.kind, found.progress()) == ("stopped", "run", (1, 0))
    (folder / "config.json").write_text("{")
    found.refresh()
    assert (found.status(), found.view.kind, found.view.config["hosts"]) == ("damaged", "run", 1)


def test_a_folder_that_is_no_run_is_refused_in_one_line(tmp_path):
    with pytest.raises(SaveError, match=r"config\.json.*--out"):
        RunReader(tmp_path)


OLDER = {
    "grown": (
        {"command": "grow", "task": {"name": "digits"}},
        [
            {
                "type": "StageChanged",
                "host": 0,
                "epoch": 0,
                "slot": "r0c0",
                "before": "DORMANT",
                "after": "GERMINATED",
            },
            {
                "type": "GrownEpoch",
                "host": 0,
                "epoch": 0,
                "train_loss": 2.0,
                "held_out_loss": 1.5,
                "params": 438,
            },
            {"type": "ContributionMeasured", "host": 0, "epoch": 0, "slot": "r0c0", "mean": 0.1},
        ],
    ),
    "ppo": (
        {"task": {"name": "digits", "life": 30}},
        [
            {"type": "RoundBegan", "round": 0},
            {"type": "HostEpoch", "round": 0, "host": 0, "epoch": 2, "train_loss": 2.0},
            {"type": "HostEpoch", "round": 0, "host": 1, "epoch": 2, "train_loss": 2.0},
        ],
    ),
}


@pytest.mark.parametrize(("config", "records"), OLDER.values(), ids=OLDER)
def test_a_folder_of_an_older_format_is_refused_and_listed_as_such(tmp_path, config, records):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "events-0.jsonl").write_bytes(as_lines(records))
    with pytest.raises(SaveError, match="older format"):
        reader.open_run(folder)
    with pytest.raises(SaveError, match="older format"):
        write_report([folder], tmp_path / "report.html")
    found = opened(folder)
    assert (found.view.events, found.status()) == (0, "older format")
    assert summarise(found).status == "older format"


def test_a_run_is_running_while_its_writer_holds_the_lock(tmp_path):
    folder = write_run(tmp_path / "run", "ppo", {0: many_rounds(1)}, rounds=3)
    found = opened(folder)
    assert found.status() == "stopped"
    with only_writer(folder):
        assert found.status() == "running"
        assert found.status() == "running"
    assert found.status() == "stopped"
    with only_writer(folder):
        pass  # asking leaves no lock behind


def test_a_writer_in_another_process_is_seen(tmp_path):
    folder = write_run(tmp_path / "run", "ppo", {0: many_rounds(1)}, rounds=3)
    code = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, "
        "fcntl.LOCK_EX); print(1, flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(folder / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        writer.stdout.readline()
        assert opened(folder).status() == "running"
        writer.communicate(b"\n")
    assert opened(folder).status() == "stopped"


def test_a_run_is_finished_when_its_last_round_is(tmp_path):
    from dashboard.test_view import finished

    records = [
        record
        for number in range(3)
        for record in (to_record(RoundBegan(number)), to_record(finished(number, {})))
    ]
    folder = write_run(tmp_path / "run", "ppo", {0: records[:-1]}, rounds=3)
    found = opened(folder)
    assert (found.status(), found.progress()) == ("stopped", (2, 3))
    (folder / "events-0.jsonl").write_bytes(as_lines(records))
    found.refresh()
    assert (found.status(), found.progress()) == ("finished", (3, 3))
    write_config(folder, "ppo", rounds=5)  # resumed for more
    found.refresh()
    assert (found.status(), found.progress()) == ("stopped", (3, 5))


def test_progress_of_a_grow_run_is_epochs_that_all_hosts_have_lived(tmp_path):
    records = [
        to_record(grown_epoch(host, epoch, 0.5, 0.5, 0.5, 438, 1))
        for epoch in range(1, 5)
        for host in range(2)
    ]
    folder = write_run(tmp_path / "run", "run", {0: records[:-1]}, hosts=2)
    assert opened(folder).progress() == (3, 0)
    write_config(folder, "run", hosts=2, task={"name": "digits", "epochs": 40})
    assert opened(folder).progress() == (3, 40)
    assert opened(folder).status() == "stopped"
