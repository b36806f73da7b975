"""Events on disk:

one JSON object per line, appended to numbered segments. A disk that fails never stops training.
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

# Bytes from which on a save ends a segment: it is never written again, and the next one follows it.
SEGMENT = 2**26
_LONGEST_LINE = 2**20


class Sink(AbstractContextManager["Sink"]):
    """Appends to one rank's events what the level in effect lets through.

    Whoever has something to tell is given it.
    """

    def __init__(self, path: Path, telemetry: TelemetryConfig):
        self.folder, self.rank, self.telemetry = (
            path.parent,
            int(path.stem.partition("-")[2]),
            telemetry,
        )
        self.problem: str | None = None
        self._file: TextIO | None = None
        newest = max(
            (number for rank, number in event_files(self.folder) if rank == self.rank), default=0
        )
        self._open((newest, sys.maxsize))

    def _open(self, end: Position) -> None:
        """Go on from a position; what is behind it is cut off."""
        self.segment, self.path = end[0], self.folder / events_of(self.rank, end[0])
        with self._giving_up():
            cut_events(self.folder, self.rank, end)
            if self._file is not None:
                self._file.close()
            # line by line, so that whoever follows the run sees what there is
            handle = os.open(
                self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644
            )
            self._file = os.fdopen(handle, "a", buffering=1, encoding="utf-8")
            sync_folder(
                self.folder
            )  # a save that tells where its events end finds them after a power cut

    def rewind(self, end: Position) -> None:
        """Go back to where `commit` said that events end."""
        if self._file is not None:
            self._open(end)

    def wants(self, severity: TelemetryLevel) -> bool:
        """Whether a record of this severity would be kept; asked before one is made in a hot
        loop.
        """
        return self._file is not None and severity <= self.telemetry.level

    def write(self, event: Event) -> None:
        severity = SEVERITIES.get(type(event), TelemetryLevel.NORMAL)
        if self.wants(severity):
            self.write_record(type(event).__name__, to_record(event), severity)

    def write_record(self, kind: str, record: Mapping[str, Any], severity: TelemetryLevel) -> None:
        if self._file is not None and self.wants(severity):
            with self._giving_up():
                self._file.write(json.dumps({"type": kind, **record}, allow_nan=False) + "\n")

    def commit(self) -> Position:
        """Make sure that all is on disk; returns where it ends, or where the next segment
        begins.
        """
        self._sync()
        # rank 0 may have removed the files of a start that is refused
        size = self.path.stat().st_size if self.path.exists() else 0
        if self._file is None or size < SEGMENT:
            return self.segment, size
        self._open((self.segment + 1, 0))
        return self.segment, 0

    def _sync(self) -> None:
        if self._file is not None:
            with self._giving_up():
                self._file.flush()
                os.fsync(self._file.fileno())

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Say once that the disk failed; training goes on without records, and the file ends with a
        whole one.
        """
        try:
            yield
        except OSError as problem:
            self.problem = (
                f"cannot write {self.path}: {problem.strerror}. Training goes on without telemetry."
            )
            complain(self.problem)
            file, self._file = self._file, None
            if file is not None:
                with suppress(OSError):  # what was buffered cannot be written either
                    file.close()
                with suppress(OSError), open(self.path, "rb+") as torn:
                    start = torn.seek(max(0, torn.seek(0, os.SEEK_END) - _LONGEST_LINE))
                    torn.truncate(start + torn.read().rfind(b"\n") + 1)

    def __exit__(self, *problem: object) -> None:
        self._sync()
        if self._file is not None:
            self._file.close()
            self._file = None
