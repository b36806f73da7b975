"""A recorded loop of one's own is a run folder like any other, while it trains, resumed, crashed,
or on a full disk.
"""

import errno
import gc
import json
import sys

import pytest
import torch

import esper
from dashboard.test_report import report_of
from esper.dashboard.reader import RunReader, find_runs, summarise
from esper.leyline.errors import EsperError, MissingExtraError, SaveError
from esper.telemetry import curve_export
from esper.telemetry.events import GrowthHint, HostEpoch, SlotEvent, to_record
from user_models import CNN, PLANT_FIRST, grow_cnn, losses_of, random_images, script, train_epoch

IMAGES, HELD_OUT = random_images(32, seed=1), random_images(24, seed=2)
PLAN = {0: PLANT_FIRST, 2: (1, 1, 2, 0)}


def grown(**options):
    return grow_cnn(PLAN, max_seeds=4, host=seeded_cnn(), **options)


def seeded_cnn():
    torch.manual_seed(7)
    return CNN()


def train(garden, epochs, first=0):
    for epoch in range(first, first + epochs):
        train_epoch(garden.model, garden.model.link.optimizer, epoch, IMAGES)
        garden.step(lambda: losses_of(garden.model, HELD_OUT))
    return garden


def load(folder):
    garden = esper.load(folder, seeded_cnn(), policy=script(PLAN))
    garden.attach(torch.optim.SGD(garden.parameters(), lr=0.05, momentum=0.9))
    return garden


def lines_of(folder):
    return [json.loads(line) for line in (folder / "events-0.jsonl").read_text().splitlines()]


def records_of(garden):
    return json.loads(json.dumps([to_record(event) for event in garden.history]))


def read(folder):
    reader = RunReader(folder)
    reader.refresh()
    assert reader.view.unknown == 0
    return reader


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "runs" / "mine"


# -- while it trains -------------------------------------------------------------------------------


def test_the_folder_holds_what_has_happened_while_it_happens(folder):
    garden = train(grown(), 1)
    garden.record(folder)
    assert lines_of(folder) == records_of(garden)
    train(garden, 4, first=1)
    assert lines_of(folder) == records_of(
        garden
    )  # nobody has closed anything: a killed process leaves this
    assert find_runs(folder.parent) == [folder]
    summary = summarise(read(folder))
    assert (summary.status, summary.task, summary.kind) == ("running", "CNN", "run")
    assert summary.policy == garden.policy_name
    assert (summary.done, summary.total, summary.params) == (5, 0, garden.model.total_params)


def test_events_spans_and_hints_name_the_module(folder):
    garden = grown()
    garden.record(folder)
    train(garden, 5)
    assert {(e.slot, e.module) for e in garden.history if isinstance(e, SlotEvent)} == {
        ("r0c0", "layer1"),
        ("r0c1", "layer2"),
    }
    spans = read(folder).view.episodes[0].spans
    assert {(span.slot, span.module) for span in spans} == {("r0c0", "layer1"), ("r0c1", "layer2")}
    with pytest.warns(UserWarning, match="layer2"):
        train(grow_cnn({0: (1, 1, 1, 0)}), 1).harvest()


def test_a_line_that_was_cut_off_is_not_read(folder):
    garden = grown()
    garden.record(folder)
    train(garden, 2)
    garden.record(None)
    events = folder / "events-0.jsonl"
    events.write_bytes(events.read_bytes()[:-9])
    assert read(folder).view.events == len(garden.history) - 1


def test_a_run_is_finished_when_it_is_harvested_or_all_epochs_are_over(folder, tmp_path):
    garden = train(grown(), 5)
    garden.record(folder)
    assert read(folder).status() == "running"
    garden.record(None)
    assert read(folder).status() == "stopped"
    garden.record(folder)
    garden.harvest()
    garden.harvest()
    garden.record(None)
    assert read(folder).status() == "finished"
    assert "esper.grow" in report_of(tmp_path, folder)[2]["runs"][0]["advice"]


def test_a_harvested_run_is_finished_while_its_process_lives_until_it_trains_on(folder):
    garden = train(grown(), 5)
    garden.record(folder)
    garden.harvest()
    assert read(folder).status() == "finished"
    train(garden, 1, first=5)
    assert read(folder).status() == "running"
    garden.record(None)
    assert read(folder).status() == "stopped"


def test_a_loop_without_accuracy_is_listed_with_its_loss_or_its_score(folder, tmp_path):
    garden = grown()
    garden.record(folder)
    train(garden, 1)
    summary = summarise(read(folder))
    (measured,) = (event for event in garden.history if isinstance(event, HostEpoch))
    assert (summary.best_accuracy, summary.best_loss) == (None, measured.held_out_loss)
    assert summary.best == f"loss {measured.held_out_loss:.4g}"
    scored = grown()
    scored.record(tmp_path / "scored")
    scored.step(lambda: losses_of(scored.model, HELD_OUT) < 1.2)
    assert summarise(read(tmp_path / "scored")).best.startswith("score ")


def test_a_page_calls_a_slot_by_its_module(folder):
    garden = grown()
    garden.record(folder)
    train(garden, 5)
    assert read(folder).view.modules == {"r0c0": "layer1", "r0c1": "layer2"}


