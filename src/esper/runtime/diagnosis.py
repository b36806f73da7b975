"""What this machine has for Esper, and what mends what is missing: for `esper doctor`.

Nothing is trained, downloaded or written.
"""

import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, requires, version
from pathlib import Path
from types import ModuleType

from esper.leyline.extras import EXTRAS, install_command, is_installed
from esper.leyline.namesake import CURE, find_namesake
from esper.runtime.tasks.fetch import SOURCES, is_fetched

_NAME = "esper-lite"
_REQUIREMENT = re.compile(r"([\w.-]+)\s*>=\s*([\d.]+)")
_PROJECTS = {"sklearn": "scikit-learn"}  # where a project is not called after its module


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: what there is, and the command that mends what is not."""

    topic: str
    name: str
    state: str
    mend: str | None = None
    is_broken: bool = False
    """whether Esper cannot work as it is; what is missing of an extra breaks nothing"""


def examine(package: ModuleType, data_root: Path | None = None) -> list[Finding]:
    """Look at versions, devices, extras and data; `package` is esper as it was imported."""
    return [*_versions(package), *_devices(), *_extras(), *_data(data_root)]


def _versions(package: ModuleType) -> Iterator[Finding]:
    topic = "versions"
    place = Path(str(package.__file__)).parent
    yield Finding(topic, "esper", f"{package.__version__} in {place}")
    yield Finding(topic, "python", f"{platform.python_version()} on {platform.platform()}")
    try:
        requirements = requires(_NAME) or []
        installed = version(_NAME)
    except PackageNotFoundError:
        yield Finding(
            topic, _NAME, "not installed, only on the path", f"pip install {place.parents[1]}", True
        )
        return
    if installed != package.__version__:
        mend = "pip install --force-reinstall --no-deps esper-lite"
        yield Finding(topic, _NAME, f"{installed} is installed, not this one", mend, True)
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)
        if match is not None and "extra ==" not in requirement:
            yield _version(match[1], match[2])
    namesake = find_namesake()
    if namesake is not None:
        state = f"another library of this name is installed: {namesake}"
        yield Finding(topic, "esper", state, CURE)


def _version(project: str, least: str) -> Finding:
    """Whether a package that Esper needs is there and new enough."""
    mend = f"pip install '{project}>={least}'"
    try:
        there = version(project)
    except PackageNotFoundError:
        return Finding("versions", project, "not installed", mend, True)
    if _numbers(there) < _numbers(least):
        return Finding("versions", project, f"{there}, older than {least}", mend, True)
    return Finding("versions", project, there)


def _numbers(text: str) -> tuple[int, ...]:
    """A version's leading numbers: 2.13.0+cpu as (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _devices() -> Iterator[Finding]:
    """What hosts can be trained on."""
    topic = "devices"
    try:
        import torch
    except Exception as problem:  # a broken torch fails in many ways
        yield Finding(topic, "torch", f"cannot be imported: {problem}", "pip install torch", True)
        return
    yield Finding(topic, "cpu", f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for number in range(count):
        facts = torch.cuda.get_device_properties(number)
        gigabytes = facts.total_memory / 2**30
        yield Finding(topic, f"cuda:{number}", f"{facts.name}, {gigabytes:.0f} GiB")
    if count == 0 and shutil.which("nvidia-smi"):
        state = "there is an NVIDIA driver, but torch sees no GPU"
        mend = "see https://pytorch.org/get-started for a torch with CUDA"
        yield Finding(topic, "cuda", state, mend)
    elif count == 0:
        yield Finding(topic, "cuda", "no GPU here")
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    state = compiler or "none; compiled hosts need one (--compile)"
    yield Finding(topic, "c++", state, None if compiler else "apt install g++")


def _extras() -> Iterator[Finding]:
    """What is installed beside the core."""
    for extra, modules in EXTRAS.items():
        missing = [module for module in modules if not is_installed(module)]
        present = [_describe(module) for module in modules if module not in missing]
        state = ", ".join([*present, *(f"no {module}" for module in missing)])
        yield Finding("extras", extra, state, install_command(extra) if missing else None)


def _describe(module: str) -> str:
    """A module and its version, where its project says one."""
    project = _PROJECTS.get(module, module)
    try:
        return f"{project} {distribution(project).version}"
    except PackageNotFoundError:
        return project


def _data(root: Path | None) -> Iterator[Finding]:
    """Which data sets that have to be fetched are there."""
    folder = "no data folder was named" if root is None else str(root)
    mend = "export ESPER_DATA=DIR" if root is None else None
    yield Finding("data", "ESPER_DATA", folder, mend)
    for name in SOURCES:
        if is_fetched(name, root):
            yield Finding("data", name, "is there")
        else:
            place = "" if root is not None else " --data-root DIR"
            yield Finding("data", name, "not fetched", f"esper data fetch {name}{place}")
