"""Registries of names that are taken, and the settings that a name carries."""

from collections.abc import Callable, Hashable, Sequence
from inspect import signature
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from esper.leyline.errors import NameTakenError, SettingError, UnknownNameError

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def enter(
    known: dict[Key, Value], what: str, key: Key, value: Value, replace: bool = False
) -> Value:
    """Put something into a registry.

    A name that is taken, by Esper or by you, is refused unless you say `replace`.
    """
    if key in known and not replace:
        raise NameTakenError(f"{what} already exists. Choose another name, or say replace=True.")
    known[key] = value
    return value


def registering(
    known: dict[str, Any], what: str, reserved: Sequence[str] = ()
) -> Callable[..., Any]:
    """A decorator for a registry:

    `@it("name")` or `@it("name", replace=True)` enters what it stands on.
    """

    def register(name: str, *, replace: bool = False) -> Callable[[Value], Value]:
        """Decorator:

        `@rule("mine")` enters a frozen dataclass, `facts` first, then its settings, or a function.
        """
        if not name.isidentifier() or name in reserved:
            raise SettingError(
                f"a {what} cannot be called {name!r}; take an identifier not in {list(reserved)}."
            )
        return lambda build: enter(known, f"{what} {name!r}", name, build, replace)

    return register


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
