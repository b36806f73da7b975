"""How names enter a registry, and how the settings behind a name ("rule:share=0.5") are read.

The registries themselves are with the things they list.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
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


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Names in the order given.

    A set has none of its own, and Python orders it anew in every process: its names are sorted.

    >>> in_order({"norm", "mlp"}), in_order(["norm", "mlp"])
    (('mlp', 'norm'), ('norm', 'mlp'))
    """
    return tuple(sorted(names) if isinstance(names, set | frozenset) else names)


def registering(
    known: dict[str, Any], what: str, reserved: Sequence[str] = ()
) -> Callable[..., Any]:
    """The decorator of a registry: `@it("name")` enters what it stands on.

    `@it("name", replace=True)` takes the place of an entry. Names in `reserved` are refused.
    """

    def register(name: str, *, replace: bool = False) -> Callable[[Value], Value]:
        """Enter a class or a function under `name`; its parameters, without `facts`, are settings.

        A frozen dataclass has `facts` as its first field, then its settings with defaults.
        """
        if not name.isidentifier() or name in reserved:
            raise SettingError(
                f"a {what} cannot be called {name!r}; take an identifier not in {list(reserved)}."
            )
        return lambda build: enter(known, f"{what} {name!r}", name, build, replace)

    return register


def read_settings(name: str, parts: Sequence[str], build: Callable[..., Any]) -> dict[str, Any]:
    """Checked settings for `build` from texts like "share=0.5", each once; + joins lists."""
    hints = get_type_hints(build, include_extras=True)
    types = {
        key: hints.get(key, type(parameter.default))
        for key, parameter in signature(build).parameters.items()
        if key != "facts"
    }
    settings: dict[str, Any] = {}
    for part in parts:
        key, _, text = part.partition("=")
        if key not in types:
            raise UnknownNameError(
                f"setting of {name}", key, types, f"Write {name}:KEY=VALUE:KEY=VALUE."
            )
        if key in settings:
            raise SettingError(
                f"{name} has {key} twice, and only one of them can hold. Leave one out."
            )
        value = text.split("+") if _is_list(types[key]) else text
        try:
            settings[key] = TypeAdapter(types[key]).validate_python(value)
        except ValidationError as problem:
            reason = problem.errors()[0]["msg"]
            raise SettingError(
                f"{key} of {name} is {text!r}: {reason[0].lower()}{reason[1:]}."
            ) from None
    return settings


def _is_list(hint: Any) -> bool:
    """Whether a type is a sequence of things, with notes around it or None beside it."""
    origin = get_origin(hint)
    is_sequence = isinstance(origin, type) and issubclass(origin, Sequence)
    return is_sequence or any(_is_list(inner) for inner in get_args(hint))
