"""What may be done to a network now. Masks, executors and policies ask here and nowhere else."""

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
)
from esper.leyline.lifecycle import MIN_CULL_AGE, repeated_blends
from esper.leyline.reports import SeedStateReport
from esper.leyline.stages import SeedStage


@dataclass(frozen=True)
class FlopsView:
    """A limit on the FLOPs of one example forward, and what of it is used."""

    used: int  # host, fossils and live seeds together
    budget: int
    costs: Mapping[tuple[str, str, str], int]  # (slot, blueprint, blend) -> FLOPs


@dataclass(frozen=True)
class GrowthView:
    """All that legality depends on. No timing rules: only what is physically possible."""

    space: ActionSpace
    reports: Mapping[str, SeedStateReport]  # by slot
    seeds_used: int  # live seeds and fossils together
    max_seeds: int | None  # None = no limit
    params_used: int  # host, fossils and live seeds together
    budget: int | None  # most parameters the whole network may have; None = no limit
    # (slot, blueprint, blend) -> parameters; a blueprint that does not fit a slot has no entry
    costs: Mapping[tuple[str, str, str], int]
    # epochs from alpha 0 to 1; None = not known, and every blend counts as one of its own
    ramp: int | None
    flops: FlopsView | None = None  # None = no limit on FLOPs


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
        return errors.SeedTooYoungError(
            f"the seed in slot {slot} is {report.seed_age_epochs} epochs old; it can be culled "
            f"from age {MIN_CULL_AGE} on, so train an epoch first."
        )
    if report.stage is SeedStage.PROBATIONARY and report.is_measured:
        return None
    problem = f"is {report.stage.name}"
    if report.stage is SeedStage.PROBATIONARY:
        problem = "has no measured contribution"
    return errors.NotMeasuredError(
        f"the seed in slot {slot} {problem}. Fossilizing needs a PROBATIONARY seed with a paired "
        f"counterfactual; train and measure it first."
    )


def require(op: int, slot: str, blueprint: str | None, blend: str, view: GrowthView) -> None:
    """Raise the refusal of an op that cannot be applied now.

    The refusal is unbound before it leaves. An exception holds its traceback, the traceback holds
    this frame, and a local name here would hold the exception: a cycle that keeps the caller's
    network in memory until the garbage collector runs.
    """
    refusal = refuse(op, slot, blueprint, blend, view)
    if refusal is None:
        return
    try:
        raise refusal
    finally:
        del refusal


def legal_plantings(slot_id: str, view: GrowthView) -> list[tuple[int, int]]:
    """Pairs of blueprint and blend that may be germinated in a slot now, as indices.

    It is `refuse` for all of them at once.
    """
    if _refuse_slot(view.reports[slot_id], view) is not None:
        return []
    room = _room(view)
    repeated = repeated_blends(view.space.blends, view.ramp)
    plantings: list[tuple[int, int]] = []
    for blueprint_index, blueprint in enumerate(view.space.blueprint_ids):
        if blueprint is None:
            continue
        for blend_index, blend in enumerate(view.space.blends):
            cost = view.costs.get((slot_id, blueprint, blend))
            is_affordable = cost is not None and cost <= room
            if is_affordable and view.flops is not None:
                is_affordable = _fits_flops((slot_id, blueprint, blend), view.flops)
            if is_affordable and blend not in repeated:
                plantings.append((blueprint_index, blend_index))
    return plantings


def _fits_flops(seed: tuple[str, str, str], flops: FlopsView) -> bool:
    """Whether the network may be as slow as this seed makes it."""
    return flops.used + flops.costs[seed] <= flops.budget


def _room(view: GrowthView) -> float:
    """Parameters that may still be added."""
    if view.budget is None:
        return math.inf
    return view.budget - view.params_used


def _refuse_slot(report: SeedStateReport, view: GrowthView) -> IllegalActionError | None:
    """Why no seed at all can be germinated in a slot now; None if one can."""
    slot = report.slot_id
    if report.stage is not SeedStage.DORMANT:
        return errors.SlotOccupiedError(
            f"slot {slot} is {report.stage.name}. A seed can be germinated only where the slot is "
            f"DORMANT; wait until it is, or choose another slot."
        )
    if view.max_seeds is not None and view.seeds_used >= view.max_seeds:
        return errors.SeedLimitError(
            f"{view.seeds_used} seeds and fossils exist, max_seeds is {view.max_seeds}; "
            f"cull one or raise max_seeds."
        )
    return None


def _refuse_germinate(
    slot: str, blueprint: str | None, blend: str, view: GrowthView
) -> IllegalActionError | None:
    """Why this seed cannot be germinated in a slot now; None if it can."""
    report = view.reports[slot]
    refusal = _refuse_slot(report, view)
    if refusal is not None:
        return refusal
    cost = None if blueprint is None else view.costs.get((slot, blueprint, blend))
    if cost is None:
        fitting = {name for owner, name, _ in view.costs if owner == slot}
        return errors.BlueprintMismatchError(
            f"blueprint {blueprint!r} does not fit slot {slot} with {report.kind} features of "
            f"shape {report.feature_shape}. Fitting here: {', '.join(sorted(fitting)) or 'none'}."
        )
    repeated = repeated_blends(view.space.blends, view.ramp)
    if blend in repeated:
        return errors.RepeatedBlendError(
            f"the ramp is {view.ramp}, so {blend} blending in slot {slot} is {repeated[blend]} "
            f"blending bit for bit; choose {repeated[blend]}, or a ramp of 3 or more."
        )
    if cost > _room(view):
        return errors.BudgetExceededError(
            f"{blueprint} in slot {slot} with {blend} blending needs {cost:,} parameters, but "
            f"{view.params_used:,} of {view.budget:,} are used. Choose a smaller blueprint, cull a "
            f"seed, or raise the budget."
        )
    if view.flops is not None and blueprint is not None:
        seed = (slot, blueprint, blend)
        if not _fits_flops(seed, view.flops):
            price = view.flops.costs[seed]
            return errors.BudgetExceededError(
                f"{blueprint} in slot {slot} with {blend} blending takes {price:,} FLOPs an "
                f"example, but {view.flops.used:,} of {view.flops.budget:,} are used. "
                f"Choose a cheaper blueprint, cull a seed, or raise budget_flops."
            )
    return None
