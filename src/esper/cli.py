"""The `esper` command. Parses, calls, prints; a mistake of the caller's is one line on stderr and exit code 2."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from esper import __version__
from esper.dashboard.tables import arms_table
from esper.leyline.errors import EsperError
from esper.telemetry.events import ActionTaken, Event, StageChanged

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Grow neural networks while they train.")


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; the way in for the console script and for `python -m esper`."""
    try:
        app(args=list(arguments) if arguments is not None else None)
    except EsperError as problem:
        print(f"esper: {problem}", file=sys.stderr)
        sys.exit(2)


__all__ = ["main"]
