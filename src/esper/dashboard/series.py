"""Columns of numbers that grow row by row, and fewer rows of them for a chart."""

from array import array
from math import isfinite, nan

from esper.telemetry.events import finite


class Series:
    """Columns of numbers of equal length; NaN is not measured. A column that appears late is NaN before."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.rows = 0
        self.values: array[float] = array("d")
        """row after row"""

    def append(self, **values: float | None) -> None:
        """One row more; a value that is no number is refused before anything has changed."""
        if list(values) == self.names:
            self.values.extend(array("d", [nan if value is None else value for value in values.values()]))
        else:
            self._append_other(values)
        self.rows += 1

    def _append_other(self, values: dict[str, float | None]) -> None:
        names = list(dict.fromkeys((*self.names, *values)))
        found = [values.get(name) for name in names]
        row = array("d", [nan if value is None else value for value in found])
        if len(names) > len(self.names):
            old, width, blank = self.values, len(self.names), array("d", [nan]) * (len(names) - len(self.names))
            self.values = array("d")
            for place in range(self.rows):
                self.values += old[place * width : (place + 1) * width] + blank
            self.names = names
        self.values.extend(row)

    @property
    def columns(self) -> "dict[str, array[float]]":
        return {name: self.values[place :: len(self.names)] for place, name in enumerate(self.names)}

    def column(self, name: str) -> "array[float]":
        """All values of a column; NaN throughout where nothing has that name."""
        if name not in self.names:
            return array("d", [nan]) * self.rows
        return self.values[self.names.index(name) :: len(self.names)]

    def last(self, name: str) -> float | None:
        """The newest value; None where it was not measured."""
        return finite(self.values[self.names.index(name) - len(self.names)]) if name in self.names else None

    def thinned(self, points: int) -> dict[str, list[float | None]]:
        """At most `points` rows: the first, the last, where a column is lowest or highest, and even steps between."""
        columns = self.columns
        kept = range(self.rows) if self.rows <= points else sorted(self._choose(columns, points))
        return {name: [finite(column[row]) for row in kept] for name, column in columns.items()}

    def _choose(self, columns: "dict[str, array[float]]", points: int) -> set[int]:
        wanted = dict.fromkeys((self.rows - 1, 0))
        for column in columns.values():
            known = [row for row in range(self.rows) if isfinite(column[row])]
            wanted |= dict.fromkeys(extreme(known, key=column.__getitem__) for extreme in (min, max) if known)
        chosen = set(list(wanted)[:points])
        room = points - len(chosen)
        return chosen | {step * (self.rows - 1) // (room + 1) for step in range(1, room + 1)}
