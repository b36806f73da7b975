"""The commands that compare and look: compare, runs, watch, serve, report. `cli` adds them to the `esper` command."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

Folder = Annotated[Path, typer.Argument(help="Folder of runs.", show_default=True)]
Run = Annotated[Path, typer.Argument(help="Run folder.", show_default=False)]


def parts_of(texts: list[str] | None) -> list[str]:
    """Values given with spaces or commas, one by one."""
    return [part for text in texts or () for part in text.split(",") if part]


def compare(
    task: Annotated[str | None, typer.Option(help="What hosts are trained on; see `esper tasks`.")] = None,
    preset: Annotated[str | None, typer.Option(help="Hosts and episodes as in this preset of esper ppo.")] = None,
    policies: Annotated[list[str] | None, typer.Option(help="Rules, as greedy:share=0.5, or checkpoints.")] = None,
    static: Annotated[list[str] | None, typer.Option(help="start, final, final-equal-flops, final-whole.")] = None,
    seeds: Annotated[int, typer.Option(help="Host seeds; the same for every arm.")] = 10,
    first_seed: Annotated[int, typer.Option(help="Where host seeds begin to count.")] = 0,
    epochs: Annotated[int | None, typer.Option(help="Epochs of an episode; the task's own if not given.")] = None,
    budget: Annotated[float | None, typer.Option(help="Most parameters, as a multiple of the host's.")] = None,
    max_seeds: Annotated[int | None, typer.Option(help="Most seeds, live and kept.")] = None,
    final_of: Annotated[
        str, typer.Option(help="Arm that the final networks are of, and that sham replays.")
    ] = "heuristic",
    rates: Annotated[list[str] | None, typer.Option(help="Learning rates to try, as multiples: 0.5 1 2.")] = None,
    pretrain: Annotated[int, typer.Option(help="Epochs that hosts are trained alone first.")] = 0,
    source: Annotated[
        Path | None, typer.Option("--from", help="Finished esper grow --policy never to go on from.")
    ] = None,
    oracle: Annotated[bool, typer.Option("--oracle", help="Try each single planting, at three times.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda:0.")] = "cpu",
    side_by_side: Annotated[int | None, typer.Option(help="Most hosts in one population.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("runs/compare"),
    resume: Annotated[bool, typer.Option("--resume", help="Keep the arms in --out that are finished.")] = False,
    data_root: Annotated[
        Path | None, typer.Option(envvar="ESPER_DATA", help="Folder that holds the data sets.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compare growth policies with fair controls, paired by host seed."""
    from esper.cli.console.comparison import arms_compared, differences
    from esper.cli.session import run_compare
    from esper.trials.comparing import CompareConfig

    given: dict[str, object] = {
        "policies": parts_of(policies),
        "static": parts_of(static),
        "rates": [_number(part) for part in parts_of(rates)],
        "source": source,
        "side_by_side": side_by_side,
        "data_root": data_root,
        "threads": 1 if device == "cpu" else None,
    }
    options = {"seeds": seeds, "first_seed": first_seed, "final_of": final_of, "pretrain": pretrain, "oracle": oracle}
    episodes = _episodes(task, preset) | {
        name: value
        for name, value in (("epochs", epochs), ("budget", budget), ("max_seeds", max_seeds))
        if value is not None
    }
    kept = {name: value for name, value in given.items() if value is not None and value != []}
    config = CompareConfig.of({"task": episodes, "device": device, "out": out, **options, **kept})
    results = run_compare(config, resume, Console(stderr=as_json))
    if results is None:
        raise typer.Exit(130)
    if as_json:
        print(json.dumps(results, indent=1, allow_nan=False))
        return
    console = Console()
    console.print(arms_compared(results), differences(results))
    console.print(f"{out}: results.json, results.csv, figure.svg", markup=False, highlight=False, soft_wrap=True)


def _episodes(task: str | None, preset: str | None) -> dict[str, object]:
    from esper.leyline.errors import SettingError
    from esper.simic.training_config import TrainingConfig

    if preset is None:
        return {"name": task or "digits"}
    found = TrainingConfig.from_preset(preset).task.model_dump(mode="json")
    if task not in (None, found["name"]):
        raise SettingError(f"--preset {preset} is for the task {found['name']}, not {task}; give one of them.")
    return found


def _number(text: str) -> float:
    from esper.leyline.errors import SettingError

    try:
        return float(text)
    except ValueError:
        raise SettingError(f"--rates takes numbers, such as 0.5 1 2, got {text!r}.") from None


def runs(
    folder: Folder = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the runs in a folder."""
    from esper.cli.console.tables import runs_table
    from esper.dashboard.reader import RunReader
    from esper.dashboard.runs import find_runs, summarise

    readers = [RunReader(path) for path in find_runs(folder)]
    for reader in readers:
        reader.refresh()
    found = [summarise(reader) for reader in readers]
    if as_json:
        print(json.dumps([asdict(summary) for summary in found], indent=1, default=str, allow_nan=False))
    else:
        Console().print(runs_table(found))


def watch(run: Run) -> None:
    """Look at a run in the terminal, running or finished."""
    from esper.dashboard.watch import watch as show

    show(run)


def serve(
    folder: Folder = Path("runs"),
    host: Annotated[str, typer.Option(help="Address to listen on; any but 127.0.0.1 needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8765,
    token: Annotated[str | None, typer.Option(help="What a browser must know; made up if not given.")] = None,
) -> None:
    """Show runs in a browser, live."""
    from esper.dashboard.server import serve as start

    start(folder, host, port, token)


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.", show_default=False)],
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page about one or more runs."""
    from esper.dashboard.report import write_report

    write_report(runs, out)
    Console().print(f"wrote {out}", markup=False, highlight=False, soft_wrap=True)


def add_to(app: typer.Typer) -> None:
    """Make these commands of `esper`."""
    for command in (compare, runs, watch, serve, report):
        app.command()(command)
