"""Tables for people, drawn from events; of a training run while it goes on, a live one or a line per round."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from esper.dashboard.reader import RunSummary
from esper.dashboard.view import printable
from esper.telemetry.events import ArmFinished, RoundFinished, clock


def arms_table(results: Sequence[ArmFinished], title: str) -> Table:
    """One row per arm: what it cost and what it reached."""
    table = Table(title=Text(printable(title)))
    table.add_column("arm")
    for column in ("parameters", "validation", "test", "kept,\nculled", "FLOPs", "seconds"):
        table.add_column(column, justify="right")
    for result in results:
        scores = [f"{score:.2%}" for score in (result.validation_accuracy, result.test_accuracy)]
        counts = f"{result.fossilized}, {result.culled}", f"{result.flops:.3g}", f"{result.seconds:.1f}"
        table.add_row(Text(printable(result.arm)), f"{result.final_params:,}", *scores, *counts)
    return table


def runs_table(summaries: Sequence[RunSummary]) -> Table:
    """One row per run: what it is, how far it is, what it reached, and how long ago it last had something to tell."""
    table = Table(title="runs", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("name", "task", "policy", "status"):
        table.add_column(column, overflow="fold")
    for column in ("rounds or\nepochs", "best\naccuracy", "parameters", "age"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in summaries:
        table.add_row(
            *(Text(printable(text)) for text in (run.name, run.task, run.policy, run.status)),
            f"{run.done}/{run.total or '?'}",
            "-" if run.best_accuracy is None else f"{run.best_accuracy:.2%}",
            "-" if run.params is None else f"{run.params:,}",
            "-" if run.age_seconds is None else ago(run.age_seconds),
        )
    return table


def ago(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def tasks_table(rows: Sequence[Mapping[str, object]]) -> Table:
    """One row per task: what it is, how large, and whether its data is there; sizes that are None are not known."""
    table = Table(title="tasks", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("what it is", min_width=16)
    table.add_column("train +\nvalidation", justify="right", no_wrap=True)
    table.add_column("host\nparameters", justify="right", no_wrap=True)
    table.add_column("source", min_width=11, max_width=14)
    table.add_column("is\nthere", no_wrap=True)
    for row in rows:
        is_there = "yes" if row["is_there"] else "no" if row["problem"] is None else "error"
        examples = "-" if row["train"] is None else f"{row['train']:,} +\n{row['validation']:,}"
        params = f"{row['host_parameters']:,}"
        table.add_row(str(row["name"]), str(row["summary"]), examples, params, str(row["source"]), is_there)
    return table


def names_table(title: str, known: Mapping[str, str]) -> Table:
    """Names and a line about each."""
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, line in known.items():
        table.add_row(Text(printable(name)), Text(printable(line)))
    return table


def _pace(event: RoundFinished, rounds: int) -> tuple[str, str]:
    """The speed of a round, and how long the rest takes at it."""
    speed = sum(event.ops.values()) / event.seconds if event.seconds else 0.0
    return f"{speed:.0f} decisions/s", clock(event.seconds * (rounds - event.round - 1))


def round_line(event: RoundFinished, rounds: int) -> str:
    ops = " ".join(f"{name.lower()} {count}" for name, count in event.ops.items())
    speed, left = _pace(event, rounds)
    return (
        f"round {event.round + 1}/{rounds}  return {event.mean_return:+.3f}  accuracy {event.accuracy:.2%} "
        f"(twin {event.twin_accuracy:.2%})  {event.params_share:.2f} x parameters  {ops}  {speed}  {left} left"
    )


def rounds_table(event: RoundFinished, rounds: int, best: float) -> Table:
    """A round in full, and the best return so far."""
    table = Table(title=f"round {event.round + 1} of {rounds}", show_header=False)
    seeds = {name: getattr(event, name) for name in ("germinated", "fossilized", "culled")}
    seeds["alive"] = event.germinated - event.fossilized - event.culled
    speed, left = _pace(event, rounds)
    for name, value in (
        ("return", f"{event.mean_return:+.3f} (best {best:+.3f})"),
        ("held-out accuracy", f"{event.accuracy:.2%} grown, {event.twin_accuracy:.2%} twin"),
        ("parameters", f"{event.params_share:.2f} x the host's"),
        ("seeds", ", ".join(f"{count} {name}" for name, count in seeds.items())),
        ("ops", ", ".join(f"{name} {count}" for name, count in event.ops.items())),
        ("reward parts", ", ".join(f"{name} {value:+.3f}" for name, value in event.reward_parts.items())),
        ("speed", speed),
        ("time left", left),
    ):
        table.add_row(name, value)
    return table


@contextmanager
def show_rounds(rounds: int, console: Console) -> Iterator[Callable[[RoundFinished], None]]:
    """Draws every round that it is given: live on a terminal, else a line each."""
    if console.quiet or not console.is_terminal:  # a live display would swallow what is written to stderr
        yield lambda event: console.print(round_line(event, rounds), markup=False, highlight=False, soft_wrap=True)
        return
    returns: list[float] = []
    with Live(console=console, refresh_per_second=4) as live:

        def draw(event: RoundFinished) -> None:
            returns.append(event.mean_return)
            live.update(rounds_table(event, rounds, max(returns)))

        yield draw
