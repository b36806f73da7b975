"""`esper compare`:

every arm in one command, results to read and to compute with, stopped and resumed, mistakes.
"""

import csv
import json
import os
import re
import shutil
import signal
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from cli.test_cli import call
from esper.runtime.population import Population
from esper.runtime.tasks.registry import TASKS
from esper.simic.team import code_digest
from esper.storage import runfolder
from esper.tamiyo.policy_files import read as read_policy
from esper.tamiyo.policy_files import seal
from policy_files import ship, write_policy
from simic.tiny_runs import Forked, Ticks
from trials.test_running import trained

RULES = ["never", "sham", "random", "schedule", "heuristic"]
STATIC = ["start", "final", "final-equal-flops"]
STATIC_ARMS = ["start", "final of heuristic", "final-equal-flops of heuristic"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("ppo"))


@pytest.fixture(scope="module")
def whole(checkpoint, tmp_path_factory):
    """All arms on three seeds of `blobs`: folder, what was printed, results."""
    folder = tmp_path_factory.mktemp("whole")
    out = folder / "run"
    lists = ["--policies", *RULES, str(checkpoint), "--static", *STATIC, "--final-of", "heuristic"]
    arguments = [
        "compare",
        "--task",
        "blobs",
        "--seeds",
        "3",
        "--epochs",
        "6",
        *lists,
        "--out",
        str(out),
    ]
    code, said, err = Forked(folder / "child", arguments).wait()
    assert (code, err) == (0, "")
    return out, said, json.loads((out / "results.json").read_text(), parse_constant=pytest.fail)


def test_all_arms_of_one_command_are_in_the_results(whole, checkpoint):
    out, _, results = whole
    assert set(results["arms"]) == {*RULES, str(checkpoint), *STATIC_ARMS}
    assert all(arm["seeds"] == [0, 1, 2] for arm in results["arms"].values())
    assert len(list((out / runfolder.ARMS).iterdir())) == len(results["arms"])
    assert results["config"]["task"]["epochs"] == 6


def test_the_tables_show_every_arm_and_claim_nothing_from_three_seeds(whole, checkpoint):
    _, said, results = whole
    for arm in (*RULES, "start"):
        score = f"{100 * results['arms'][arm]['test_accuracy']['mean']:.2f}%"
        assert any(line.split()[:2] == [arm, score] for line in said.splitlines()), arm
    claims = [
        line
        for line in said.splitlines()
        if line.strip().startswith("heuristic") and "5 seeds" in line
    ]
    assert len(claims) == 7
    assert all(line.strip().endswith("5 seeds") for line in claims)
    assert said.splitlines()[-1].endswith("run: results.json, results.csv, figure.svg")


def test_the_csv_parses_back_to_the_rows(whole):
    out, _, results = whole
    with open(out / "results.csv", newline="") as file:
        parsed = list(csv.DictReader(file))
    assert len(parsed) == 3 * len(results["arms"])
    for row, read in zip(results["rows"], parsed, strict=True):
        assert read == {name: str(value) for name, value in row.items() if name != "type"}


def test_the_figure_is_well_formed_and_names_every_arm(whole):
    out, _, _ = whole
    texts = {element.text for element in ElementTree.parse(out / "figure.svg").iter()}
    assert {*RULES, *STATIC_ARMS[:2]} <= texts


# -- shorter episodes from here on -----------------------------------------------------------------


@pytest.fixture
def brief(monkeypatch):
    """Three training steps per epoch; what is forked has it too."""
    monkeypatch.setitem(TASKS, "blobs", replace(TASKS["blobs"], epoch_examples=96, held_out=64))


def command(out, *more):
    return ["compare", "--task", "blobs", "--seeds", "2", "--epochs", "4", "--out", str(out), *more]


def rows_of(out):
    rows = json.loads((out / "results.json").read_text())["rows"]
    return [{**row, "seconds": None} for row in rows]


def test_json_on_standard_output_is_what_is_on_disk(brief, tmp_path, capsys):
    code, out, err = call(capsys, *command(tmp_path / "run", "--policies", "never", "--json"))
    assert code == 0
    assert json.loads(out) == runfolder.read_json(tmp_path / "run" / runfolder.RESULTS)
    assert re.fullmatch("never: 2 hosts.* x 1\n", err)


