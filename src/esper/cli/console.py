"""What commands print: tables, progress and figures. Reads results, never a run folder."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.console import Console, Group, JustifyMethod
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from esper.cli.progress import Meter, is_watched
from esper.dashboard.comparisons import pairs_of
from esper.dashboard.reader import RunSummary
from esper.leyline.errors import printable
from esper.storage.runfolder import label_policies
from esper.telemetry.events import ArmFinished, RoundFinished
from esper.telemetry.wording import clock


class Row(NamedTuple):
    """One line of a figure of intervals; without ends it is a single value."""

    label: str
    mean: float
    low: float | None
    high: float | None


_LEFT, _WIDTH, _LINE, _TOP = 170, 720, 26, 56
_LETTERS = 20  # of a label that fit left of the bars; of a longer one the end is shown
_LOOK: dict[str, Any] = {"box": SIMPLE, "padding": (0, 1, 0, 0), "pad_edge": False}


def print_json(values: Any) -> None:
    """Print the one JSON document of a command; a number that JSON has no form for is null."""
    text = json.dumps(values, default=str)
    plain = json.loads(text, parse_constant=lambda name: None)
    print(json.dumps(plain, indent=1, allow_nan=False))


def arms_table(
    results: Sequence[ArmFinished],
    title: str,
    variations: Mapping[int, object] | None = None,
) -> Table:
    """Return one row per arm and host: size, scores, seeds and cost.

    `variations` has what hosts that differ have drawn, by their seeds.
    """
    table = Table("arm", title=Text(printable(title)))
    if variations:
        table.add_column("host", min_width=20)
    for column in ("parameters", "validation", "test", "kept,\nculled", "FLOPs", "seconds"):
        table.add_column(column, justify="right")
    labels = label_policies(result.arm for result in results)
    for result in results:
        cells = [Text(printable(labels[result.arm]))]
        if variations:
            cells.append(Text(str(variations[result.seed])))
        numbers = (
            f"{result.final_params:,}",
            f"{result.validation_accuracy:.2%}",
            f"{result.test_accuracy:.2%}",
            f"{result.fossilized}, {result.culled}",
            f"{result.flops:.3g}",
            f"{result.seconds:.1f}",
        )
        table.add_row(*cells, *numbers)
    return table


def runs_table(summaries: Sequence[RunSummary]) -> Table:
    """Return one row per run.

    It says what the run is, how far it is, what it reached, and how old its newest event is.
    """
    table = Table(title="runs", **_LOOK)
    for column in ("name", "task", "policy", "status"):
        table.add_column(column, overflow="fold")
    for column in ("rounds or\nepochs", "best", "parameters", "age"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in summaries:
        table.add_row(
            *(Text(printable(text)) for text in (run.name, run.task, run.policy, run.status)),
            f"{run.done} arms" if run.kind == "compare" else f"{run.done}/{run.total or '?'}",
            run.best or "-",
            "-" if run.params is None else f"{run.params:,}",
            "-" if run.age_seconds is None else ago(run.age_seconds),
        )
    return table


def ago(seconds: float) -> str:
    """Return a time span in the largest unit that it fills."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def tasks_table(rows: Sequence[Mapping[str, object]]) -> Table:
    """Return one row per task: what it is, how large, and whether its data is there.

    A size of None is not known.
    """
    table = Table(
        Column("name", no_wrap=True), Column("what it is", min_width=16), title="tasks", **_LOOK
    )
    table.add_column("train +\nvalidation", justify="right", no_wrap=True)
    table.add_column("host\nparameters", justify="right", no_wrap=True)
    table.add_column("source", min_width=11, max_width=14)
    table.add_column("is\nthere", no_wrap=True)
    for row in rows:
        is_there = "yes" if row["is_there"] else "no" if row["problem"] is None else "error"
        examples = "-" if row["train"] is None else f"{row['train']:,} +\n{row['validation']:,}"
        params = "?" if row["host_parameters"] is None else f"{row['host_parameters']:,}"
        table.add_row(
            str(row["name"]), str(row["summary"]), examples, params, str(row["source"]), is_there
        )
    return table


def names_table(title: str, known: Mapping[str, str]) -> Table:
    """Return one row per name, with a line about it."""
    table = Table(Column(no_wrap=True), Column(), title=title, show_header=False, **_LOOK)
    for name, line in known.items():
        table.add_row(Text(printable(name)), Text(printable(line)))
    return table


