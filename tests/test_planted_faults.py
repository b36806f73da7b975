"""Every property test is seen failing: each planted fault, in a copy of the sources, must be caught by its test."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import esper
import planted_faults
import planted_faults_dashboard
import planted_faults_garden
import planted_faults_grow
import planted_faults_growth
import planted_faults_learner
import planted_faults_policy
import planted_faults_runtime
import planted_faults_signals
import planted_faults_training
from kasmina import planted_faults as kasmina_faults
from simic import planted_faults_starts, planted_faults_team
from trials import planted_faults_compare

TESTS = Path(__file__).parent
PACKAGE = Path(esper.__file__).parent
FAULTS = [
    *planted_faults.FAULTS,
    *planted_faults_compare.FAULTS,
    *kasmina_faults.FAULTS,
    *planted_faults_dashboard.DASHBOARD_FAULTS,
    *planted_faults_garden.GARDEN_FAULTS,
    *planted_faults_grow.GROW_FAULTS,
    *planted_faults_growth.GROWTH_FAULTS,
    *planted_faults_runtime.RUNTIME_FAULTS,
    *planted_faults_policy.POLICY_FAULTS,
    *planted_faults_learner.LEARNER_FAULTS,
    *planted_faults_training.TRAINING_FAULTS,
    *planted_faults_signals.SIGNAL_FAULTS,
    *planted_faults_team.TEAM_FAULTS,
    *planted_faults_starts.START_FAULTS,
]
PASSED, FAILED = 0, 1


def copy_sources(folder):
    return Path(shutil.copytree(PACKAGE, folder / "esper", ignore=shutil.ignore_patterns("__pycache__")))


def run(source, tests):
    """Exit code and output of pytest with `source` as the only esper it can import."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    env = {**kept, "PYTHONPATH": str(source), "ESPER_SOURCE": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=short", "-p", "no:cacheprovider"]
    nodes = [str(TESTS / test) for test in tests]
    done = subprocess.run([*command, *nodes], cwd=TESTS.parent, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.phrase)
def test_the_text_of_a_fault_is_in_its_file_once(fault):
    assert (PACKAGE / fault.file).read_text().count(fault.old) == 1


def test_every_fault_has_a_phrase_of_its_own():
    assert len({fault.phrase for fault in FAULTS}) == len(FAULTS)


@pytest.mark.slow
def test_without_a_fault_every_one_of_these_tests_passes(tmp_path):
    copy_sources(tmp_path)
    code, said = run(tmp_path, sorted({fault.test for fault in FAULTS}))
    assert code == PASSED, said


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.phrase)
def test_a_planted_fault_is_caught(fault, tmp_path):
    broken = copy_sources(tmp_path) / fault.file
    broken.write_text(broken.read_text().replace(fault.old, fault.new))
    code, said = run(tmp_path, [fault.test])
    assert code == FAILED, said
