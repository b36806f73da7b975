"""What happened to slots, told as events."""

from collections.abc import Iterable, Mapping

from esper.kasmina.model import SlotChange
from esper.leyline.reports import SeedStateReport
from esper.telemetry.events import Event, GateJudged, SeedMeasured, StageChanged, finite


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


def tell_seeds(host: int, epoch: int, reports: Mapping[str, SeedStateReport]) -> list[SeedMeasured]:
    """Every live seed as it stands after an epoch."""
    return [
        SeedMeasured(
            host=host,
            epoch=epoch,
            slot=slot_id,
            stage=report.stage.name,
            blueprint=report.blueprint_id,
            alpha=report.alpha,
            age=report.seed_age_epochs,
            params=report.metrics.seed_param_count,
            contribution=finite(report.metrics.counterfactual_contribution),
            standard_error=finite(report.metrics.counterfactual_standard_error),
        )
        for slot_id, report in reports.items()
        if report.is_live
    ]
