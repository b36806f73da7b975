"""How much is recorded, and for how long an anomaly makes it more.

Decides only; the sink asks for `level`.
"""

from collections.abc import Mapping
from enum import IntEnum


class TelemetryLevel(IntEnum):
    """How much is recorded; each level has all that the lower ones have."""

    OFF, MINIMAL, NORMAL, DEBUG = range(4)


class TelemetryConfig:
    """The level of a run.

    An anomaly lifts it to debug for a few rounds, once per series of anomalies. A series that
    outlives its escalation begins no new one; a round without any anomaly ends it. So a fault that
    stays is shown in full once, not for ever. Its `escalation_rounds` include the one with the
    anomaly. Off stays off.
    """

    def __init__(
        self, level: TelemetryLevel | str = TelemetryLevel.NORMAL, escalation_rounds: int = 3
    ):
        self.base_level = (
            level if isinstance(level, TelemetryLevel) else TelemetryLevel[level.upper()]
        )
        self.escalation_rounds = escalation_rounds
        self._rounds_left = 0
        self._is_series = False
        self._was_called = False

    @property
    def level(self) -> TelemetryLevel:
        """What is recorded now."""
        return TelemetryLevel.DEBUG if self._rounds_left else self.base_level

    def escalate_temporarily(self) -> bool:
        """Report an anomaly. True if debug records begin now, for `escalation_rounds` rounds."""
        is_first = not self._is_series
        self._is_series = True
        self._was_called = True
        if not is_first or self.base_level in (TelemetryLevel.OFF, TelemetryLevel.DEBUG):
            return False
        self._rounds_left = self.escalation_rounds
        return True

    def state(self) -> dict[str, int | bool]:
        """Where an escalation stands, ready for JSON."""
        return {
            "rounds_left": self._rounds_left,
            "is_series": self._is_series,
            "was_called": self._was_called,
        }

    def load(self, state: Mapping[str, int | bool]) -> None:
        """Continue where `state` stood."""
        self._rounds_left = int(state["rounds_left"])
        self._is_series = bool(state["is_series"])
        self._was_called = bool(state["was_called"])

    def end_round(self) -> None:
        """One rollout and its update are over."""
        self._rounds_left = max(0, self._rounds_left - 1)
        # while the level is lifted a quiet round proves little: what was seen may be the same
        # fault's next sign
        self._is_series = self._was_called or self._rounds_left > 0
        self._was_called = False
