"""`esper serve`: the page's server, and who may come.

It hands out runs as JSON and as a stream, to readers only.
"""

import asyncio
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import suppress
from functools import partial
from hashlib import sha256
from ipaddress import IPv4Address, IPv6Address, ip_address
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from esper.dashboard.comparisons import (
    ComparisonReader,
    FolderReader,
    comparison_data,
    comparison_header,
    open_folder,
)
from esper.dashboard.payload import Sent, curves, encode, episode_data, header, news
from esper.dashboard.reader import RunReader, Stamp, find_runs, stamp_of
from esper.dashboard.standings import Arm, arms_of, standings
from esper.leyline.errors import EsperError, SettingError
from esper.leyline.extras import needs

with needs("web", "esper serve"):
    import uvicorn
    from anyio import CapacityLimiter, Lock, to_thread
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
    from starlette.requests import Request
    from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles
    from starlette.types import ASGIApp
    from uvicorn.protocols.http.h11_impl import H11Protocol

STATIC = Path(__file__).parent / "static"
LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'; form-action 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}
TICK = 0.15
"""Seconds between looks at a run that is running."""

IDLE_TICK = 1.0
"""Seconds between looks at any other run."""

HEARTBEAT = 15.0
"""Seconds after which a stream without news says that it is still there."""

KEPT_SECONDS = 60.0
"""How long a run stays in memory after a client looked at it alone."""

PATIENCE = 10.0
"""Seconds that a request may take to come whole, or an answer may stand still."""

MOST_CONNECTIONS = 1000
MOST_COMPARED = 12
Answer = TypeVar("Answer")
_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,}")
_json = partial(Response, media_type="application/json")


class Guard(BaseHTTPMiddleware):
    """Lets clients through that only read, ask for a name of ours, and have the token.

    The headers are added to all answers.
    """

    def __init__(self, app: ASGIApp, token: str | None, allowed_hosts: Collection[str]):
        super().__init__(app)
        self.token = token
        self.allowed_hosts = {name.lower() for name in allowed_hosts}
        # servers on other ports share cookies, but not tokens
        self.cookie = "esper-" + sha256((token or "").encode()).hexdigest()[:8]

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        """Answer a request; the token in the page's address buys a cookie."""
        is_new = self._is_right(request.query_params.get("token")) and request.url.path == "/"
        answer = self._refuse(request, is_new) or await call_next(request)
        answer.headers.update(HEADERS)
        if is_new:
            answer.headers.append(
                "set-cookie", f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"
            )
        return answer

    def _refuse(self, request: Request, is_new: bool) -> Response | None:
        """Return why a request gets no answer, or None."""
        name = re.sub(r":\d+$", "", request.headers.get("host", "").lower())
        # no other page can make a number point elsewhere, as it can with a name of its own
        is_number = address_of(name.strip("[]")) is not None
        if name not in self.allowed_hosts and not (self.token is not None and is_number):
            return PlainTextResponse("This server does not answer under that name.", 421)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse(
                "There is nothing to change here.", 405, {"allow": "GET, HEAD"}
            )
        if self.token is None or is_new or self._is_right(request.cookies.get(self.cookie)):
            return None
        return PlainTextResponse(
            "Open the address that esper serve has printed: it holds the token.", 401
        )

    def _is_right(self, token: str | None) -> bool:
        if self.token is None:
            return False
        return secrets.compare_digest((token or "").encode(), self.token.encode())


