"""The policies in examples/policies are those that were measured, and fit their tasks."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from esper.runtime.population import Population
from esper.runtime.tasks.registry import get_task
from esper.tamiyo.policy_files import load_fitting
from esper.tamiyo.policy_files import read as read_policy
from esper.trials.arms import Entry, run_entries
from runtime.episodes import image_splits

ROOT = Path(__file__).parents[2]
POLICIES = ROOT / "examples" / "policies"
PHOTOS = replace(get_task("cifar10"), epoch_examples=16, batch=16, epochs=5, held_out=8)
DIGITS = replace(get_task("digits"), epoch_examples=128, epochs=5)
SPLITS = image_splits(count=64, size=32, channels=3)


@pytest.mark.parametrize(
    ("question", "name"),
    [
        ("controller-cifar10", "cifar10"),
        ("controller-digits", "digits"),
    ],
)
def test_it_is_the_file_whose_results_are_published(question, name):
    found = json.loads((ROOT / "benchmarks" / "results" / f"question_{question}.json").read_text())
    facts = read_policy(POLICIES / f"{name}.safetensors")[1]["facts"]
    assert (
        found["checkpoint_sha256"] == facts["converted_from"]
    )  # the same tensors in the format of that time


@pytest.mark.parametrize(
    ("name", "task", "splits"), [("cifar10", PHOTOS, SPLITS), ("digits", DIGITS, None)]
)
def test_it_fits_its_task_and_plants(name, task, splits):
    space = Population(task, [0], splits=splits).runs[0].model.space
    policy = load_fitting(POLICIES / f"{name}.safetensors", space)
    assert policy.reads_telemetry
    (run,) = run_entries(
        task, [Entry("trained", 3, lambda facts: policy)], partial(Population, splits=splits)
    )
    assert run.result.germinated > 0
