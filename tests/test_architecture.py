"""Sizes, names and layout of the sources, so that nobody has to remember them."""

import ast
import re
from pathlib import Path

import pytest

import esper
from second_cases import SECOND_CASES

TESTS = Path(__file__).parent
PACKAGE = Path(esper.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
FILES = SOURCES + sorted(TESTS.rglob("*.py"))
PACKAGES = sorted(path.parent for path in SOURCES if path.name == "__init__.py")
MOST_LINES_PER_FILE, MOST_LINES_PER_FUNCTION, MOST_LINES = 500, 60, 27_000

MUST_NOT_EXIST = [
    r"\bmax_seeds_per_slot\b",
    r"(?i)flat_?actions?",
    r"\bcompute_flat_action_mask\b",
    r"\bget_slot_states\b",
    r"\bcollect_dual_gradients_async\b",
    r"\bnormalize_observation\b",
    r"\bADVANCE\b",
    r"\bNUM_SLOTS\b",
    r"\bSlotAction\b",
    r"\bis_advance\b",
    r"\bcount_seeds_in_slot\b",
    r"\bincrement_epoch\b",
    r"\brecord_epoch\b",
    r"\bstart_blending\([^)]*\btemperature\b",
    r"\bfor_imagenet\b",
    r"(?i)\byaml\b",
    r"\bupdate[-_]every\b",
    r"(?i)legacy",
    r"(?i)deprecated",
    r"(?i)torchvision",
]
PROSE = re.compile(r"\b[a-z]{2,}( [a-z]{2,}){2,}\b")
WORDS_NOT_IN_NAMES = {
    "manager",
    "helper",
    "helpers",
    "coordinator",
    "context",
    "util",
    "utils",
    "common",
    "types",
}


def label(path):
    root = PACKAGE.parent if path.is_relative_to(PACKAGE) else TESTS
    return str(path.relative_to(root))


def defined_names(path):
    """Module, class and function names of one file."""
    defined = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [path.stem] + [
        node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, defined)
    ]


def words_of(name):
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)}


@pytest.mark.parametrize("path", FILES, ids=label)
def test_no_file_is_over_400_lines(path):
    assert len(path.read_text().splitlines()) <= MOST_LINES_PER_FILE


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_no_function_is_over_60_lines(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < MOST_LINES_PER_FUNCTION, node.name


def test_the_sources_stay_under_17000_raw_lines():
    """As `wc -l` counts them: explaining is paid for too, so that it stays short."""
    assert sum(path.read_text().count("\n") for path in SOURCES) <= MOST_LINES


@pytest.mark.parametrize("pattern", MUST_NOT_EXIST)
def test_what_must_not_exist_does_not(pattern):
    assert [label(path) for path in SOURCES if re.search(pattern, path.read_text())] == []


def test_the_registry_has_no_reset():
    assert not hasattr(esper.blueprint.__self__, "reset")


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_names_say_what_a_thing_is(path):
    for name in defined_names(path):
        assert not words_of(name) & WORDS_NOT_IN_NAMES, name
        assert not re.search(r"(_v|V)\d+$", name), name


@pytest.mark.parametrize(
    "name", ["SlotManager", "build_helper", "TrainContext", "utils", "common_parts", "types"]
)
def test_the_check_of_names_sees_every_spelling(name):
    assert words_of(name) & WORDS_NOT_IN_NAMES


@pytest.mark.parametrize("package", PACKAGES, ids=label)
def test_every_package_says_what_it_is_for(package):
    assert ast.get_docstring(ast.parse((package / "__init__.py").read_text()))


@pytest.mark.parametrize(
    "package", [package for package in PACKAGES if package != PACKAGE], ids=label
)
def test_every_package_has_its_tests(package):
    assert list((TESTS / package.relative_to(PACKAGE)).glob("test_*.py"))


def expected_errors(text):
    """The texts of every `match=` in a file, without what an f-string fills in."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.keyword) and node.arg == "match":
            parts = (part for part in ast.walk(node.value) if isinstance(part, ast.Constant))
            yield from (part.value for part in parts if isinstance(part.value, str))


@pytest.mark.parametrize("path", sorted(TESTS.rglob("test_*.py")), ids=label)
def test_no_test_expects_three_words_of_an_errors_prose_in_a_row(path):
    """Values, names and numbers tell one error from another; its sentences may be put better at any
    time.
    """
    assert [
        expected for expected in expected_errors(path.read_text()) if PROSE.search(expected)
    ] == []


def test_the_check_of_prose_sees_every_form_of_a_pattern():
    text = (
        'raises(E, match="the host is gone")\nraises(E, match=rf"{path} was never '
        'saved")\nraises(E, match="r0c0")'
    )
    assert [bool(PROSE.search(expected)) for expected in expected_errors(text)] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("case", SECOND_CASES)
def test_a_second_case_names_a_test_that_there_is(case):
    """Else it would run in `make test` again without a word."""
    path, _, name = case.partition("::")
    assert f"def {name.partition('[')[0]}(" in (TESTS / path).read_text()
