"""Contracts everybody shares: stages, slot ids, factored actions, gates, reports, legality, errors. No torch here."""

from esper.leyline.errors import EsperError, UnknownNameError
from esper.leyline.factored_actions import (
    DEFAULT_SPACE,
    ActionSpace,
    BlendAction,
    BlueprintAction,
    FactoredAction,
    LifecycleOp,
)
from esper.leyline.gates import GateEvidence, Measurement, Verdict
from esper.leyline.legality import GrowthView, is_legal, refusal
from esper.leyline.lifecycle import MIN_CULL_AGE, SeedState, StageLengths, ramp_alpha, tick
from esper.leyline.reports import SeedMetrics, SeedStateReport
from esper.leyline.slots import SlotConfig, ordered_slots
from esper.leyline.stages import LIVE_STAGES, TRANSITIONS, SeedStage

__all__ = [
    "DEFAULT_SPACE",
    "LIVE_STAGES",
    "MIN_CULL_AGE",
    "TRANSITIONS",
    "ActionSpace",
    "BlendAction",
    "BlueprintAction",
    "EsperError",
    "FactoredAction",
    "GateEvidence",
    "GrowthView",
    "LifecycleOp",
    "Measurement",
    "SeedMetrics",
    "SeedStage",
    "SeedState",
    "SeedStateReport",
    "SlotConfig",
    "StageLengths",
    "UnknownNameError",
    "Verdict",
    "is_legal",
    "ordered_slots",
    "ramp_alpha",
    "refusal",
    "tick",
]
