"""The commands that look: list, runs, watch, serve and report.

They change nothing.
"""

from collections.abc import Mapping
from dataclasses import asdict
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from esper.cli.console import names_table, print_json, runs_table, tasks_table
from esper.dashboard.comparisons import open_folder, summarise_folder
from esper.dashboard.reader import find_runs
from esper.dashboard.tables import RESULTS, read_run
from esper.leyline.errors import EsperError, printable

if TYPE_CHECKING:
    from esper.runtime.tasks.task import Task

Folder = Annotated[Path, typer.Argument(help="Folder of runs.", show_default=True)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
DataRoot = Annotated[
    Path | None,
    typer.Option(envvar="ESPER_DATA", help="Folder that holds the data sets.", show_default=False),
]


def runs(folder: Folder = Path("runs"), as_json: AsJson = False) -> None:
    """List the runs and comparisons in a folder."""
    summaries = []
    for path in find_runs(folder):
        reader = open_folder(path)
        reader.refresh()
        summaries.append(summarise_folder(reader))
    if as_json:
        rows = [asdict(summary) for summary in summaries]
        print_json(rows)
    else:
        Console().print(runs_table(summaries))


def watch(run: Annotated[Path, typer.Argument(help="Run folder.", show_default=False)]) -> None:
    """Look at a run in the terminal, live or finished."""
    from esper.dashboard.watch import watch as show

    show(run)


def serve(
    folder: Folder = Path("runs"),
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but 127.0.0.1 needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8765,
    token: Annotated[
        str | None, typer.Option(help="What a browser must know; made up if not given.")
    ] = None,
) -> None:
    """Show runs in a browser, live."""
    from esper.dashboard.server import serve as start

    start(folder, host, port, token)


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs or comparisons.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
    as_json: AsJson = False,
) -> None:
    """Write one HTML page about runs and comparisons."""
    from esper.dashboard.report import write_report

    write_report(runs, out)
    if as_json:
        print_json({"report": out, "runs": runs})
    else:
        print(f"wrote {printable(str(out))}")


def table(
    run: Annotated[Path, typer.Argument(help="Run folder.", show_default=False)],
    name: Annotated[
        str, typer.Argument(help="results, epochs, rounds, or a kind of event.")
    ] = RESULTS,
    as_json: AsJson = False,
) -> None:
    """Print what a run has recorded as CSV."""
    tables = read_run(run)
    if as_json:
        print_json(tables.rows(name))
    else:
        print(tables.csv(name), end="")


def list_names(data_root: DataRoot = None, as_json: AsJson = False) -> None:
    """List tasks, rules, blueprints and rewards by name."""
    from esper.kasmina.blueprints import REGISTRY
    from esper.leyline.slots import KINDS
    from esper.runtime.tasks.registry import TASKS
    from esper.simic.rewards import FAMILIES, TERMS
    from esper.tamiyo.rules import RULES

    rows = [_describe(task, data_root) for task in TASKS.values()]
    kinds = KINDS.values()
    fits = {
        name: [kind for kind in kinds if REGISTRY.has(kind, name)]
        for name in REGISTRY.names_for(kinds)
    }
    names = {
        "rules": _first_lines(RULES),
        "blueprints": {name: f"for {', '.join(known)}" for name, known in fits.items()},
        "reward terms": _first_lines(TERMS),
        "reward families": {
            family: ", ".join(f"{weight:g} {term}" for term, weight in weights.items())
            for family, weights in FAMILIES.items()
        },
    }
    if as_json:
        print_json({"tasks": rows, **names})
        return
    console = Console()
    console.print(tasks_table(rows))
    for row in rows:
        if row["problem"] is not None:
            print(printable(f"{row['name']}: {row['problem']}"))
    for row in rows:
        if row["varies"] is not None:
            print(printable(f"{row['name']}: hosts differ, {row['varies']}"))
    if not all(row["is_there"] for row in rows):
        print("What is not there: esper data fetch NAME --data-root DIR")
    for title, known in names.items():
        console.print(names_table(title, known))


def _first_lines(known: Mapping[str, Any]) -> dict[str, str]:
    return {name: (getdoc(thing) or "").partition("\n")[0] for name, thing in known.items()}


def _describe(task: "Task", root: Path | None) -> dict[str, Any]:
    """One task as plain values. Its data is read, so that `is_there` means it can be trained on."""
    import torch

    from esper.runtime.tasks.fetch import is_fetched

    row: dict[str, Any] = {
        "name": task.name,
        "summary": task.summary,
        "train": None,
        "validation": None,
    }
    row |= {"host_parameters": None, "source": task.source, "is_there": False, "problem": None}
    row["varies"] = None if task.varies is None else str(task.varies)
    try:
        with torch.device("meta"):
            row["host_parameters"] = sum(
                parameter.numel() for parameter in task.build_host().parameters()
            )
    except Exception as problem:  # of a user's own code
        return row | {
            "problem": f"its host cannot be built without memory (device meta): {problem}"
        }
    if not is_fetched(task.name, root):
        return row
    try:
        splits = task.load(root)
    except (EsperError, OSError) as problem:
        return row | {"problem": str(problem)}
    return row | {
        "train": len(splits.train),
        "validation": len(splits.validation),
        "is_there": True,
    }
