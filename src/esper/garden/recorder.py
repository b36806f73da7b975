"""A garden's history as a run folder, for `esper watch`, `serve` and `report`.

What an event says is decided elsewhere; here it is only written.
"""

import json
import secrets
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from esper.kasmina.model import MorphogeneticModel
from esper.storage import runfolder
from esper.storage.files import write_durably
from esper.telemetry.curve_export import TrackerName, TrackingSink, require_trackers
from esper.telemetry.escalation import TelemetryConfig
from esper.telemetry.events import Event, to_record


class Recorder:
    """Writes a garden's events until it is closed, or the process ends.

    The folder holds the garden's history and no more: what a garden has lost in memory, because
    an earlier save was loaded, the folder of its run loses too.

    `run` is the name of the run, which the folder has as well.
    """

    def __init__(
        self,
        folder: Path,
        track: Sequence[TrackerName],
        *,
        run: str | None,
        start: dict[str, Any],
        history: Sequence[Event],
    ):
        """Continue `run` where the folder is its own, or begin a new run in a fresh folder."""
        require_trackers(track)
        self.folder = folder
        self.track = track
        with ExitStack() as held:
            held.enter_context(runfolder.only_writer(folder))
            is_known = run is not None and runfolder.read_start(folder).get("run") == run
            if not is_known:
                runfolder.require_fresh(folder)
            self.run = run if is_known else secrets.token_hex(8)
            config = start | {"run": self.run}
            lines = [_to_line(event) for event in history] if is_known else []
            with runfolder.begun(folder, config):
                write_durably(folder / runfolder.EVENTS, "".join(lines).encode())
            self.sink = held.enter_context(
                TrackingSink(folder / runfolder.EVENTS, TelemetryConfig(), track, config)
            )
            self.close = weakref.finalize(self, held.pop_all().close)
        if not is_known:
            self.write(history)

    def write(self, events: Sequence[Event]) -> None:
        """Write events to the folder and the trackers."""
        for event in events:
            self.sink.write(event)


def _to_line(event: Event) -> str:
    return json.dumps(to_record(event), allow_nan=False) + "\n"


def describe_start(model: MorphogeneticModel, policy_name: str) -> dict[str, Any]:
    """What a run is started with, as far as `esper.grow` knows."""
    settings = asdict(model.settings)
    return {
        "command": runfolder.GARDEN_COMMAND,
        "task": {"name": type(model.host).__name__, "epochs": settings["epochs"]},
        "hosts": 1,
        "policy": policy_name,
        "slots": dict(model.slot_config.modules),
        "budget": model.budget,
        "budget_flops": None if model.flops_limit is None else model.flops_limit.budget,
        "max_seeds": model.max_seeds,
        "blueprints": list(model.space.blueprint_ids[1:]),
        "settings": settings,
    }
