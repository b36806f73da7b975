"""A sink for tests that look at nothing of what is told."""

from collections.abc import Mapping
from typing import Any

from esper.telemetry.escalation import TelemetryConfig, TelemetryLevel
from esper.telemetry.events import Event


class NullSink:
    """Takes everything and keeps nothing."""

    def __init__(self) -> None:
        self.telemetry = TelemetryConfig(TelemetryLevel.OFF)

    def rewind(self, end: tuple[int, int]) -> None:
        pass

    def write(self, event: Event) -> None:
        pass

    def write_record(self, kind: str, record: Mapping[str, Any], severity: TelemetryLevel) -> None:
        pass

    def wants(self, severity: TelemetryLevel) -> bool:
        return False

    def commit(self) -> tuple[int, int]:
        return 0, 0
