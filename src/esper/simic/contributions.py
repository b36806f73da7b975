"""The last readings of all that grew in one host, as rewards know them: by slot, in loss units."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import nn

from esper.kasmina.pruning import find_judged
from esper.kasmina.slot import SeedSlot
from esper.runtime.host import HostRun
from esper.simic.rewards import in_units
from esper.telemetry.events import Event, FossilJudged, HostRolledBack, RemainsMeasured, finite


@dataclass(frozen=True)
class Worth:
    """What a network is worth by its last readings, in the unit of its host's loss."""

    contributions: Mapping[str, float] = field(default_factory=dict)
    """by slot, those of its fossils and of its seed on probation together"""
    lead: float = 0.0
    """how far its held-out loss is below its twin's"""


class ContributionBook:
    """Follows one host through its episode.

    A reading belongs to the module that was measured: it stays when a seed becomes a fossil, comes
    back with what a rollback brings back, and goes with what is removed.
    """

    def __init__(self) -> None:
        self.worth = Worth()
        self._readings: WeakKeyDictionary[nn.Module, float] = WeakKeyDictionary()

    def begin(self, slots: Sequence[SeedSlot]) -> None:
        """Begin an episode: nothing has been measured, and the host equals its twin."""
        self._readings.clear()
        self.worth = Worth(contributions={slot.slot_id: 0.0 for slot in slots})

    def read(self, run: HostRun, happened: Iterable[Event], lead: float, unit: float) -> Worth:
        """Take in an epoch that was measured, and return what the network is worth now.

        Args:
            run: the host as it stands after that epoch.
            happened: the events of the epoch.
            lead: how far its loss is below its twin's. After a rollback, that of before holds: the
                reading is of the network that broke. Only what an episode leaves is measured again.
            unit: the unit of the host's loss.
        """
        kept_fossils: list[FossilJudged] = []
        remains: RemainsMeasured | None = None
        is_rolled_back = False
        for event in happened:
            if isinstance(event, FossilJudged) and event.is_kept:
                kept_fossils.append(event)
            elif isinstance(event, HostRolledBack):
                is_rolled_back = True
            elif isinstance(event, RemainsMeasured):
                remains = event
        is_measured = remains is not None and remains.held_out_loss is not None
        if is_rolled_back and not is_measured:
            lead = self.worth.lead
        self._read_seeds(run.slots)
        self._read_fossils(run, kept_fossils)
        contributions = self._by_slot(run.slots) if remains is None else remains.contributions
        in_unit = {
            slot.slot_id: in_units(contributions.get(slot.slot_id, 0.0), unit) for slot in run.slots
        }
        self.worth = Worth(contributions=in_unit, lead=lead)
        return self.worth

    def _read_seeds(self, slots: Iterable[SeedSlot]) -> None:
        """Note what seeds on probation were measured to contribute."""
        for slot in slots:
            measured = slot.state.contribution
            if slot.seed is not None and measured is not None:
                self._note(slot.seed, measured.mean)

    def _read_fossils(self, run: HostRun, verdicts: Sequence[FossilJudged]) -> None:
        """Note what late pruning measured of the fossils that it left, in its order."""
        if not verdicts:
            return
        for position, verdict in zip(find_judged(run.model), verdicts, strict=True):
            fossil = run.model.slot(position.slot_id).fossils[position.number]
            self._note(fossil, verdict.contribution)

    def _note(self, module: nn.Module, contribution: float | None) -> None:
        """Remember a reading; what is not finite leaves the one before it."""
        reading = finite(contribution)
        if reading is not None:
            self._readings[module] = reading

    def _by_slot(self, slots: Iterable[SeedSlot]) -> dict[str, float]:
        """What the modules that are there now contribute, added up by slot."""
        contributions: dict[str, float] = {}
        for slot in slots:
            modules: list[nn.Module] = [*slot.fossils]
            if slot.seed is not None:
                modules.append(slot.seed)
            contributions[slot.slot_id] = sum(self._readings.get(module, 0.0) for module in modules)
        return contributions
