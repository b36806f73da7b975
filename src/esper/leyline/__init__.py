"""Contracts everybody shares: stages, slot ids, factored actions, gates, reports, legality, errors. No torch here."""

from esper.leyline.errors import EsperError as EsperError
from esper.leyline.errors import UnknownNameError as UnknownNameError
from esper.leyline.factored_actions import DEFAULT_SPACE as DEFAULT_SPACE
from esper.leyline.factored_actions import ActionSpace as ActionSpace
from esper.leyline.factored_actions import BlendAction as BlendAction
from esper.leyline.factored_actions import BlueprintAction as BlueprintAction
from esper.leyline.factored_actions import FactoredAction as FactoredAction
from esper.leyline.factored_actions import LifecycleOp as LifecycleOp
from esper.leyline.gates import GateEvidence as GateEvidence
from esper.leyline.gates import Measurement as Measurement
from esper.leyline.gates import Verdict as Verdict
from esper.leyline.legality import GrowthView as GrowthView
from esper.leyline.legality import is_legal as is_legal
from esper.leyline.legality import refusal as refusal
from esper.leyline.lifecycle import MIN_CULL_AGE as MIN_CULL_AGE
from esper.leyline.lifecycle import SeedState as SeedState
from esper.leyline.lifecycle import StageLengths as StageLengths
from esper.leyline.lifecycle import ramp_alpha as ramp_alpha
from esper.leyline.lifecycle import tick as tick
from esper.leyline.reports import SeedMetrics as SeedMetrics
from esper.leyline.reports import SeedStateReport as SeedStateReport
from esper.leyline.slots import SlotConfig as SlotConfig
from esper.leyline.slots import ordered_slots as ordered_slots
from esper.leyline.stages import LIVE_STAGES as LIVE_STAGES
from esper.leyline.stages import TRANSITIONS as TRANSITIONS
from esper.leyline.stages import SeedStage as SeedStage
