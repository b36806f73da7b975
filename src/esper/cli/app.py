"""The `esper` command. Parses, calls, prints; a mistake of the caller's is one line on stderr and exit code 2."""

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from esper import __version__
from esper.cli.console.tables import arms_table, tasks_table
from esper.cli.look import add_to, parts_of
from esper.leyline.errors import EsperError, SettingError

if TYPE_CHECKING:
    from esper.runtime.tasks import Task

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Grow neural networks while they train.")
data_app = typer.Typer(no_args_is_help=True, help="Official data sets on this machine.")
app.add_typer(data_app, name="data")

DataRoot = Annotated[
    Path | None, typer.Option(envvar="ESPER_DATA", help="Folder that holds the data sets.", show_default=False)
]
Deterministic = Annotated[bool, typer.Option("--deterministic", help="Only kernels that repeat exactly.")]
Tensorboard = Annotated[bool, typer.Option("--tensorboard", help="Curves for TensorBoard, in OUT/tensorboard.")]
Wandb = Annotated[bool, typer.Option("--wandb", help="Curves for Weights & Biases, in OUT/wandb.")]
Watch = Annotated[bool, typer.Option("--watch", help="Show the run on this terminal while it trains.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"esper {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    epochs: Annotated[int, typer.Option(min=8, help="Epochs of training per arm.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="Seeds the host's weights and its order of the data.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the two runs; a number is added where it is taken.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Grow a small CNN on handwritten digits and compare it with the same host left alone."""
    from esper.cli.session import export_run, run_grow
    from esper.trials.growing import GrowConfig

    console = Console()
    out = unused(out)
    console.print(
        f"Digits, two arms of {epochs} epochs: same host, same order of data, same learning rates. First the host "
        "alone, then growing under the heuristic, which sees held-out examples only; the score is on test images.",
        highlight=False,
    )
    shared = {"task": {"name": "digits", "epochs": epochs}, "seed": seed, "threads": 1}
    results = []
    for policy in ("never", "heuristic"):
        config = GrowConfig.of({**shared, "policy": policy, "out": str(out / policy)})
        found = run_grow(config, False, console)
        if found is None:
            raise typer.Exit(130)
        results += found
    console.print(arms_table(results, f"host alone against grown, digits, seed {seed}"))
    export_run(out / "heuristic", out / "exported")
    for line in (
        f"Runs: {out / 'never'} and {out / 'heuristic'}. The grown network as a plain module: {out / 'exported'}.",
        f"Look at it: esper report {out / 'heuristic'} {out / 'never'}   (one HTML page)",
        "One seed is an anecdote: docs/results.md has ten, with controls.",
        "Next: esper grow --task digits --policy greedy --hosts 4 --out runs/greedy",
        "      esper ppo --preset digits --out runs/first        (a policy of your own)",
        "      esper.grow(your_model, ...) in your own loop      (README)",
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def unused(folder: Path) -> Path:
    """The folder, or the first of folder-2, folder-3, ... that is not there."""
    if not folder.exists():
        return folder
    if folder.name in ("", ".."):
        raise SettingError(f"--out {folder} is no folder of the demo's own; name one, such as runs/demo.")
    return next(path for number in count(2) if not (path := folder.with_name(f"{folder.name}-{number}")).exists())


@app.command()
def tasks(
    data_root: DataRoot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List what hosts can be trained on, and whether the data is there."""
    from esper.runtime.tasks import TASKS

    rows = [_describe(task, data_root) for task in TASKS.values()]
    if as_json:
        print(json.dumps(rows, indent=2, allow_nan=False))
        return
    console = Console()
    console.print(tasks_table(rows))
    for row in rows:
        if row["problem"] is not None:
            console.print(f"{row['name']}: {row['problem']}", markup=False, highlight=False)
    if not all(row["is_there"] for row in rows):
        console.print("What is not there: esper data fetch NAME --data-root DIR", highlight=False)


def _describe(task: "Task", root: Path | None) -> dict[str, Any]:
    """One task as plain values. Its data is read, so that `is_there` means it can be trained on."""
    import torch

    from esper.runtime.fetch import is_fetched

    with torch.device("meta"):
        host = task.build_host()
    row: dict[str, Any] = {"name": task.name, "summary": task.summary, "train": None, "validation": None}
    row["host_parameters"] = sum(parameter.numel() for parameter in host.parameters())
    row |= {"source": task.source, "is_there": False, "problem": None}
    if is_fetched(task.name, root):
        try:
            splits = task.load(root)
        except EsperError as problem:
            row["problem"] = str(problem)
        else:
            row |= {"train": len(splits.train), "validation": len(splits.validation), "is_there": True}
    return row


def trackers(tensorboard: bool, wandb: bool) -> list[str]:
    """Names of those that were asked for."""
    return [name for name, is_wanted in (("tensorboard", tensorboard), ("wandb", wandb)) if is_wanted]


def _watch(call: typer.Context, out: Path, resume: bool) -> NoReturn:
    """The same call without --watch in another process, and its run on this terminal."""
    from esper.cli.beside import require_screen, train_beside

    arguments = [argument for argument in call.obj if argument != "--watch"]
    raise typer.Exit(train_beside(arguments, out, resume, require_screen()))


@app.command()
def ppo(
    call: typer.Context,
    preset: Annotated[str | None, typer.Option(help="Configuration to start from; digits if none is named.")] = None,
    config_json: Annotated[Path | None, typer.Option(help="Configuration file, instead of a preset.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, such as ppo.lr=3e-4.")] = None,
    task: Annotated[str | None, typer.Option(help="What hosts are trained on; see `esper tasks`.")] = None,
    device: Annotated[str | None, typer.Option(help="One device: cpu or cuda:0.")] = None,
    devices: Annotated[list[str] | None, typer.Option(help="Several devices: cuda:0 cuda:1.")] = None,
    amp: Annotated[str | None, typer.Option(help="off, bf16 or fp16.")] = None,
    executor: Annotated[str | None, typer.Option(help="auto, eager or graphed.")] = None,
    reward_family: Annotated[str | None, typer.Option(help="contribution or loss.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of N episodes and one update.")] = None,
    hosts: Annotated[int | None, typer.Option(help="Hosts that live side by side.")] = None,
    seed: Annotated[int | None, typer.Option(help="Decides everything that is drawn.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    data_root: DataRoot = None,
    deterministic: Deterministic = False,
    tensorboard: Tensorboard = False,
    wandb: Wandb = False,
    watch: Watch = False,
) -> None:
    """Train a growth policy by PPO over many hosts that train side by side."""
    from esper.cli.session import assemble, run_ppo
    from esper.simic.team import is_launched
    from esper.simic.training_config import read_setting

    if preset is not None and config_json is not None:
        raise SettingError("--preset and --config-json both name a configuration; give one of them.")
    if device is not None and devices:
        raise SettingError("--device and --devices both say where; give one of them.")
    if (device is not None or devices) and is_launched():
        raise SettingError("under torchrun every rank has a device of its own; leave --device and --devices out.")
    if watch and is_launched():
        raise SettingError("ranks share one terminal; leave --watch out and look with: esper watch RUN")
    named = [device] if device is not None else devices or []
    places = parts_of(named)
    given = {
        "task.name": task,
        "devices": places if named else None,
        "amp": amp,
        "executor": executor,
        "reward.family": reward_family,
        "rounds": rounds,
        "hosts": hosts,
        "seed": seed,
        "out": None if out is None else str(out),
        "data_root": None if data_root is None else str(data_root),
        "deterministic": deterministic or None,
        "telemetry.track": trackers(tensorboard, wandb) or None,
    }
    changes = [(key, value) for key, value in given.items() if value is not None]
    changes += [read_setting(text) for text in settings or ()]
    config = assemble(preset, config_json, changes, resume)
    if watch:
        _watch(call, config.out, resume)
    if not run_ppo(config, resume, Console()):
        raise typer.Exit(130)


@app.command()
def grow(
    call: typer.Context,
    task: Annotated[str, typer.Option(help="What hosts are trained on; see `esper tasks`.")] = "digits",
    policy: Annotated[
        str, typer.Option(help="A rule, as heuristic or greedy:share=0.5, or a checkpoint.")
    ] = "heuristic",
    hosts: Annotated[int, typer.Option(help="Hosts that live side by side.")] = 1,
    epochs: Annotated[int | None, typer.Option(help="Epochs of an episode; the task's own if not given.")] = None,
    slots: Annotated[list[str] | None, typer.Option(help="Slots that are enabled: r0c0 r0c1.")] = None,
    budget: Annotated[float | None, typer.Option(help="Most parameters, as a multiple of the host's.")] = None,
    max_seeds: Annotated[int | None, typer.Option(help="Most seeds, live and kept.")] = None,
    seed: Annotated[int, typer.Option(help="The first host's seed; the others count on.")] = 0,
    devices: Annotated[list[str] | None, typer.Option(help="cpu, or cuda:0 cuda:1.")] = None,
    executor: Annotated[str, typer.Option(help="auto, eager or graphed.")] = "auto",
    amp: Annotated[str, typer.Option(help="off, bf16 or fp16.")] = "off",
    out: Annotated[Path, typer.Option(help="Run folder.")] = Path("runs/grow"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out, as it was started.")] = False,
    data_root: DataRoot = None,
    deterministic: Deterministic = False,
    tensorboard: Tensorboard = False,
    wandb: Wandb = False,
    watch: Watch = False,
) -> None:
    """Run a policy on one or many hosts, saved after every epoch."""
    from esper.cli.session import grow_config_of, run_grow
    from esper.telemetry.runfolder import CONFIG
    from esper.trials.growing import GrowConfig

    if resume and (out / CONFIG).exists():
        config = grow_config_of(out)
    else:
        episodes = {"name": task, "epochs": epochs, "budget": budget, "max_seeds": max_seeds}
        places = parts_of(devices) or ["cpu"]
        config = GrowConfig.of(
            {
                "task": {**episodes, "slots": parts_of(slots) or None},
                "policy": policy,
                "hosts": hosts,
                "seed": seed,
                "devices": places,
                "executor": executor,
                "amp": amp,
                "out": str(out),
                "data_root": None if data_root is None else str(data_root),
                "threads": 1 if places == ["cpu"] else None,
                "deterministic": deterministic,
            }
        )
    if tracked := trackers(tensorboard, wandb):
        config = config.model_copy(update={"track": tuple(tracked)})
    if watch:
        _watch(call, out, resume)
    console = Console()
    results = run_grow(config, resume, console)
    if results is None:
        raise typer.Exit(130)
    console.print(arms_table(results, f"{config.policy} on {config.task.name}"))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Folder of a finished esper grow.", show_default=False)],
    to: Annotated[Path | None, typer.Option(help="Where to; RUN/exported if not given.")] = None,
) -> None:
    """Write the best grown network of a run as a plain module and its weights."""
    from esper.cli.session import export_run

    folder = to or run / "exported"
    best = export_run(run, folder)
    Console().print(
        f"{folder}: the host of seed {best['seed']}, {best['final_params']:,} parameters, held-out accuracy "
        f"{best['validation_accuracy']:.2%}, test accuracy {best['test_accuracy']:.2%}.",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


@data_app.command("fetch")
def fetch_data(
    name: Annotated[str, typer.Argument(help="Name of a data set; `esper tasks` lists them.", show_default=False)],
    data_root: DataRoot = None,
) -> None:
    """Download a data set from its official address. What already exists is checked and kept."""
    from esper.runtime.fetch import fetch

    console = Console()
    bars: dict[str, TaskID] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    progress = Progress(*columns, TimeRemainingColumn(), console=console)
    with ExitStack() as open_bars:

        def show(file: str, here: int, total: int | None) -> None:
            if not bars:
                open_bars.enter_context(progress)  # drawn from the first byte on, so that a refusal is all one sees
            if file not in bars:
                bars[file] = progress.add_task(file)
            progress.update(bars[file], completed=here, total=total)

        notes = fetch(name, data_root, progress=show)
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


add_to(app)

LISTS = ("--devices", "--slots", "--policies", "--static", "--rates")
"""Options that take several values, with spaces or commas."""


def join_lists(arguments: Sequence[str]) -> list[str]:
    """`--devices a b` as `--devices a,b`, the way the parser takes it."""
    joined: list[str] = []
    is_list = False
    for argument in arguments:
        is_value = not argument.startswith("-")
        if is_list and is_value and joined[-1] not in LISTS:
            joined[-1] += f",{argument}"
        else:
            joined.append(argument)
            is_list = argument in LISTS or (is_list and is_value)
    return joined


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; the way in for the console script and for `python -m esper`."""
    try:
        given = join_lists(sys.argv[1:] if arguments is None else arguments)
        app(args=given, obj=given)
    except EsperError as problem:
        print(f"esper: {problem}", file=sys.stderr)
        sys.exit(2)


__all__ = ["main"]
