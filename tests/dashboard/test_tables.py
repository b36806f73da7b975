"""A run folder as tables: rows, CSV, and pandas where it is installed."""

import csv
import io
import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import esper
from esper.leyline.errors import MissingExtraError, SaveError, UnknownNameError
from esper.storage import runfolder
from esper.telemetry.events import ArmFinished, HostEpoch, RoundFinished, to_record

EPOCHS = [
    HostEpoch(host=0, epoch=1, held_out_loss=0.5, params=10),
    HostEpoch(host=0, epoch=2, held_out_loss=0.25, params=12, reward_parts={"rent": -0.125}),
]
DONE = ArmFinished(
    arm="never",
    seed=3,
    epochs=2,
    start_params=10,
    final_params=12,
    validation_accuracy=0.75,
    test_accuracy=0.5,
    test_loss=0.25,
    flops=1000,
    seconds=1.5,
    germinated=1,
    fossilized=1,
    culled=0,
)


def write_run(folder, events, results=None, command="run"):
    folder.mkdir(exist_ok=True)
    runfolder.write_json(folder / "config.json", {"command": command, "task": {"name": "blobs"}})
    lines = [json.dumps(to_record(event)) + "\n" for event in events]
    (folder / "events-0.jsonl").write_text("".join(lines))
    if results is not None:
        runfolder.write_json(folder / "results.json", results)
    return folder


def test_epochs_are_rows_with_the_same_columns_and_parts_have_their_own(tmp_path):
    run = esper.read_run(write_run(tmp_path, EPOCHS))
    first, second = run.rows("epochs")
    assert list(first) == list(second)
    assert (first["held_out_loss"], first["reward_parts.rent"]) == (0.5, None)
    assert (second["epoch"], second["reward_parts.rent"]) == (2, -0.125)
    assert run.names == ["epochs", "HostEpoch"]
    assert run.config["task"] == {"name": "blobs"}


def test_results_are_those_of_the_file_for_a_run_and_for_a_comparison(tmp_path):
    record = to_record(DONE)
    row = {name: value for name, value in record.items() if name != "type"}
    ran = write_run(tmp_path / "run", [], {"results": [row], "networks": []})
    compared = write_run(tmp_path / "compared", [], {"rows": [record], "arms": {}}, "compare")
    assert esper.read_run(ran).rows() == esper.read_run(compared).rows() == [row]


def test_a_run_that_goes_on_has_the_results_so_far_and_a_half_written_line_is_left_out(tmp_path):
    folder = write_run(tmp_path, [*EPOCHS, DONE])
    with (folder / "events-0.jsonl").open("a") as file:
        file.write('{"type": "HostEpoch", "host": 0, "ep')
    run = esper.read_run(folder)
    assert [row["arm"] for row in run.rows()] == ["never"]
    assert len(run.rows("epochs")) == 2


def test_csv_has_a_line_of_names_and_a_line_per_row(tmp_path):
    run = esper.read_run(write_run(tmp_path, EPOCHS))
    lines = list(csv.DictReader(io.StringIO(run.csv("epochs"))))
    assert [(line["epoch"], line["held_out_loss"]) for line in lines] == [
        ("1", "0.5"),
        ("2", "0.25"),
    ]
    assert run.csv("rounds") == ""


def test_rounds_have_a_column_per_op(tmp_path):
    round_of = {
        "mean_return": 0.5,
        "accuracy": 0.8,
        "twin_accuracy": 0.7,
        "params_share": 1.2,
        "seconds": 2.0,
    }
    counts = {"germinated": 1, "fossilized": 0, "culled": 0, "refused": 0, "decisions": 12}
    event = RoundFinished(
        round=0, ops={"WAIT": 11, "GERMINATE": 1}, reward_parts={}, update={}, **round_of, **counts
    )
    (row,) = esper.read_run(write_run(tmp_path, [event], command="ppo")).rows("rounds")
    assert (row["ops.WAIT"], row["mean_return"]) == (11, 0.5)


def test_a_table_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    run = esper.read_run(write_run(tmp_path, EPOCHS))
    assert run.rows("rounds") == []
    with pytest.raises(UnknownNameError, match="epochs"):
        run.rows("epoch")


def test_a_folder_without_a_run_and_a_changed_run_are_refused(tmp_path):
    with pytest.raises(SaveError, match="not a run folder"):
        esper.read_run(tmp_path)
    folder = write_run(tmp_path / "run", [], {"results": "none"})
    with pytest.raises(SaveError, match="holds no rows"):
        esper.read_run(folder)


def test_a_frame_has_the_columns_of_the_rows(tmp_path):
    pandas = pytest.importorskip("pandas")
    run = esper.read_run(write_run(tmp_path, EPOCHS))
    frame = run.frame("epochs")
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["held_out_loss"]) == [0.5, 0.25]
    assert list(frame.columns) == list(run.rows("epochs")[0])


def test_without_pandas_a_frame_says_what_to_install_and_rows_work(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    run = esper.read_run(write_run(tmp_path, EPOCHS))
    with pytest.raises(MissingExtraError, match=r"pip install 'esper-lite\[pandas\]'"):
        run.frame("epochs")
    assert len(run.rows("epochs")) == 2


def test_reading_a_run_loads_no_torch(tmp_path):
    folder = write_run(tmp_path, EPOCHS)
    code = f"import sys, esper; print(esper.read_run({str(folder)!r}), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == f"run {folder}: epochs 2, HostEpoch 2 False\n", done.stderr


def test_a_loop_of_ones_own_that_is_recorded_can_be_read(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    garden = esper.grow(model, slots=["0"], example=torch.zeros(3, 4))
    garden.attach(torch.optim.SGD(garden.parameters(), lr=0.1))
    garden.record(tmp_path / "mine")
    garden.step(lambda: torch.tensor([0.5, 1.5]))
    assert esper.read_run(tmp_path / "mine").rows("epochs")[0]["held_out_loss"] == 1.0
    garden.record(None)
