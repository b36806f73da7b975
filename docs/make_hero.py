"""Draws the README's picture from benchmarks/results/question_q2-cifar10.json: python docs/make_hero.py."""

import json
from pathlib import Path

DOCS = Path(__file__).parent
RESULT = DOCS.parent / "benchmarks" / "results" / "question_q2-cifar10.json"
PICTURE = DOCS / "pictures" / "hero.svg"
ROWS = (
    ("never", "trained on for 10 epochs", ""),
    ("heuristic", "grown for 10 epochs", "grown"),
    ("final", "grown size, from scratch, 10 epochs", ""),
    ("final-whole", "grown size, from scratch, 30 epochs", ""),
)
LEFT, RIGHT, TOP, STEP = 270, 690, 62, 34
LOW, HIGH = 63.0, 75.0
STYLE = (
    "text{font:14px system-ui,sans-serif;fill:#222}.title{font-weight:600;font-size:16px}.note{fill:#666;font-size:12px}"
    ".value{font-weight:600}.line{stroke:#777;stroke-width:2}.dot{fill:#777}.grown .line{stroke:#00796b;stroke-width:3}"
    ".grown .dot{fill:#00796b}.grown text{font-weight:700}.grid{stroke:#ddd}"
    "@media(prefers-color-scheme:dark){text{fill:#eee}.note{fill:#aaa}.grid{stroke:#444}.line{stroke:#aaa}.dot{fill:#aaa}"
    ".grown .line{stroke:#4db6ac}.grown .dot{fill:#4db6ac}}"
)


def place(percent: float) -> float:
    """Where a number stands from left to right."""
    return LEFT + (RIGHT - LEFT) * (percent - LOW) / (HIGH - LOW)


def draw() -> str:
    """The picture as SVG."""
    arms = json.loads(RESULT.read_text())["arms"]
    height = TOP + STEP * len(ROWS) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" width="720" height="{height}" role="img" '
        f'aria-label="Test accuracy of a CIFAR-10 network after ten more epochs"><style>{STYLE}</style>',
        '<text class="title" x="10" y="22">A CIFAR-10 network that was trained for 20 epochs, ten epochs later</text>',
        '<text class="note" x="10" y="42">test accuracy in per cent, mean of 10 random seeds and 95 % interval</text>',
    ]
    bottom = TOP + STEP * len(ROWS)
    for tick in range(64, 75, 2):
        parts.append(
            f'<line class="grid" x1="{place(tick):.1f}" x2="{place(tick):.1f}" y1="{TOP - 8}" y2="{bottom}"/>'
        )
        parts.append(
            f'<text class="note" text-anchor="middle" x="{place(tick):.1f}" y="{bottom + 18}">{tick}</text>'
        )
    for number, (arm, label, kind) in enumerate(ROWS):
        accuracy = {name: 100 * value for name, value in arms[arm]["test_accuracy"].items()}
        middle = TOP + STEP * number + STEP / 2 - 4
        mean = place(accuracy["mean"])
        parts.append(
            f'<g class="{kind}"><text x="10" y="{middle + 5}">{label}</text>'
            f'<line class="line" x1="{place(accuracy["low"]):.1f}" x2="{place(accuracy["high"]):.1f}" y1="{middle}" '
            f'y2="{middle}"/><circle class="dot" cx="{mean:.1f}" cy="{middle}" r="6"/>'
            f'<text class="value" x="{mean + 14:.1f}" y="{middle - 7}">{accuracy["mean"]:.1f}</text></g>'
        )
    return "".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    PICTURE.write_text(draw())
    print(PICTURE)
