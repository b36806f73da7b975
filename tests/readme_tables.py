"""README.md, for tests: its text, and the paired differences that it tells."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
_DIFFERENCE = re.compile(r"([+-]\d+\.\d\d)(?: points)? (\[[+-][\d.]+, [+-][\d.]+\])")


def told_differences() -> list[str]:
    """Every difference with an interval, as the committed results write it."""
    return [" ".join(found) for found in _DIFFERENCE.findall(README)]
