"""The tables under "What is measured" in README.md, for tests."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def measured_tables() -> list[list[list[str]]]:
    """Cells by row, the header first, for every table in that section."""
    section = README.split("## What is measured\n")[1].split("\n## ")[0]
    blocks = [
        [line for line in block.splitlines() if line.startswith("|")]
        for block in section.split("\n\n")
    ]
    tables = [[_cells(line) for line in lines] for lines in blocks if lines]
    return [[header, *rows] for header, _, *rows in tables]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]
