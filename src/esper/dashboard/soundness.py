"""Which event records can be trusted to have what their type says. No view, no drawing."""

from collections.abc import Mapping
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from esper.telemetry.events import ACTION_TAKEN, EVENT_TYPES

Record = Mapping[str, Any]

_DEBUG_KINDS = (ACTION_TAKEN, "UPDATE_DUMP")


def _options(annotation: Any) -> set[type]:
    """Return the types that a field's value may have; a whole number is a float as well."""
    options = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    kinds = {get_origin(option) or option for option in options}
    return kinds | {int} if float in kinds else kinds


def _field_kinds(event: type) -> dict[str, set[type]]:
    """Return the fields of a record of this event, with the types that each may have."""
    fields: dict[str, set[type]] = {"type": {str}}
    for name, annotation in get_type_hints(event).items():
        fields[name] = _options(annotation)
    return fields


_FIELDS = {name: _field_kinds(event) for name, event in EVENT_TYPES.items()}


def is_sound(record: Record) -> bool:
    """Whether a record has the fields of its type, each with a value that may be there."""
    kind = record.get("type")
    fields = _FIELDS.get(str(kind))
    if fields is None or record.keys() != fields.keys():
        return kind in _DEBUG_KINDS
    return all(type(value) in fields[name] for name, value in record.items())
