"""Events of a long run are in numbered segments:

resume finds its place in them, and screens show all of them.
"""

import json

import pytest

from esper.dashboard.reader import RunReader
from esper.dashboard.report import write_report
from esper.leyline.errors import SaveError
from esper.storage import runfolder
from esper.telemetry import sink
from faults.damage import forge, truncate
from simic.tiny_runs import events_of, tiny, train
from trials.grown_runs import assert_same_end, configured, grow, grow_epoch_by_epoch, stopped


def opened(folder, command):
    """A reader of the folder, which is told what was started there."""
    (folder / runfolder.CONFIG).write_text(
        json.dumps({"command": command, "task": {"name": "blobs", "epochs": 8}})
    )
    found = RunReader(folder)
    found.refresh()
    return found


def test_events_of_a_long_run_are_in_segments_and_a_resume_finds_its_place_in_them(
    tmp_path, monkeypatch
):
    straight, config = tmp_path / "straight", configured(tmp_path / "run")
    grow(configured(straight))
    monkeypatch.setattr(sink, "SEGMENT", 2000)
    grow_epoch_by_epoch(config)
    assert_same_end(config.out, straight)
    segments = [path.read_bytes() for path in runfolder.event_files(config.out).values()]
    assert len(segments) > 2
    whole = (straight / runfolder.EVENTS).read_bytes().splitlines()
    assert len(b"".join(segments).splitlines()) == len(whole)
    seen = [opened(folder, "run").view for folder in (config.out, straight)]
    assert [view.events for view in seen] == [len(whole)] * 2
    assert seen[0].episodes[1].epochs.column("accuracy") == seen[1].episodes[1].epochs.column(
        "accuracy"
    )
    write_report([config.out], tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size


def test_events_in_segments_are_found_again_and_every_round_can_be_looked_at(
    tmp_path, monkeypatch, capsys
):
    whole = tiny(tmp_path / "whole", rounds=4)
    train(whole)
    monkeypatch.setattr(sink, "SEGMENT", 3000)
    config = tiny(tmp_path / "run", rounds=4)
    train(config)
    files = runfolder.event_files(config.out)
    assert len(files) > 2
    complete = {path: path.stat().st_mtime_ns for path in list(files.values())[:2]}
    with open(files[max(files)], "a") as file:
        file.write('{"type": "HostEp')
    (config.out / runfolder.events_of(0, 9)).write_text('{"type": "of a round that was cut off"}\n')
    truncate(config.out / runfolder.CHECKPOINTS / "round-000004.safetensors")
    train(config, resume=True)
    rows = [
        [row for row in events_of(folder) if row["type"] != "CheckpointSaved"]
        for folder in (config.out, whole.out)
    ]
    assert rows[0] == rows[1]
    assert {path: path.stat().st_mtime_ns for path in complete} == complete
    found, expected = (opened(folder, "ppo") for folder in (config.out, whole.out))
    assert found.view.events == expected.view.events == len(events_of(whole.out))
    for number in range(4):
        assert found.episode(number, 1).round == number
        assert str(vars(found.episode(number, 1).epochs)) == str(
            vars(expected.episode(number, 1).epochs)
        )


@pytest.mark.parametrize("end", [7, None, [1], [0, -1], [-1, 0], ["x", 0], [0, 0, 0], {"0": 1}])
def test_a_forged_place_in_the_events_is_one_error(tmp_path, end):
    config = configured(tmp_path / "run", hosts=1, task__epochs=3)
    stopped(config, 1)
    manifest = config.out / runfolder.MANIFEST
    forge(manifest, lambda body: body["generations"][-1]["facts"].update(events=end))
    with pytest.raises(SaveError, match=str(manifest)):
        grow(config, resume=True)
