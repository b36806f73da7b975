"""Means with their intervals as one SVG picture, readable in light and dark. Numbers in, text out."""

from collections.abc import Sequence
from html import escape

Row = tuple[str, float, float | None, float | None]
"""label, mean, lower and upper end; no ends is a single value"""
_LEFT, _WIDTH, _LINE, _TOP = 170, 720, 26, 56
_LETTERS = 20
"""of a label that fit left of the bars; of a longer one the end is shown"""


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
