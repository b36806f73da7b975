"""A user's own code: what `esper --import` brings in, and whether a run still has it."""

import sys
from collections.abc import Mapping
from hashlib import file_digest
from importlib import import_module, invalidate_caches
from importlib.util import find_spec
from pathlib import Path
from traceback import extract_tb

from esper.leyline.errors import SettingError

IMPORTED: dict[str, str] = {}
"""What `--import` brought in: file or module -> SHA-256 of the file. Runs note it."""


def import_own(target: str) -> None:
    """Import a file or a module; whatever goes wrong in it is one error that names its line."""
    path = Path(target)
    is_file = target.endswith(".py")
    if is_file and not path.is_file():
        raise SettingError(
            f"--import {target}: there is no such file. Name a Python file, or a module without "
            f".py."
        )
    folder = str(path.resolve().parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)  # at the end, so that nothing else is hidden by it
    invalidate_caches()
    name = _module_name(target)
    origin = _find_origin(name, target)
    if origin is None:
        raise SettingError(
            f"--import {target}: there is no such module. Name a module that Python can import."
        )
    if is_file and origin.resolve() != path.resolve():
        raise SettingError(
            f"--import {target}: {name} is another module already ({origin}). Rename the file."
        )
    _import(name, target, origin)
    IMPORTED[path.name if is_file else target] = _digest(origin)


def _module_name(target: str) -> str:
    return Path(target).stem if target.endswith(".py") else target


def _find_origin(name: str, target: str) -> Path | None:
    """The file that a module would be imported from; None if there is no such module."""
    try:
        spec = find_spec(name)
    except ValueError:  # a module that is loaded and does not say where from
        return None
    except Exception as problem:
        # `name` says which module was not there: a package of the target, or one that it imports
        missing = getattr(problem, "name", None)
        if missing and name.startswith(missing):
            return None
        raise SettingError(
            f"--import {target}: it failed with {type(problem).__name__}: {problem}"
        ) from problem
    if spec is None or not spec.origin:
        return None
    return Path(spec.origin)


def _import(name: str, target: str, origin: Path) -> None:
    """Import a module; what fails in it is an error that names the line of `origin`."""
    try:
        import_module(name)
    except (Exception, SystemExit) as problem:
        frames = extract_tb(problem.__traceback__)
        lines = [
            f"line {frame.lineno} ({frame.line})"
            for frame in frames
            if frame.filename == str(origin)
        ]
        where = lines[-1] if lines else "it"
        message = " ".join(str(problem).split())
        raise SettingError(
            f"--import {target}: {where} failed with {type(problem).__name__}: {message}"
        ) from problem


def require_imported(needed: Mapping[str, str]) -> None:
    """Refuse to continue a run without the files that it was started with.

    They are code, so they are imported only when the user names them.
    """
    for name, digest in needed.items():
        file = getattr(sys.modules.get(_module_name(name)), "__file__", None)
        if file is None:
            raise SettingError(
                f"the run was started with --import {name}. Name it again: esper --import {name} "
                f"..."
            )
        if _digest(Path(file)) != digest:
            raise SettingError(
                f"{file} is not what the run was started with. Restore it, or choose another --out."
            )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
