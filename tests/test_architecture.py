"""Sizes, names and layout of the sources, so that you do not have to remember them."""

import ast
import re
from pathlib import Path

import pytest

import esper

TESTS = Path(__file__).parent
PACKAGE = Path(esper.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
TOOLS = TESTS.parent / "tools"
FILES = SOURCES + sorted(TESTS.rglob("*.py")) + sorted(TOOLS.rglob("*.py"))
PACKAGES = sorted(path.parent for path in SOURCES if path.name == "__init__.py")
MOST_LINES_PER_FILE = 500
MOST_LINES_PER_FUNCTION = 60

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
    for root in (PACKAGE.parent, TESTS, TOOLS.parent):
        if path.is_relative_to(root):
            return str(path.relative_to(root))
    raise ValueError(path)


def defined_names(path):
    """Module, class and function names of one file."""
    defined = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [path.stem] + [
        node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, defined)
    ]


def words_of(name):
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)}


def body_lines(function):
    """Lines of a function without its docstring."""
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


@pytest.mark.parametrize("path", FILES, ids=label)
def test_a_file_is_short_enough_to_read(path):
    assert len(path.read_text().splitlines()) <= MOST_LINES_PER_FILE


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_a_function_is_short_enough_to_read(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert body_lines(node) <= MOST_LINES_PER_FUNCTION, node.name


def test_a_docstring_does_not_count_as_the_body_of_its_function():
    text = 'def f():\n    """One.\n\n    Two.\n    """\n    return 1\n'
    assert body_lines(ast.parse(text).body[0]) == 2


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
