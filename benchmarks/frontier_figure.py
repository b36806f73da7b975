"""Loss against compute and against seconds as one SVG picture, readable in light and dark."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from esper.cli.console import round_ticks

Point = tuple[float, float, float]
"""compute or seconds, mean, standard error"""
_PANEL, _HIGH, _LEFT, _TOP, _GAP = 380, 400, 62, 64, 62
_ABOVE, _APART = 0.25, 30
"""How far a panel reaches above the best depth, in its own range, and pixels between two marks below it."""
_COLOURS = ("#cc6677", "#117733", "#aa4499", "#999933", "#33bbee", "#882255", "#ee7733", "#332288")
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.title{font-weight:600;font-size:15px}"
    ".note{fill:#666;font-size:11px}"
    ".middle{text-anchor:middle}.end{text-anchor:end}.frame{fill:none;stroke:#ccc}.grid{stroke:#eee}"
    ".static{stroke:#999;fill:none}.best{stroke:#4477aa;stroke-width:3;fill:none}.back{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#eee}.note{fill:#aaa}.frame{stroke:#555}.grid{stroke:#333}"
    ".back{fill:#181818}}"
)


def draw_figure(
    name: str, metric: str, judged: Mapping[str, Any], alone: Mapping[str, float]
) -> str:
    """Two panels: static depths and the best of them, and grown plans with their standard errors."""
    times = 100 if metric == "error" else 1
    curves = {
        arm: _points(each, times)
        for arm, each in judged["arms"].items()
        if is_plain(each["settings"])
    }
    static = {
        arm: points
        for arm, points in curves.items()
        if judged["arms"][arm]["settings"]["is_static"]
    }
    static = {arm: points for arm, points in static.items() if arm in _of_best_rate(judged)}
    grown = {arm: curves[arm] for arm in curves if not judged["arms"][arm]["settings"]["is_static"]}
    colours = {arm: _COLOURS[number % len(_COLOURS)] for number, arm in enumerate(grown)}
    best = [
        (each["arm"], (each["used"], times * each["mean"], 0.0))
        for each in judged["frontier"].get("0.2", [])
    ]
    unit = "wrong answers, %" if metric == "error" else "held-out loss, nats"
    parts = [_text(12, 24, f"{name}: {unit}", "title"), _legend(colours)]
    scale = _scale(static, grown, [point for _, point in best])
    parts += _panel(_LEFT, "compute", static, grown, [point for _, point in best], colours, scale)
    timed = {
        arm: [(x * alone[arm], y, e) for x, y, e in points]
        for arm, points in curves.items()
        if arm in alone
    }
    timed_static, timed_grown = (
        {arm: timed[arm] for arm in part if arm in timed} for part in (static, grown)
    )
    frontier = [(x * alone[arm], y, e) for arm, (x, y, e) in best if arm in alone]
    if timed:
        left, title = _LEFT + _PANEL + _GAP, "seconds, from short runs alone"
        parts += _panel(left, title, timed_static, timed_grown, frontier, colours, scale)
    width, height = (
        _LEFT + (2 * _PANEL + _GAP if timed else 2 * _PANEL) + 20,
        _TOP + _HIGH + 48 + 16 * math.ceil(len(grown) / 4),
    )
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" '
        f'aria-label="{escape(name)}: {escape(unit)}">'
    )
    return (
        f'{head}<style>{_STYLE}</style><rect class="back" width="100%" '
        f'height="100%"/>{"".join(parts)}</svg>\n'
    )


def _of_best_rate(judged: Mapping[str, Any]) -> set[str]:
    """Of each static depth the arm with the most seeds, and of these the one with the lowest loss."""
    found: dict[str, list[tuple[int, float, str]]] = {}
    for arm, each in judged["arms"].items():
        if each["settings"]["is_static"] and is_plain(each["settings"]):
            cells = each["computes"].values()
            rank = -sum(cell["count"] for cell in cells), sum(cell["mean"] for cell in cells), arm
            found.setdefault(each["settings"]["shape"], []).append(rank)
    return {min(ranks)[-1] for ranks in found.values()}


def is_plain(settings: Mapping[str, Any]) -> bool:
    """Depths, plans by the setup's own copies at once, and the default rule: neither a variant nor a doubt."""
    is_plan = "@" in settings["shape"] and settings["ramp"] == 0
    is_known = settings["is_static"] or is_plan or settings["shape"] == "heuristic"
    is_usual = settings["decay"] == 0.2 and settings.get("warmup", 1.0) == 1.0
    return bool(is_known and settings["kind"] is None and is_usual)


def _points(each: Mapping[str, Any], times: float) -> list[Point]:
    cells = each["computes"].values()
    return sorted(
        (cell["used"], times * cell["mean"], times * (cell["error"] or 0.0)) for cell in cells
    )


