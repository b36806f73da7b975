"""What must import without torch, and how light `import esper` is."""

import pydoc
import re
import subprocess
import sys

import pytest

import esper

OPTIONAL = ("textual", "starlette", "uvicorn", "rich")
IMPORT_ALL = """
import importlib, pkgutil, sys
sys.modules["torch"] = None
package = importlib.import_module({package!r})
for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    try:
        importlib.import_module(found.name)
    except ModuleNotFoundError as problem:
        if (problem.name or "").split(".")[0] not in {optional!r}:
            raise
"""


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("package", ["esper.leyline", "esper.telemetry", "esper.dashboard"])
def test_it_imports_with_torch_blocked(package):
    done = python(IMPORT_ALL.format(package=package, optional=OPTIONAL))
    assert done.returncode == 0, done.stderr


def test_the_block_is_a_real_one():
    assert "halted" in python(IMPORT_ALL.format(package="esper.kasmina", optional=OPTIONAL)).stderr


def test_importing_esper_does_not_load_torch():
    done = python("import sys, esper; esper.__version__; print('torch' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr


OTHERS = ("blueprint", "check_host", "check_blueprint")


@pytest.mark.parametrize(
    "name", ["MorphogeneticModel", *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS)]
)
def test_what_needs_torch_loads_when_it_is_used(name):
    done = python(f"import sys, esper; esper.{name}; print('torch' in sys.modules)")
    assert done.stdout.strip() == "True", done.stderr


def test_dir_and_help_show_what_there_is():
    assert set(esper.__all__) <= set(dir(esper))
    assert not {"import_module", "TYPE_CHECKING", "Any"} & set(dir(esper))
    assert all(getattr(esper, name) is not None for name in dir(esper))
    shown = pydoc.plain(pydoc.render_doc(esper))
    for name in {*esper.__all__} - {"__version__"}:
        assert re.search(rf"^    (class )?{name}\b", shown, re.MULTILINE), name


def test_an_unknown_attribute_is_an_attribute_error():
    said = python("import esper; esper.gorw").stderr.splitlines()[-1]
    assert said.startswith("AttributeError: ")
    assert "'gorw'" in said
