"""A comparison on screen: one table of arms, one of paired differences and what may be claimed. Reads plain data."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.box import SIMPLE
from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from esper.cli.console.figure import Row, interval_figure

_FINALS = ("final", "final-equal-flops", "final-whole")
CONTROLS = ("never", "sham", "random", "schedule", "search", "start", *_FINALS, "oracle")
"""What every other arm is measured against, where it is there, with whatever settings."""


def pairs_of(arms: Iterable[str]) -> list[tuple[str, str]]:
    """(arm, other) to be held against each other: every policy with the controls and with the policies before it.

    Where all arms are controls, each with those before it. A network that follows an arm is held against that one only.
    """
    names = list(arms)
    finals = {f"{kind} of {arm}": arm for kind in CONTROLS for arm in names}
    others = [name for name in names if name not in finals]
    controls = [name for name in others if name.partition(":")[0] in CONTROLS]
    tried = [name for name in others if name not in controls]
    if not tried:
        controls, tried = [], others
    pairs = []
    for name in others:
        before = [*controls, *tried[: tried.index(name)]] if name in tried else []
        pairs += [(name, other) for other in (*before, *(one for one in names if finals.get(one) == name))]
    return pairs


def arms_compared(results: Mapping[str, Any]) -> Table:
    """One row per arm: what it reached and what it cost."""
    table = Table(title="arms: mean over seeds, 95 % interval", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("arm", overflow="fold")
    gap = ["to the\noracle"] if "oracle" in results["arms"] else []
    costs = "parameters", "FLOPs\nseconds", "planted\nkept,\nculled", "epi-\nsodes\nbefore"
    for column in ("test accuracy", *gap, "test\nloss", *costs):
        table.add_column(column, justify="right", overflow="fold")
    for name, arm in results["arms"].items():
        found = arm["minus"].get("oracle")  # the best single placement has no gap to itself
        points = "" if found is None else f"{100 * found['test_accuracy']['mean']:+.2f}"
        table.add_row(
            Text(name if arm["rate"] == 1 else f"{name}\n(rate x {arm['rate']:g})"),
            f"{100 * arm['test_accuracy']['mean']:.2f}%\n{_interval(arm['test_accuracy'], '.2f')}",
            *([points] if gap else []),
            f"{arm['test_loss']['mean']:.4f}",
            f"{arm['final_params']:,.0f}\npeak {arm['peak_params']:,.0f}",
            f"{arm['flops']:.3g}\n{arm['seconds']:.1f} s",
            f"{arm['germinated']:.1f}\n{arm['fossilized']:.1f}, {arm['culled']:.1f}",
            "?" if arm["episodes"] is None else f"{arm['episodes']:,}",
        )
    return table


def _interval(estimate: Mapping[str, Any], form: str) -> str:
    """In points."""
    low, high = estimate["low"], estimate["high"]
    return "one seed" if low is None else f"{100 * low:{form}} to {100 * high:{form}}"


def differences(results: Mapping[str, Any]) -> Table:
    """Arms minus those they are held against, paired by seed, with what the data let us say."""
    table = Table(title="differences in test accuracy, points, paired by seed", box=SIMPLE, pad_edge=False)
    for column in ("arm", "minus", "points", "95 %", "claim"):
        side: JustifyMethod = "right" if column in ("points", "95 %") else "left"
        table.add_column(column, justify=side, no_wrap=column not in ("arm", "minus"), overflow="fold")
    for name, other in pairs_of(results["arms"]):
        found = results["arms"][name]["minus"][other]["test_accuracy"]
        cells = f"{100 * found['mean']:+.2f}", _interval(found, "+.2f"), found["verdict"]
        table.add_row(Text(name), Text(other), *cells)
    return table


def compared_figure(results: Mapping[str, Any]) -> str:
    """The arms' test accuracies as an SVG picture."""
    rows: list[Row] = []
    for name, arm in results["arms"].items():
        score = arm["test_accuracy"]
        ends = [None if score[end] is None else 100 * score[end] for end in ("low", "high")]
        rows.append((name, 100 * score["mean"], *ends))
    config = results["config"]
    count = len(next(iter(results["arms"].values()))["seeds"])
    return interval_figure(rows, f"{config['task']['name']}: test accuracy", f"per cent, 95 % interval, {count} seeds")