class Connection(H11Protocol):
    """Ends where a request does not come whole in time, or the client does not take the answer.

    Strangers can do that, too.
    """

    deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a first request."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Stop to wait where the request is whole."""
        super().data_received(data)
        is_whole = self.cycle is not None and not self.cycle.response_complete
        if is_whole:
            self._stop_waiting()
        else:
            self._wait()

    def pause_writing(self) -> None:
        """Wait for the client to take what was sent."""
        super().pause_writing()
        self._wait()

    def resume_writing(self) -> None:
        """Stop to wait, as the client takes the answer."""
        super().resume_writing()
        self._stop_waiting()

    def _wait(self) -> None:
        self.deadline = self.deadline or self.loop.call_later(PATIENCE, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None


class Feed:
    """The reader of one run or comparison, shared by all clients that look at it.

    It answers one question at a time, in a thread.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.lock = Lock()
        self.reader: FolderReader | None = None
        self.refreshed = -inf  # when the reader last took in what is new
        # the row of the list, as of the stamp
        self.row: dict[str, Any] = {"name": folder.name, "status": "being read"}
        self.stamp: Stamp | None = None
        self.glance: asyncio.Task[None] | None = None
        self.asked = -inf  # when a client last looked at this run alone

    async def ask(
        self, question: Callable[[FolderReader], Answer], limit: CapacityLimiter | None = None
    ) -> Answer:
        """Ask the reader something, in a thread; with a limit it is for the list of runs."""
        async with self.lock:
            if limit is None:
                self.asked = time.monotonic()
            return await to_thread.run_sync(self._answer, question, limiter=limit)

    async def ask_run(self, question: Callable[[RunReader], Answer]) -> Answer:
        """Ask the reader of a run something; a comparison is answered as no run."""

        def require(reader: FolderReader) -> Answer:
            if not isinstance(reader, RunReader):
                raise HTTPException(404, "There is no run of that name.")
            return question(reader)

        return await self.ask(require)

    def _answer(self, question: Callable[[FolderReader], Answer]) -> Answer:
        if self.reader is None:
            self.reader = open_folder(self.folder)
            self.refreshed = -inf
        if time.monotonic() - self.refreshed > TICK / 2:
            self.reader.refresh()
            self.refreshed = time.monotonic()
        return question(self.reader)

    def look(self, stamp: Stamp, limit: CapacityLimiter) -> "asyncio.Task[None]":
        """Bring the row up to date.

        That continues beyond the request that asked, so that a long run is read once.
        """
        if self.glance is None or self.glance.done():
            self.glance = asyncio.create_task(self._look(stamp, limit))
        return self.glance

    async def _look(self, stamp: Stamp, limit: CapacityLimiter) -> None:
        try:
            self.row = await self.ask(_row, limit)
        except Exception:  # of this run alone: the others are listed
            self.row = {"name": self.folder.name, "status": "damaged"}
        self.stamp = stamp
        self.close()

    def close(self) -> None:
        """Let go of what was read, unless the run continues or a client looks at it.

        Memory must not grow with the number of runs.
        """
        is_watched = time.monotonic() - self.asked < KEPT_SECONDS
        if self.row["status"] != "running" and not is_watched and not self.lock.locked():
            self.reader = None


class Side(NamedTuple):
    """One run beside others."""

    shown: dict[str, Any]
    arms: list[Arm]


class Site:
    """The runs of a folder, and the answers about them."""

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        self.feeds: dict[Path, Feed] = {}
        self.limit = CapacityLimiter(1)  # runs that are read at a time for the list
        self.is_closing: Callable[[], bool] = lambda: False

    async def open(self) -> dict[str, Feed]:
        """Return the runs that are there now, by name; what is no run folder has none."""
        paths = await to_thread.run_sync(find_runs, self.folder)
        self.feeds = {path: self.feeds.get(path) or Feed(path) for path in paths}
        return {path.name: feed for path, feed in self.feeds.items()}

    async def find(self, name: str) -> Feed:
        """Return the run of a name, or answer that there is none."""
        feeds = await self.open()
        if name not in feeds:
            raise HTTPException(404, "There is no run of that name.")
        return feeds[name]

    async def runs(self, request: Request) -> Response:
        """Answer with all runs, within a second; those not read to their end yet say so."""
        begun = time.monotonic()
        feeds = list((await self.open()).values())
        stamps = await to_thread.run_sync(lambda: [stamp_of(feed.folder) for feed in feeds])
        for feed in feeds:
            feed.close()
        changed = [
            (feed, stamp) for feed, stamp in zip(feeds, stamps, strict=True) if feed.stamp != stamp
        ]
        if changed:
            # a long run keeps no short one waiting
            changed.sort(key=lambda pair: pair[1].size)
            patience = max(0.1, 1.0 - (time.monotonic() - begun))
            looks = [feed.look(stamp, self.limit) for feed, stamp in changed]
            await asyncio.wait(looks, timeout=patience)
        now = time.time()
        rows = [
            feed.row | {"age_seconds": max(0.0, now - stamp.written)}
            for feed, stamp in zip(feeds, stamps, strict=True)
        ]
        return _json(encode({"runs": rows}))

    async def episode(self, request: Request) -> Response:
        """Answer with one host's episode in one round."""
        feed = await self.find(request.path_params["name"])
        host = _whole(request, "host")
        number = _whole(request, "round")

        def read(reader: RunReader) -> str | None:
            episode = reader.episode(number, host)
            return None if episode is None else encode(episode_data(episode))

        text = await feed.ask_run(read)
        if text is None:
            raise HTTPException(404, f"Host {host} has no episode in round {number}.")
        return _json(text)

    async def compare(self, request: Request) -> Response:
        """Answer with several runs side by side."""
        names = list(dict.fromkeys(request.query_params.getlist("run")))[:MOST_COMPARED]
        shown = []
        arms = []
        for name in names:
            feed = await self.find(name)
            side = await feed.ask_run(_side)
            shown.append(side.shown)
            arms.extend(side.arms)
        return _json(encode({"runs": shown, "standings": standings(arms)}))

    async def comparison(self, request: Request) -> Response:
        """Answer with the results of a comparison."""
        feed = await self.find(request.path_params["name"])

        def read(reader: FolderReader) -> str:
            if not isinstance(reader, ComparisonReader):
                raise HTTPException(404, "There is no comparison of that name.")
            return encode(comparison_data(reader))

        return _json(await feed.ask(read))

    async def stream(self, request: Request) -> Response:
        """Answer with a run as it is, and from then on with what is new."""
        feed = await self.find(request.path_params["name"])
        host = _whole(request, "host")
        await feed.ask_run(lambda reader: None)
        return StreamingResponse(self._follow(feed, host), media_type="text/event-stream")

    async def _follow(self, feed: Feed, host: int) -> AsyncIterator[str]:
        sent = Sent()
        written = time.monotonic()

        def read(reader: RunReader) -> str | None:
            message = news(reader, host, sent)
            return None if message is None else encode(message)

        while not self.is_closing():
            message = await feed.ask_run(read)
            if message or time.monotonic() - written > HEARTBEAT:
                written = time.monotonic()
                yield f"data: {message}\n\n" if message else ": still here\n\n"
            await asyncio.sleep(TICK if sent.status == "running" else IDLE_TICK)


def _row(reader: FolderReader) -> dict[str, Any]:
    return header(reader) if isinstance(reader, RunReader) else comparison_header(reader)


def _side(reader: RunReader) -> Side:
    return Side(
        shown={"header": header(reader), "curves": curves(reader.view)},
        arms=arms_of(reader.view, reader.folder.name),
    )


def _whole(request: Request, name: str) -> int:
    """Return a whole number from the query of a request, or answer that it is none."""
    text = request.query_params.get(name, "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise HTTPException(400, f"{name} must be a whole number.")
    return int(text)


async def _answer_problem(request: Request, problem: Exception) -> Response:
    return PlainTextResponse(f"This run cannot be read: {type(problem).__name__}.", 404)


def build_app(
    folder: Path, token: str | None = None, allowed_hosts: Collection[str] = LOCAL_HOSTS
) -> Starlette:
    """Build the application; `app.state.site` holds the runs."""
    site = Site(folder)
    routes = [
        Route("/", lambda request: FileResponse(STATIC / "index.html")),
        Mount("/static", StaticFiles(directory=STATIC)),
        Route("/api/runs", site.runs),
        Route("/api/runs/{name}/episode", site.episode),
        Route("/api/runs/{name}/stream", site.stream),
        Route("/api/comparisons/{name}", site.comparison),
        Route("/api/compare", site.compare),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, token=token, allowed_hosts=allowed_hosts)],
        exception_handlers={EsperError: _answer_problem, OSError: _answer_problem},
    )
    app.router.redirect_slashes = False
    app.state.site = site
    return app


