"""The commands that look at runs: runs, watch, serve, report. They change nothing."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

Folder = Annotated[Path, typer.Argument(help="Folder of runs.", show_default=True)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Run = Annotated[Path, typer.Argument(help="Run folder.", show_default=False)]


def runs(folder: Folder = Path("runs"), as_json: AsJson = False) -> None:
    """List the runs in a folder."""
    from esper.cli.console.tables import runs_table
    from esper.dashboard.reader import RunReader, find_runs, summarise

    readers = [RunReader(path) for path in find_runs(folder)]
    for reader in readers:
        reader.refresh()
    found = [summarise(reader) for reader in readers]
    if as_json:
        print(json.dumps([asdict(summary) for summary in found], indent=1, default=str, allow_nan=False))
    else:
        Console().print(runs_table(found))


def watch(run: Run) -> None:
    """Look at a run in the terminal, live or finished."""
    from esper.dashboard.watch import watch as show

    show(run)


def serve(
    folder: Folder = Path("runs"),
    host: Annotated[str, typer.Option(help="Address to listen on; any but 127.0.0.1 needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8765,
    token: Annotated[str | None, typer.Option(help="What a browser must know; made up if not given.")] = None,
) -> None:
    """Show runs in a browser, live."""
    from esper.dashboard.server import serve as start

    start(folder, host, port, token)


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.", show_default=False)],
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
) -> None:
    """Write one HTML page about one or more runs."""
    from esper.dashboard.report import write_report

    write_report(runs, out)
    print(f"wrote {out}")
