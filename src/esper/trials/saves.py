"""A growing run on disk, epoch by epoch: hosts, what policies remember, and what had happened. No training in here."""

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from esper.leyline.errors import SaveError
from esper.runtime.population import Population
from esper.runtime.storing import can_be_stored, restore_population, store_population
from esper.telemetry import runfolder
from esper.telemetry.events import Event, from_record, to_record
from esper.telemetry.sink import Sink
from esper.trials.arms import Decider

KEPT_EPOCHS = 2
"""Newest epochs whose hosts stay on disk."""
_STATE, _MEMORY = "state.json", "memory.safetensors"


@dataclass(frozen=True)
class EpochSave:
    """An epoch that has been trained and measured, before anything was decided about it."""

    epoch: int
    happened: list[list[Event]]
    counts: list[dict[str, int]]
    """stages entered so far, per host"""


class EpochSaves:
    """Saves after every epoch and finds the way back."""

    def __init__(self, out: Path, population: Population, deciders: Sequence[Decider], sink: Sink):
        self.out, self.population, self.deciders, self.sink = out, population, deciders, sink
        self.epochs = 0
        """epochs of the episodes that a resume would not have to train again"""

    def save(self, save: EpochSave) -> None:
        """A kill after this costs less than an epoch. Hosts under the governor's suspicion are not saved."""
        if not can_be_stored(self.population):
            return
        folder = self.out / runfolder.CHECKPOINTS / f"epoch-{save.epoch:06d}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            store_population(self.population, folder)
            save_file(self._tensors(), folder / _MEMORY)
        except (OSError, SafetensorError) as problem:
            raise SaveError(
                f"cannot save {folder}: {problem}. What was saved before is untouched; make room and use --resume."
            ) from problem
        runfolder.write_json(folder / _STATE, {**self._plain(save), "files": _digests(folder)})
        self._list(folder, save.epoch)
        self.epochs = save.epoch + 1

    def _tensors(self) -> dict[str, Tensor]:
        """Memories of networks; those of rules are plain data."""
        return {
            f"{host}.{part}": tensor.cpu().contiguous()
            for host, decider in enumerate(self.deciders)
            if isinstance(decider.memory, tuple)
            for part, tensor in enumerate(decider.memory)
        }

    def _plain(self, save: EpochSave) -> dict[str, Any]:
        return {
            "epoch": save.epoch,
            "events": self.sink.commit(),
            "memory": [None if isinstance(d.memory, tuple) else d.memory for d in self.deciders],
            "trackers": [decider.tracker.state() for decider in self.deciders],
            "happened": [[to_record(event) for event in events] for events in save.happened],
            "counts": save.counts,
        }

    def _list(self, folder: Path, epoch: int) -> None:
        """Enter the epoch into the manifest; only what is listed there exists."""
        known = [entry for entry in runfolder.read_manifest(self.out)["checkpoints"] if entry["epoch"] < epoch]
        entry = {"file": folder.name, "epoch": epoch, "sha256": runfolder.digest(folder / _STATE)}
        kept = [*known, entry][-KEPT_EPOCHS:]
        runfolder.write_json(self.out / runfolder.MANIFEST, {"format": 1, "checkpoints": kept})
        names = {entry["file"] for entry in kept}
        for stale in (self.out / runfolder.CHECKPOINTS).glob("epoch-*"):
            if stale.name not in names:
                shutil.rmtree(stale)

    def restore(self) -> EpochSave | None:
        """Hosts, memories and events as they were at the newest whole epoch; None where none was saved yet."""
        entries = runfolder.read_manifest(self.out)["checkpoints"]
        for entry in reversed(entries):
            folder = self.out / runfolder.CHECKPOINTS / str(entry["file"])
            try:
                return self._read(folder, str(entry["sha256"]))
            except SaveError as problem:
                print(f"esper: {entry['file']} cannot be used ({problem}); using the one before.", file=sys.stderr)
        if entries:
            raise SaveError(f"no saved epoch in {self.out} is whole; restore one from a copy, or start anew.")
        self.sink.rewind(0)
        return None

    def _read(self, folder: Path, digest: str) -> EpochSave:
        path = folder / _STATE
        if not path.is_file() or runfolder.digest(path) != digest:
            raise SaveError(f"{path} is missing or damaged")
        state = json.loads(path.read_text(encoding="utf-8"))
        found = _digests(folder)
        for name, wanted in state["files"].items():
            if found.get(name) != wanted:
                raise SaveError(f"{folder / name} is missing or damaged")
        restore_population(self.population, folder)
        tensors = load_file(folder / _MEMORY)
        for host, decider in enumerate(self.deciders):
            decider.memory = state["memory"][host]
            if f"{host}.0" in tensors:
                decider.memory = (tensors[f"{host}.0"], tensors[f"{host}.1"])
            decider.tracker.load(state["trackers"][host])
        self.sink.rewind(int(state["events"]))
        self.epochs = state["epoch"] + 1
        happened = [[from_record(record) for record in events] for events in state["happened"]]
        return EpochSave(state["epoch"], happened, state["counts"])


def _digests(folder: Path) -> dict[str, str]:
    """Every file below, by its path from here; the list itself is guarded by the run's manifest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _STATE)
    return {str(path.relative_to(folder)): runfolder.digest(path) for path in files}
