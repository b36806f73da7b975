"""Events on disk: one JSON object per line, appended to numbered segments.

A disk that fails never stops training.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from esper.leyline.errors import complain
from esper.storage.files import sync_folder
from esper.storage.runfolder import Position, cut_events, event_files, events_of
from esper.telemetry.escalation import TelemetryConfig, TelemetryLevel
from esper.telemetry.events import SEVERITIES, Event, to_record

SEGMENT = 2**26
"""Bytes from which on a save ends a segment: it is never written again, and another one follows."""

_LONGEST_LINE = 2**20


class Sink(AbstractContextManager["Sink"]):
    """Appends to one rank's events what the level in effect lets through.

    It is handed to every part of a run that emits events. `path` is the first segment; the sink
    continues behind the newest one.
    """

    def __init__(self, path: Path, telemetry: TelemetryConfig):
        self.folder = path.parent
        self.rank = int(path.stem.partition("-")[2])
        self.telemetry = telemetry
        self.problem: str | None = None
        self._file: TextIO | None = None
        segments = [file.number for file in event_files(self.folder) if file.rank == self.rank]
        self._open(Position(segment=max(segments, default=0), size=sys.maxsize))

    def _open(self, end: Position) -> None:
        """Continue from a position; what is behind it is cut off."""
        self.segment = end.segment
        self.path = self.folder / events_of(self.rank, end.segment)
        with self._giving_up():
            cut_events(self.folder, self.rank, end)
            if self._file is not None:
                self._file.close()
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            handle = os.open(self.path, flags, 0o644)
            # line by line, so that a dashboard that follows the run sees what there is
            self._file = os.fdopen(handle, "a", buffering=1, encoding="utf-8")
            # a save that says where its events end finds them after a power cut
            sync_folder(self.folder)

    def rewind(self, end: Position) -> None:
        """Go back to where `commit` said that events end."""
        if self._file is not None:
            self._open(end)

    def wants(self, severity: TelemetryLevel) -> bool:
        """Whether a record of this severity would be kept.

        A hot loop asks before it makes one.
        """
        return self._file is not None and severity <= self.telemetry.level

    def write(self, event: Event) -> None:
        """Append an event, if the level lets it through."""
        severity = SEVERITIES.get(type(event), TelemetryLevel.NORMAL)
        if self.wants(severity):
            self.write_record(type(event).__name__, to_record(event), severity)

    def write_record(self, kind: str, record: Mapping[str, Any], severity: TelemetryLevel) -> None:
        """Append plain data that is no event, such as a decision at debug."""
        if self._file is not None and self.wants(severity):
            with self._giving_up():
                self._file.write(json.dumps({"type": kind, **record}, allow_nan=False) + "\n")

    def commit(self) -> Position:
        """Make sure that all is on disk; where it ends, or where the next segment begins."""
        self._sync()
        # rank 0 may have removed the files of a start that is refused
        size = self.path.stat().st_size if self.path.exists() else 0
        if self._file is None or size < SEGMENT:
            return Position(segment=self.segment, size=size)
        following = Position(segment=self.segment + 1, size=0)
        self._open(following)
        return following

    def _sync(self) -> None:
        if self._file is not None:
            with self._giving_up():
                self._file.flush()
                os.fsync(self._file.fileno())

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Say once that the disk failed, and write nothing more.

        Training continues without records, and the file ends with a whole one.
        """
        try:
            yield
        except OSError as problem:
            self.problem = (
                f"cannot write {self.path}: {problem.strerror}. "
                "Training continues without telemetry."
            )
            complain(self.problem)
            file = self._file
            self._file = None
            if file is not None:
                with suppress(OSError):  # what was buffered cannot be written either
                    file.close()
                self._cut_torn_line()

    def _cut_torn_line(self) -> None:
        """Take away the half of a record at the end of the file."""
        with suppress(OSError), open(self.path, "rb+") as torn:
            size = torn.seek(0, os.SEEK_END)
            start = torn.seek(max(0, size - _LONGEST_LINE))
            torn.truncate(start + torn.read().rfind(b"\n") + 1)

    def __exit__(self, *problem: object) -> None:
        self._sync()
        if self._file is not None:
            self._file.close()
            self._file = None