def test_scores_are_shown_as_scores(folder):
    garden = grown()
    garden.record(folder)
    garden.step(lambda: losses_of(garden.model, HELD_OUT) < 1.2)
    (measured,) = (event for event in garden.history if isinstance(event, HostEpoch))
    assert read(folder).view.episodes[0].epochs.last("score") == measured.held_out_score


# -- resumed ---------------------------------------------------------------------------------------


def without_seconds(records):
    return [
        {k: v for k, v in record.items() if k not in ("seconds", "flops")} for record in records
    ]


def test_a_saved_run_goes_on_in_its_folder(folder):
    first = grown()
    first.record(folder)
    train(first, 2)
    first.save(folder)
    train(first, 2, first=2)  # lost
    first.record(None)
    again = load(folder)
    again.record(folder)
    assert lines_of(folder) == records_of(again)
    assert again.epoch == 2
    train(again, 4, first=2)
    assert without_seconds(lines_of(folder)) == without_seconds(records_of(train(grown(), 6)))


@pytest.mark.parametrize("kind", ["fresh", "saved before", "of another run", "no run"])
def test_a_folder_of_anything_else_is_refused_and_left_alone(kind, folder, tmp_path):
    recorded, other = grown(), grown()
    if kind == "no run":
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"model_type": "llama"}')
    else:
        other.save(tmp_path / "before")
        recorded.record(folder)
        train(recorded, 1)
        recorded.record(None)
    if kind == "saved before":
        other = load(tmp_path / "before")
    if kind == "of another run":
        other.record(tmp_path / "other")
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}
    with pytest.raises(SaveError, match="mine"):
        other.record(folder)
    assert {
        path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"
    } == before
    train(other, 1)
    if kind == "of another run":
        assert lines_of(tmp_path / "other") == records_of(other)  # which goes on


def test_a_record_that_a_tracker_refuses_leaves_the_one_before_going_on(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    garden = grown()
    garden.record(folder)
    with pytest.raises(MissingExtraError, match="wandb"):
        garden.record(folder, track=["wandb"])
    train(garden, 1)
    assert lines_of(folder) == records_of(garden)


def test_a_second_writer_is_refused(folder):
    garden = grown()
    garden.record(folder)
    with pytest.raises(SaveError, match="--out"):
        grown().record(folder)
    train(garden, 1)
    assert lines_of(folder) == records_of(garden)
    del garden
    gc.collect()  # whoever forgets a garden gives its folder back
    assert read(folder).status() == "stopped"


# -- a disk that fails -----------------------------------------------------------------------------


class Full:
    """A file on a disk that is full."""

    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self):
        pass


def test_a_full_disk_is_told_once_and_training_is_unharmed(folder, capsys):
    garden = grown()
    garden.record(folder)
    train(garden, 1)
    told = lines_of(folder)
    garden._recorder.sink._file = Full()
    train(garden, 3, first=1)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(folder) in said
    assert lines_of(folder) == told
    alone = train(grown(), 4)
    assert all(
        torch.equal(a, b) for a, b in zip(garden.parameters(), alone.parameters(), strict=True)
    )
    garden.record(folder)
    assert lines_of(folder) == records_of(garden)  # once there is room, nothing is missing


def test_a_start_that_fails_leaves_nothing_and_training_goes_on(folder, monkeypatch):
    def fail(*_):
        raise SaveError("cannot save: no space")

    garden = grown()
    monkeypatch.setattr("esper.garden.recorder.write_durably", fail)
    with pytest.raises(SaveError, match="no space"):
        garden.record(folder)
    assert not folder.exists()
    assert garden.run is None
    train(garden, 1)


# -- trackers --------------------------------------------------------------------------------------


@pytest.fixture
def tracked(monkeypatch):
    """Steps that a tracker was told."""
    steps = []
    log = curve_export.Tracker(lambda scalars: steps.append(scalars.step), lambda: None)
    monkeypatch.setitem(curve_export.TRACKERS, "wandb", lambda *_: log)
    monkeypatch.setattr("esper.garden.recorder.require_trackers", lambda names: None)
    return steps


def test_trackers_get_a_new_runs_past_and_of_a_resumed_one_what_is_new(folder, tracked):
    garden = train(grown(), 2)
    garden.record(folder, track=["wandb"])
    train(garden, 1, first=2)
    assert tracked == [1, 2, 3]
    garden.save(folder)
    garden.record(None)
    again = load(folder)
    again.record(folder, track=["wandb"])
    train(again, 1, first=3)
    assert tracked == [1, 2, 3, 4]


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_written(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match="wandb"):
        grown().record(folder, track=["wandb"])
    with pytest.raises(EsperError, match=r"'mlflow'.*wandb"):
        grown().record(folder, track=["mlflow"])
    assert not folder.exists()


def test_hints_are_recorded_too(folder):
    garden = grown()
    garden.record(folder)
    train(garden, 1)
    garden.step(lambda: losses_of(garden.model, HELD_OUT))
    assert any(isinstance(event, GrowthHint) for event in garden.history)
    assert lines_of(folder) == records_of(garden)
