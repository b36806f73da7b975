"""How far long work is, and how long the rest takes: on a terminal; pipes stay plain."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from esper.simic.trainer import Advance


class Meter:
    """A bar with the time left. Work of another name begins anew."""

    def __init__(self, console: Console | None = None):
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            transient=True,
        )
        self._work: str | None = None
        self._task: TaskID | None = None

    def advance(self, work: str, done: int, total: int) -> None:
        """Move the bar."""
        if work != self._work or self._task is None:
            self.clear()
            self._work = work
            self._task = self.bar.add_task(work, total=total)
        self.bar.update(self._task, completed=done, total=total)

    def clear(self) -> None:
        """Take the bar away."""
        if self._task is not None:
            self.bar.remove_task(self._task)
            self._task = None


def is_watched(console: Console) -> bool:
    """Whether somebody looks: what is written to a file or a pipe is for programs."""
    # notebooks set FORCE_COLOR for what they show, which is no terminal
    is_coloured_pipe = bool(os.environ.get("FORCE_COLOR")) and not console.file.isatty()
    return console.is_terminal and not is_coloured_pipe and not console.quiet


@contextmanager
def show_progress(console: Console) -> "Iterator[Advance]":
    """Show a bar below the lines that the console prints meanwhile; nothing in a pipe."""
    if not is_watched(console):
        yield lambda work, done, total: None
        return
    meter = Meter(console)
    with meter.bar:
        yield meter.advance