def serve(
    folder: Path, host: str = "127.0.0.1", port: int = 8765, token: str | None = None
) -> None:
    """Show the runs in a folder to a browser, until Ctrl-C.

    An address that other machines reach asks for a token.
    """
    find_runs(folder)
    token = choose_token(host, token)
    with listen(host, port) as listener:
        name = socket.gethostname() if host in ("0.0.0.0", "::") else host
        name = f"[{name}]" if ":" in name else name
        names = {*LOCAL_HOSTS, name, socket.gethostname(), socket.getfqdn()}
        app = build_app(folder, token, names)
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=2,
            log_level="error",
            server_header=False,
            proxy_headers=False,
        )
        server = uvicorn.Server(config)
        app.state.site.is_closing = lambda: server.should_exit
        query = "" if token is None else f"?token={token}"
        print(f"http://{name}:{listener.getsockname()[1]}/{query}  (Ctrl-C ends it)", flush=True)
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listener])


def choose_token(host: str, token: str | None) -> str | None:
    """Return the token that clients are asked for, if any.

    That is the user's, or else a new one where the address can be reached from other machines.
    """
    if token is None:
        address = address_of(host)
        is_local = host == "localhost" or (address is not None and address.is_loopback)
        return None if is_local else secrets.token_urlsafe(32)
    if not _TOKEN.fullmatch(token):
        raise SettingError(
            "a token has at least 16 letters, digits, - or _. Leave it out to get one where needed."
        )
    return token


def address_of(name: str) -> IPv4Address | IPv6Address | None:
    """Return the address that a text spells in numbers, or None."""
    with suppress(ValueError):
        return ip_address(name)
    return None


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that listens, or say why that is not possible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as problem:
        raise SettingError(
            f"cannot listen on {host}:{port}: {problem}. Choose another --port or --host."
        ) from None
