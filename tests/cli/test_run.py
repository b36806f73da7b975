"""`esper run` and `esper export`: killed and resumed to the same end, networks that leave."""

import json
import os
import random
import re
import resource
import shutil
import signal
from dataclasses import replace
from functools import partial

import pytest
import torch

from cases import with_slow
from cli.test_cli import call
from esper.cli import main
from esper.cli.run import describe_start
from esper.kasmina.hosts import build_cnn_host
from esper.runtime.config import TaskConfig
from esper.runtime.population import Population
from esper.runtime.tasks.data import load_blobs
from esper.runtime.tasks.registry import TASKS
from esper.storage import runfolder
from esper.trials.config import RunConfig
from kasmina.test_exporting import rebuilt_elsewhere
from policy_files import ship
from runtime.episodes import IMAGES
from simic.tiny_runs import (
    KILLED,
    Forked,
    Ticks,
    events_of,
    kill_self,
    manifest_of,
    run_until_it_ends,
)
from trials.grown_runs import assert_same_end, install

EPOCHS = 8


def command(out, *more):
    options = {"--task": "blobs", "--hosts": 2, "--epochs": EPOCHS, "--seed": 0, "--out": out}
    return ["run", *(str(part) for pair in options.items() for part in pair), *more]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nobody disturbed, the networks that were harvested in it, and how many moments
    it has.
    """
    folder = tmp_path_factory.mktemp("whole")
    harvested = []

    def kept(population, real=Population.final_scores):
        scores = real(population)
        harvested.extend(score.network for score in scores)
        return scores

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Population, "final_scores", kept)
        with pytest.raises(SystemExit) as leaving:
            main(command(folder / "run"))
    assert not leaving.value.code
    ticks = Ticks()

    def count():
        install(ticks)
        leave = os._exit
        os._exit = lambda code: ((folder / "moments").write_text(str(ticks.count)), leave(code))

    code, _, err = Forked(folder / "child", command(folder / "counted"), count).wait()
    assert (code, err) == (0, "")
    return folder / "run", harvested, int((folder / "moments").read_text())


def results_of(run):
    """What the results say, without the wall clock."""
    return [
        {**row, "seconds": None}
        for row in json.loads((run / runfolder.RESULTS).read_text())["results"]
    ]


def assert_same_run(run, other):
    assert results_of(run) == results_of(other)
    assert_same_end(run, other)


def test_the_undisturbed_run_has_every_kind_of_change(whole):
    assert {event["op"] for event in events_of(whole[0], "ActionTaken")} == {
        "GERMINATE",
        "FOSSILIZE",
    }
    assert "FOSSILIZED" in {event["after"] for event in events_of(whole[0], "StageChanged")}
    assert events_of(whole[0], "FossilJudged")
    assert whole[2] > 300


# -- killed, asked to stop -------------------------------------------------------------------------


def run_and_resume(tmp_path, kills):
    """The run folder of `esper run` that was killed and resumed, and how many deaths there were."""
    out = tmp_path / "run"
    first, again = command(out), command(out, "--resume")
    return out, run_until_it_ends(tmp_path / "child", first, again, kills, install)


@pytest.mark.parametrize("seed", with_slow(range(3), {1, 2}))
def test_killed_at_random_moments_and_resumed_it_ends_the_same(whole, tmp_path, seed):
    draw = random.Random(seed)
    out, deaths = run_and_resume(tmp_path, [draw.randint(1, whole[2] // 2) for _ in range(2)])
    assert deaths == 2
    assert_same_run(out, whole[0])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_killed_once_anywhere_and_resumed_it_ends_the_same(whole, tmp_path, seed):
    out, deaths = run_and_resume(tmp_path, [random.Random(seed).randint(1, whole[2])])
    assert deaths == 1
    assert_same_run(out, whole[0])


def test_killed_while_the_networks_are_written_it_is_not_finished_yet(whole, tmp_path, capsys):
    def install_at_the_end():
        from esper.trials import running

        real = running.export_network
        running.export_network = lambda *args: (real(*args), kill_self())

    out = tmp_path / "run"
    assert Forked(tmp_path / "child", command(out), install_at_the_end).wait()[0] == KILLED
    code, _, err = call(capsys, "export", str(out))
    assert (code, "its episodes are not over" in err) == (2, True)
    assert Forked(tmp_path / "child", ["run", "--out", str(out), "--resume"]).wait()[0] == 0
    assert_same_run(out, whole[0])


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_a_signal_ends_after_the_epoch_and_the_run_goes_on_as_if_nothing_was(
    whole, tmp_path, number
):
    out = tmp_path / "run"
    ask = partial(install, Ticks(whole[2] // 2, lambda: os.kill(os.getpid(), number)))
    code, said, err = Forked(tmp_path / "child", command(out), ask).wait()
    assert (code, err) == (130, "")
    epochs = manifest_of(out)["checkpoints"][-1]["epoch"] + 1
    assert 1 < epochs < EPOCHS
    last = said.splitlines()[-1]
    assert (
        last == f"stopped; {epochs} epochs are saved. Continue with: esper run --out {out} --resume"
    )
    assert {event["epoch"] for event in events_of(out)} == set(range(1, epochs + 1))
    code, _, err = Forked(tmp_path / "child", last.split("esper ")[1].split()).wait()
    assert (code, err) == (0, "")
    assert_same_run(out, whole[0])


def test_a_run_can_be_moved_before_it_is_resumed(whole, tmp_path):
    ask = partial(install, Ticks(whole[2] // 2, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert Forked(tmp_path / "child", command(tmp_path / "here"), ask).wait()[0] == 130
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert (
        Forked(tmp_path / "child", ["run", "--out", str(tmp_path / "there"), "--resume"]).wait()[0]
        == 0
    )
    assert not (tmp_path / "here").exists()
    assert_same_run(tmp_path / "there", whole[0])


@pytest.mark.parametrize("size", [900, 3000], ids=["tensors", "texts"])
def test_a_full_disk_is_one_line_and_the_run_can_go_on(whole, tmp_path, size):
    """Every file is limited, so the first host's weights or its manifest do not fit."""
    out = tmp_path / "run"
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    code, _, err = Forked(tmp_path / "child", command(out), limit).wait()
    assert code == 2
    assert err.startswith(f"esper: cannot save {out}/")
    assert "ree disk space" in err
    assert err.count("\n") == 1
    assert Forked(tmp_path / "child", command(out, "--resume")).wait()[0] == 0
    assert_same_run(out, whole[0])


