"""Rows of plain values as a file that every program reads."""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows of the same columns as CSV with one line of names.

    Lists are written as JSON, and what is inside of a row has columns of its own. `type`, which
    says what kind of record a row was, is left out.
    """
    if not rows:
        return ""
    rows = [dict(flat(row)) for row in rows]
    columns = [name for name in rows[0] if name != "type"]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _cell(row[name]) for name in columns})
    return text.getvalue()


def flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A record's values by name; those of a record in it by both names, as in `ops.WAIT`."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list) else value
