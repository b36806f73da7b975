"""Rows of plain values as a file that every program reads."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows of the same columns as CSV with one line of names.

    Lists are written as JSON. `type`, which says what kind of record a row was, is left out.
    """
    if not rows:
        return ""
    columns = [name for name in rows[0] if name != "type"]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _cell(row[name]) for name in columns})
    return text.getvalue()


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list) else value
