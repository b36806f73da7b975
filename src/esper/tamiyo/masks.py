"""Which choices are possible, as arrays.

Every entry is an answer of `leyline.legality`; there is no rule in here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from esper.leyline.errors import SettingError
from esper.leyline.factored_actions import (
    OP_CULL,
    OP_FOSSILIZE,
    OP_GERMINATE,
    OP_WAIT,
    ActionSpace,
)
from esper.leyline.legality import FlopsView, GrowthView, legal_plantings, refuse
from esper.leyline.reports import SeedMetrics, SeedStateReport
from esper.leyline.slots import SlotConfig
from esper.leyline.stages import SeedStage
from esper.tamiyo.layout import ObservationLayout

Masks = dict[str, NDArray[np.bool_]]
"""By head: op [ops], slot [ops, S], blueprint [S, blueprints], blend [blends].

A batch has a leading N.
"""


@dataclass(frozen=True, slots=True)
class MaskSeedInfo:
    """All that a mask needs to know of one slot."""

    stage: SeedStage | int
    """the stage or its number"""
    seed_age_epochs: int = 0
    is_measured: bool = True
    """whether its contribution is known; seeds on probation are measured every epoch"""


def compute_action_masks(
    slot_states: Mapping[str, MaskSeedInfo | SeedStateReport | None],
    total_seeds: int,
    max_seeds: int | None,
    *,
    space: ActionSpace | None = None,
    costs: Mapping[tuple[str, str, str], int] | None = None,
    ramp: int | None = None,
    params_used: int = 0,
    budget: int | None = None,
    flops: FlopsView | None = None,
) -> Masks:
    """The masks of one host.

    Args:
        slot_states: what is in each slot, in few words or as the slot reports it; None, or a slot
            that is not named, is empty.
        total_seeds: live seeds and fossils together.
        max_seeds: how many of them there may be; None is no limit.
        space: the run's actions; without it the slots named, all built-in blueprints, all blends.
        costs: parameters by slot, blueprint and blend; without it every blueprint fits, free.
        ramp: epochs of a ramp; without it every blend counts as one of its own.
        params_used: parameters of host, fossils and live seeds together.
        budget: most parameters that the whole network may have; None is no limit.
        flops: the limit on the FLOPs of an example, and what of it is used; None is no limit.

    >>> masks = compute_action_masks({"r0c0": None, "r0c1": MaskSeedInfo(4, 5)}, 1, 3)
    >>> masks["slot"].tolist()  # rows: WAIT, GERMINATE, CULL, FOSSILIZE
    [[True, False], [True, False], [False, True], [False, True]]
    """
    if space is None:
        space = ActionSpace(SlotConfig(tuple(slot_states)))
    for slot_id in slot_states:
        space.slots.index_for_slot_id(slot_id)
    if costs is None:
        names = [name for name in space.blueprint_ids if name is not None]
        costs = dict.fromkeys(product(space.slots.slot_ids, names, space.blends), 0)
    reports = {}
    for slot_id in space.slots.slot_ids:
        reports[slot_id] = _as_report(slot_id, slot_states.get(slot_id))
    return _masks(
        GrowthView(
            space=space,
            reports=reports,
            seeds_used=total_seeds,
            max_seeds=max_seeds,
            params_used=params_used,
            budget=budget,
            costs=costs,
            ramp=ramp,
            flops=flops,
        )
    )


def _as_report(slot_id: str, state: MaskSeedInfo | SeedStateReport | None) -> SeedStateReport:
    """What is known of a slot, as legality reads it."""
    if isinstance(state, SeedStateReport):
        return state
    info = state or MaskSeedInfo(SeedStage.DORMANT)
    return SeedStateReport(
        slot_id=slot_id,
        stage=_as_stage(slot_id, info.stage),
        seed_age_epochs=info.seed_age_epochs,
        metrics=SeedMetrics(counterfactual_contribution=0.0 if info.is_measured else None),
    )


def _as_stage(slot_id: str, stage: SeedStage | int) -> SeedStage:
    """A stage or its number as a stage; a number that no stage has is refused."""
    try:
        return SeedStage(stage)
    except ValueError:
        stages = ", ".join(f"{known.value} {known.name}" for known in SeedStage)
        raise SettingError(
            f"slot {slot_id} is in stage {stage!r}, which is none; stages are {stages}."
        ) from None


def _masks(view: GrowthView) -> Masks:
    """The answers of legality to all that may be asked.

    A head that an op does not use, or cannot, has exactly one true entry: index 0. The blend head
    sees neither slot nor blueprint, so a blend counts as possible only where it is possible for
    every pair that any blend allows: what the masks let through is then always legal as a whole.
    """
    space = view.space
    ops, slots, blueprints, blends = space.sizes
    slot = np.zeros((ops, slots), bool)
    germinate = np.zeros((slots, blueprints, blends), bool)
    for index, slot_id in enumerate(space.slots.slot_ids):
        for end in (OP_CULL, OP_FOSSILIZE):
            slot[end, index] = refuse(end, slot_id, None, space.blends[0], view) is None
        for number, way in legal_plantings(slot_id, view):
            germinate[index, number, way] = True
    blueprint: NDArray[np.bool_] = np.any(germinate, axis=2)
    may_plant = bool(blueprint.any())
    serves_every_pair = np.all(germinate | ~blueprint[:, :, None], axis=(0, 1))
    blend: NDArray[np.bool_] = serves_every_pair & may_plant
    assert blend.any() or not may_plant, "the plainest blend is never dearer: it serves every pair"
    slot[OP_GERMINATE] = np.any(blueprint, axis=1)
    op: NDArray[np.bool_] = np.any(slot, axis=1)
    op[OP_WAIT] = True
    for rows in (slot, blueprint, blend[None]):
        rows[~rows.any(axis=-1), 0] = True
    return {"op": op, "slot": slot, "blueprint": blueprint, "blend": blend}


def only_waiting(masks: Masks) -> Masks:
    """The same masks for hosts to which nothing may be done now."""
    closed = {head: np.zeros_like(mask) for head, mask in masks.items()}
    for mask in closed.values():
        mask[..., 0] = True
    return closed


def pad_masks(masks: Masks, layout: ObservationLayout) -> Masks:
    """Masks of N hosts as wide as a layout; slots and blueprints that no host has are closed."""
    count, ops, slots = masks["slot"].shape
    blueprints = masks["blueprint"].shape[-1]
    if (slots, blueprints) == (layout.num_slots, layout.num_blueprints):
        return masks
    slot = np.zeros((count, ops, layout.num_slots), bool)
    slot[..., :slots] = masks["slot"]
    blueprint = np.zeros((count, layout.num_slots, layout.num_blueprints), bool)
    blueprint[:, :slots, :blueprints] = masks["blueprint"]
    blueprint[:, slots:, 0] = True
    return {**masks, "slot": slot, "blueprint": blueprint}


def padded_masks(views: Sequence[GrowthView], layout: ObservationLayout) -> Masks:
    """The masks of hosts that may have fewer slots than a layout, stacked."""
    if len({view.space.sizes for view in views}) == 1:
        return pad_masks(compute_batch_masks(views), layout)
    by_host = [pad_masks(compute_batch_masks([view]), layout) for view in views]
    return {head: np.concatenate([masks[head] for masks in by_host]) for head in by_host[0]}


def masks_for(view: GrowthView) -> Masks:
    """The masks of one host as it stands."""
    return compute_action_masks(
        view.reports,
        view.seeds_used,
        view.max_seeds,
        space=view.space,
        costs=view.costs,
        ramp=view.ramp,
        params_used=view.params_used,
        budget=view.budget,
        flops=view.flops,
    )


def compute_batch_masks(views: Sequence[GrowthView]) -> Masks:
    """The masks of N hosts, stacked."""
    by_host = [masks_for(view) for view in views]
    stacked = {}
    for head in by_host[0]:
        stacked[head] = np.stack([masks[head] for masks in by_host])
    return stacked
