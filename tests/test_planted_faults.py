"""The tests that matter are seen failing:

each planted fault, in a copy of the sources, must be caught by its test.
"""

import compileall
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import esper
from planted_faults import compute, evidence, growing, learning, loops, trust, updates

TESTS = Path(__file__).parent
PACKAGE = Path(esper.__file__).parent
FAULTS = [
    *learning.FAULTS,
    *updates.FAULTS,
    *evidence.FAULTS,
    *growing.FAULTS,
    *loops.FAULTS,
    *compute.FAULTS,
    *trust.FAULTS,
]
PASSED, FAILED = 0, 1


@pytest.fixture(scope="session")
def copied(tmp_path_factory):
    """One copy for all faults of this process, compiled once:

    a run on it compiles only the file with the fault.
    """
    folder = tmp_path_factory.mktemp("sources")
    shutil.copytree(PACKAGE, folder / "esper", ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(folder, quiet=1)
    return folder


@pytest.fixture
def planted(fault, copied):
    """The copy with this fault in it, and without it again afterwards."""
    broken = copied / "esper" / fault.file
    broken.write_text(broken.read_text().replace(fault.old, fault.new))
    yield copied
    shutil.copy2(
        PACKAGE / fault.file, broken
    )  # with its old time, so that the compiled file is valid again


def run(source, tests):
    """Exit code and output of pytest with `source` as the only esper it can import."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    own = {"PYTHONPATH": str(source), "ESPER_SOURCE": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-m",
        "",
    ]
    nodes = [str(TESTS / test) for test in tests]
    env = {**kept, **own, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *nodes], cwd=TESTS.parent, env=env, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def test_every_fault_has_a_phrase_of_its_own():
    assert len({fault.phrase for fault in FAULTS}) == len(FAULTS)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.phrase)
def test_the_text_of_a_fault_is_in_its_file_once(fault):
    assert (PACKAGE / fault.file).read_text().count(fault.old) == 1


@pytest.mark.slow
def test_without_a_fault_every_one_of_these_tests_passes(copied):
    code, said = run(copied, sorted({fault.test for fault in FAULTS}))
    assert code == PASSED, said


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.phrase)
def test_a_planted_fault_is_caught(fault, planted):
    code, said = run(planted, [fault.test])
    assert code == FAILED, said