# -- growing ---------------------------------------------------------------------------------------


def started(run):
    return runfolder.read_json(run / runfolder.CONFIG)


def test_a_run_prints_where_hosts_are_what_happens_and_a_table(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "160")
    code, out, err = call(capsys, *command(tmp_path / "run"))
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "heuristic on cpu: 2 hosts"
    for event in events_of(tmp_path / "run", "ActionTaken"):
        assert f"  host {event['host']}, epoch {event['epoch']}: {event['op']}" in out
    assert "heuristic on blobs" in out
    assert sum("│ heuristic " in line for line in out.splitlines()) == 2


def training_of(**task):
    return describe_start(RunConfig.of({"task": {"name": "blobs", **task}}))["training"]


@pytest.mark.parametrize(
    ("change", "is_felt"),
    [
        ({"batch": 8}, True),
        ({"epochs": 3}, True),
        ({"clock": "compute", "decay": 0.5}, True),
        ({"budget": 9.0}, False),
        ({"slots": ["r0c1"]}, False),
        ({"lengths": {"ramp": 2}}, False),
    ],
)
def test_a_run_notes_what_a_host_feels_that_never_grows(change, is_felt):
    """By that note the screens know which control a run may be held against."""
    assert (training_of(**change) != training_of()) == is_felt


