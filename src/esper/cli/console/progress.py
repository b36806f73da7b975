"""A training run while it goes on: one line per round, or a live table where there is a terminal. Draws events only."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table

from esper.telemetry.events import RoundFinished, clock


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
