"""What `help(esper.grow)` shows: every public name explains itself with an example that runs."""

import doctest
import inspect

import pytest

import esper
from esper.kasmina.blueprints import REGISTRY
from esper.leyline import errors
from esper.runtime.tasks.registry import TASKS
from esper.simic.rewards import FAMILIES, TERMS
from esper.tamiyo.rules import RULES

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
