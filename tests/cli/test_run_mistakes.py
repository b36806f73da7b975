"""Mistakes in a line of `esper run`: one line, exit code 2, and nothing is left behind."""

import pytest

from cli.test_cli import call
from cli.test_run import assert_refused, command
from esper.storage import runfolder


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--task blob", "unknown task 'blob'. Did you mean 'blobs'?"),
        ("--policy heuristik", "unknown policy 'heuristik'. Did you mean 'heuristic'?"),
        ("--policy nowhere.safetensors", "Or name a checkpoint file"),
        ("--devices gpu", "'gpu' is not a device"),
        ("--devices cuda:99", "'cuda:99' is not there"),
        ("--devices mps", "mps is not supported"),
        ("--devices cpu cpu cpu", "hosts is 2, but devices are cpu, cpu, cpu"),
        ('--set devices=["cpu,cpu,cpu"]', "1 would stay idle"),
        ("--amp fp8", 'amp is "fp8"'),
        ("--amp fp16", "amp fp16 .*CUDA"),
        ("--executor fast", 'executor is "fast"'),
        ("--executor graphed", "executor graphed needs CUDA devices"),
        ("--hosts -1", "hosts is -1"),
        ("--hosts 0", "hosts is 0"),
        ("--epochs 0", "task.epochs is 0"),
        ("--seed -3", "seed is -3"),
        ("--budget 0.5", "task.budget is 0.5"),
        ("--budget nan", "task.budget"),
        ("--max-seeds 0", "task.max_seeds is 0"),
        ("--slots r0c9", "unknown slot 'r0c9'. Did you mean 'r0c1'?"),
        (
            "--slots early mid late",
            "unknown slot or module 'early'. Known: blocks.0, blocks.0.0, blocks.1, "
            "blocks.1.0, head, r0c0, r0c1",
        ),
        ("--slots r0c0 late", "unknown slot 'late'. Known: r0c0, r0c1."),
        ("--task cifar10", "no data folder was named"),
    ],
)
def test_a_wrong_setting_is_one_line_and_leaves_nothing_behind(
    capsys, monkeypatch, tmp_path, options, words
):
    monkeypatch.delenv("ESPER_DATA", raising=False)
    said = call(capsys, *command(tmp_path / "run"), *options.split())
    assert_refused(said, words)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_empty_is_refused(capsys, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert_refused(call(capsys, *command(tmp_path)), "--resume")
    assert {path.name for path in tmp_path.iterdir()} == {"thesis.txt"}


def test_a_file_in_the_folders_place_is_refused(capsys, tmp_path):
    (tmp_path / "run").write_text("")
    assert_refused(call(capsys, *command(tmp_path / "run")), f"{tmp_path / 'run'}: File exists")


@pytest.mark.parametrize("more", [[], ["--resume"]])
def test_a_second_writer_is_refused(capsys, tmp_path, more):
    with runfolder.only_writer(tmp_path / "run"):
        assert_refused(
            call(capsys, *command(tmp_path / "run", *more)), f"process .*{tmp_path / 'run'}"
        )


def test_the_run_of_another_command_is_not_resumed(capsys, tmp_path):
    runfolder.write_json(tmp_path / runfolder.CONFIG, {"rounds": 3})
    assert_refused(call(capsys, *command(tmp_path, "--resume")), "is not a run of esper run")
