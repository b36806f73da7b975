"""Hosts that differ on the command line: runs, comparisons, lists, and the screens of both."""

import json
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from cli.test_cli import call
from dashboard.test_payload import read
from esper.cli.compare import run_compare
from esper.dashboard.comparisons import ComparisonReader, comparison_data
from esper.dashboard.drawing import Moment, draw_chain
from esper.dashboard.payload import Sent, news
from esper.dashboard.reader import summarise
from esper.dashboard.report import write_report
from esper.dashboard.tables import read_run
from esper.runtime.tasks.families import Span, at_rate, variation_of
from esper.runtime.tasks.registry import TASKS, get_task, register_task
from esper.storage import runfolder
from esper.trials.comparison import Comparison
from esper.trials.config import CompareConfig, RunConfig
from runtime.test_differing_hosts import DEEP
from simic.tiny_runs import events_of, tiny, train
from trials.grown_runs import assert_same_end, changed, grow, grow_epoch_by_epoch

FAMILY = get_task("digits_varied")


@pytest.fixture(scope="module", autouse=True)
def deep():
    """A family of other depths, rates and budgets too, under a name."""
    task = register_task(replace(DEEP, name="deep_digits"))
    yield task
    del TASKS[task.name]


SETTINGS = {"task": {"name": "deep_digits", "epochs": 4}, "hosts": 3, "threads": 1}


def configured(out, **changes):
    return RunConfig.of(changed(SETTINGS, out, changes))


# -- runs ------------------------------------------------------------------------------------------


def test_a_run_is_continued_to_the_same_end(tmp_path):
    whole = configured(tmp_path / "whole")
    results = grow(whole)
    pieces = configured(tmp_path / "pieces")
    again = grow_epoch_by_epoch(pieces)
    assert_same_end(whole.out, pieces.out)
    assert [result.test_accuracy for result in again] == [
        result.test_accuracy for result in results
    ]
    began = events_of(whole.out, "HostBegan")
    assert [event["variation"] for event in began] == [
        variation_of(DEEP, seed).number for seed in range(3)
    ]


def test_a_run_of_many_hosts_has_the_results_of_each_alone(tmp_path):
    together = grow(configured(tmp_path / "all"))
    for number, result in enumerate(together):
        (alone,) = grow(configured(tmp_path / str(number), hosts=1, seed=number))
        assert replace(alone, seconds=0.0) == replace(result, seconds=0.0)


def test_a_run_says_what_its_hosts_have_drawn(tmp_path, capsys):
    out = tmp_path / "run"
    words = ["--task", "digits_varied", "--epochs", "2", "--hosts", "2", "--out", str(out)]
    code, text, progress = call(capsys, "run", *words)
    assert code == 0, progress
    shown = " ".join((text + progress).split())
    assert "digits_varied: 4,096 variations: examples 60 to 1,000" in shown
    for host in range(2):
        variation = variation_of(FAMILY, host)
        assert f"host {host} is variation {variation.number}: {variation}" in shown
        row = read_run(out).rows("HostBegan")[host]
        assert (row["seed"], row["variation"]) == (host, variation.number)
        assert row["drawn.examples"] == variation.examples
    header, first, *_ = (out / runfolder.RESULTS_TABLE).read_text().splitlines()
    values = dict(zip(header.split(","), first.split(","), strict=True))
    assert values["drawn.width"] == str(variation_of(FAMILY, 0).width)
    code, text, _ = call(capsys, "run", "--out", str(out), "--resume", "--json")
    assert json.loads(text)[1]["drawn"] == variation_of(FAMILY, 1).drawn


def test_what_hosts_draw_is_in_the_digest(tmp_path, deep):
    digest = configured(tmp_path).digest()
    assert configured(tmp_path).digest() == digest
    wider = replace(deep, varies=replace(deep.varies, lr=Span(0.02, 0.3, "log")))
    register_task(wider, replace=True)
    try:
        assert configured(tmp_path).digest() != digest
        assert configured(tmp_path).digest("task") != digest
    finally:
        register_task(deep, replace=True)
    assert configured(tmp_path).digest() == digest


def test_a_budget_that_is_named_stays_when_a_run_is_continued(tmp_path):
    drawn = configured(tmp_path)
    assert drawn.settled().task.budget is None
    named = configured(tmp_path, task__budget=5.0)
    assert named.settled().task.budget == 5.0
    assert named.settled().task.build().varies.budget is None


