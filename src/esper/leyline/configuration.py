"""How settings are read and checked: plain values in, frozen values out, one line per mistake.

Which settings there are is said by the packages that use them.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from esper.leyline.errors import CONTROLS, SettingError, plain_number
from esper.leyline.registry import in_order

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass as _ModelClass
else:  # which is not public
    _ModelClass = type(BaseModel)

MOST = 10**9
"""The largest number where a setting names no limit of its own."""
_LONGEST = 2**20  # letters of the longest file of settings


class _Section(_ModelClass):
    """The class of sections, which are made with numbers of numpy and torch too.

    Validators of fields could do it, but then lists in files would no longer be read as tuples.
    """

    def __call__(self, *args: Any, **values: Any) -> Any:
        return super().__call__(
            *args, **{name: plain_number(value) for name, value in values.items()}
        )


class Configuration(BaseModel, metaclass=_Section):
    """A section of settings.

    A field has its default, its bounds and its help; unknown keys are refused.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @model_validator(mode="after")
    def _values_are_sane(self) -> Self:
        """Refuse numbers beyond all sense and texts that a terminal would obey."""
        for name, value in self:
            is_bound = any(hasattr(rule, "le") for rule in type(self).model_fields[name].metadata)
            for entry in _entries(value):
                if isinstance(entry, int | float) and abs(entry) > MOST and not is_bound:
                    raise ValueError(f"{name} is {str(entry)[:20]}; numbers are at most {MOST:,}.")
                if isinstance(entry, str | Path) and CONTROLS.search(str(entry)):
                    raise ValueError(f"{name} is {str(entry)!r}; a text has no control characters.")
        return self

    @classmethod
    def of(cls, values: Any, source: str = "the configuration") -> Self:
        """A checked configuration from plain values."""
        if not isinstance(values, dict):
            kind = type(values).__name__
            raise SettingError(f"{source} holds a {kind}; it must be an object of keys and values.")
        # through JSON, so that lists and paths are read as a file of settings has them
        text = json.dumps(values, default=_as_json)
        try:
            settings = cls.model_validate_json(text)
        except ValidationError as problem:
            mistakes = "; ".join(_explain(cls, problem.errors()))
            raise SettingError(f"{source}: {mistakes}") from None
        settings.check()
        return settings

    @classmethod
    def from_json_path(cls, path: str | Path, notes: Collection[str] = ()) -> Self:
        """A checked configuration from a JSON file; keys named in `notes` are passed over."""
        values = read_json(path)
        if isinstance(values, dict):
            values = {key: value for key, value in values.items() if key not in notes}
        return cls.of(values, str(path))

    def check(self) -> None:
        """Refuse what no single field shows: unknown names, values that contradict each other."""

    def with_changes(self, changes: Sequence[tuple[str, Any]], source: str) -> Self:
        """The same with some leaves changed, named by dotted keys such as ppo.lr."""
        values = self.model_dump(mode="json")
        for key, value in changes:
            path = key.split(".")
            section: Any = values
            for name in path[:-1]:
                section = section.get(name) if isinstance(section, dict) else None
            if not isinstance(section, dict):
                raise SettingError(f"{source}: {_unknown(type(self), path)}")
            section[path[-1]] = value
        return type(self).of(values, source)

    def value(self, key: str) -> Any:
        """A leaf or a section by its dotted key."""
        return attrgetter(key)(self)


def _as_json(value: Any) -> Any:
    """What JSON has no form for.

    A set is a list in a fixed order, a number of numpy or torch one of Python, all else its text.
    """
    if isinstance(value, set | frozenset):
        return list(in_order(value))
    number = plain_number(value)
    return str(value) if number is value else number


def _entries(value: Any) -> Iterable[Any]:
    """The single values of a setting: of a dict or tuple its entries, else the value itself."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, tuple) else (value,)


def read_json(path: str | Path) -> Any:
    """What a file of settings holds, not checked yet; a file that is no JSON is refused."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_LONGEST + 1)
        if len(text) > _LONGEST:
            raise ValueError(f"it has more than {_LONGEST:,} letters")
        return json.loads(text, object_pairs_hook=_object_of)
    except SettingError as problem:
        raise SettingError(f"{path}: {problem}") from None
    except OSError as problem:
        raise SettingError(
            f"cannot read the configuration {path}: {problem.strerror}."
        ) from problem
    except (ValueError, RecursionError) as problem:
        raise SettingError(
            f"{path} is not JSON: {problem}. Write an object of keys and values."
        ) from problem


def _object_of(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; one that has a key twice is refused, since only one value would hold."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise SettingError(
                f"the key {key!r} is there twice, and only one of them can hold. Leave one out."
            )
        values[key] = value
    return values


def read_setting(text: str) -> tuple[str, Any]:
    """`key=value` from the command line."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise SettingError(f"--set {text!r} is not KEY=VALUE; write it like --set task.epochs=30.")
    return key, read_value(value)


def read_value(text: str) -> Any:
    """JSON where it can be, else the text itself."""
    try:
        return json.loads(text, object_pairs_hook=_object_of)
    except SettingError:
        raise
    except (ValueError, RecursionError):
        return text


def leaves(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Every leaf field by its dotted key."""
    fields: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            fields |= leaves(inner, f"{prefix}{name}.")
        else:
            fields[prefix + name] = field
    return fields


def _explain(model: type[BaseModel], errors: Sequence[Any]) -> Iterator[str]:
    """A few words for each mistake; of a list with a wrong entry, the entry alone is named."""
    locations = [error["loc"] for error in errors]
    for error in errors:
        location = error["loc"]
        if any(_is_inside(entry, location) for entry in locations):
            continue
        path = [str(part) for part in location]
        key = ".".join(path)
        if error["type"] == "extra_forbidden":
            yield _unknown(model, path)
        elif error["type"] == "value_error":
            reason = str(error["ctx"]["error"])
            yield f"{key}: {reason}" if key else reason
        else:
            value = json.dumps(error["input"])
            message = error["msg"]
            yield f"{key} is {value}: {message[0].lower()}{message[1:]}"


def _is_inside(inner: Sequence[Any], outer: Sequence[Any]) -> bool:
    """Whether a mistake's location is an entry of another mistake's location."""
    return len(inner) > len(outer) and inner[: len(outer)] == outer


def _unknown(model: type[BaseModel], path: Sequence[str]) -> str:
    """What to say of a key that no section has: the nearest known one, or all of its section."""
    key = ".".join(path)
    section = ".".join(path[:-1])
    leaf = path[-1]
    known = list(leaves(model))
    # the sections themselves, each once
    known += dict.fromkeys(name.rpartition(".")[0] for name in known if "." in name)
    siblings: dict[str, str] = {}
    for name in known:
        parent, _, last = name.rpartition(".")
        if parent == section:
            siblings[last] = name
    near = [siblings[name] for name in get_close_matches(leaf, siblings, n=1)]
    near += [name for name in known if name.endswith(f".{leaf}")]
    if not siblings or not section:
        near += get_close_matches(key, known, n=1)
    if near:
        return f"unknown key {key!r}. Did you mean {near[0]!r}?"
    return f"unknown key {key!r}. Known: {', '.join(siblings.values() or known)}."
