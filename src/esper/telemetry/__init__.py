"""What happened, as small frozen records that serialise themselves. No torch in here, and no global sink."""

from esper.telemetry.escalation import TelemetryConfig, TelemetryLevel
from esper.telemetry.events import (
    ActionRefused,
    ActionTaken,
    ArmFinished,
    ContributionMeasured,
    EpochMeasured,
    Event,
    GateJudged,
    GrowthHint,
    HostRolledBack,
    StageChanged,
    from_record,
    to_record,
)

__all__ = [
    "ActionRefused",
    "ActionTaken",
    "ArmFinished",
    "ContributionMeasured",
    "EpochMeasured",
    "Event",
    "GateJudged",
    "GrowthHint",
    "HostRolledBack",
    "StageChanged",
    "TelemetryConfig",
    "TelemetryLevel",
    "from_record",
    "to_record",
]
