"""Tables for people, drawn from events."""

from collections.abc import Sequence

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
