"""The `esper` command: one module per family of commands."""

from esper.cli.app import main

__all__ = ["main"]
