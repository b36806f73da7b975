"""A training run while it goes on: one line per round, or a live table where there is a terminal. Draws events only."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table

from esper.telemetry.events import RoundFinished, clock

Show = Callable[[RoundFinished], None]


class RoundsSoFar:
    """What the display needs to remember: speed, how long it will take, the best round."""

    def __init__(self, rounds: int):
        self.rounds = rounds
        self.last: RoundFinished | None = None
        self.decisions_per_s = 0.0
        self.seconds_left = 0.0
        self.best: RoundFinished | None = None

    def take(self, event: RoundFinished) -> None:
        decisions = sum(event.ops.values())
        self.decisions_per_s = decisions / event.seconds if event.seconds else 0.0
        self.seconds_left = event.seconds * (self.rounds - event.round - 1)
        self.last = event
        if self.best is None or event.mean_return > self.best.mean_return:
            self.best = event


def round_line(so_far: RoundsSoFar) -> str:
    """The last round in one line."""
    event = so_far.last
    assert event is not None
    ops = " ".join(f"{name.lower()} {count}" for name, count in event.ops.items())
    return (
        f"round {event.round + 1}/{so_far.rounds}  return {event.mean_return:+.3f}  accuracy {event.accuracy:.2%} "
        f"(twin {event.twin_accuracy:.2%})  {event.params_share:.2f} x parameters  {ops}  "
        f"{so_far.decisions_per_s:.0f} decisions/s  {clock(so_far.seconds_left)} left"
    )


def rounds_table(so_far: RoundsSoFar) -> Table:
    """The last round in full."""
    event = so_far.last
    assert event is not None
    alive = event.germinated - event.fossilized - event.culled
    table = Table(title=f"round {event.round + 1} of {so_far.rounds}", show_header=False)
    for name, value in (
        ("return", f"{event.mean_return:+.3f} (best {so_far.best.mean_return if so_far.best else 0:+.3f})"),
        ("held-out accuracy", f"{event.accuracy:.2%} grown, {event.twin_accuracy:.2%} twin"),
        ("parameters", f"{event.params_share:.2f} x the host's"),
        (
            "seeds",
            f"{event.germinated} germinated, {event.fossilized} fossilized, {event.culled} culled, {alive} alive",
        ),
        ("ops", ", ".join(f"{name} {count}" for name, count in event.ops.items())),
        ("reward parts", ", ".join(f"{name} {value:+.3f}" for name, value in event.reward_parts.items())),
        ("speed", f"{so_far.decisions_per_s:.0f} decisions/s"),
        ("time left", clock(so_far.seconds_left)),
    ):
        table.add_row(name, value)
    return table


@contextmanager
def show_rounds(rounds: int, console: Console) -> Iterator[Show]:
    """Draws every round that it is given: live on a terminal, else a line each."""
    so_far = RoundsSoFar(rounds)
    if console.quiet or not console.is_terminal:  # a live display would swallow what is written to stderr

        def tell(event: RoundFinished) -> None:
            so_far.take(event)
            console.print(round_line(so_far), markup=False, highlight=False, soft_wrap=True)

        yield tell
        return
    with Live(console=console, refresh_per_second=4) as live:

        def draw(event: RoundFinished) -> None:
            so_far.take(event)
            live.update(rounds_table(so_far))

        yield draw
