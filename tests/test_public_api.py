"""What `help(esper.grow)` shows: every public name explains itself with an example that runs."""

import ast
import doctest
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import esper
from esper.kasmina.blueprints import REGISTRY
from esper.leyline import errors
from esper.runtime.tasks.registry import TASKS
from esper.simic.rewards import FAMILIES, TERMS
from esper.tamiyo.rules import RULES

TYPED_USE = Path(__file__).with_name("typed_use.py")
NAMES = sorted(set(esper.__all__) - {"__version__"})
ERRORS = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, Exception)
]


@pytest.fixture(autouse=True)
def registries_as_before():
    """What an example registers is gone afterwards."""
    before = [(known, dict(known)) for known in (REGISTRY._known, TASKS, FAMILIES, TERMS, RULES)]
    yield
    for known, entries in before:
        known.clear()
        known.update(entries)


def examples_of(name):
    """The doctests in the docstring of a public name, not those of its methods."""
    finder = doctest.DocTestFinder(recurse=False, exclude_empty=False)
    return finder.find(getattr(esper, name), name, globs={})


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_an_example_that_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an example may save something
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    tests = examples_of(name)
    assert any(test.examples for test in tests)
    report = []
    for test in tests:
        runner.run(test, out=report.append)
    assert "".join(report) == ""


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_an_error_says_when_it_is_raised_and_what_to_do(error):
    first, _, rest = (vars(error).get("__doc__") or "").partition("\n\n")
    assert first.startswith("Raised ")
    assert rest.strip()


def test_a_strictly_typed_program_uses_every_public_name():
    tree = ast.parse(TYPED_USE.read_text("utf-8"))
    reads = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used = {node.attr for node in reads if getattr(node.value, "id", None) == "esper"}
    assert used == set(esper.__all__)


@pytest.mark.slow
@pytest.mark.parametrize(
    "checker",
    [
        ["pyright", "--pythonpath", sys.executable],
        ["mypy", "--strict", "--config-file=", "--follow-imports=silent"],
    ],
    ids=["pyright", "mypy"],
)
def test_a_strictly_typed_program_passes(checker, tmp_path):
    """In a folder without our settings; `make lint` reads it with them."""
    program = tmp_path / TYPED_USE.name
    program.write_text("# pyright: strict\n" + TYPED_USE.read_text("utf-8"), encoding="utf-8")
    command = [sys.executable, "-m", *checker, program.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
