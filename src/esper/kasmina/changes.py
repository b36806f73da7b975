"""What happened to slots, told as events."""

from collections.abc import Iterable

from esper.kasmina.model import SlotChange
from esper.telemetry.events import Event, GateJudged, StageChanged


def tell_changes(host: int, epoch: int, changes: Iterable[SlotChange]) -> list[Event]:
    """The verdicts that were new and the move itself, slot by slot."""
    events: list[Event] = []
    for change in changes:
        before, after = change.before, change.after
        events += [
            GateJudged(host, epoch, change.slot_id, g.name, g.measured, g.needed, g.verdict.value, g.reason)
            for g in after.gates
            if g not in before.gates
        ]
        blueprint = after.blueprint_id or before.blueprint_id
        events.append(
            StageChanged(host, epoch, change.slot_id, before.stage.name, after.stage.name, blueprint, after.alpha)
        )
    return events
