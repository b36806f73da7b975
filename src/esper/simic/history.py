"""A run's checkpoints: the newest few and the best, which one to go on from, and what the events were then."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from esper.leyline.errors import SaveError
from esper.simic.agent import PPOAgent
from esper.simic.checkpoints import Layout, load_agent, save_agent
from esper.simic.team import Team
from esper.simic.training_config import TrainingConfig
from esper.telemetry import runfolder
from esper.telemetry.events import CheckpointSaved
from esper.telemetry.sink import Sink


class History:
    """Saves after every round and finds the way back."""

    def __init__(self, config: TrainingConfig, layout: Layout, sink: Sink, team: Team | None = None):
        self.folder, self.keep = config.out, config.keep_checkpoints
        self.layout, self.sink, self.team = layout, sink, team or Team()
        self.entries: list[dict[str, Any]] = []
        self.best: dict[str, Any] | None = None

    def save(self, agent: PPOAgent, rounds: int, mean_return: float) -> None:
        """A checkpoint after `rounds` whole rounds, with where each rank's events stood.

        Hosts begin anew with every round, so the learner is all there is to keep, and it is the same on all ranks.
        """
        name = f"round-{rounds:06d}.safetensors"
        if self.team.rank == 0:
            self.sink.write(CheckpointSaved(rounds, name))
        events = runfolder.event_sizes(self.folder)  # of ranks that there were once, too
        events |= {str(rank): size for rank, size in enumerate(self.team.gather(self.sink.commit()))}
        if self.team.rank == 0:
            self._save(agent, rounds, mean_return, name, events)

    def _save(self, agent: PPOAgent, rounds: int, mean_return: float, name: str, events: dict[str, int]) -> None:
        facts = {"rounds": rounds, "events": events, "telemetry": self.sink.telemetry.state()}
        path = self.folder / runfolder.CHECKPOINTS / name
        save_agent(path, agent, self.layout, facts)
        entry = {"file": name, "rounds": rounds, "return": mean_return, "sha256": runfolder.digest(path)}
        self.entries.append(entry)
        if self.best is None or mean_return > self.best["return"]:
            self.best = entry
        self.entries = self.entries[-self.keep :]
        self._write(rounds)
        self._forget()

    def _write(self, rounds: int) -> None:
        values = {"format": 1, "rounds": rounds, "checkpoints": self.entries, "best": self.best}
        runfolder.write_json(self.folder / runfolder.MANIFEST, values)

    def _forget(self) -> None:
        """Delete the checkpoints that the manifest no longer names; what others put there stays."""
        named = {entry["file"] for entry in (*self.entries, self.best or self.entries[-1])}
        for path in (self.folder / runfolder.CHECKPOINTS).glob("round-*.safetensors*"):
            if path.name not in named:
                with suppress(OSError):  # one file too many harms nobody
                    path.unlink()

    def resume(self, agent: PPOAgent) -> int:
        """Put the learner and the events back to the newest whole checkpoint; the number of rounds it has behind it."""
        with self.team.together():
            entries, best = self._whole()
        newest = entries[-1] if entries else None
        self.team.require_same({"the checkpoint to go on from": newest and f"{newest['file']} {newest['sha256'][:12]}"})
        if newest is None:
            self._rewind({})
            return 0
        facts = load_agent(self._path(newest), agent, self.layout)
        self.entries, self.best = entries, best
        if self.best is not None and self.best["rounds"] > newest["rounds"]:
            self.best = max(self.entries, key=lambda known: known["return"])
        self._rewind(facts["events"])
        self.sink.telemetry.load(facts["telemetry"])
        self.sink.telemetry.end_round()
        return int(facts["rounds"])

    def _rewind(self, sizes: dict[str, int]) -> None:
        self.sink.rewind(int(sizes.get(str(self.team.rank), 0)))
        if self.team.rank == 0:
            runfolder.cut_events(self.folder, sizes, self.team.size)

    def _whole(self) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
        """The checkpoints up to the newest that is whole, and the best; the damaged ones are named."""
        manifest = runfolder.read_manifest(self.folder)
        entries = manifest["checkpoints"]
        for entry in (*entries, manifest.get("best")) if entries else ():
            if not isinstance(entry, dict) or not {"file", "rounds", "return", "sha256"} <= entry.keys():
                raise SaveError(f"the manifest in {self.folder} is not that of an esper ppo; choose another --out.")
        while entries and not runfolder.is_whole(self.folder, entries[-1]):
            name = entries.pop()["file"]
            print(f"esper: checkpoint {name} is damaged or missing; trying the one before.", file=sys.stderr)
            if not entries:
                raise SaveError(f"no checkpoint in {self.folder} is whole; restore one from a copy, or start anew.")
        return entries, manifest.get("best")

    def _path(self, entry: dict[str, Any]) -> Path:
        return self.folder / runfolder.CHECKPOINTS / str(entry["file"])
