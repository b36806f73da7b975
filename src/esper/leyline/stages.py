"""The life of a seed as one table.

No clock and no tensors: `lifecycle` moves along this table, nothing else may.
"""

from enum import IntEnum


class SeedStage(IntEnum):
    """Where a slot stands, in the order a successful seed passes through."""

    (
        DORMANT,
        GERMINATED,
        TRAINING,
        BLENDING,
        PROBATIONARY,
        FOSSILIZED,
        CULLED,
        EMBARGOED,
        RESETTING,
    ) = range(9)


TRANSITIONS: dict[SeedStage, frozenset[SeedStage]] = {
    SeedStage.DORMANT: frozenset({SeedStage.GERMINATED}),
    SeedStage.GERMINATED: frozenset(
        {SeedStage.TRAINING, SeedStage.CULLED, SeedStage.FOSSILIZED}
    ),  # last: no ramp
    SeedStage.TRAINING: frozenset({SeedStage.BLENDING, SeedStage.CULLED}),
    SeedStage.BLENDING: frozenset({SeedStage.PROBATIONARY, SeedStage.CULLED}),
    SeedStage.PROBATIONARY: frozenset({SeedStage.FOSSILIZED, SeedStage.CULLED}),
    SeedStage.FOSSILIZED: frozenset(
        {SeedStage.DORMANT}
    ),  # its seed is host now; the slot opens again
    SeedStage.CULLED: frozenset({SeedStage.EMBARGOED}),
    SeedStage.EMBARGOED: frozenset({SeedStage.RESETTING}),
    SeedStage.RESETTING: frozenset({SeedStage.DORMANT}),
}

LIVE_STAGES = frozenset(stage for stage, after in TRANSITIONS.items() if SeedStage.CULLED in after)
"""Stages in which the slot holds a seed of its own."""

assert set(TRANSITIONS) == set(SeedStage), "every stage needs a row in TRANSITIONS"
