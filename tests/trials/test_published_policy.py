"""The policy in examples/policies is the one that was measured, and it fits its task."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from esper.runtime.population import Population
from esper.runtime.tasks import get_task
from esper.trials.arms import Entry, Settings, run_entries
from esper.trials.growing import load_fitting
from runtime.lives import image_splits

ROOT = Path(__file__).parents[2]
POLICY = ROOT / "examples" / "policies" / "cifar10.safetensors"
PHOTOS = replace(get_task("cifar10"), epoch_examples=16, batch=16, life=5, held_out=8)
SPLITS = image_splits(count=64, size=32, channels=3)


def test_it_is_the_file_whose_results_are_published():
    found = json.loads((ROOT / "benchmarks" / "results" / "question_controller-cifar10-longer.json").read_text())
    assert found["checkpoint_sha256"] == hashlib.sha256(POLICY.read_bytes()).hexdigest()


def test_it_fits_the_task_and_plants():
    space = Population(PHOTOS, [0], splits=SPLITS).runs[0].model.space
    policy, reads_telemetry = load_fitting(POLICY, space)
    assert reads_telemetry
    (run,) = run_entries(PHOTOS, [Entry("trained", 3, lambda ground: policy)], Settings(splits=SPLITS))
    assert run.result.germinated > 0
