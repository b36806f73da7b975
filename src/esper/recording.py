"""A run folder of one's own training loop, as `esper run` writes one: screens, reports and trackers read it at once."""

import json
import secrets
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.leyline.errors import SaveError
from esper.leyline.files import write_durably
from esper.telemetry import runfolder
from esper.telemetry.curve_export import TrackerName, TrackingSink, require_trackers
from esper.telemetry.escalation import TelemetryConfig
from esper.telemetry.events import to_record

if TYPE_CHECKING:
    from esper.garden import Garden


class Recorder:
    """Writes a garden's events until it is closed, or the process ends. The folder holds its history, no more.

    So a garden that was saved, loaded and recorded to the folder of its run loses there what it has lost in memory.
    """

    def __init__(self, garden: "Garden", folder: Path, track: Sequence[TrackerName]):
        require_trackers(track)
        self.folder, self.track = folder, track
        with ExitStack() as held:
            held.enter_context(runfolder.only_writer(folder))
            is_known = _is_of(folder, garden.run)
            self.run = garden.run if is_known else secrets.token_hex(8)
            config = _describe(garden) | {"run": self.run}
            past = [json.dumps(to_record(event), allow_nan=False) + "\n" for event in garden.history if is_known]
            with runfolder.begun(folder, config):
                write_durably(folder / runfolder.EVENTS, "".join(past).encode())
            self.sink = TrackingSink(folder / runfolder.EVENTS, TelemetryConfig(), track, config)
            held.enter_context(self.sink)
            self.close = weakref.finalize(self, held.pop_all().close)
        for event in [] if is_known else garden.history:
            self.sink.write(event)


def _describe(garden: "Garden") -> dict[str, Any]:
    """What a run is started with, as far as `esper.grow` knows."""
    model, settings = garden.model, asdict(garden.model.settings)
    task = {"name": type(model.host).__name__, "epochs": settings["epochs"]}
    limits = {"budget": model.budget, "max_seeds": model.max_seeds, "blueprints": list(model.space.blueprint_ids[1:])}
    known = {"command": runfolder.GARDEN, "task": task, "hosts": 1, "policy": garden.policy_name}
    return {**known, "slots": dict(model.slot_config.modules), **limits, "settings": settings}


def _is_of(folder: Path, run: str | None) -> bool:
    """Whether the folder holds this run; one that holds anything else is refused."""
    with suppress(SaveError):
        if run is not None and runfolder.read_json(folder / runfolder.CONFIG).get("run") == run:
            return True
    runfolder.require_fresh(folder)
    return False
