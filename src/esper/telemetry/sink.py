"""Events on disk: one JSON object per line, appended. A disk that fails is told once and never stops training."""

import json
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

from esper.leyline.files import sync_folder
from esper.telemetry.escalation import TelemetryConfig, TelemetryLevel
from esper.telemetry.events import SEVERITIES, Event, to_record

_LONGEST_LINE = 2**20


class Sink(Protocol):
    """Where events go. It is passed to whoever has something to tell; there is no global one."""

    telemetry: TelemetryConfig

    def rewind(self, size: int) -> None: ...
    def write(self, event: Event) -> None: ...
    def write_record(self, kind: str, record: Mapping[str, Any], severity: TelemetryLevel) -> None: ...
    def wants(self, severity: TelemetryLevel) -> bool: ...
    def commit(self) -> int: ...


class JsonlSink(AbstractContextManager["JsonlSink"]):
    """Appends to a file what the level in effect lets through."""

    def __init__(self, path: Path, telemetry: TelemetryConfig):
        self.path, self.telemetry = path, telemetry
        self.problem: str | None = None
        self._file: TextIO | None = None
        try:
            # line by line, so that whoever follows the run sees what there is
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
            self._file = os.fdopen(handle, "a", buffering=1, encoding="utf-8")
            sync_folder(path.parent)  # a save that tells where its events end finds them after a power cut
        except OSError as problem:
            self._give_up(problem)

    def rewind(self, size: int) -> None:
        """Cut off what was written behind the first `size` bytes."""
        if self._file is not None:
            try:
                self._file.flush()
                os.truncate(self.path, min(size, self.path.stat().st_size))  # never longer: that would write zeros
            except OSError as problem:
                self._give_up(problem)

    def wants(self, severity: TelemetryLevel) -> bool:
        """Whether a record of this severity would be kept; asked before one is made in a hot loop."""
        return self._file is not None and severity <= self.telemetry.level

    def write(self, event: Event) -> None:
        severity = SEVERITIES.get(type(event), TelemetryLevel.NORMAL)
        if self.wants(severity):
            self.write_record(type(event).__name__, to_record(event), severity)

    def write_record(self, kind: str, record: Mapping[str, Any], severity: TelemetryLevel) -> None:
        if self._file is not None and self.wants(severity):
            try:
                self._file.write(json.dumps({"type": kind, **record}, allow_nan=False) + "\n")
            except OSError as problem:
                self._give_up(problem)

    def commit(self) -> int:
        """Make sure that all is on disk; returns how many bytes there are."""
        if self._file is None:
            return self.path.stat().st_size if self.path.exists() else 0
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as problem:
            self._give_up(problem)
            return self.path.stat().st_size
        return os.fstat(self._file.fileno()).st_size  # rank 0 may have removed the files of a start that is refused

    def _give_up(self, problem: OSError) -> None:
        """Say so once; training goes on without records, and the file ends with a whole one."""
        self.problem = f"cannot write {self.path}: {problem.strerror}. Training goes on without telemetry."
        print(f"esper: {self.problem}", file=sys.stderr)
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # what was buffered cannot be written either
                file.close()
            with suppress(OSError), open(self.path, "rb+") as torn:
                start = torn.seek(max(0, torn.seek(0, os.SEEK_END) - _LONGEST_LINE))
                torn.truncate(start + torn.read().rfind(b"\n") + 1)

    def __exit__(self, *problem: object) -> None:
        self.commit()
        if self._file is not None:
            self._file.close()
            self._file = None
