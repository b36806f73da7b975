"""`esper` alone and `esper doctor`: a newcomer's first steps, and what this machine lacks."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

import esper
from esper.cli.console import print_json
from esper.cli.look import AsJson, DataRoot
from esper.leyline.errors import printable

if TYPE_CHECKING:
    from esper.runtime.diagnosis import Finding

GREETING = f"""\
Esper {esper.__version__} grows neural networks while they train.

  1. See a small network grow:   esper demo
  2. Grow a model of your own:   python -c "import esper; help(esper.grow)"
  3. See what is missing here:   esper doctor

All commands: esper --help
"""


def doctor(data_root: DataRoot = None, as_json: AsJson = False) -> None:
    """Show what this machine has, and how to mend what lacks."""
    from esper.runtime.diagnosis import examine

    findings = examine(esper, data_root)
    is_broken = any(finding.is_broken for finding in findings)
    if as_json:
        rows = [asdict(finding) for finding in findings]
        print_json({"works": not is_broken, "findings": rows})
    else:
        Console().print(findings_table(findings))
        for line in advice(findings):
            print(printable(line))
    if is_broken:
        raise typer.Exit(1)


def findings_table(findings: Sequence["Finding"]) -> Table:
    """Return one row per finding, topic by topic."""
    table = Table(
        Column("", no_wrap=True), Column("", no_wrap=True), "", box=SIMPLE, show_header=False
    )
    topic = ""
    for finding in findings:
        state = f"{finding.state} (broken)" if finding.is_broken else finding.state
        shown = finding.topic if finding.topic != topic else ""
        table.add_row(shown, finding.name, Text(printable(state)))
        topic = finding.topic
    return table


def advice(findings: Sequence["Finding"]) -> list[str]:
    """Return what is missing with the command that mends it, line by line, and the verdict."""
    lines = []
    missing = [finding for finding in findings if finding.mend is not None]
    if missing:
        lines.append("Where you need what is missing:")
        width = max(len(finding.name) for finding in missing)
        lines += [f"  {finding.name:{width}}  {finding.mend}" for finding in missing]
    broken = [finding.name for finding in findings if finding.is_broken]
    lines.append(
        f"Esper does not work here: mend {', '.join(broken)}." if broken else "Esper works here."
    )
    return lines
