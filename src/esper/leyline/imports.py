"""A user's own code: what `esper --import` brings in."""

import sys
from collections.abc import Mapping
from hashlib import file_digest
from importlib import import_module, invalidate_caches
from importlib.util import find_spec
from pathlib import Path
from traceback import extract_tb

from esper.leyline.errors import SettingError

# What `--import` brought in: file or module -> SHA-256 of the file. Runs note it.
IMPORTED: dict[str, str] = {}


def import_own(given: str) -> None:
    """Import a file or a module; whatever goes wrong in it is one error that names its line."""
    path, is_file = Path(given), given.endswith(".py")
    name = _module_name(given)
    if is_file and not path.is_file():
        raise SettingError(
            f"--import {given}: there is no such file. Name a Python file, or a module without .py."
        )
    if (folder := str(path.resolve().parent if is_file else Path.cwd())) not in sys.path:
        sys.path.append(folder)  # at the end, so that nothing else is hidden by it
    invalidate_caches()
    try:
        spec = find_spec(name)
    except Exception as problem:  # of a package that does not exist, or that fails
        if not isinstance(problem, ValueError) and not name.startswith(
            getattr(problem, "name", None) or "?"
        ):
            raise SettingError(
                f"--import {given}: it failed with {type(problem).__name__}: {problem}"
            ) from problem
        spec = None
    origin = Path((spec and spec.origin) or "")
    if not origin.name or (is_file and origin.resolve() != path.resolve()):
        found = (
            f"{name} is another module already ({origin})"
            if origin.name
            else "there is no such module"
        )
        raise SettingError(
            f"--import {given}: {found}. Rename the file, or name a module that Python can import."
        )
    try:
        import_module(name)
    except (Exception, SystemExit) as problem:
        frames = [at for at in extract_tb(problem.__traceback__) if at.filename == str(origin)]
        lines = [f"line {at.lineno} ({at.line})" for at in frames]
        where, said = (lines or ["it"])[-1], " ".join(str(problem).split())
        raise SettingError(
            f"--import {given}: {where} failed with {type(problem).__name__}: {said}"
        ) from problem
    IMPORTED[path.name if is_file else given] = _digest(origin)


def _module_name(given: str) -> str:
    return Path(given).stem if given.endswith(".py") else given


def require_imported(needed: Mapping[str, str]) -> None:
    """Refuse to go on without the files that a run was started with.

    They are code, so nobody imports them unasked.
    """
    for name, known in needed.items():
        if (file := getattr(sys.modules.get(_module_name(name)), "__file__", None)) is None:
            raise SettingError(
                f"the run was started with --import {name}. Name it again: esper "
                f"--import {name} ..."
            )
        if _digest(Path(file)) != known:
            raise SettingError(
                f"{file} is not what the run was started with. Restore it, or choose another --out."
            )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
