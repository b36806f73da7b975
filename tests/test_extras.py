"""What works without the extras of pyproject.toml, and what a missing one says."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from esper.leyline.errors import MissingExtraError
from esper.leyline.extras import EXTRAS, is_installed, needs

DECLARED = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))
OPTIONAL = DECLARED["project"]["optional-dependencies"]
BLOCK = "import sys; sys.modules.update(dict.fromkeys({modules!r}));"
EVERY_MODULE = [module for modules in EXTRAS.values() for module in modules]
GROW = """
import torch, esper
from torch import nn
model = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 2))
garden = esper.grow(model, slots=["0"], example=torch.rand(4, 2), budget=20.0)
garden.attach(torch.optim.SGD(garden.parameters(), lr=0.1))
print(garden.summary())
garden.harvest()
"""


def python_without(modules, code, *arguments):
    """Run code where these modules cannot be imported."""
    command = [sys.executable, "-c", BLOCK.format(modules=modules) + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def contained(extra):
    """The extras that one extra brings, itself included."""
    names = {extra}
    for requirement in OPTIONAL[extra]:
        match = re.match(r"esper-lite\[(.*)\]", requirement)
        for name in match[1].split(",") if match else ():
            names |= contained(name)
    return names


def test_every_extra_is_known_with_its_modules():
    assert set(EXTRAS) == set(OPTIONAL) - {"all", "dev", "docs", "slow"}


def test_all_brings_every_extra_and_dev_what_the_tests_need():
    assert contained("all") >= set(EXTRAS)
    assert contained("dev") >= set(EXTRAS) - {"track"}  # of it only tensorboard, by itself


def test_growing_needs_no_extra():
    done = python_without(EVERY_MODULE, GROW)
    assert done.returncode == 0, done.stderr
    assert "DORMANT" in done.stdout


def test_help_without_gymnasium_shows_what_can_be_used():
    code = "import pydoc, esper; print(pydoc.plain(pydoc.render_doc(esper)))"
    done = python_without(["gymnasium"], code)
    assert done.returncode == 0, done.stderr
    assert "Garden" in done.stdout
    assert "GrowthEnv" not in done.stdout


def test_a_name_that_needs_gymnasium_says_what_to_install():
    said = python_without(["gymnasium"], "import esper; esper.GrowthEnv").stderr.splitlines()[-1]
    assert said.endswith(
        "MissingExtraError: esper.GrowthEnv needs gymnasium. "
        "Install it: pip install 'esper-lite[rl]'"
    )


@pytest.mark.parametrize("module", EXTRAS["cli"])
def test_the_command_without_its_extra_says_what_to_install(module):
    done = python_without([module], "from esper.cli import main; main()", "list")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"esper: the command esper needs {module}. Install it: pip install 'esper-lite[cli]'\n"
    )


def test_a_mistake_of_ones_own_is_not_taken_for_a_missing_extra():
    with pytest.raises(ModuleNotFoundError, match="no_such_module") as raised, needs("rl", "this"):
        import no_such_module  # noqa: F401
    assert not isinstance(raised.value, MissingExtraError)


def test_a_module_that_is_blocked_is_not_installed(monkeypatch):
    assert is_installed("gymnasium")
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    assert not is_installed("gymnasium")
    assert not is_installed("no_such_module")
