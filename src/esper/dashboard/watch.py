"""`esper watch`: a run on a terminal, followed while it is written.

Reads and lays out; what is drawn is in `drawing`.
"""

import asyncio
import sys
import time
from collections import deque
from pathlib import Path
from typing import ClassVar

from esper.dashboard.reader import RunReader, open_run, summarise
from esper.leyline.errors import EsperError, SettingError
from esper.leyline.extras import needs

with needs("tui", "esper watch"):
    from rich.text import Text
    from textual import work
    from textual.app import App, ComposeResult
    from textual.binding import Binding
    from textual.containers import Horizontal, VerticalScroll
    from textual.widgets import Footer, Input, Static

    from esper.dashboard import drawing
    from esper.dashboard.drawing import Moment

SECONDS_BETWEEN_READINGS = 0.25


class Panel(VerticalScroll):
    """A titled part of the picture, which `drawing` draws by its id.

    It scrolls where it is too small for its lines.
    """

    def compose(self) -> ComposeResult:
        """Hold one widget, which shows what is drawn."""
        yield Static()

    def on_resize(self) -> None:
        """Draw again, as drawings depend on the size."""
        assert isinstance(self.app, WatchApp)
        self.app.redraw()

    def show(self, moment: Moment) -> None:
        """Draw a moment in the size that there is."""
        size = self.scrollable_content_region.size
        title, picture = getattr(drawing, f"draw_{self.id}")(moment, size.width, size.height)
        self.border_title = Text(title)
        self.query_one(Static).update(picture)


class WatchApp(App[None]):
    """The screen: panels, keys, and a reader that follows the run in a thread."""

    CSS_PATH = "watch.tcss"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (120, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (50, "-tall")]  # noqa: RUF012
    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = "#log"
    BINDINGS: ClassVar = [
        ("n", "choose_host(1)", "next host"),
        ("p", "choose_host(-1)", "previous"),
        ("slash", "focus('filter')", "filter"),
        Binding("escape", "drop_filter", "drop filter", show=False),
        ("q", "quit", "quit"),
    ]

    def __init__(self, reader: RunReader):
        super().__init__()
        self.reader = reader
        self.summary = summarise(reader)
        self.seen: deque[tuple[float, int]] = deque(maxlen=8)  # clock and progress
        self.host = 0  # counts up and down; taken modulo the number of hosts
        self.wanted = ""
        self.note = "reading"
        self.is_reading = False
        self.is_late = False  # whether a drawing waits for the reader

    def compose(self) -> ComposeResult:
        """Lay out the panels; `watch.tcss` says how large they are."""
        yield Panel(id="header")
        yield Panel(id="chain")
        yield Horizontal(Panel(id="episode"), Panel(id="rounds"), id="curves")
        yield Horizontal(Panel(id="ops"), Panel(id="reward"), Panel(id="health"), id="numbers")
        yield Panel(id="log")
        yield Input(
            placeholder="filter events: words that a line must have; Enter keeps, Escape drops it",
            id="filter",
        )
        yield Footer()

    def on_mount(self) -> None:
        """Begin to follow the run."""
        self.query_one("#header").can_focus = False
        self.query_one("#log").anchor()  # stays at its end until the user scrolls back
        self.screen.set_class(self.reader.view.kind != "ppo", "is-grown")
        self.call_after_refresh(self.follow)

    @work
    async def follow(self) -> None:
        """Read on in a thread, so that keys never wait, and draw when that is done."""
        self.redraw()
        while True:
            self.is_reading = True
            is_new = await asyncio.to_thread(self.read)
            self.is_reading = False
            if not self.seen or self.seen[-1][1] != self.summary.done:
                self.seen.append((time.monotonic(), self.summary.done))
            if is_new or self.is_late:
                self.redraw()
            await asyncio.sleep(SECONDS_BETWEEN_READINGS)

    def read(self) -> bool:
        """Take in what the folder has; whether that is anything new."""
        before = (self.summary.status, self.note)
        news = 0
        try:
            news = self.reader.refresh()
            self.summary = summarise(self.reader)
            self.note = self.reader.problem or ""
        except (OSError, EsperError) as problem:
            self.note = str(problem)
        return news > 0 or before != (self.summary.status, self.note)

    def redraw(self) -> None:
        """Draw what was read.

        While the view changes the picture stays, and it is drawn right after.
        """
        self.is_late = self.is_reading
        if self.is_late:
            return
        view = self.reader.view
        hosts = sorted(view.episodes)
        episode = view.episodes[hosts[self.host % len(hosts)]] if hosts else None
        moment = Moment(view, self.summary, episode, self.seen, self.wanted, self.note)
        for panel in self.query(Panel):
            if panel.display:
                panel.show(moment)

    def action_choose_host(self, by: int) -> None:
        """Show the next host, or the one before."""
        self.host += by
        self.redraw()

    def action_drop_filter(self) -> None:
        """List all events again."""
        self.query_one(Input).value = ""
        self.on_input_submitted()

    def on_input_changed(self, event: Input.Changed) -> None:
        """List the events that have the words so far."""
        self.wanted = event.value
        self.redraw()

    def on_input_submitted(self) -> None:
        """Go back to the events."""
        self.query_one("#log").focus()


def watch(folder: Path) -> None:
    """Show a run folder on the terminal until the user quits."""
    app = WatchApp(open_run(folder))
    if not (sys.__stdin__ and sys.__stdin__.isatty()):
        raise SettingError("esper watch needs a terminal; `esper runs` prints without one.")
    app.run()
