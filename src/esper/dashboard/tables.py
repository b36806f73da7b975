"""Tables for people, drawn from events."""

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE
from rich.table import Table

from esper.telemetry.events import ArmFinished


def arms_table(results: Sequence[ArmFinished], title: str) -> Table:
    """One row per arm: what it cost and what it reached."""
    table = Table(title=title)
    table.add_column("arm")
    for column in ("parameters", "validation", "test", "kept", "culled", "seconds"):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            result.arm,
            f"{result.final_params:,}",
            f"{result.validation_accuracy:.2%}",
            f"{result.test_accuracy:.2%}",
            str(result.fossilized),
            str(result.culled),
            f"{result.seconds:.1f}",
        )
    return table


def tasks_table(rows: Sequence[Mapping[str, object]]) -> Table:
    """One row per task: what it is, how large, and whether its data is there; sizes that are None are not known."""
    table = Table(title="tasks", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("what it is", min_width=16)
    table.add_column("train +\nvalidation", justify="right", no_wrap=True)
    table.add_column("host\nparameters", justify="right", no_wrap=True)
    table.add_column("source", min_width=11)
    table.add_column("is\nthere", no_wrap=True)
    for row in rows:
        is_there = "yes" if row["is_there"] else "no" if row["problem"] is None else "error"
        examples = "-" if row["train"] is None else f"{row['train']:,} +\n{row['validation']:,}"
        params = f"{row['host_parameters']:,}"
        table.add_row(str(row["name"]), str(row["summary"]), examples, params, str(row["source"]), is_there)
    return table
