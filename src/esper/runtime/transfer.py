"""One address into one file, going on where an earlier attempt ended. What the bytes are worth is judged by `fetch`."""

import re
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import BinaryIO
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from esper.leyline.errors import DataError

_CHUNK = 1 << 18
_TIMEOUT = 30.0
"""Seconds without a byte after which a server counts as gone."""


class UnreachableError(Exception):
    """The server could not be asked, or refused; whoever knows what the file is for turns it into advice."""


def transfer(url: str, part: Path, progress: Callable[[int, int | None], None]) -> int | None:
    """All bytes of `url` in `part`, after those it holds already; their number, where the server says it."""
    here = part.stat().st_size if part.exists() else 0
    with _connect(url, here) as response:
        start, total = _announced(response)
        if response.status == 416 and total == here:
            return total
        if start not in (0, here):  # what is here is not the beginning of what the server has
            if not here:
                raise UnreachableError(f"{url} answered {response.status} without a beginning")
            part.unlink()
            return transfer(url, part, progress)
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab" if start else "wb") as out:
            here, broken = _copy(response, out, start, lambda here: progress(here, total))
    if broken is not None or total not in (None, here):
        of_total = f" of {total:,}" if total is not None else ""
        why = f" ({str(broken) or type(broken).__name__})" if broken is not None else ""
        raise DataError(
            f"the transfer of {url} ended after {here:,}{of_total} bytes{why}. They are kept in {part}: run the "
            "command again to go on from there."
        )
    return total


def _connect(url: str, start: int) -> HTTPResponse:
    headers = {"User-Agent": "esper"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        response: HTTPResponse = urlopen(Request(url, headers=headers), timeout=_TIMEOUT)
        return response
    except HTTPError as problem:
        if problem.code == 416 and start:
            return problem  # type: ignore[return-value]  # an answer like any other: status and headers
        raise UnreachableError(f"{url} answered {problem.code} {problem.reason}") from problem
    except (OSError, HTTPException) as problem:
        reason = getattr(problem, "reason", problem)
        raise UnreachableError(f"{url} cannot be reached ({str(reason) or type(problem).__name__})") from problem


def _announced(response: HTTPResponse) -> tuple[int | None, int | None]:
    """Where the answer begins, and how long the whole file is; None is unsaid."""
    if response.status == 200:
        length = response.headers.get("Content-Length", "")
        return 0, int(length) if length.isdigit() else None
    span = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(?:(\d+)|\*)", response.headers.get("Content-Range", ""))
    first, whole = span.groups() if span else (None, None)
    return int(first) if first else None, int(whole) if whole else None


def _copy(
    response: HTTPResponse, out: BinaryIO, here: int, progress: Callable[[int], None]
) -> tuple[int, Exception | None]:
    """Where `out` stands when the answer ends, and what broke it off, if anything did."""
    progress(here)
    while True:
        try:
            chunk = response.read(_CHUNK)
        except (OSError, HTTPException) as problem:  # the network's; a full disk is not caught here
            return here, problem
        if not chunk:
            return here, None
        out.write(chunk)
        here += len(chunk)
        progress(here)
