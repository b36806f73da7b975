"""Tables for people, drawn from events."""

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from esper.dashboard.reader import RunSummary
from esper.dashboard.view import printable
from esper.telemetry.events import ArmFinished


def arms_table(results: Sequence[ArmFinished], title: str) -> Table:
    """One row per arm: what it cost and what it reached."""
    table = Table(title=Text(printable(title)))
    table.add_column("arm")
    for column in ("parameters", "validation", "test", "kept,\nculled", "FLOPs", "seconds"):
        table.add_column(column, justify="right")
    for result in results:
        scores = [f"{score:.2%}" for score in (result.validation_accuracy, result.test_accuracy)]
        counts = f"{result.fossilized}, {result.culled}", f"{result.flops:.3g}", f"{result.seconds:.1f}"
        table.add_row(Text(printable(result.arm)), f"{result.final_params:,}", *scores, *counts)
    return table


def runs_table(summaries: Sequence[RunSummary]) -> Table:
    """One row per run: what it is, how far it is, what it reached, and how long ago it last had something to tell."""
    table = Table(title="runs", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("name", "task", "policy", "status"):
        table.add_column(column, overflow="fold")
    for column in ("rounds or\nepochs", "best\naccuracy", "parameters", "age"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in summaries:
        table.add_row(
            *(Text(printable(text)) for text in (run.name, run.task, run.policy, run.status)),
            f"{run.done}/{run.total or '?'}",
            "-" if run.best_accuracy is None else f"{run.best_accuracy:.2%}",
            "-" if run.params is None else f"{run.params:,}",
            "-" if run.age_seconds is None else ago(run.age_seconds),
        )
    return table


def ago(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def tasks_table(rows: Sequence[Mapping[str, object]]) -> Table:
    """One row per task: what it is, how large, and whether its data is there; sizes that are None are not known."""
    table = Table(title="tasks", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("what it is", min_width=16)
    table.add_column("train +\nvalidation", justify="right", no_wrap=True)
    table.add_column("host\nparameters", justify="right", no_wrap=True)
    table.add_column("source", min_width=11, max_width=14)
    table.add_column("is\nthere", no_wrap=True)
    for row in rows:
        is_there = "yes" if row["is_there"] else "no" if row["problem"] is None else "error"
        examples = "-" if row["train"] is None else f"{row['train']:,} +\n{row['validation']:,}"
        params = f"{row['host_parameters']:,}"
        table.add_row(str(row["name"]), str(row["summary"]), examples, params, str(row["source"]), is_there)
    return table


def names_table(title: str, known: Mapping[str, str]) -> Table:
    """Names and a line about each."""
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, line in known.items():
        table.add_row(Text(printable(name)), Text(printable(line)))
    return table