def test_a_batch_beyond_the_smallest_host_is_one_line(tmp_path, capsys):
    words = ["--task", "digits_varied", "--set", "task.batch=100", "--out", str(tmp_path / "run")]
    code, out, err = call(capsys, "run", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "60 examples" in err


def test_tasks_whose_hosts_differ_say_so(capsys):
    code, out, _ = call(capsys, "list")
    assert code == 0
    assert "digits_varied: hosts differ, 4,096 variations" in out
    rows = json.loads(call(capsys, "list", "--json")[1])["tasks"]
    varies = {row["name"]: row["varies"] for row in rows}
    assert varies["digits"] is None
    assert "width 2, 3, 4, 6, 8" in varies["digits_varied"]


# -- comparisons -----------------------------------------------------------------------------------


def test_an_oracle_plants_where_every_host_has_a_slot(tmp_path):
    assert [variation_of(DEEP, seed).depth for seed in (0, 2, 3)] == [3, 3, 2]
    settings = {
        "task": {"name": "deep_digits", "epochs": 2, "blueprints": ["norm"]},
        "policies": ["never"],
        "oracle": True,
        "seed": 2,
        "seeds": 2,
        "threads": 1,
        "out": str(tmp_path / "run"),
    }
    config = CompareConfig.of(settings)
    comparison = Comparison(config, say=lambda line: None, should_stop=lambda: False)
    names = [f"oracle {slot} norm @{start}" for slot in ("r0c0", "r0c1") for start in (0, 1)]
    assert [*comparison.placements] == names
    assert {*run_compare(config, False, Console(quiet=True))["arms"]} == {"never", "oracle"}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison at two rates on trained hosts, and its results."""
    out = tmp_path_factory.mktemp("compared") / "run"
    settings = {
        "task": {"name": "deep_digits", "epochs": 3},
        "policies": ["never", "random"],
        "seeds": 3,
        "rates": [0.5, 1.0],
        "pretrain": 1,
        "threads": 1,
        "out": str(out),
    }
    config = CompareConfig.of(settings)
    return out, run_compare(config, False, Console(quiet=True))


def test_a_comparison_has_what_its_hosts_have_drawn(compared):
    out, results = compared
    for row in results["rows"]:
        variation = variation_of(at_rate(DEEP, row["rate"]), row["seed"])
        assert (row["variation"], row["drawn"]) == (variation.number, variation.drawn)
    table = (out / runfolder.RESULTS_TABLE).read_text().splitlines()
    assert "drawn.examples" in table[0].split(",")
    reader = ComparisonReader(out)
    reader.refresh()
    hosts = comparison_data(reader)["hosts"]
    assert [host["seed"] for host in hosts] == [0, 1, 2]
    assert "examples 69, noise 0.05506, width 2, depth 3" in hosts[1]["drawn"]


def test_rates_of_a_comparison_are_multiples_of_what_each_host_draws(compared, tmp_path):
    _, results = compared
    losses = {}
    for row in results["rows"]:
        if row["arm"] == "never":
            losses.setdefault(row["seed"], set()).add(row["test_loss"])
    assert all(len(of_seed) == 2 for of_seed in losses.values())


# -- screens ---------------------------------------------------------------------------------------


def test_screens_say_what_a_host_has_drawn(tmp_path):
    config = configured(tmp_path / "run")
    grow(config)
    runfolder.write_json(
        config.out / runfolder.CONFIG, {"command": "run", **config.model_dump(mode="json")}
    )
    reader = read(config.out)
    said = f"variation {variation_of(DEEP, 1).number}: {variation_of(DEEP, 1)}"
    assert news(reader, 1, Sent())["episode"]["drawn"] == said
    moment = Moment(reader.view, summarise(reader), reader.view.episodes[1])
    title, _ = draw_chain(moment, 200, 12)
    assert said in title
    assert any(said in line.text for line in reader.view.log)
    write_report([config.out], tmp_path / "report.html")
    assert said in (tmp_path / "report.html").read_text()


def test_a_policys_run_says_what_each_rounds_hosts_have_drawn(tmp_path):
    config = tiny(tmp_path / "run", rounds=1, hosts=2, task__name="deep_digits", task__epochs=3)
    train(config)
    began = events_of(config.out, "HostBegan")
    assert [event["host"] for event in began] == [0, 1]
    for event in began:
        assert event["drawn"] == variation_of(DEEP, event["seed"]).drawn
    reader = read(config.out)
    assert reader.view.unknown == 0
    assert re.match(r"variation \d+: examples", reader.view.episodes[0].drawn)


def test_a_trained_policy_plays_hosts_of_fewer_slots(tmp_path):
    config = tiny(tmp_path / "run", rounds=1, hosts=2, task__name="deep_digits", task__epochs=3)
    train(config)
    path = next((config.out / runfolder.CHECKPOINTS).glob("*.safetensors"))
    results = grow(configured(tmp_path / "grown", policy=str(path), hosts=6))
    assert len(results) == 6
    assert (
        len({event["drawn"]["depth"] for event in events_of(tmp_path / "grown", "HostBegan")}) == 2
    )
    assert torch.isfinite(torch.tensor([result.test_loss for result in results])).all()
