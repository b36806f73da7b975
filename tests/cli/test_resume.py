"""`esper run` gone on with, and where its settings come from."""

import json
import shutil

import pytest

from cli.test_cli import call
from cli.test_run import assert_refused, assert_same_run, command
from esper.cli import main
from esper.storage import runfolder
from simic.tiny_runs import command as ppo_command


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run; not to be changed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    with pytest.raises(SystemExit) as leaving:
        main(command(out))
    assert not leaving.value.code
    return out


def test_an_option_that_contradicts_what_a_run_was_started_with_is_refused_by_name(
    capsys, tmp_path, whole
):
    run = shutil.copytree(whole, tmp_path / "run")
    for options, words in (
        (["--hosts", "5"], "started with hosts 2, not 5"),
        (["--preset", "digits"], 'started with task.name "blobs", not "digits"'),
        (["--set", "task.batch=8"], "started with task.batch null, not 8"),
    ):
        assert_refused(call(capsys, "run", *options, "--out", str(run), "--resume"), words)
    assert_same_run(run, whole)


def test_a_resumed_run_is_the_one_that_was_started(capsys, monkeypatch, tmp_path, whole):
    """Options that say the same again, and where the data is, do no harm."""
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "data"))
    run = shutil.copytree(whole, tmp_path / "run")
    assert call(capsys, *command(run, "--resume"), "--data-root", str(tmp_path / "other"))[0] == 0
    assert_same_run(run, whole)


def test_the_results_are_printed_as_json(capsys, tmp_path, whole):
    run = shutil.copytree(whole, tmp_path / "run")
    code, out, _ = call(capsys, "run", "--out", str(run), "--resume", "--json")
    assert (code, [row["seed"] for row in json.loads(out)]) == (0, [0, 1])


def all_files(folder):
    return {
        path.relative_to(folder): (path.stat().st_mtime_ns, path.is_file() and path.read_bytes())
        for path in (folder, *folder.rglob("*"))
    }


def test_a_finished_run_that_is_resumed_does_nothing_and_says_so(capsys, tmp_path, whole):
    run = shutil.copytree(whole, tmp_path / "run")
    before = all_files(run)
    code, out, err = call(capsys, "run", "--out", str(run), "--resume")
    assert (code, err) == (0, "")
    assert f"{run} is finished: nothing is trained or written. A new run: another --out." in out
    assert out.count("heuristic") == 3  # the title and both hosts of the table
    assert all_files(run) == before


@pytest.mark.parametrize(
    "name", ["results.json", "networks/host-0/grown.py", "networks/host-1/weights.safetensors"]
)
def test_a_run_of_which_something_is_missing_is_finished_again(capsys, tmp_path, whole, name):
    run = shutil.copytree(whole, tmp_path / "run")
    (run / name).unlink()
    code, out, _ = call(capsys, "run", "--out", str(run), "--resume")
    assert (code, "is finished" in out) == (0, False)
    assert_same_run(run, whole)


def test_settings_presets_and_files_reach_the_run(capsys, monkeypatch, tmp_path):
    taken = []
    monkeypatch.setattr("esper.cli.run.run_policy", lambda config, *rest: taken.append(config))
    (tmp_path / "mine.json").write_text('{"hosts": 3, "task": {"name": "blobs"}}')
    call(
        capsys,
        "run",
        "--preset",
        "digits",
        "--set",
        "task.batch=8",
        "--set",
        "telemetry.level=debug",
    )
    call(capsys, "run", "--config-json", str(tmp_path / "mine.json"), "--epochs", "5")
    assert (taken[0].task.epoch_examples, taken[0].task.batch, taken[0].telemetry.level) == (
        512,
        8,
        "debug",
    )
    assert (taken[1].hosts, taken[1].task.name, taken[1].task.epochs) == (3, "blobs", 5)


@pytest.mark.parametrize("said", ["grow", "compare", 3])
def test_the_run_of_another_command_or_of_an_older_version_is_not_gone_on_with(
    capsys, tmp_path, whole, said
):
    run = shutil.copytree(whole, tmp_path / "run")
    path = run / runfolder.CONFIG
    runfolder.write_json(path, {**runfolder.read_json(path), "command": said})
    assert_refused(
        call(capsys, "run", "--out", str(run), "--resume"),
        "is not a run of esper run",
        f"says {said}",
    )


def test_a_run_can_be_started_again_from_the_configuration_in_its_folder(
    capsys, monkeypatch, tmp_path, whole
):
    file = str(whole / "config.json")
    assert call(capsys, "run", "--config-json", file, "--out", str(tmp_path / "again"))[0] == 0
    assert_same_run(tmp_path / "again", whole)
    with_both = call(capsys, "run", "--config-json", file, "--preset", "digits")
    assert_refused(with_both, "--preset", "--config-json")


def test_what_a_trained_policy_came_to_is_printed_as_json(capsys, tmp_path):
    code, out, _ = call(capsys, *ppo_command(tmp_path / "run"), "--json")
    assert (code, json.loads(out)["rounds"]) == (0, 2)