def _pace(event: RoundFinished, rounds: int) -> tuple[str, str]:
    """The speed of a round, and how long the rest takes at it."""
    speed = sum(event.ops.values()) / event.seconds if event.seconds else 0.0
    return f"{speed:.0f} decisions/s", clock(event.seconds * (rounds - event.round - 1))


def _cost(event: RoundFinished) -> str:
    """What a round has cost, and the part of the policy's learning in it."""
    total = sum(event.flops.values())
    if not total:
        return "FLOPs not known"
    return f"{total:.3g} FLOPs ({event.flops.get('learning', 0) / total:.1%} learning)"


def round_line(event: RoundFinished, rounds: int) -> str:
    """Return a round in one line, for where there is no terminal."""
    ops = " ".join(f"{name.lower()} {count}" for name, count in event.ops.items())
    speed, left = _pace(event, rounds)
    return (
        f"round {event.round + 1}/{rounds}  return {event.mean_return:+.3f}  accuracy "
        f"{event.accuracy:.2%} "
        f"(twin {event.twin_accuracy:.2%})  {event.params_share:.2f} x parameters  "
        f"{_agreement(event)}{ops}  {_cost(event)}  {speed}  {left} left"
    )


def _agreement(event: RoundFinished) -> str:
    """How often the policy would do what the rule does that it imitates; nothing afterwards."""
    if event.agreement is None:
        return ""
    acts = ""
    if event.agreement_on_acts is not None:
        acts = f" ({event.agreement_on_acts:.1%} of those that act)"
    return f"as the rule in {event.agreement:.1%} of decisions{acts}  "


def rounds_table(event: RoundFinished, rounds: int, best: float) -> Table:
    """Return a round as a table, for a terminal to show until the next one."""
    table = Table(title=f"round {event.round + 1} of {rounds}", show_header=False)
    seeds = {name: getattr(event, name) for name in ("germinated", "fossilized", "culled")}
    seeds["alive"] = event.germinated - event.fossilized - event.culled
    speed, left = _pace(event, rounds)
    table.add_row("return", f"{event.mean_return:+.3f} (best {best:+.3f})")
    table.add_row(
        "held-out accuracy", f"{event.accuracy:.2%} grown, {event.twin_accuracy:.2%} twin"
    )
    table.add_row("parameters", f"{event.params_share:.2f} x the host's")
    if event.agreement is not None:
        table.add_row("imitates", _agreement(event).strip())
    table.add_row("seeds", ", ".join(f"{count} {name}" for name, count in seeds.items()))
    table.add_row("ops", ", ".join(f"{name} {count}" for name, count in event.ops.items()))
    table.add_row(
        "reward parts",
        ", ".join(f"{name} {value:+.3f}" for name, value in event.reward_parts.items()),
    )
    table.add_row("cost", _cost(event))
    table.add_row("speed", speed)
    table.add_row("time left", left)
    return table


@contextmanager
def show_rounds(
    rounds: int, console: Console, meter: Meter | None = None
) -> Iterator[Callable[[RoundFinished], None]]:
    """Draws every round that it is given: live on a terminal, else a line each.

    `meter` shows how far the round is below the last one.
    """
    if not is_watched(console):  # a live display would swallow what is written to stderr
        yield lambda event: console.print(
            round_line(event, rounds), markup=False, highlight=False, soft_wrap=True
        )
        return
    returns: list[float] = []
    meter = meter or Meter()
    with Live(meter.bar, console=console, refresh_per_second=4) as live:

        def draw(event: RoundFinished) -> None:
            returns.append(event.mean_return)
            live.update(Group(rounds_table(event, rounds, max(returns)), meter.bar), refresh=True)

        try:
            yield draw
        finally:
            meter.clear()


