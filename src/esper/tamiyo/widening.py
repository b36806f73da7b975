"""Hosts of fewer slots in the action space of their family's widest list of slots.

A slot that a host does not have can hold nothing, and nothing may be planted in it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.leyline.factored_actions import OP_WAIT, ActionSpace, Choice, look_up
from esper.leyline.legality import GrowthView
from esper.leyline.reports import SeedStateReport
from esper.leyline.stages import SeedStage
from esper.tamiyo.observation import observe, signals_to_features
from esper.tamiyo.policies import WAIT
from esper.tamiyo.signals import SignalTracker


def widen(view: GrowthView, space: ActionSpace) -> GrowthView:
    """Return what may be done to a host in a space that has slots which it lacks."""
    if view.space == space:
        return view
    reports = dict(view.reports)
    for slot_id in space.slots.slot_ids:
        reports.setdefault(slot_id, _absent(slot_id))
    return replace(view, space=space, reports=reports)


def _absent(slot_id: str) -> SeedStateReport:
    return SeedStateReport(slot_id=slot_id, stage=SeedStage.DORMANT)


def narrow(choice: Choice, space: ActionSpace, own: ActionSpace) -> Choice | None:
    """Return a choice of a wide space in a host's own space; None where the host lacks the slot."""
    if space == own:
        return choice
    _, slot_id, blueprint_id, blend = look_up(space, *choice)
    if choice[0] == OP_WAIT:
        return WAIT
    if slot_id not in own.slots.slot_ids:
        return None
    return (
        choice[0],
        own.slots.index_for_slot_id(slot_id),
        own.blueprint_index(blueprint_id),
        own.blend_index(blend),
    )


def observe_in(
    trackers: Sequence[SignalTracker], space: ActionSpace, use_telemetry: bool = True
) -> NDArray[np.float32]:
    """Return observations of N hosts with the slots of a space, [N, F]; all is 0 of absent ones."""
    if all(tracker.slots == space.slots for tracker in trackers):
        return observe(trackers, use_telemetry)
    rows: list[Any] = []
    for tracker in trackers:
        if tracker.tracked is None or tracker.slots == space.slots:
            rows.append(observe([tracker], use_telemetry)[0])
            continue
        reports = {slot_id: _absent(slot_id) for slot_id in space.slots.slot_ids}
        row = signals_to_features(
            tracker.tracked,
            reports | tracker.reports,
            space.slots,
            tracker.loss_scale,
            use_telemetry,
        )
        rows.append(row)
    return np.stack(rows)