def _scale(
    static: Mapping[str, Sequence[Point]],
    grown: Mapping[str, Sequence[Point]],
    best: Sequence[Point],
) -> tuple[float, float]:
    """Lowest and highest value of both panels."""
    known = [point for points in (*static.values(), *grown.values()) for point in points]
    low, high = min(y - e for _, y, e in known), max(y + e for _, y, e in known)
    if best:  # depths far above the best would press everything else together
        top = max(
            [y for _, y, _ in best] + [y + e for points in grown.values() for _, y, e in points]
        )
        high = min(high, top + _ABOVE * (top - low))
    return low - 0.04 * (high - low) - 1e-9, high + 0.04 * (high - low) + 1e-9


def _panel(
    left: float,
    title: str,
    static: Mapping[str, Sequence[Point]],
    grown: Mapping[str, Sequence[Point]],
    best: Sequence[Point],
    colours: Mapping[str, str],
    scale: tuple[float, float],
) -> list[str]:
    known = [point for points in (*static.values(), *grown.values()) for point in points]
    parts = [
        f'<rect class="frame" x="{left}" y="{_TOP}" width="{_PANEL}" height="{_HIGH}"/>',
        _text(left + _PANEL / 2, _TOP + _HIGH + 32, title, "note middle"),
    ]
    near, far = (math.log(end(x for x, _, _ in known)) for end in (min, max))
    near, far = near - 0.12, far + 0.06
    low, high = scale
    static = {arm: seen for arm, points in static.items() if (seen := _below(points, high))}

    def across(x: float) -> float:
        return left + (math.log(x) - near) / (far - near) * _PANEL

    def down(y: float) -> float:
        return _TOP + (high - y) / (high - low) * _HIGH

    for y in round_ticks(low, high):
        parts.append(
            f'<line class="grid" x1="{left}" x2="{left + _PANEL}" y1="{down(y):.1f}" '
            f'y2="{down(y):.1f}"/>'
        )
        parts.append(_text(left - 6, down(y) + 4, f"{y:g}", "note end"))
    marks = [-math.inf]
    for x in sorted(
        {float(f"{x:.2g}") for points in static.values() for x, y, _ in points if y < high}
    ):
        if across(x) - marks[-1] >= _APART:
            marks.append(across(x))
            parts.append(_text(across(x), _TOP + _HIGH + 16, f"{x:g}", "note middle"))
    for points in static.values():
        parts.append(_line([(across(x), down(y)) for x, y, _ in points], 'class="static"'))
    # labels stand where the lines lie furthest apart, and none on another
    lowest = math.inf
    for (x, y, _), arm in sorted(
        ((points[0], arm) for arm, points in static.items()), key=lambda each: each[0][1]
    ):
        blocks = arm.removeprefix("static ").partition(" ")[0]
        if y == high:
            parts.append(_text(across(x) + 8, _TOP + 13, blocks, "note"))
            continue
        lowest = min(down(y) + 4, lowest - 11)
        parts.append(_text(across(x) - 4, lowest, blocks, "note end"))
    parts.append(_line([(across(x), down(y)) for x, y, _ in best], 'class="best"'))
    for arm, points in grown.items():
        colour = colours[arm]
        parts.append(
            _line([(across(x), down(y)) for x, y, _ in points], f'fill="none" stroke="{colour}"')
        )
        for x, y, error in points:
            parts.append(f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="4" fill="{colour}"/>')
            bar = [(across(x), down(y - error)), (across(x), down(y + error))]
            parts.append(_line(bar, f'fill="none" stroke="{colour}"'))
    return parts


def _below(points: Sequence[Point], high: float) -> list[Point]:
    """A curve from where it comes below `high`."""
    for number, (x, y, error) in enumerate(points):
        if y <= high:
            if number == 0:
                return list(points)
            before, above, _ = points[number - 1]
            share = (above - high) / (above - y)
            start = math.exp(math.log(before) + share * (math.log(x) - math.log(before)))
            return [(start, high, error), *points[number:]]
    return []


def _legend(colours: Mapping[str, str]) -> str:
    parts = [f'<line class="best" x1="{_LEFT}" x2="{_LEFT + 24}" y1="42" y2="42"/>']
    parts.append(
        _text(
            _LEFT + 30,
            46,
            "best static depth by compute; thin lines: static, with their blocks",
            "note",
        )
    )
    for number, (arm, colour) in enumerate(colours.items()):
        x, y = _LEFT + 200 * (number % 4), _TOP + _HIGH + 54 + 16 * (number // 4)
        parts.append(f'<circle cx="{x}" cy="{y - 4}" r="4" fill="{colour}"/>')
        parts.append(_text(x + 10, y, arm, "note"))
    return "".join(parts)


def _line(points: Sequence[tuple[float, float]], style: str) -> str:
    return f'<polyline {style} points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
