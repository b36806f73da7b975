"""What is published: the distributions, what is said about them, and a stranger's first minutes."""

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from readme_tables import README

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PUBLISHED = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md", "src")
INSTALL = re.search(r"^pip install '\.(\[[\w,]+\])'", README, re.MULTILINE)
LOOK = """
import gymnasium
env = gymnasium.make("esper:esper/blobs-v0", host_seeds=[1])
observation, info = env.reset(seed=0)
env.close()
import esper
print(esper.__file__)
"""


def test_an_index_knows_who_made_it_what_it_is_and_for_whom():
    assert PROJECT["authors"] == [{"name": "Esper maintainers"}]
    assert "pytorch" in PROJECT["keywords"]
    assert "Typing :: Typed" in PROJECT["classifiers"]


def test_the_workflow_runs_what_ci_runs():
    workflow = (ROOT / ".github/workflows/ci.yml").read_text("utf-8")
    assert "- run: .ci/run\n" in workflow
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


def test_a_citation_names_the_authors_of_the_licence():
    authors = re.search(r"^Copyright \(c\) \d+ (.+)$", (ROOT / "LICENSE").read_text(), re.M)[1]
    assert f"- name: {authors}\n" in (ROOT / "CITATION.cff").read_text("utf-8")


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The folder with the wheel and the sdist, built from a copy of the sources."""
    source = tmp_path_factory.mktemp("source")
    for name in PUBLISHED:
        if (ROOT / name).is_dir():
            without = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, source / name, ignore=without)
        else:
            shutil.copy(ROOT / name, source / name)
    folder = tmp_path_factory.mktemp("dist")
    call([sys.executable, "-m", "build", "--outdir", str(folder), str(source)], cwd=folder)
    return folder


def call(command, **options):
    """What a command prints; it must end well."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, **options)
    assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


@pytest.mark.slow
def test_wheel_and_sdist_hold_every_file_of_the_package(distributions):
    package = ROOT / "src/esper"
    kinds = ("*.py", "py.typed", "presets/*.json", "static/*", "*.tcss")
    files = {path for kind in kinds for path in package.rglob(kind) if path.is_file()}
    names = {str(path.relative_to(package.parent)) for path in files}
    with zipfile.ZipFile(next(distributions.glob("*.whl"))) as wheel:
        assert names <= set(wheel.namelist())
    with tarfile.open(next(distributions.glob("*.tar.gz"))) as sdist:
        inner = {member.partition("/")[2] for member in sdist.getnames()}
    assert {f"src/{name}" for name in names} <= inner
    assert {"LICENSE", "CHANGELOG.md"} <= inner


@pytest.mark.slow
def test_a_stranger_without_the_sources_walks_the_first_five_minutes(distributions, tmp_path):
    """With the extras of the README's line, in an environment that has nothing else."""
    call([sys.executable, "-m", "venv", str(tmp_path / "env")])
    binaries = tmp_path / "env/bin"
    wheel = next(distributions.glob("*.whl"))
    constraint = ["--constraint", str(ROOT / "constraints.txt")]
    wanted = f"{wheel}{INSTALL[1]}"
    call([str(binaries / "pip"), "install", "--quiet", *constraint, wanted], cwd=tmp_path)
    plain = {"cwd": tmp_path, "env": {"PATH": str(binaries), "HOME": str(tmp_path)}}
    block = re.search(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)[1]
    (tmp_path / "pasted.py").write_text(block, encoding="utf-8")
    assert "same size from scratch: " in call([str(binaries / "python"), "pasted.py"], **plain)
    assert str(tmp_path) in call([str(binaries / "python"), "-c", LOOK], **plain)
    esper = str(binaries / "esper")
    call([esper, "demo", "--epochs", "8"], **plain)
    call([esper, "report", "runs/demo/heuristic", "runs/demo/never"], **plain)
    assert (tmp_path / "report.html").is_file()
    assert len(json.loads(call([esper, "runs", "runs/demo", "--json"], **plain))) == 2
