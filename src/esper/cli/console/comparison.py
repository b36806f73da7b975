"""A comparison on screen and as an SVG picture: arms, paired differences, what may be claimed. Reads plain data."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from rich.box import SIMPLE
from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

Row = tuple[str, float, float | None, float | None]  # label, mean, lower and upper end; no ends is a single value
_LEFT, _WIDTH, _LINE, _TOP = 170, 720, 26, 56
_LETTERS = 20  # of a label that fit left of the bars; of a longer one the end is shown
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


def interval_figure(rows: Sequence[Row], title: str, unit: str) -> str:
    """One line per row: a dot at the mean, a bar over the interval, ticks below."""
    ends = [value for _, *values in rows for value in values if value is not None]
    low, high = min(ends), max(ends)
    margin = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    low, high = low - margin, high + margin

    def place(value: float) -> float:
        return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - 90)

    bottom = _TOP + _LINE * len(rows)
    parts = [_text(12, 24, title, "title"), _text(12, 42, unit, "note")]
    for step in range(5):
        value = low + (high - low) * step / 4
        x = place(value)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{bottom}"/>')
        parts.append(_text(x, bottom + 16, f"{value:.4g}", "tick"))
    for number, (label, mean, start, end) in enumerate(rows):
        y = _TOP + _LINE * number + 8
        fitting = label if len(label) <= _LETTERS else f"…{label[1 - _LETTERS :]}"
        parts.append(_text(12, y + 4, fitting, "label"))
        if start is not None and end is not None:
            parts.append(f'<line class="bar" x1="{place(start):.1f}" x2="{place(end):.1f}" y1="{y}" y2="{y}"/>')
        parts.append(f'<circle class="dot" cx="{place(mean):.1f}" cy="{y}" r="4.5"/>')
        parts.append(_text(_WIDTH - 76, y + 4, f"{mean:.4g}", "label"))
    style = (
        "text{font:13px system-ui,sans-serif;fill:#222}.title{font-weight:600;font-size:15px}.note,.tick{fill:#666;"
        "font-size:11px}.tick{text-anchor:middle}.grid{stroke:#ddd}.bar{stroke:#4477aa;stroke-width:3;opacity:.55}"
        ".dot{fill:#4477aa}rect{fill:#fff}@media(prefers-color-scheme:dark){text{fill:#eee}.note,.tick{fill:#aaa}"
        ".grid{stroke:#444}rect{fill:#181818}}"
    )
    size = f'width="{_WIDTH}" height="{bottom + 28}" viewBox="0 0 {_WIDTH} {bottom + 28}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">'
    return f'{head}<style>{style}</style><rect width="100%" height="100%"/>{"".join(parts)}</svg>\n'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
