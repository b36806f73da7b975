"""Settings as frozen values:

read from plain values, every mistake in one clear line. Which settings: elsewhere.
"""

import json
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from esper.leyline.errors import CONTROLS, SettingError

MOST, _LONGEST = (
    10**9,
    2**20,
)  # Largest number where a setting names none; letters of the longest file of settings.


class Configuration(BaseModel):
    """A section of settings.

    A field has its default, its bounds and its help; unknown keys are refused.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @model_validator(mode="after")
    def _values_are_sane(self) -> Self:
        for name, value in self:
            is_bound = any(hasattr(rule, "le") for rule in type(self).model_fields[name].metadata)
            for part in (
                value.values()
                if isinstance(value, dict)
                else value
                if isinstance(value, tuple)
                else (value,)
            ):
                if isinstance(part, int | float) and abs(part) > MOST and not is_bound:
                    raise ValueError(f"{name} is {str(part)[:20]}; numbers are at most {MOST:,}.")
                if isinstance(part, str | Path) and CONTROLS.search(str(part)):
                    raise ValueError(f"{name} is {str(part)!r}; a text has no control characters.")
        return self

    @classmethod
    def of(cls, values: Any, source: str = "the configuration") -> Self:
        """A checked configuration from plain values."""
        if not isinstance(values, dict):
            raise SettingError(
                f"{source} holds a {type(values).__name__}; it must be an object of "
                f"keys and values."
            )
        try:
            found = cls.model_validate_json(
                json.dumps(values, default=str)
            )  # lists and paths as JSON has them
        except ValidationError as problem:
            raise SettingError(f"{source}: {'; '.join(_explain(cls, problem.errors()))}") from None
        found.check()
        return found

    def check(self) -> None:
        """Refuse what single fields cannot tell:

        names that do not exist, combinations that make no sense.
        """

    def with_changes(self, changes: Sequence[tuple[str, Any]], source: str) -> Self:
        """The same with some leaves changed, named by dotted keys such as ppo.lr."""
        values = self.model_dump(mode="json")
        for key, value in changes:
            *parents, leaf = key.split(".")
            place: Any = values
            for parent in parents:
                place = place.get(parent) if isinstance(place, dict) else None
            if not isinstance(place, dict):
                raise SettingError(f"{source}: {_unknown(type(self), key.split('.'))}")
            place[leaf] = value
        return type(self).of(values, source)

    def value(self, key: str) -> Any:
        """A leaf or a section by its dotted key."""
        return attrgetter(key)(self)


def read_json(path: str | Path) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            if len(text := file.read(_LONGEST + 1)) > _LONGEST:
                raise ValueError(f"it has more than {_LONGEST:,} letters")
        return json.loads(text)
    except OSError as problem:
        raise SettingError(
            f"cannot read the configuration {path}: {problem.strerror}."
        ) from problem
    except (ValueError, RecursionError) as problem:
        raise SettingError(
            f"{path} is not JSON: {problem}. Write an object of keys and values."
        ) from problem


def read_setting(text: str) -> tuple[str, Any]:
    """`key=value` from the command line."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise SettingError(f"--set {text!r} is not KEY=VALUE; write it like --set task.epochs=30.")
    return key, read_value(value)


def read_value(text: str) -> Any:
    """JSON where it can be, else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def leaves(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Every leaf field by its dotted key."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found |= leaves(inner, f"{prefix}{name}.")
        else:
            found[prefix + name] = field
    return found


def _explain(model: type[BaseModel], errors: Sequence[Any]) -> Iterator[str]:
    """A few words for each mistake; of a list with a wrong entry, the entry alone is named."""
    for error in errors:
        path, message = [str(part) for part in error["loc"]], error["msg"]
        if any(
            len(other["loc"]) > len(path) and other["loc"][: len(path)] == error["loc"]
            for other in errors
        ):
            continue
        if error["type"] == "extra_forbidden":
            yield _unknown(model, path)
        elif error["type"] == "value_error":
            yield ": ".join(filter(None, [".".join(path), str(error["ctx"]["error"])]))
        else:
            value = json.dumps(error["input"])
            yield f"{'.'.join(path)} is {value}: {message[0].lower()}{message[1:]}"


def _unknown(model: type[BaseModel], path: Sequence[str]) -> str:
    key, section = ".".join(path), ".".join(path[:-1])
    known = [
        *leaves(model),
        *{leaf.rpartition(".")[0]: None for leaf in leaves(model) if "." in leaf},
    ]
    siblings = {
        name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == section
    }
    near = [siblings[name] for name in get_close_matches(path[-1], siblings, n=1)]
    near += [name for name in known if name.endswith(f".{path[-1]}")]
    near += [] if siblings and section else get_close_matches(key, known, n=1)
    hint = (
        f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(siblings.values() or known)}."
    )
    return f"unknown key {key!r}. {hint}"