def arms_compared(results: Mapping[str, Any]) -> Table:
    """Return one row per arm of a comparison: scores with intervals, and costs."""
    table = Table(
        Column("arm", overflow="fold"), title="arms: mean over seeds, 95 % interval", **_LOOK
    )
    gap = ["to the\noracle"] if "oracle" in results["arms"] else []
    costs = "parameters", "FLOPs\nseconds", "planted\nkept,\nculled", "epi-\nsodes\nbefore"
    for column in ("test accuracy", *gap, "test\nloss", *costs):
        table.add_column(column, justify="right", overflow="fold")
    labels = label_policies(results["arms"])
    for name, arm in results["arms"].items():
        label = labels[name]
        # the best single placement has no gap to itself
        to_oracle = arm["minus"].get("oracle")
        points = "" if to_oracle is None else f"{100 * to_oracle['test_accuracy']['mean']:+.2f}"
        table.add_row(
            Text(label if arm["rate"] == 1 else f"{label}\n(rate x {arm['rate']:g})"),
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
    table = Table(
        title="differences in test accuracy, points, paired by seed", box=SIMPLE, pad_edge=False
    )
    for column in ("arm", "minus", "points", "95 %", "claim"):
        side: JustifyMethod = "right" if column in ("points", "95 %") else "left"
        table.add_column(
            column, justify=side, no_wrap=column not in ("arm", "minus"), overflow="fold"
        )
    labels = label_policies(results["arms"])
    for arm, other in pairs_of(results["arms"]):
        difference = results["arms"][arm]["minus"][other]["test_accuracy"]
        table.add_row(
            Text(labels[arm]),
            Text(labels[other]),
            f"{100 * difference['mean']:+.2f}",
            _interval(difference, "+.2f"),
            difference["verdict"],
        )
    return table


def compared_figure(results: Mapping[str, Any]) -> str:
    """Return the test accuracy of every arm as an SVG."""
    rows: list[Row] = []
    labels = label_policies(results["arms"])
    for name, arm in results["arms"].items():
        accuracy = arm["test_accuracy"]
        low = None if accuracy["low"] is None else 100 * accuracy["low"]
        high = None if accuracy["high"] is None else 100 * accuracy["high"]
        rows.append(Row(label=labels[name], mean=100 * accuracy["mean"], low=low, high=high))
    title = f"{results['config']['task']['name']}: test accuracy"
    count = len(next(iter(results["arms"].values()))["seeds"])
    return interval_figure(rows, title, f"per cent, 95 % interval, {count} seeds")


def interval_figure(rows: Sequence[Row], title: str, unit: str) -> str:
    """One line per row: a dot at the mean, a bar over the interval, ticks below."""
    ends = []
    for row in rows:
        ends += [value for value in row[1:] if value is not None]
    lowest = min(ends)
    highest = max(ends)
    margin = (highest - lowest) * 0.06 or abs(highest) * 0.05 or 1.0
    low = lowest - margin
    high = highest + margin

    def x_of(value: float) -> float:
        return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - 90)

    bottom = _TOP + _LINE * len(rows)
    parts = [_text(12, 24, title, "title"), _text(12, 42, unit, "note")]
    for value in round_ticks(low, high):
        x = x_of(value)
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{bottom}"/>'
        )
        parts.append(_text(x, bottom + 16, f"{value:.4g}", "tick"))
    for number, (label, mean, start, end) in enumerate(rows):
        y = _TOP + _LINE * number + 8
        parts.append(
            _text(
                12, y + 4, label if len(label) <= _LETTERS else f"…{label[1 - _LETTERS :]}", "label"
            )
        )
        if start is not None and end is not None:
            parts.append(
                f'<line class="bar" x1="{x_of(start):.1f}" x2="{x_of(end):.1f}" y1="{y}" y2="{y}"/>'
            )
        parts.append(f'<circle class="dot" cx="{x_of(mean):.1f}" cy="{y}" r="4.5"/>')
        parts.append(_text(_WIDTH - 76, y + 4, f"{mean:.4g}", "label"))
    style = (
        "text{font:13px "
        "system-ui,sans-serif;fill:#222}.title{font-weight:600;font-size:15px}.note,.tick{fill:#666;"
        "font-size:11px}.tick{text-anchor:middle}.grid{stroke:#ddd}.bar{stroke:#4477aa;stroke-width:3;opacity:.55}"
        ".dot{fill:#4477aa}rect{fill:#fff}@media(prefers-color-scheme:dark){text{fill:#eee}.note,.tick{fill:#aaa}"
        ".grid{stroke:#444}rect{fill:#181818}}"
    )
    size = f'width="{_WIDTH}" height="{bottom + 28}" viewBox="0 0 {_WIDTH} {bottom + 28}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">'
    )
    return f'{head}<style>{style}</style><rect width="100%" height="100%"/>{"".join(parts)}</svg>\n'


def round_ticks(low: float, high: float, most: int = 8) -> list[float]:
    """The numbers in a range that are 1, 2 or 5 times a power of ten apart, so many at most."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(n * power for n in (1, 2, 5, 10, 20) if n * power >= (high - low) / most)
    first = math.ceil(low / step)
    last = math.floor(high / step)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
