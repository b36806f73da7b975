"""Events on disk:

what the level lets through, cut where it must be, and a full disk that is told once.
"""

import errno
import json
import math
import os
import re
import resource
import time

import pytest

from esper.storage.runfolder import BEGINNING, Position
from esper.telemetry import sink as sink_module
from esper.telemetry.escalation import TelemetryConfig, TelemetryLevel
from esper.telemetry.events import (
    SEVERITIES,
    ActionTaken,
    CheckpointSaved,
    GrowthHint,
    HostRolledBack,
    from_record,
    to_record,
)
from esper.telemetry.sink import Sink
from null_sink import NullSink

HINT, SAVED = GrowthHint(0, 3, "the rate is low"), CheckpointSaved(2, "round-000002.safetensors")
TAKEN, ROLLED = ActionTaken(0, 3, "CULL", "r0c0", None, None), HostRolledBack(1, 3, "loss is nan")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events-0.jsonl"


def open_at(path, level="normal"):
    return Sink(path, TelemetryConfig(level))


def rows(path):
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_an_event_is_a_line_of_json_that_reads_back(path):
    with open_at(path) as sink:
        sink.write(HINT)
        sink.write(TAKEN)
    assert [from_record(row) for row in rows(path)] == [HINT, TAKEN]


def test_a_later_sink_goes_on_at_the_end(path):
    for event in (HINT, TAKEN):
        with open_at(path) as sink:
            sink.write(event)
    assert len(rows(path)) == 2


@pytest.mark.parametrize(
    ("level", "kept"),
    [
        ("off", []),
        ("minimal", [SAVED, ROLLED]),
        ("normal", [SAVED, ROLLED, HINT, TAKEN]),
        ("debug", [SAVED, ROLLED, HINT, TAKEN, "DECISION"]),
    ],
)
def test_a_level_keeps_its_own_and_all_lower_ones(path, level, kept):
    with open_at(path, level) as sink:
        for event in (SAVED, ROLLED, HINT, TAKEN):
            sink.write(event)
        sink.write_record("DECISION", {"n": 1}, TelemetryLevel.DEBUG)
    assert rows(path) == [
        {"type": event, "n": 1} if isinstance(event, str) else to_record(event) for event in kept
    ]


def test_a_sink_says_beforehand_what_it_wants(path):
    with open_at(path, "minimal") as sink:
        wanted = {level for level in TelemetryLevel if sink.wants(level)}
        assert wanted == {TelemetryLevel.OFF, TelemetryLevel.MINIMAL}
        sink.telemetry.escalate_temporarily()
        assert sink.wants(TelemetryLevel.DEBUG)


def test_what_ends_or_breaks_a_run_is_kept_at_every_level_but_off():
    assert {cls.__name__ for cls in SEVERITIES} == {
        "RoundFinished",
        "AnomalyFound",
        "CheckpointSaved",
        "ArmFinished",
        "LedgerClosed",
        "HostRolledBack",
    }
    assert set(SEVERITIES.values()) == {TelemetryLevel.MINIMAL}


def test_a_commit_puts_everything_on_disk_and_says_how_much_that_is(path):
    with open_at(path) as sink:
        assert sink.commit() == (0, 0)
        sink.write(HINT)
        segment, size = sink.commit()
        assert size == path.stat().st_size == len(path.read_bytes()) > 0
        sink.write(HINT)
        assert sink.commit() == (segment, 2 * size) == (0, 2 * size)


def test_rewinding_cuts_off_what_came_later_and_writing_goes_on_there(path):
    with open_at(path) as sink:
        sink.write(HINT)
        end = sink.commit()
        sink.write(TAKEN)
        sink.rewind(end)
        sink.write(SAVED)
    assert [from_record(row) for row in rows(path)] == [HINT, SAVED]


def test_a_torn_line_is_cut_off_with_what_came_later(path):
    with open_at(path) as sink:
        sink.write(HINT)
        end = sink.commit()
        sink.write(TAKEN)
    with open(path, "a") as torn:
        torn.write('{"type": "HostEp')
    with open_at(path) as sink:
        sink.rewind(end)
        sink.write(SAVED)
    assert [from_record(row) for row in rows(path)] == [HINT, SAVED]


def test_rewinding_never_makes_a_file_longer(path):
    with open_at(path) as sink:
        sink.write(HINT)
        sink.rewind(Position(0, 10_000))
        sink.write(TAKEN)
    assert [from_record(row) for row in rows(path)] == [HINT, TAKEN]


def test_a_number_that_json_does_not_know_is_our_mistake(path):
    with open_at(path) as sink, pytest.raises(ValueError, match="JSON compliant"):
        sink.write_record("X", {"value": math.nan}, TelemetryLevel.MINIMAL)


def test_a_link_in_place_of_the_events_is_not_followed(path, tmp_path, capsys):
    (tmp_path / "precious").write_text("mine\n")
    path.symlink_to(tmp_path / "precious")
    with open_at(path) as sink:
        sink.write(HINT)
    assert (tmp_path / "precious").read_text() == "mine\n"
    assert str(path) in capsys.readouterr().err


# -- segments --------------------------------------------------------------------------------------


def stamps(folder):
    """What would change if a file were written to."""
    return {name: (folder / name).stat().st_mtime_ns for name in sorted(os.listdir(folder))}


