"""The `esper` command and its list of commands.

A caller's mistake is one line on stderr and exit code 2.
"""

import errno
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from esper import __version__
from esper.cli.console import arms_table, print_json
from esper.cli.doctor import GREETING, doctor
from esper.cli.look import AsJson, DataRoot, list_names, report, runs, serve, table, watch
from esper.cli.options import ConfiguredCommand
from esper.leyline.errors import CONTROLS, EsperError, SettingError, complain, printable
from esper.leyline.imports import import_own
from esper.storage.runfolder import EXPORTED

_DEMO = Path("runs/demo")


class OneScreen(TyperGroup):
    """Commands by what they are for, on one screen of 80 x 24."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, and the commands panel by panel."""
        self.format_usage(ctx, formatter)
        formatter.write(f"\n  {self.help}\n\n")
        known: list[Any] = list(self.commands.values())
        for panel in ("Train", "Compare", "Look", "Data"):
            commands = [command for command in known if command.rich_help_panel == panel]
            formatter.write(f"{panel}\n")
            with formatter.indentation():
                formatter.write_dl(
                    [(f"{command.name:8}", command.get_short_help_str(60)) for command in commands]
                )
        formatter.write(
            "\nesper COMMAND --help: options of a command. esper --version: the version.\n"
        )
        formatter.write(
            "esper --import FILE COMMAND: with your own tasks, rules, seeds and rewards.\n"
        )


app = typer.Typer(cls=OneScreen, help="Grow neural networks while they train.")
data_app = typer.Typer(no_args_is_help=True, help="Fetch official data sets to this machine.")
app.add_typer(data_app, name="data", rich_help_panel="Data")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"esper {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    call: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and leave."
        ),
    ] = False,
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import", metavar="FILE", help="Import a Python file or module of your own."
        ),
    ] = None,
) -> None:
    if call.invoked_subcommand is None:
        print(GREETING, end="")
        raise typer.Exit
    for name in imports or ():
        import_own(name)


@app.command(rich_help_panel="Train")
def demo(
    epochs: Annotated[int, typer.Option(min=8, help="Epochs of training per arm.")] = 40,
    seed: Annotated[
        int, typer.Option(min=0, help="Seeds the host's weights and its order of the data.")
    ] = 0,
    out: Annotated[
        Path, typer.Option(help="Folder for the two runs; a number is added where it is taken.")
    ] = _DEMO,
    as_json: AsJson = False,
) -> None:
    """Grow a small CNN on digits, next to one left alone."""
    from esper.cli.run import export_run, run_policy
    from esper.trials.config import RunConfig

    console = Console(stderr=as_json)
    out = unused(out)
    console.print(
        f"Digits, two arms of {epochs} epochs: same host, same order of data, same "
        f"learning rates. First the host "
        "alone, then growing under the heuristic, which sees held-out examples only; "
        "the score is on test images.",
        highlight=False,
    )
    results = []
    for policy in ("never", "heuristic"):
        task = {"name": "digits", "epochs": epochs}
        config = RunConfig.of(
            {"task": task, "seed": seed, "policy": policy, "out": str(out / policy)}
        )
        arms = run_policy(config, False, console)
        if arms is None:
            raise typer.Exit(130)
        results += arms
    export_run(out / "heuristic", out / EXPORTED)
    if as_json:
        rows = [asdict(result) for result in results]
        print_json({"results": rows, "out": out, "exported": out / EXPORTED})
        return
    console.print(arms_table(results, f"host alone against grown, digits, seed {seed}"))
    print(
        f"Runs: {out / 'never'} and {out / 'heuristic'}. The grown network as a plain "
        f"module: {out / 'exported'}.\n"
        f"Look at it: esper report {out / 'heuristic'} {out / 'never'}   (one HTML page)\n"
        "One seed is an anecdote: docs/results.md has ten, with controls.\n"
        "Next: esper run --task digits --policy heuristic --hosts 4 --out runs/four\n"
        "      esper ppo --preset digits --out runs/first        (a policy of your own)\n"
        "      esper.grow(your_model, ...) in your own loop      (README)"
    )


def unused(folder: Path) -> Path:
    """The folder, or the first of folder-2, folder-3, ... that is not there."""
    if not folder.exists():
        return folder
    if folder.name in ("", ".."):
        raise SettingError(f"--out {folder} is not a folder name; give one, such as runs/demo.")
    paths = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return next(path for path in paths if not path.exists())


for name, panel, summary in (
    ("ppo", "Train", "Train a growth policy by PPO over many hosts."),
    ("run", "Train", "Run a policy on one or many hosts."),
    ("compare", "Compare", "Compare growth policies with fair controls, seed by seed."),
):
    app.command(name, cls=ConfiguredCommand, help=summary, rich_help_panel=panel)(lambda: None)


@app.command(rich_help_panel="Train")
def export(
    run: Annotated[
        Path, typer.Argument(help="Folder of a finished esper run.", show_default=False)
    ],
    to: Annotated[Path | None, typer.Option(help="Where to; RUN/exported if not given.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write the best network of a run as a plain module."""
    from esper.cli.run import export_run

    folder = to or run / EXPORTED
    best = export_run(run, folder)
    if as_json:
        print_json({"folder": folder, **best})
        return
    scores = (
        f"held-out accuracy {best['validation_accuracy']:.2%}, test accuracy "
        f"{best['test_accuracy']:.2%}"
    )
    print(
        f"{printable(str(folder))}: the host of seed {best['seed']}, "
        f"{best['final_params']:,} parameters, {scores}."
    )


@data_app.command("fetch")
def fetch_data(
    name: Annotated[
        str, typer.Argument(help="Name of a data set; `esper list` has them.", show_default=False)
    ],
    data_root: DataRoot = None,
    as_json: AsJson = False,
) -> None:
    """Download a data set from its official address."""
    from esper.runtime.tasks.fetch import fetch

    notes = fetch(name, data_root)
    if as_json:
        print_json({"name": name, "data_root": data_root, "files": notes})
    else:
        print(*(printable(note) for note in notes), sep="\n")


app.command("list", rich_help_panel="Data")(list_names)
app.command(rich_help_panel="Data")(doctor)
for look in (runs, watch, serve, report, table):
    app.command(rich_help_panel="Look")(look)


def main(arguments: Sequence[str]) -> None:
    """Run the command line; what a caller got wrong is one line, and exit code 2."""
    try:
        words = list(arguments)
        for word in words:
            if CONTROLS.search(word):
                raise SettingError(
                    f"the argument {word!r} holds control characters; write it without them."
                )
        app(args=words, obj=words)
    except (EsperError, OSError, MemoryError) as problem:
        text = (
            str(problem)
            or "out of memory. What was saved is kept; try fewer hosts or a smaller batch."
        )
        if isinstance(problem, OSError) and problem.errno == errno.ENAMETOOLONG:
            text = f"the path {str(problem.filename)[:60]}... is too long; choose another."
        complain(text)
        sys.exit(2)