def test_every_option_reaches_the_run(capsys, tmp_path):
    options = (
        "--epochs 2 --budget 9 --max-seeds 1 --seed 4 --slots r0c1 --amp bf16 "
        "--executor eager --deterministic"
    )
    options += " --compile off --graph-memory 2"
    run = tmp_path / "run"
    code, _, _ = call(
        capsys,
        "run",
        "--task",
        "blobs",
        "--policy",
        "random",
        "--out",
        str(run),
        "--devices",
        "cpu",
        *options.split(),
    )
    assert code == 0
    found = started(run)
    given = {
        "name": "blobs",
        "epochs": 2,
        "clock": "epochs",
        "budget": 9.0,
        "max_seeds": 1,
        "slots": ["r0c1"],
    }
    assert found.pop("task") == TaskConfig.of(given).model_dump(mode="json")
    assert found.pop("training")
    assert found == {
        "command": "run",
        "policy": "random",
        "hosts": 1,
        "seed": 4,
        "devices": ["cpu"],
        "executor": "eager",
        "amp": "bf16",
        "compile": "off",
        "graph_memory": 2.0,
        "out": str(run),
        "imports": {},
        "data_root": None,
        "threads": 1,
        "deterministic": True,
        "telemetry": {"level": "normal", "track": []},
    }


@pytest.mark.parametrize(
    "slots", [["r0c0", "r0c2"], ["r0c0,r0c2"], ["r0c2,", "r0c0"]], ids=" ".join
)
def test_slots_are_written_with_spaces_or_commas(capsys, monkeypatch, tmp_path, slots):
    host = partial(build_cnn_host, blocks=3, base_channels=2, in_channels=1, image_size=8)
    monkeypatch.setitem(
        TASKS, "three", replace(IMAGES, name="three", build_host=host, epochs=4, lr=0.02)
    )
    run = tmp_path / "run"
    arguments = [
        "run",
        "--task",
        "three",
        "--slots",
        *slots,
        "--policy",
        "schedule",
        "--out",
        str(run),
    ]
    assert call(capsys, *arguments)[0] == 0
    assert sorted(started(run)["task"]["slots"]) == ["r0c0", "r0c2"]
    assert {event["slot"] for event in events_of(run, "StageChanged")} == {"r0c0", "r0c2"}


def assert_refused(said, *words):
    """Exit code 2 and one line."""
    code, _, err = said
    assert code == 2
    assert err.startswith("esper: ")
    assert err.count("\n") == 1
    for word in words:
        assert re.search(word, err)


# -- exporting -------------------------------------------------------------------------------------

PLAIN_HOST = """
class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 8)), nn.Sequential(nn.Linear(8, 8))])
        self.sites = nn.ModuleList([nn.Identity(), nn.Identity()])
        self.head = nn.Linear(8, 2)

    def forward(self, features):
        for block, site in zip(self.blocks, self.sites):
            features = site(block(features))
        return self.head(features)

host = Chain()
"""


def test_the_best_network_is_rebuilt_to_the_bit_where_esper_cannot_be_imported(
    capsys, tmp_path, whole
):
    run, harvested, _ = whole
    code, out, err = call(capsys, "export", str(run), "--to", str(tmp_path / "deep" / "network"))
    assert (code, err) == (0, "")
    results = results_of(run)
    best = max(range(2), key=lambda host: results[host]["validation_accuracy"])
    inputs, targets = load_blobs().test.open_for_final_report().gather(torch.arange(384))
    with torch.no_grad():
        expected = harvested[best](inputs)
    found = rebuilt_elsewhere(tmp_path / "deep" / "network", PLAIN_HOST, inputs)
    assert torch.equal(found, expected)
    assert float((found.argmax(1) == targets).float().mean()) == results[best]["test_accuracy"]
    assert f"seed {best}, {results[best]['final_params']:,} parameters" in out


@pytest.fixture
def finished(whole, tmp_path):
    """A copy of the finished run."""
    return shutil.copytree(whole[0], tmp_path / "run")