def test_every_option_reaches_the_comparison(brief, tmp_path, capsys):
    options = ["--rates", "0.5", "1", "--pretrain", "2", "--oracle", "--seed", "5"]
    more = ["--policies", "schedule", "--static", "final", "final-whole", "--final-of", "schedule"]
    limits = ["--budget", "3", "--max-seeds", "1", "--json"]
    code, out, _ = call(capsys, *command(tmp_path / "run", *options, *more, *limits))
    assert code == 0
    results = json.loads(out)
    config = results["config"]
    assert (config["rates"], config["pretrain"], config["seed"]) == ([0.5, 1], 2, 5)
    assert (config["task"]["budget"], config["task"]["max_seeds"], config["oracle"]) == (
        3.0,
        1,
        True,
    )
    assert set(results["arms"]) == {
        "schedule",
        "final of schedule",
        "final-whole of schedule",
        "oracle",
    }
    assert results["arms"]["final-whole of schedule"]["epochs"] == 6
    assert {(row["rate"], row["seed"]) for row in results["rows"]} == {
        (r, s) for r in (0.5, 1) for s in (5, 6)
    }


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)],
    ids=str,
)
def test_stopped_or_killed_between_arms_and_resumed_it_ends_the_same(
    number, brief, tmp_path, capsys
):
    out, more = tmp_path / "run", ["--static", "final", "--policies", "never", "random", "sham"]

    def prepare():
        Ticks(2 * 9, lambda: os.kill(os.getpid(), number)).watch(Population, "finish_epoch")

    code, said, err = Forked(tmp_path / "child", command(out, *more), prepare).wait()
    if number == signal.SIGKILL:
        assert code == -number
    else:
        assert (code, err) == (130, "")
        assert f"esper compare --out {out} --resume" in said
    kept = sorted(path.name for path in (out / runfolder.ARMS).iterdir())
    assert kept == ["never-1.json", "random-1.json"]
    assert not (out / "results.json").exists()
    code, said, err = Forked(tmp_path / "child", ["compare", "--out", str(out), "--resume"]).wait()
    assert (code, err) == (0, "")
    assert "never: 2 hosts" not in said
    code, _, _ = call(capsys, *command(tmp_path / "whole", *more))
    assert code == 0
    assert rows_of(out) == rows_of(tmp_path / "whole")


def test_resuming_what_is_finished_writes_the_same_again(brief, tmp_path, capsys):
    assert call(capsys, *command(tmp_path / "run", "--policies", "never"))[0] == 0
    before = (tmp_path / "run" / "results.json").read_bytes()
    code, said, _ = call(capsys, *command(tmp_path / "run", "--policies", "never", "--resume"))
    assert code == 0
    assert "2 hosts" not in said
    assert (tmp_path / "run" / "results.json").read_bytes() == before


# -- mistakes --------------------------------------------------------------------------------------


def refused(capsys, *arguments):
    """The one line that a mistake is told in; a policy that was trained for other episodes is told
    of before it.
    """
    code, out, err = call(capsys, *arguments)
    assert code == 2
    assert all("trained for other episodes" in line for line in out.splitlines())
    assert err.startswith("esper: ")
    assert err.count("\n") == 1
    return err


MISTAKES = {
    "--seeds 0": "seeds is 0",
    "--policies nevr": "'nevr'.*'never'",
    "--policies heuristic:shared=0.5": "heuristic 'shared'.*'share'",
    "--policies heuristic:share=2": "share .*heuristic .*'2'.* 1",
    "--static finel": "'final-equal-flops'",
    "--policies never,sham": "sham follow the arm 'all'",
    "--policies never --static final": "final follow the arm 'all'",
    "--static final-whole": "it needs --pretrain",
    "--rates fast": 'rates.0 is "fast": input should be a valid number',
    "--rates 1 0": "1e-6",
    "--rates 5e-324": "1e-6",
    "--rates nan": "valid number",
    "--epochs 1": "task.epochs is 1",
    "--budget 1.01": "Raise the budget",
    "--task blob": "unknown task 'blob'. Did you mean 'blobs'?",
    "--devices mps": "device mps is not supported",
    "--devices cpu cpu": "a comparison runs on one",
    "--set pretran=3": "unknown key 'pretran'. Did you mean 'pretrain'?",
    "--preset digit": "Did you mean 'digits'?",
}


