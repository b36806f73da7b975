"""The stages of a slot and the moves between them, as one table.

No clock and no tensors: `lifecycle` moves along this table, nothing else may.
"""

from enum import IntEnum


class SeedStage(IntEnum):
    """Where a slot stands, in the order a successful seed passes through."""

    DORMANT = 0
    GERMINATED = 1
    TRAINING = 2
    BLENDING = 3
    PROBATIONARY = 4
    FOSSILIZED = 5
    CULLED = 6
    EMBARGOED = 7
    RESETTING = 8


TRANSITIONS: dict[SeedStage, frozenset[SeedStage]] = {
    SeedStage.DORMANT: frozenset({SeedStage.GERMINATED}),
    # FOSSILIZED at once where the ramp has length 0
    SeedStage.GERMINATED: frozenset({SeedStage.TRAINING, SeedStage.CULLED, SeedStage.FOSSILIZED}),
    SeedStage.TRAINING: frozenset({SeedStage.BLENDING, SeedStage.CULLED}),
    SeedStage.BLENDING: frozenset({SeedStage.PROBATIONARY, SeedStage.CULLED}),
    SeedStage.PROBATIONARY: frozenset({SeedStage.FOSSILIZED, SeedStage.CULLED}),
    # its seed is host now; the slot opens again
    SeedStage.FOSSILIZED: frozenset({SeedStage.DORMANT}),
    SeedStage.CULLED: frozenset({SeedStage.EMBARGOED}),
    SeedStage.EMBARGOED: frozenset({SeedStage.RESETTING}),
    SeedStage.RESETTING: frozenset({SeedStage.DORMANT}),
}
"""Stage -> the stages that may follow it."""

LIVE_STAGES = frozenset(stage for stage, after in TRANSITIONS.items() if SeedStage.CULLED in after)
"""Stages in which the slot holds a seed of its own."""

assert set(TRANSITIONS) == set(SeedStage), "every stage needs a row in TRANSITIONS"
