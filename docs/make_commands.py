"""Writes docs/commands.md from the esper command itself: python docs/make_commands.py. A test compares the two."""

from pathlib import Path
from typing import Any

import typer

from esper.cli.app import app

PAGE = Path(__file__).parent / "commands.md"
PANELS = ("Train", "Compare", "Look", "Data")
INTRODUCTION = """# Commands

<!-- written by docs/make_commands.py; change the commands in src/esper/cli, then run it -->

`esper COMMAND --help` shows the same in the terminal, `esper --version` the version. `esper --import FILE COMMAND` brings
[your own](own.md) tasks, rules, blueprints and rewards. A mistake ends with one line and exit code 2.
"""


def commands_of(group: Any, name: str = "esper") -> list[tuple[str, Any]]:
    """Commands by name, those of groups included."""
    found = []
    for part, command in group.commands.items():
        is_group = hasattr(command, "commands")
        found += (
            commands_of(command, f"{name} {part}") if is_group else [(f"{name} {part}", command)]
        )
    return found


def default_of(parameter: Any) -> str:
    """What holds without the option."""
    value = parameter.default
    if value is None or value is False or callable(value) or parameter.required:
        return ""
    value = getattr(value, "value", value)
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def row_of(parameter: Any) -> str:
    """One argument or option."""
    is_argument = parameter.param_type_name == "argument"
    name = parameter.name.upper() if is_argument else ", ".join(parameter.opts)
    takes = (parameter.metavar or "").replace("|", ", ")
    cells = [
        f"`{name}` {takes}",
        getattr(parameter, "help", None) or "",
        default_of(parameter),
    ]
    return "| " + " | ".join(" ".join(cell.split()) for cell in cells) + " |"


def section_of(name: str, command: Any) -> list[str]:
    """A command with what it takes."""
    context = typer.Context(command, info_name=name)
    parameters = [part for part in command.get_params(context) if part.name != "help"]
    lines = [f"### {name}", "", (command.help or "").partition("\f")[0].strip(), ""]
    if parameters:
        lines += ["| | what it does | default |", "|---|---|---|"]
        lines += [row_of(part) for part in parameters if not part.hidden]
        lines.append("")
    return lines


def page() -> str:
    """The whole page."""
    root: Any = typer.main.get_command(app)
    lines = [INTRODUCTION]
    for panel in PANELS:
        lines += [f"## {panel}", ""]
        for part, command in root.commands.items():
            if command.rich_help_panel == panel:
                is_group = hasattr(command, "commands")
                known = (
                    commands_of(command, f"esper {part}")
                    if is_group
                    else [(f"esper {part}", command)]
                )
                for name, own in known:
                    lines += section_of(name, own)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
