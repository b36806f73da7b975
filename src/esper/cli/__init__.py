"""The `esper` command: one module per family of commands, and what they print.

A command reads its options, calls one function of another package, and shows what came of it. No
training, no measuring and no file format may come in here, and no package imports this one.
"""

from esper.cli.app import main

__all__ = ["main"]
