"""A growing run on disk, epoch by epoch: hosts, what policies remember, and what had happened. No training in here."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from safetensors.torch import load_file, save_file

from esper.runtime.population import Population
from esper.runtime.splits import require_corpus
from esper.runtime.storing import can_be_stored, describe_population, restore_population
from esper.telemetry import runfolder
from esper.telemetry.events import Event, from_record, to_record
from esper.telemetry.sink import Sink
from esper.telemetry.store import Generation, Store, fitting
from esper.trials.arms import Decider

KEPT_EPOCHS = 2
"""Newest epochs whose hosts stay on disk."""
_MEMORY = "memory"


@dataclass(frozen=True)
class EpochSave:
    """An epoch that has been trained and measured, before anything was decided about it."""

    epoch: int
    happened: list[list[Event]]
    counts: list[dict[str, int]]
    """stages entered so far, per host"""


class EpochSaves:
    """Saves after every epoch and finds the way back."""

    def __init__(self, out: Path, population: Population, deciders: Sequence[Decider], sink: Sink, of: str = ""):
        self.population, self.deciders, self.sink = population, deciders, sink
        self.epochs = 0
        """epochs of the episodes that a resume would not have to train again"""
        manifest, place = out / runfolder.MANIFEST, out / runfolder.CHECKPOINTS
        self.store = Store(manifest, "run of a policy", place, r"epoch-\d{6}-[a-z0-9-]+", KEPT_EPOCHS, of=of)

    def save(self, save: EpochSave) -> None:
        """A kill after this costs less than an epoch. Hosts under the governor's suspicion are not saved."""
        if not can_be_stored(self.population):
            return
        hosts, contents = describe_population(self.population)
        tensors = {  # memories of networks; those of rules are plain data
            f"{host}.{part}": tensor.cpu().contiguous()
            for host, decider in enumerate(self.deciders)
            if isinstance(decider.memory, tuple)
            for part, tensor in enumerate(decider.memory)
        }
        contents[_MEMORY] = partial(save_file, tensors)
        facts = {
            "epoch": save.epoch,
            "corpus": self.population.corpus,
            "events": self.sink.commit(),
            "memory": [None if isinstance(d.memory, tuple) else d.memory for d in self.deciders],
            "trackers": [decider.tracker.state() for decider in self.deciders],
            "happened": [[to_record(event) for event in events] for events in save.happened],
            "counts": save.counts,
            "hosts": hosts,
        }
        start = f"epoch-{save.epoch:06d}-"
        self.store.save(facts, {role: (f"{start}{role}.safetensors", content) for role, content in contents.items()})
        self.epochs = save.epoch + 1

    def restore(self) -> EpochSave | None:
        """Hosts, memories and events as they were at the newest whole epoch; None where none was saved yet."""
        save = self.store.newest()
        if save is None:
            self.sink.rewind(0)
            return None
        with fitting(self.store.manifest):
            return self._restore(save)

    def _restore(self, save: Generation) -> EpochSave:
        require_corpus(save.facts.get("corpus"), self.population.corpus, self.store.manifest.parent)
        paths = {role: self.store.path(save, role) for role in save.files}
        restore_population(self.population, save.facts["hosts"], paths)
        tensors = load_file(paths[_MEMORY])
        for host, decider in enumerate(self.deciders):
            decider.memory = save.facts["memory"][host]
            if f"{host}.0" in tensors:
                decider.memory = (tensors[f"{host}.0"], tensors[f"{host}.1"])
            decider.tracker.load(save.facts["trackers"][host])
        self.sink.rewind(int(save.facts["events"]))
        self.epochs = save.facts["epoch"] + 1
        happened = [[from_record(record) for record in events] for events in save.facts["happened"]]
        return EpochSave(save.facts["epoch"], happened, save.facts["counts"])
