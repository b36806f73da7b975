"""The one rule for what may be done now. Masks, executors and policies ask here and nowhere else."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from esper.leyline import errors
from esper.leyline.errors import IllegalActionError
from esper.leyline.factored_actions import (
    OP_CULL,
    OP_GERMINATE,
    OP_WAIT,
    ActionSpace,
    FactoredAction,
)
from esper.leyline.lifecycle import MIN_CULL_AGE
from esper.leyline.reports import SeedStateReport
from esper.leyline.stages import SeedStage


@dataclass(frozen=True)
class GrowthView:
    """All that legality depends on. No timing rules: only what is physically possible."""

    space: ActionSpace
    reports: Mapping[str, SeedStateReport]
    seeds_used: int  # live seeds and fossils together
    max_seeds: int | None
    params_used: int  # host, fossils and live seeds together
    budget: int | None  # most parameters the whole network may have; None = no limit
    costs: Mapping[tuple[str, str, str], int]
    """(slot, blueprint, blend) -> parameters; a blueprint that does not fit a slot has no entry"""


def refuse(
    op: int, slot: str, blueprint: str | None, blend: str, view: GrowthView
) -> IllegalActionError | None:
    """Why an op cannot be applied now, ready to be raised; None if it can."""
    if op == OP_WAIT:
        return None
    report = view.reports[slot]
    if op == OP_GERMINATE:
        return _refuse_germinate(slot, blueprint, blend, view)
    if not report.is_live:
        return errors.NoLiveSeedError(
            f"slot {slot} is {report.stage.name} and holds no live seed; germinate one."
        )
    if op == OP_CULL:
        if report.seed_age_epochs >= MIN_CULL_AGE:
            return None
        age = f"{report.seed_age_epochs} epochs old; it can be culled from age {MIN_CULL_AGE} on"
        return errors.SeedTooYoungError(
            f"the seed in slot {slot} is {age}, so train an epoch first."
        )
    if report.stage is SeedStage.PROBATIONARY and report.is_measured:
        return None
    problem = (
        "has no measured contribution"
        if report.stage is SeedStage.PROBATIONARY
        else f"is {report.stage.name}"
    )
    rule = "Fossilizing needs a PROBATIONARY seed with a paired counterfactual; train and measure it first."
    return errors.NotMeasuredError(f"the seed in slot {slot} {problem}. {rule}")


def is_legal(action: FactoredAction, view: GrowthView) -> bool:
    return (
        refuse(action.op, action.slot_id, action.blueprint_id, action.blend_algorithm_id, view)
        is None
    )


def legal_plantings(slot_id: str, view: GrowthView) -> list[tuple[int, int]]:
    """(blueprint, blend) indices that may be germinated in a slot now: `is_legal` for all of them at once."""
    if _refuse_place(view.reports[slot_id], view) is not None:
        return []
    costs, room = view.costs, _room(view)
    return [
        (number, way)
        for number, blueprint in enumerate(view.space.blueprint_ids)
        for way, blend in enumerate(view.space.blends)
        if (slot_id, blueprint, blend) in costs and costs[slot_id, blueprint, blend] <= room  # type: ignore[index]
    ]


def _room(view: GrowthView) -> float:
    """Parameters that may still be added."""
    return math.inf if view.budget is None else view.budget - view.params_used


def _refuse_place(report: SeedStateReport, view: GrowthView) -> IllegalActionError | None:
    slot = report.slot_id
    if report.stage is not SeedStage.DORMANT:
        rule = "A seed can be germinated only where the slot is DORMANT; wait until it is, or choose another slot."
        return errors.SlotOccupiedError(f"slot {slot} is {report.stage.name}. {rule}")
    if view.max_seeds is not None and view.seeds_used >= view.max_seeds:
        found = f"{view.seeds_used} seeds and fossils exist, max_seeds is {view.max_seeds}"
        return errors.SeedLimitError(f"{found}; cull one or raise max_seeds.")
    return None


def _refuse_germinate(
    slot: str, blueprint: str | None, blend: str, view: GrowthView
) -> IllegalActionError | None:
    report = view.reports[slot]
    if (problem := _refuse_place(report, view)) is not None:
        return problem
    if (cost := None if blueprint is None else view.costs.get((slot, blueprint, blend))) is None:
        fitting = ", ".join(sorted({b for s, b, _ in view.costs if s == slot})) or "none"
        place = f"slot {slot} with {report.kind} features of shape {report.feature_shape}"
        return errors.BlueprintMismatchError(
            f"blueprint {blueprint!r} does not fit {place}. Fitting here: {fitting}."
        )
    if cost > _room(view):
        needs = f"{blueprint} in slot {slot} with {blend} blending needs {cost:,} parameters"
        found = f"{needs}, but {view.params_used:,} of {view.budget:,} are used"
        return errors.BudgetExceededError(
            f"{found}. Choose a smaller blueprint, cull a seed, or raise the budget."
        )
    return None
