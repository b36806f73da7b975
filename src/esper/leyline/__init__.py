"""Contracts everybody shares: stages, slot ids, factored actions, gates, reports, legality, errors. No torch here."""

from esper.leyline.errors import EsperError as EsperError
from esper.leyline.factored_actions import FactoredAction as FactoredAction
from esper.leyline.gates import Measurement as Measurement
from esper.leyline.legality import is_legal as is_legal
from esper.leyline.lifecycle import SeedState as SeedState
from esper.leyline.lifecycle import StageLengths as StageLengths
from esper.leyline.reports import SeedMetrics as SeedMetrics
from esper.leyline.reports import SeedStateReport as SeedStateReport
from esper.leyline.slots import SlotConfig as SlotConfig
from esper.leyline.stages import SeedStage as SeedStage
