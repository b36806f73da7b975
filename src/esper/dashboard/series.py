"""Columns of numbers that grow by rows, and their thinning for a chart. No events, no files."""

from array import array
from math import isfinite, nan

from esper.telemetry.events import finite


class Series:
    """Columns of numbers of equal length; NaN is not measured.

    A column that appears late is NaN before.
    """

    def __init__(self) -> None:
        self.columns: dict[str, array[float]] = {}
        self.rows = 0

    def append(self, **values: float | None) -> None:
        """Add one row; a value that is no number is refused before anything has changed."""
        row = array("d", [nan if value is None else value for value in values.values()])
        if list(values) != list(self.columns):
            for name in values:
                self.columns.setdefault(name, array("d", [nan]) * self.rows)
            known = dict(zip(values, row, strict=True))
            row = array("d", [known.get(name, nan) for name in self.columns])
        for column, value in zip(self.columns.values(), row, strict=True):
            column.append(value)
        self.rows += 1

    def column(self, name: str) -> "array[float]":
        """Return all values of a column; NaN throughout where nothing has that name."""
        return self.columns.get(name) or array("d", [nan]) * self.rows

    def last(self, name: str) -> float | None:
        """Return the newest value; None where it was not measured."""
        if name not in self.columns:
            return None
        return finite(self.columns[name][-1])

    def thinned(self, points: int) -> dict[str, list[float | None]]:
        """Return at most `points` rows, column by column.

        These are the first, the last, those where a column is lowest or highest, and even steps
        between.
        """
        rows = range(self.rows) if self.rows <= points else sorted(self._choose(points))
        return {
            name: [finite(column[row]) for row in rows] for name, column in self.columns.items()
        }

    def _choose(self, points: int) -> set[int]:
        # a dict keeps the order: where there is no room for all, the ends come first
        wanted = dict.fromkeys((self.rows - 1, 0))
        for column in self.columns.values():
            measured = [row for row in range(self.rows) if isfinite(column[row])]
            if measured:
                wanted[min(measured, key=column.__getitem__)] = None
                wanted[max(measured, key=column.__getitem__)] = None
        chosen = set(list(wanted)[:points])
        room = points - len(chosen)
        steps = {step * (self.rows - 1) // (room + 1) for step in range(1, room + 1)}
        return chosen | steps
