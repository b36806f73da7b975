"""The contract of `RunConfig` and `CompareConfig`: every leaf is read and changes what it says."""

import json
from contextlib import chdir
from functools import cache
from tempfile import TemporaryDirectory

import pytest
import torch
from rich.console import Console

from cases import with_slow
from esper.cli import compare, run
from esper.leyline.configuration import leaves
from esper.leyline.errors import EsperError
from esper.runtime import nursery, population
from esper.runtime.config import TaskConfig
from esper.trials.config import CompareConfig, RunConfig
from simic.tiny_runs import events_of
from trials.test_comparison import configured as comparison

QUIET = Console(quiet=True)
TASK = {
    "task.name": "digits",
    "task.epoch_examples": 64,
    "task.held_out": 100,
    "task.batch": 16,
    "task.epochs": 5,
    "task.clock": "compute",
    "task.compute": 2.0,
    "task.decay": 0.9,
    "task.budget": 2.0,
    "task.max_seeds": 1,
    "task.slots": ["r0c1"],
    "task.blueprints": ["lora"],
    "task.blends": ["gated"],
    "task.scale_at_birth": 0.1,
    "task.lengths.training": 1,
    "task.lengths.ramp": 3,
    "task.prunes": False,
    "task.lengths.embargo": 0,
    "task.lengths.resetting": 0,
}
PLACES = {
    "seed": 7,
    "devices": ["cuda:300"],
    "executor": "eager",
    "amp": "bf16",
    "compile": "on",
    "graph_memory": 1.5,
    "out": "elsewhere",
    "data_root": None,
    "threads": 2,
    "deterministic": True,
}
OF_RUN = {
    "policy": "never",
    "hosts": 3,
    "telemetry.level": "minimal",
    "telemetry.track": ["tensorboard"],
}
OF_COMPARE = {
    "policies": ["random", "never"],
    "static": ["final"],
    "seeds": 2,
    "final_of": ["random"],
    "rates": [0.5],
    "pretrain": 1,
    "oracle": True,
    "suite": {
        "families": [{"task": {"name": "digits_varied", "epochs": 2}}],
        "reserved": [0, 2000],
    },
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.delenv("ESPER_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def facets_of(play, config):
    """All that a run leaves behind and how the process computed, or what it was refused with."""
    seen = []
    real = population.choose_executor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            population,
            "choose_executor",
            lambda *asked: seen.append((asked[0], asked[-1])) or real(*asked),
        )
        patch.setattr(nursery, "is_compiled", lambda wanted, *rest: bool(seen.append(wanted)))
        patch.setattr(torch, "set_num_threads", seen.append)
        patch.setattr(
            torch, "use_deterministic_algorithms", lambda wanted, **rest: seen.append(wanted)
        )
        try:
            return (
                play(config),
                seen,
                sorted(path.name for path in config.out.iterdir()),
                config.out.name,
            )
        except EsperError as problem:
            return str(problem)


def run_facets(config):
    run.run_policy(config, False, QUIET)
    return events_of(config.out)


def compare_facets(config):
    found = compare.run_compare(config, False, QUIET)
    return [{**row, "seconds": None} for row in found["rows"]], found["arms"].keys()


BASE = {"task": {"name": "blobs", "epochs": 8, "epoch_examples": 96}, "out": "run"}
CASES = {
    "run": (run_facets, RunConfig, {**BASE, "policy": "random", "hosts": 2}),
    "compare": (compare_facets, CompareConfig, {**BASE, "policies": ["random"], "seeds": 1}),
}


@cache
def known_facets(command, base):
    """Facets of settings that many cases start from; played once, in a folder of their own."""
    play, model, _ = CASES[command]
    with TemporaryDirectory() as folder, chdir(folder):
        return facets_of(play, model.of(json.loads(base)))


def changed(command, key, value):
    """Facets without and with one leaf changed."""
    play, model, base = CASES[command]
    if key == "final_of":
        base = {
            **base,
            "policies": ["random", "heuristic"],
            "static": ["final"],
            "final_of": ["heuristic"],
        }
    if key in (
        "task.clock",
        "task.compute",
        "task.decay",
    ):  # by compute, held-out examples are not for nothing
        base = {**base, "task": {**base["task"], "held_out": 8, "budget": 2.0}}
    if key in ("task.compute", "task.decay"):
        base = {**base, "task": {**base["task"], "clock": "compute"}}
    if key.startswith("task.lengths"):  # episodes in which slots open again
        base = {**base, "task": {**base["task"], "epochs": 16}}
    if key in (
        "task.lengths.embargo",
        "task.lengths.resetting",
    ):  # what is culled by itself, incubation culls
        base = {**base, "task": {**base["task"], "lengths": {"training": 1}}}
    config = model.of(base)
    before = known_facets(command, json.dumps(base))
    other = config.with_changes(
        [(key, value), *([] if key == "out" else [("out", "run2")])], "the test"
    )
    after = facets_of(play, other)
    if isinstance(before, str) or isinstance(after, str) or key == "out":
        return before, after
    return before[:3], after[:3]


OF_STAGES = [key for key in TASK if key.startswith("task.lengths")]
SHORT = [
    key
    for key in {**TASK, **PLACES, **OF_RUN}
    if key != "data_root" and not key.startswith("task.lengths")
]
SLOW_KEYS = {*TASK} - {"task.name", "task.epochs"}
"""Leaves that `esper ppo` has too: simic/test_every_knob.py turns each of them."""


@pytest.mark.parametrize("key", with_slow([*SHORT, *OF_STAGES], SLOW_KEYS))
def test_every_setting_of_a_run_has_an_effect(key):
    before, after = changed("run", key, {**TASK, **PLACES, **OF_RUN}[key])
    assert before != after


@pytest.mark.parametrize("key", [key for key in {**PLACES, **OF_COMPARE} if key != "data_root"])
def test_every_setting_of_a_comparison_has_an_effect(key):
    before, after = changed("compare", key, {**PLACES, **OF_COMPARE}[key])
    assert before != after


def test_the_tables_name_every_leaf_of_a_run_and_of_a_comparison():
    assert set(leaves(TaskConfig, "task.")) == set(TASK)
    noted = {"imports"}  # by --import: cli/test_own_files.py
    assert set(leaves(RunConfig)) == {*TASK, *PLACES, *OF_RUN, *noted}
    assert set(leaves(CompareConfig)) == {*TASK, *PLACES, *OF_COMPARE, *noted}


@pytest.mark.parametrize("model", [RunConfig, CompareConfig])
def test_the_folder_of_the_data_reaches_the_task(model):
    config = model.of({"task": {"name": "shakespeare"}, "data_root": "nowhere", "out": "run"})
    play = run_facets if model is RunConfig else compare_facets
    assert "nowhere" in facets_of(play, config)


@pytest.mark.parametrize(
    "config", [RunConfig(policy="never", hosts=3), CompareConfig(rates=(0.5, 1.0), oracle=True)]
)
def test_a_configuration_comes_back_from_json(config):
    assert type(config).of(json.loads(json.dumps(config.model_dump(mode="json")))) == config


# -- how seeds are raised --------------------------------------------------------------------------


def test_stage_lengths_are_those_that_are_set(tmp_path):
    config = RunConfig.of(
        {**BASE, "policy": "schedule", "task": {**BASE["task"], "lengths": {"ramp": 3}}}
    )
    run.run_policy(config, False, QUIET)
    began = {"BLENDING": {}, "PROBATIONARY": {}}
    for event in events_of(config.out, "StageChanged"):
        if event["after"] in began:
            began[event["after"]].setdefault((event["host"], event["slot"]), event["epoch"])
    assert began["PROBATIONARY"]
    for place, epoch in began["PROBATIONARY"].items():
        assert epoch - began["BLENDING"][place] == 3


@pytest.mark.slow
@pytest.mark.parametrize("blends", [["sigmoid"], ["gated"]])
def test_ways_to_blend_reach_policies_static_networks_and_the_oracle(blends):
    task = {**BASE["task"], "blends": blends, "epochs": 12}
    asked = {"policies": ["heuristic"], "static": ["final"], "oracle": True, "seeds": 2}
    found = compare.run_compare(CompareConfig.of({**BASE, **asked, "task": task}), False, QUIET)
    assert {"heuristic", "final of heuristic", "oracle"} == found["arms"].keys()
    rows = {(row["arm"], row["seed"]): row for row in found["rows"]}
    assert sum(rows["heuristic", seed]["fossilized"] for seed in (0, 1))
    for seed in (0, 1):
        assert (
            rows["heuristic", seed]["final_params"]
            == rows["final of heuristic", seed]["final_params"]
        )


def test_an_unknown_way_to_blend_is_refused():
    with pytest.raises(EsperError, match="sigmoid"):
        run.run_policy(
            RunConfig.of({**BASE, "task": {**BASE["task"], "blends": ["sigmod"]}}), False, QUIET
        )


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seeds": 0}, "seeds is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"policies": ["heuristik"]}, "arm 'heuristik'.*'heuristic'"),
        ({"policies": ["heuristic:share=2"]}, "share of heuristic is '2'.* 1"),
        ({"policies": ["no/such.safetensors"]}, "no/such.safetensors.*`esper ppo`"),
        ({"static": ["finel"]}, "'final', 'final-equal-flops' or 'final-whole'"),
        ({"policies": ["never", "sham"]}, "sham .*'all'.*none"),
        ({"policies": ["sham", "heuristic"], "final_of": ["sham"]}, "arm 'sham'"),
        ({"policies": ["never"], "static": ["final"], "final_of": ["never"]}, "final .*'never'"),
        (
            {"policies": ["random"], "static": ["final"], "final_of": ["heuristic"]},
            r"\(random\).*--final-of",
        ),
        (
            {"policies": ["random", "schedule"], "final_of": ["random", "heuristic"]},
            "final .*'heuristic'",
        ),
        ({"final_of": []}, r"final_of is \[\]"),
        ({"policies": ["search:episodes=1"]}, "episodes of search is '1'.* 2"),
        ({"policies": ["search:episode=9"]}, "search 'episode'.*'episodes'"),
        ({"policies": ["search:seed=2"]}, "search:seed=2 .*host seed 2,.*--seed"),
        ({"policies": ["search:hosts=5"], "seed": 1000004}, "host seed 1000004,"),
        ({"static": ["final-whole"]}, "final-whole .*--pretrain"),
        ({"rates": []}, r"rates is \[\]"),
        ({"rates": [1, 0]}, "rates .*1.* 0"),
        ({"rates": [-1]}, "rates .*-1.* 1e-6"),
        ({"rates": [float("nan")]}, "rates.* NaN"),
        ({"task__name": "blob"}, "task 'blob'.*'blobs'"),
        ({"task__epochs": 1}, "task.epochs is 1"),
        ({"polices": ["never"]}, "'polices'.*'policies'"),
    ],
    ids=str,
)
def test_a_mistake_is_named_with_the_way_out(changes, words, tmp_path):
    with pytest.raises(EsperError, match=words) as refusal:
        comparison(tmp_path, **changes)
    assert "\n" not in str(refusal.value)
