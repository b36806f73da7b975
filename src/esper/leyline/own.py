"""A user's own code: what `esper --import` brings in, names that are taken, settings that a name carries."""

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from importlib import import_module, invalidate_caches
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from traceback import extract_tb
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from esper.leyline.errors import NameTakenError, SettingError, UnknownNameError
from esper.leyline.files import digest

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
IMPORTED: dict[
    str, str
] = {}  # What `--import` brought in: file or module -> SHA-256 of the file. Runs note it.


def enter(
    known: dict[Key, Value], what: str, key: Key, value: Value, replace: bool = False
) -> Value:
    """Put something into a registry. A name that is taken, by Esper or by you, is refused unless you say `replace`."""
    if key in known and not replace:
        raise NameTakenError(f"{what} already exists. Choose another name, or say replace=True.")
    known[key] = value
    return value


def registering(
    known: dict[str, Any], what: str, reserved: Sequence[str] = ()
) -> Callable[..., Any]:
    """A decorator for a registry: `@it("name")` or `@it("name", replace=True)` enters what it stands on."""

    def register(name: str, *, replace: bool = False) -> Callable[[Value], Value]:
        """Decorator: `@rule("mine")` enters a frozen dataclass, `facts` first, then its settings, or a function."""
        if not name.isidentifier() or name in reserved:
            raise SettingError(
                f"a {what} cannot be called {name!r}; take an identifier not in {list(reserved)}."
            )
        return lambda build: enter(known, f"{what} {name!r}", name, build, replace)

    return register


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
    IMPORTED[path.name if is_file else given] = digest(origin)


def _module_name(given: str) -> str:
    return Path(given).stem if given.endswith(".py") else given


def require_imported(needed: Mapping[str, str]) -> None:
    """Refuse to go on without the files that a run was started with. They are code, so nobody imports them unasked."""
    for name, known in needed.items():
        if (file := getattr(sys.modules.get(_module_name(name)), "__file__", None)) is None:
            raise SettingError(
                f"the run was started with --import {name}. Name it again: esper --import {name} ..."
            )
        if digest(Path(file)) != known:
            raise SettingError(
                f"{file} is not what the run was started with. Restore it, or choose another --out."
            )


def read_settings(name: str, parts: Sequence[str], build: Callable[..., Any]) -> dict[str, Any]:
    """Checked settings for `build` from texts like "share=0.5"; lists are joined by +."""
    hints = get_type_hints(build, include_extras=True)
    taken = signature(build).parameters.items()
    known = {key: hints.get(key, type(one.default)) for key, one in taken if key != "facts"}
    found: dict[str, Any] = {}
    for part in parts:
        key, _, text = part.partition("=")
        if key not in known:
            raise UnknownNameError(
                f"setting of {name}", key, known, f"Write {name}:KEY=VALUE:KEY=VALUE."
            )
        try:
            found[key] = TypeAdapter(known[key]).validate_python(
                text.split("+") if _is_list(known[key]) else text
            )
        except ValidationError as problem:
            said = problem.errors()[0]["msg"]
            raise SettingError(
                f"{key} of {name} is {text!r}: {said[0].lower()}{said[1:]}."
            ) from None
    return found


def _is_list(hint: Any) -> bool:
    """Whether a type is a sequence of things, with notes around it or None beside it."""
    origin = get_origin(hint)
    is_sequence = isinstance(origin, type) and issubclass(origin, Sequence)
    return is_sequence or any(_is_list(inner) for inner in get_args(hint))
