"""The tests that matter are seen failing.

Each planted fault, in a copy of the sources, must be caught by its test.
"""

import compileall
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import esper
from planted_faults import (
    deepening,
    evidence,
    growing,
    learning,
    loops,
    promises,
    shown,
    trust,
    updates,
)
from planted_faults.planting import plant

TESTS = Path(__file__).parent
PACKAGE = Path(esper.__file__).parent
FAULTS = [
    *learning.FAULTS,
    *updates.FAULTS,
    *evidence.FAULTS,
    *growing.FAULTS,
    *deepening.FAULTS,
    *loops.FAULTS,
    *promises.FAULTS,
    *trust.FAULTS,
    *shown.FAULTS,
]
PASSED, FAILED = 0, 1


@pytest.fixture(scope="session")
def copied(tmp_path_factory):
    """One copy for all faults of this process.

    It is compiled once: a run on it compiles only the file with the fault.
    """
    folder = tmp_path_factory.mktemp("sources")
    shutil.copytree(PACKAGE, folder / "esper", ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(folder, quiet=1)
    return folder


@pytest.fixture
def planted(fault, copied):
    """The copy with this fault in it, and without it again afterwards."""
    broken = copied / "esper" / fault.file
    broken.write_text(plant(broken.read_text(), fault.function, fault.old, fault.new))
    yield copied
    # with its old time, so that the compiled file is valid again
    shutil.copy2(PACKAGE / fault.file, broken)


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


SOURCE = """
def outer(x):
    if x > 1:  # a comment
        # another
        call(x,
             'a')
    return [x, y]

class Thing:
    def outer(self):
        x = 1
        return x
"""


@pytest.mark.parametrize(
    ("function", "old", "new", "expected"),
    [
        ("outer", 'call(x, "a")', "pass", "        pass\n"),
        ("outer", "[x, y]", "[y]", "    return ([y])\n"),
        ("outer", "if x > 1:\n    ...", "if x:\n    ...", "    if x:\n        call(x,\n"),
        ("Thing.outer", "x = 1\nreturn x", "return 2", "        return 2\n"),
        ("", "y", "z", "    return [x, (z)]\n"),
    ],
)
def test_code_is_found_by_its_syntax_in_its_function(function, old, new, expected):
    planted = plant(SOURCE, function, old, new)
    assert expected in planted
    assert expected not in SOURCE


@pytest.mark.parametrize(
    ("function", "old"), [("outer", "x"), ("Thing.outer", "[x, y]"), ("missing", "x > 1")]
)
def test_code_that_does_not_stand_there_once_is_an_error(function, old):
    with pytest.raises(LookupError, match=r"times in"):
        plant(SOURCE, function, old, "pass")


def test_every_fault_has_a_phrase_of_its_own():
    assert len({fault.phrase for fault in FAULTS}) == len(FAULTS)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.phrase)
def test_the_code_of_a_fault_stands_once_in_its_function(fault):
    source = (PACKAGE / fault.file).read_text()
    assert plant(source, fault.function, fault.old, fault.new) != source


@pytest.mark.slow
def test_without_a_fault_every_one_of_these_tests_passes(copied):
    code, said = run(copied, sorted({fault.test for fault in FAULTS}))
    assert code == PASSED, said


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.phrase)
def test_a_planted_fault_is_caught(fault, planted):
    code, said = run(planted, [fault.test])
    assert code == FAILED, said
