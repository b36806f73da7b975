"""The `esper` command. Parses, calls, prints; a mistake of the caller's is one line on stderr and exit code 2."""

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from esper import __version__
from esper.dashboard.tables import arms_table, tasks_table
from esper.leyline.errors import EsperError
from esper.telemetry.events import ActionTaken, Event, StageChanged

if TYPE_CHECKING:
    from esper.runtime.tasks import Task

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Grow neural networks while they train.")
data_app = typer.Typer(no_args_is_help=True, help="Official data sets on this machine.")
app.add_typer(data_app, name="data")

DataRoot = Annotated[
    Path | None, typer.Option(envvar="ESPER_DATA", help="Folder that holds the data sets.", show_default=False)
]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"esper {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    epochs: Annotated[int, typer.Option(min=8, help="Epochs of training per arm.")] = 40,
    seed: Annotated[int, typer.Option(help="Seeds the host's weights and its order of the data.")] = 0,
) -> None:
    """Grow a small CNN on handwritten digits and compare it with the same host left alone."""
    from esper.runtime.tasks import get_task
    from esper.trials.arms import Settings, run_arm

    console = Console()
    task = replace(get_task("digits"), life=epochs)
    splits = task.load(None)
    console.print(
        f"Digits: {len(splits.train)} images to learn from, {len(splits.validation)} to judge seeds by, the rest for "
        f"the final score. Two arms of {epochs} epochs: same host, same order of data, same learning rates."
    )
    results = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        for arm, title in (("never", "host alone"), ("heuristic", "grown")):
            bar = progress.add_task(title, total=epochs)

            def watch(epoch: int, events: Sequence[Event], bar: TaskID = bar) -> None:
                progress.update(bar, completed=epoch + 1)
                for event in events:
                    if isinstance(event, ActionTaken) or (isinstance(event, StageChanged) and event.after == "CULLED"):
                        progress.console.print(f"  {event}", highlight=False)

            results.append(run_arm(task, arm, [seed], Settings(splits=splits), watch=watch)[0].result)
    console.print(arms_table(results, f"host alone against grown, digits, seed {seed}"))
    console.print("One seed is an anecdote: docs/log.md has five, with controls. Next: esper.grow on your own model.")


@app.command()
def tasks(
    data_root: DataRoot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List what hosts can be trained on, and whether the data is there."""
    from esper.runtime.tasks import TASKS

    rows = [_describe(task, data_root) for task in TASKS.values()]
    if as_json:
        print(json.dumps(rows, indent=2, allow_nan=False))
        return
    console = Console()
    console.print(tasks_table(rows))
    for row in rows:
        if row["problem"] is not None:
            console.print(f"{row['name']}: {row['problem']}", markup=False, highlight=False)
    if not all(row["is_there"] for row in rows):
        console.print("What is not there: esper data fetch NAME --data-root DIR", highlight=False)


def _describe(task: "Task", root: Path | None) -> dict[str, Any]:
    """One task as plain values. Its data is read, so that `is_there` means it can be trained on."""
    import torch

    from esper.runtime.fetch import is_fetched

    with torch.device("meta"):
        host = task.build_host()
    row: dict[str, Any] = {"name": task.name, "summary": task.summary, "train": None, "validation": None}
    row["host_parameters"] = sum(parameter.numel() for parameter in host.parameters())
    row |= {"source": task.source, "is_there": False, "problem": None}
    if is_fetched(task.name, root):
        try:
            splits = task.load(root)
        except EsperError as problem:
            row["problem"] = str(problem)
        else:
            row |= {"train": len(splits.train), "validation": len(splits.validation), "is_there": True}
    return row


@data_app.command("fetch")
def fetch_data(
    name: Annotated[str, typer.Argument(help="Name of a data set; `esper tasks` lists them.", show_default=False)],
    data_root: DataRoot = None,
) -> None:
    """Download a data set from its official address, going on where an earlier call ended."""
    from esper.runtime.fetch import fetch

    console = Console()
    bars: dict[str, TaskID] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    progress = Progress(*columns, TimeRemainingColumn(), console=console)
    with ExitStack() as open_bars:

        def show(file: str, here: int, total: int | None) -> None:
            if not bars:
                open_bars.enter_context(progress)  # drawn from the first byte on, so that a refusal is all one sees
            if file not in bars:
                bars[file] = progress.add_task(file)
            progress.update(bars[file], completed=here, total=total)

        notes = fetch(name, data_root, progress=show)
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; the way in for the console script and for `python -m esper`."""
    try:
        app(args=list(arguments) if arguments is not None else None)
    except EsperError as problem:
        print(f"esper: {problem}", file=sys.stderr)
        sys.exit(2)


__all__ = ["main"]
