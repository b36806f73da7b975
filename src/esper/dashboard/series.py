"""Columns of numbers that grow row by row, and fewer rows of them for a chart."""

from array import array
from math import isfinite, nan

from esper.telemetry.events import finite


class Series:
    """Columns of numbers of equal length; NaN is not measured. A column that appears late is NaN before."""

    def __init__(self) -> None:
        self.columns: dict[str, array[float]] = {}
        self.rows = 0

    def append(self, **values: float | None) -> None:
        """One row more; a value that is no number is refused before anything has changed."""
        row = array("d", [nan if value is None else value for value in values.values()])
        if list(values) != list(self.columns):
            for name in values:
                self.columns.setdefault(name, array("d", [nan]) * self.rows)
            row = array("d", [dict(zip(values, row, strict=True)).get(name, nan) for name in self.columns])
        for column, value in zip(self.columns.values(), row, strict=True):
            column.append(value)
        self.rows += 1

    def column(self, name: str) -> "array[float]":
        """All values of a column; NaN throughout where nothing has that name."""
        return self.columns.get(name) or array("d", [nan]) * self.rows

    def last(self, name: str) -> float | None:
        """The newest value; None where it was not measured."""
        return finite(self.columns[name][-1]) if name in self.columns else None

    def thinned(self, points: int) -> dict[str, list[float | None]]:
        """At most `points` rows: the first, the last, where a column is lowest or highest, and even steps between."""
        kept = range(self.rows) if self.rows <= points else sorted(self._choose(points))
        return {name: [finite(column[row]) for row in kept] for name, column in self.columns.items()}

    def _choose(self, points: int) -> set[int]:
        wanted = dict.fromkeys((self.rows - 1, 0))
        for column in self.columns.values():
            known = [row for row in range(self.rows) if isfinite(column[row])]
            wanted |= dict.fromkeys(extreme(known, key=column.__getitem__) for extreme in (min, max) if known)
        chosen = set(list(wanted)[:points])
        room = points - len(chosen)
        return chosen | {step * (self.rows - 1) // (room + 1) for step in range(1, room + 1)}