def test_a_save_ends_a_segment_that_is_long_enough_and_nobody_touches_it_again(
    path, tmp_path, monkeypatch
):
    monkeypatch.setattr(sink_module, "SEGMENT", 1000)
    with open_at(path) as sink:
        fill(sink, 20)  # however long a round is, it stays together
        assert sink.commit() == (1, 0)
        sink.write(HINT)
        end = sink.commit()
        assert end == (1, (tmp_path / "events-0.1.jsonl").stat().st_size)
        complete = stamps(tmp_path)["events-0.jsonl"]
        fill(sink, 20)
        assert sink.commit() == (2, 0)
        fill(sink, 3)
    with open_at(path) as sink:  # goes on in the newest one
        sink.write(TAKEN)
        assert rows(tmp_path / "events-0.2.jsonl")[-1] == to_record(TAKEN)
        sink.rewind(end)
        assert sorted(stamps(tmp_path)) == ["events-0.1.jsonl", "events-0.jsonl"]
        sink.write(SAVED)
    assert [from_record(row) for row in rows(tmp_path / "events-0.1.jsonl")] == [HINT, SAVED]
    assert stamps(tmp_path)["events-0.jsonl"] == complete
    assert len(rows(path)) == 20


def test_the_end_of_a_segment_is_the_beginning_of_the_next_one(path, tmp_path, monkeypatch):
    monkeypatch.setattr(sink_module, "SEGMENT", 1000)
    with open_at(path) as sink:
        fill(sink, 20)
        end, complete = sink.commit(), stamps(tmp_path)["events-0.jsonl"]
        fill(sink, 5)
    (tmp_path / "events-0.1.jsonl").unlink()  # as a power cut may leave it
    with open_at(path) as sink:
        sink.rewind(end)
        sink.write(HINT)
    assert [from_record(row) for row in rows(tmp_path / "events-0.1.jsonl")] == [HINT]
    assert stamps(tmp_path)["events-0.jsonl"] == complete


def test_ranks_do_not_touch_each_other_s_segments(tmp_path, monkeypatch):
    monkeypatch.setattr(sink_module, "SEGMENT", 1000)
    with (
        open_at(tmp_path / "events-1.jsonl") as other,
        open_at(tmp_path / "events-11.jsonl") as sink,
    ):
        for each in (other, sink):
            fill(each, 20)
            assert each.commit() == (1, 0)
            fill(each, 2)
        sink.rewind(BEGINNING)
    names = ("events-1.jsonl", "events-1.1.jsonl", "events-11.jsonl")
    assert [len(rows(tmp_path / name)) for name in names] == [20, 2, 0]
    assert not (tmp_path / "events-11.1.jsonl").exists()


# -- a disk that fails -----------------------------------------------------------------------------


@pytest.fixture
def room_for():
    """Sets how long files may get; a longer write fails like one on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill(sink, count):
    for number in range(count):
        sink.write(GrowthHint(0, number, "x" * 80))


def test_a_full_disk_is_told_once_and_stops_nobody(path, capsys, room_for):
    with open_at(path) as sink:
        sink.write(HINT)
        whole = sink.commit()
        room_for(20_000)
        fill(sink, 1000)
        room_for(resource.RLIM_INFINITY)
        fill(sink, 10)
        assert not sink.wants(TelemetryLevel.MINIMAL)
        assert sink.commit() == (0, path.stat().st_size) >= whole
        sink.rewind(BEGINNING)  # nor does it touch what there is
    said = capsys.readouterr().err
    assert re.fullmatch(f"esper: .*{path}: File too large.*\n", said)
    assert sink.problem in said


def test_what_a_full_disk_leaves_is_whole_lines(path, capsys, room_for):
    with open_at(path) as sink:
        room_for(20_000)
        fill(sink, 1000)
        room_for(resource.RLIM_INFINITY)
    assert [row["epoch"] for row in rows(path)] == list(range(len(rows(path))))
    assert len(rows(path)) > 50
    with open_at(path) as sink:
        sink.write(HINT)
    assert from_record(rows(path)[-1]) == HINT


@pytest.mark.parametrize("call", ["fsync", "truncate"])
def test_a_disk_that_fails_while_saving_is_told_once(path, capsys, monkeypatch, call):
    def fail(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with open_at(path) as sink:
        sink.write(HINT)
        monkeypatch.setattr(os, call, fail)
        sink.commit() if call == "fsync" else sink.rewind(BEGINNING)
        sink.commit()
        sink.rewind(BEGINNING)
        sink.write(HINT)
        monkeypatch.undo()
    assert capsys.readouterr().err.count("Input/output error") == 1


def test_a_file_that_cannot_be_opened_is_told_once(tmp_path, capsys):
    with open_at(tmp_path / "nowhere" / "events-0.jsonl") as sink:
        sink.write(HINT)
        assert sink.commit() == (0, 0)
        sink.rewind(BEGINNING)
    assert capsys.readouterr().err.count("\n") == 1


def test_a_slow_disk_is_waited_for_only_at_a_commit(path, monkeypatch):
    waits, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (waits.append(number), real(number)))
    with open_at(path) as sink:
        waits.clear()  # its name is made durable once
        fill(sink, 500)
        assert waits == []
        sink.commit()
        assert len(waits) == 1


def test_writing_an_event_takes_microseconds(path):
    with open_at(path) as sink:
        times = []
        for _ in range(20):
            started = time.process_time()
            fill(sink, 100)
            times.append(time.process_time() - started)
    assert min(times) / 100 < 1e-3


def test_nowhere_takes_everything_and_keeps_nothing():
    sink = NullSink()
    sink.write(HINT)
    sink.write_record("X", {"value": math.nan}, TelemetryLevel.MINIMAL)
    sink.rewind(Position(0, 100))
    assert sink.commit() == (0, 0)
    assert not any(sink.wants(level) for level in TelemetryLevel)
    assert not sink.telemetry.escalate_temporarily()
