"""The `esper` command: one module per family of commands, and what they print.

A command reads its options, calls one function of another package, and shows what came of it. No
training, no measuring and no file format may come in here, and no package imports this one.
"""

import sys
from collections.abc import Sequence

import esper
from esper.leyline.errors import EsperError, complain
from esper.leyline.extras import needs
from esper.leyline.namesake import require_own


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; the way in for the console script and for `python -m esper`."""
    try:
        require_own(esper)
        with needs("cli", "the command esper"):
            from esper.cli.app import main as run
    except EsperError as problem:
        complain(str(problem))
        sys.exit(2)
    run(sys.argv[1:] if arguments is None else arguments)
