"""Another distribution on PyPI, of a game engine, is imported as `esper` too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import esper

OURS = Path(esper.__file__).parent
CURE = "pip uninstall esper && pip install --force-reinstall --no-deps esper-lite"


def python(code, *folders):
    path = os.pathsep.join(map(str, [*folders, OURS.parent]))
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("name", ["esper-3.9.dist-info", "esper-2.5-py3.11.egg-info"])
def test_importing_esper_beside_its_namesake_says_so_in_one_line(tmp_path, name):
    (tmp_path / name).mkdir()
    said = python("import esper; print(esper.GrowthSettings.__name__)", tmp_path)
    assert said.stdout == "GrowthSettings\n"
    (line,) = [line for line in said.stderr.splitlines() if "UserWarning" in line]
    assert str(tmp_path / name) in line
    assert line.endswith(CURE)
    assert line.startswith("<string>:1:")  # the caller's import, not a line of ours


def test_without_a_namesake_nothing_is_said(tmp_path):
    (tmp_path / "esper_lite-0.3.0.dist-info").mkdir()
    (tmp_path / "esperanto-1.0.dist-info").mkdir()
    assert python("import esper", tmp_path).stderr == ""


def test_looking_for_the_namesake_reads_no_metadata():
    code = (
        "import sys; sys.modules['gymnasium'] = None; import esper;"
        "print('importlib.metadata' in sys.modules)"
    )
    assert python(code).stdout == "False\n"


def test_the_command_refuses_where_its_namesake_has_taken_its_place(tmp_path):
    """As pip leaves it: one folder with the files of both, and the other's `__init__.py`."""
    taken = tmp_path / "esper"
    taken.mkdir()
    for path in OURS.iterdir():
        (taken / path.name).symlink_to(path)
    (taken / "__init__.py").unlink()
    (taken / "__init__.py").write_text("class Processor: ...\n")
    done = python("from esper.cli import main; main(['list'])", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"esper: import esper gives another library ({taken}")
    assert done.stderr.rstrip().endswith(CURE)
