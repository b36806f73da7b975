"""A run folder of one's own training loop, as `esper run` writes one: screens, reports and trackers read it at once."""

import json
import secrets
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from esper.kasmina import processes
from esper.kasmina.model import MorphogeneticModel
from esper.leyline.errors import SaveError
from esper.leyline.files import names_in, write_durably
from esper.telemetry import runfolder
from esper.telemetry.curve_export import TrackerName, TrackingSink, require_trackers
from esper.telemetry.escalation import TelemetryConfig
from esper.telemetry.events import Event, to_record
from esper.telemetry.sink import JsonlSink

COMMAND = "garden"
"""What started the run, in config.json."""


class Recorder(AbstractContextManager["Recorder"]):
    """Writes events to a run folder until it is closed: by `close`, by `with`, or by the end of the process.

    The folder must be new, or be the one of `run`; that is then written anew from `history`, so that what was trained
    after the save that a garden was loaded from is gone. Of several processes only the first one writes.
    """

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        run: str | None,
        history: Sequence[Event],
        track: Sequence[TrackerName],
    ):
        require_trackers(track)
        self.run = run
        self._sink: TrackingSink | None = None
        self._end = weakref.finalize(self, lambda: None)
        if not processes.is_first():
            return
        lines = [json.dumps(to_record(event), allow_nan=False) + "\n" for event in history]
        with ExitStack() as held:
            held.enter_context(runfolder.only_writer(folder))
            is_known = _goes_on(folder, run)
            self.run = run if is_known else secrets.token_hex(8)
            with runfolder.begun(folder, config | {"run": self.run}):
                write_durably(folder / runfolder.EVENTS, "".join(lines).encode())
            disk = held.enter_context(JsonlSink(folder / runfolder.EVENTS, TelemetryConfig()))
            self._sink = held.enter_context(closing(TrackingSink(disk, track, folder, config)))
            for event in () if is_known else history:
                self._sink.track(event)
            self._end = weakref.finalize(self, held.pop_all().close)

    def write(self, events: Iterable[Event]) -> None:
        for event in events:
            if self._sink is not None:
                self._sink.write(event)

    def close(self) -> None:
        """Give the folder back; the garden trains on unrecorded."""
        self._sink = None
        self._end()

    def __exit__(self, *problem: object) -> None:
        self.close()


def describe(model: MorphogeneticModel, policy: str) -> dict[str, Any]:
    """What a run is started with, as far as `esper.grow` knows."""
    settings = asdict(model.settings)
    return {
        "command": COMMAND,
        "task": {"name": type(model.host).__name__, "epochs": settings["epochs"]},
        "policy": policy,
        "hosts": 1,
        "slots": dict(model.slot_config.modules),
        "blueprints": list(model.space.blueprint_ids[1:]),
        "budget": model.budget,
        "max_seeds": model.max_seeds,
        "settings": settings,
    }


def _goes_on(folder: Path, run: str | None) -> bool:
    """Whether the folder holds this run; one that holds anything else is refused, but for a garden's own save."""
    names = [name for name in names_in(folder) if name not in (runfolder.LOCK, runfolder.MANIFEST)]
    if all(name.startswith("garden-") for name in names):
        return False
    try:
        found = runfolder.read_json(folder / runfolder.CONFIG)
    except SaveError:
        found = {}
    if run is not None and (found.get("command"), found.get("run")) == (COMMAND, run):
        return True
    way_out = (
        "Choose another one. To go on, load what garden.save wrote of the recorded run, then record to its folder."
    )
    raise SaveError(f"{folder} is not empty, and not the folder of this run. {way_out}")
