"""A run as tables of plain rows: for Python, CSV, JSON and pandas."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.dashboard.reader import records_of
from esper.leyline.errors import SaveError, UnknownNameError
from esper.leyline.extras import needs
from esper.storage import runfolder
from esper.storage.rows import flat, to_csv

if TYPE_CHECKING:
    import pandas

Row = dict[str, Any]
"""One line of a table; its columns are those of every row of the table, None where unknown."""

RESULTS = "results"
_EVENTS_BY_TABLE = {"epochs": "HostEpoch", "rounds": "RoundFinished"}
_FINISHED = "ArmFinished"


class RunTables:
    """What a run folder has recorded, as far as it is written; `esper.read_run` makes one.

    The tables are `results` (a row per host, or per arm and host seed of a comparison), `epochs` (a
    row per host and epoch), `rounds` (of `esper ppo`), and one for each kind of event, by its name.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], tables: Mapping[str, list[Row]]):
        self.folder = folder
        self.config = dict(config)
        """what the run was started with"""
        self._tables = dict(tables)

    def __repr__(self) -> str:
        counts = ", ".join(f"{name} {len(rows)}" for name, rows in self._tables.items())
        return f"run {self.folder}: {counts or 'no rows yet'}"

    @property
    def names(self) -> list[str]:
        """The tables that have rows."""
        return list(self._tables)

    def rows(self, table: str = RESULTS) -> list[Row]:
        """Return a table as plain rows."""
        if table not in self._tables and table not in (RESULTS, *_EVENTS_BY_TABLE):
            raise UnknownNameError("table", table, self._tables)
        return [dict(row) for row in self._tables.get(table, ())]

    def csv(self, table: str = RESULTS) -> str:
        """Return a table as CSV with one line of names; empty where it has no rows."""
        return to_csv(self.rows(table))

    def frame(self, table: str = RESULTS) -> "pandas.DataFrame":
        """Return a table as a pandas frame; needs the extra `[pandas]`, `rows` does not."""
        with needs("pandas", "frame"):
            import pandas
        return pandas.DataFrame(self.rows(table))


def read_run(folder: str | Path) -> RunTables:
    """Read a run folder, finished or not, of any command or of `garden.record`.

    Nothing is written to it, and no torch is loaded.

    Args:
        folder: what `--out` or `garden.record` named.

    >>> import esper, torch
    >>> host = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    >>> garden = esper.grow(host, slots=["0"], example=torch.zeros(3, 4))
    >>> garden.attach(torch.optim.SGD(garden.parameters(), lr=0.1))
    >>> garden.record("runs/mine")
    >>> _ = garden.step(lambda: torch.ones(8))
    >>> run = esper.read_run("runs/mine")
    >>> [(row["epoch"], row["held_out_loss"]) for row in run.rows("epochs")]
    [(1, 1.0)]
    >>> run.csv("epochs").split(",")[:3]
    ['host', 'epoch', 'held_out_loss']
    >>> garden.record(None)
    """
    folder = Path(folder)
    path = folder / runfolder.CONFIG
    if not path.is_file():
        raise SaveError(f"{folder} is not a run folder: it has no {path.name}. Name a run's --out.")
    config = runfolder.read_json(path)
    by_kind: dict[str, list[Row]] = {}
    for record in records_of(folder):
        kind = record.pop("type", None)
        if isinstance(kind, str):
            by_kind.setdefault(kind, []).append(dict(flat(record)))
    recorded = {RESULTS: _results(folder) or by_kind.get(_FINISHED, [])}
    for table, kind in _EVENTS_BY_TABLE.items():
        recorded[table] = by_kind.get(kind, [])
    recorded |= by_kind
    tables = {name: _even(rows) for name, rows in recorded.items() if rows}
    return RunTables(folder=folder, config=config, tables=tables)


def _results(folder: Path) -> list[Row]:
    """The rows of the file of results, if the run has come to any."""
    path = folder / runfolder.RESULTS
    if not path.is_file():
        return []
    end = runfolder.read_json(path)
    rows = end.get("rows") or end.get("results")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise SaveError(f"{path} holds no rows. Restore it, or look at another run.")
    return [dict(flat({key: row[key] for key in row if key != "type"})) for row in rows]


def _even(rows: Sequence[Row]) -> list[Row]:
    """The same rows, each with the columns of all, in the order in which these appear."""
    columns: dict[str, None] = {}
    for row in rows:
        columns |= dict.fromkeys(row)
    return [{column: row.get(column) for column in columns} for row in rows]