@pytest.mark.parametrize("best", [0, 1])
def test_the_best_network_is_best_on_held_out_examples_whatever_the_test_says(
    capsys, finished, best
):
    results = json.loads((finished / runfolder.RESULTS).read_text())
    for host, row in enumerate(results["results"]):
        row |= {
            "validation_accuracy": 0.7 + 0.01 * (host == best),
            "test_accuracy": 0.9 - 0.3 * (host == best),
        }
    runfolder.write_json(finished / runfolder.RESULTS, results)
    code, out, _ = call(capsys, "export", str(finished))
    assert code == 0
    assert re.search(r"71\.00%.* 60\.00%", out)
    for name in ("grown.py", "weights.safetensors"):
        here, there = finished / "exported" / name, finished / "networks" / f"host-{best}" / name
        assert here.read_bytes() == there.read_bytes()


def test_exporting_needs_neither_the_policy_nor_the_saves(capsys, finished):
    """A run may outlive the checkpoint that decided in it."""
    config = started(finished)
    runfolder.write_json(finished / runfolder.CONFIG, {**config, "policy": "gone/best.safetensors"})
    shutil.rmtree(finished / runfolder.CHECKPOINTS)
    assert call(capsys, "export", str(finished))[0] == 0


def test_weights_behind_a_link_or_changed_are_not_exported(capsys, finished, tmp_path):
    for spoil in (
        lambda path: path.symlink_to(tmp_path / "secret"),
        lambda path: path.write_text("others"),
    ):
        for weights in finished.glob("networks/*/weights.safetensors"):
            weights.unlink()
            spoil(weights)
        assert_refused(call(capsys, "export", str(finished)), "export|networks")
    assert not (finished / "exported").exists()


def tree(folder):
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda run: (run / runfolder.RESULTS).unlink(),
            ("its episodes are not over", "Finish: esper run --out", "--resume"),
        ),
        (
            lambda run: (run / runfolder.RESULTS).write_text('{"results": ['),
            ("results.json is damaged",),
        ),
        (
            lambda run: runfolder.write_json(run / runfolder.RESULTS, {"results": []}),
            ("results.json is damaged",),
        ),
        (
            lambda run: (run / runfolder.RESULTS).write_text('{"results": []}'),
            ("results.json is damaged",),
        ),
        (lambda run: (run / runfolder.CONFIG).unlink(), ("is not a run folder",)),
        (
            lambda run: runfolder.write_json(run / runfolder.CONFIG, {"rounds": 40}),
            ("is not a run of esper run",),
        ),
        (lambda run: (run / runfolder.CONFIG).write_text("{"), ("cannot be read",)),
        (lambda run: shutil.rmtree(run / "networks"), ("cannot export to",)),
        (lambda run: (run / "exported").mkdir(), ("exported already exists",)),
        (shutil.rmtree, ("is not a run folder",)),
    ],
    ids=[
        "unfinished",
        "torn",
        "empty",
        "changed",
        "foreign",
        "ppo",
        "not json",
        "no networks",
        "taken",
        "not there",
    ],
)
def test_what_cannot_be_exported_is_one_line_and_nothing_is_written(capsys, finished, spoil, words):
    spoil(finished)
    before = tree(finished.parent)
    assert_refused(call(capsys, "export", str(finished)), *words)
    assert tree(finished.parent) == before


def test_the_policy_of_the_package_plays_where_one_ships(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("esper.tamiyo.policy_names.SHIPPED", tmp_path / "none.safetensors")
    words = ["--task", "blobs", "--epochs", "3", "--set", "task.epoch_examples=64"]
    arguments = ["run", "--policy", "pretrained", *words, "--out", str(tmp_path / "run")]
    code, out, err = call(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "no trained policy ships with this version" in err
    ship(tmp_path, monkeypatch)
    assert call(capsys, *arguments)[0] == 0
    kept = tmp_path / "run" / runfolder.POLICY
    assert kept.read_bytes() == (tmp_path / "pretrained.safetensors").read_bytes()
