"""Tables for people show what the events say."""

import io

from rich.console import Console

from esper.cli.console import arms_table
from esper.telemetry.events import ArmFinished


def rendered(results):
    console = Console(file=io.StringIO(), width=160)
    console.print(arms_table(results, "a title"))
    return console.file.getvalue()


def test_a_table_has_one_row_per_arm_with_its_costs_and_scores():
    text = rendered(
        [
            ArmFinished("never", 0, 8, 1402, 1402, 0.5, 0.4219, 1.5, 10**9, 3.25, 0, 0, 0),
            ArmFinished("heuristic", 0, 8, 1402, 3127, 0.625, 0.75, 1.5, 10**9, 4.0, 4, 2, 1),
        ]
    )
    never, heuristic = (
        next(line for line in text.splitlines() if arm in line) for arm in ("never", "heuristic")
    )
    assert "1,402" in never
    assert "42.19%" in never
    for part in ("3,127", "62.50%", "75.00%", " 2, 1 ", "1e+09", "4.0"):
        assert part in heuristic
    assert "a title" in text


def test_an_empty_comparison_is_an_empty_table():
    assert "validation" in rendered([])