@pytest.mark.parametrize("options", MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_written(options, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert re.search(MISTAKES[options], refused(capsys, *command("run", *options.split())))
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_reads_other_features_is_refused_and_nothing_is_written(tmp_path, capsys):
    tensors, plain = read_policy(write_policy(tmp_path / "policy"))
    layout = vars(plain["layout"])
    plain["layout"] = {**layout, "features": ["host.mood", *layout["features"][1:]]}
    path = tmp_path / "other.safetensors"
    path.write_bytes(seal(tensors, plain))
    code, out, err = call(capsys, *command(tmp_path / "run", "--policies", "never", str(path)))
    assert (code, out) == (2, "")
    assert err.startswith(f"esper: {path} reads other features: host.mood")
    assert "Traceback" not in err
    assert not (tmp_path / "run" / "results.json").exists()


def test_the_policy_of_the_package_is_an_arm_where_one_ships(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("esper.tamiyo.policy_names.SHIPPED", tmp_path / "none.safetensors")
    arguments = command(tmp_path / "run", "--policies", "never", "pretrained")
    code, out, err = call(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "no trained policy ships with this version" in err
    ship(tmp_path, monkeypatch)
    code, _, err = call(capsys, *arguments)
    assert code == 0, err
    arms = json.loads((tmp_path / "run" / "results.json").read_text())["arms"]
    assert set(arms) == {"never", "pretrained"}


@pytest.fixture(scope="module")
def finished(checkpoint, tmp_path_factory):
    """A comparison of the host alone with a copy of a trained policy."""
    folder = tmp_path_factory.mktemp("finished")
    shutil.copy(checkpoint, folder / "policy.safetensors")
    arguments = command(folder / "run", "--policies", "never", str(folder / "policy.safetensors"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, "blobs", replace(TASKS["blobs"], epoch_examples=96, held_out=64))
        assert Forked(folder / "child", arguments).wait()[0] == 0
    return folder


def test_a_folder_that_is_not_empty_is_not_begun_anew(finished, capsys):
    assert "--resume" in refused(capsys, *command(finished / "run", "--policies", "never"))


def test_another_comparison_is_not_gone_on_with(finished, capsys):
    for more, key in (
        (["--policies", "never"], "policies"),
        (["--rates", "2"], "rates [1.0], not [2.0]"),
    ):
        said = refused(capsys, "compare", "--out", str(finished / "run"), *more, "--resume")
        assert f"was started with {key}" in said


def test_arms_of_another_version_are_not_gone_on_with(finished, tmp_path, capsys):
    run = shutil.copytree(finished / "run", tmp_path / "run")
    config = json.loads((run / runfolder.CONFIG).read_text())
    assert config["code"] == code_digest()
    runfolder.write_json(run / runfolder.CONFIG, {**config, "code": "0123456789ab"})
    said = refused(
        capsys,
        *command(run, "--policies", "never", str(finished / "policy.safetensors"), "--resume"),
    )
    assert "code of Esper" in said


def test_a_policy_that_has_been_trained_on_is_another_comparison(finished, capsys):
    """Its finished arms are those of the old one."""
    path = finished / "policy.safetensors"
    content = path.read_bytes()
    path.write_bytes(content + b"trained on")
    try:
        said = refused(
            capsys, *command(finished / "run", "--policies", "never", str(path), "--resume")
        )
    finally:
        path.write_bytes(content)
    assert re.search("settings.*config.json", said)


@pytest.mark.parametrize(
    ("content", "words"), [("{", "cannot be read"), ('{"command": "grow"}', "older format")]
)
def test_a_folder_of_something_else_is_named(content, words, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / runfolder.CONFIG).write_text(content)
    assert re.search(
        words, refused(capsys, *command(tmp_path / "run", "--policies", "never", "--resume"))
    )


def test_a_damaged_arm_is_one_line(finished, brief, tmp_path, capsys):
    run = shutil.copytree(finished / "run", tmp_path / "run")
    (run / runfolder.ARMS / "never-1.json").write_text("{")
    options = ["--policies", "never", str(finished / "policy.safetensors"), "--resume"]
    assert f"{run / runfolder.ARMS / 'never-1.json'} is damaged" in refused(
        capsys, *command(run, *options)
    )
