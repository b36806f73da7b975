"""`esper serve`:

the page's server. Runs as JSON and as a stream, to readers only, and who may come.
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
from typing import Any, TypeVar

from esper.dashboard.payload import Sent, curves, encode, episode_data, header, news
from esper.dashboard.reader import RunReader, Stamp, find_runs, stamp_of
from esper.dashboard.standings import Arm, arms_of, standings
from esper.leyline.errors import EsperError, SettingError

try:
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
except ModuleNotFoundError as missing:
    raise SettingError(
        "esper serve needs starlette and uvicorn: pip install 'esper-lite[web]'"
    ) from missing

STATIC = Path(__file__).parent / "static"
LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src "
    "'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'; form-action 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}
TICK, IDLE_TICK, HEARTBEAT = (
    0.15,
    1.0,
    15.0,
)  # Seconds between looks: running, not running; between heartbeats.
KEPT_SECONDS = 60.0  # How long a run stays in memory after somebody looked at it alone.
PATIENCE, MOST_CONNECTIONS = (
    10.0,
    1000,
)  # Seconds that a request may take, or an answer stand still; connections.
MOST_COMPARED = 12
Answer = TypeVar("Answer")
_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,}")
_json = partial(Response, media_type="application/json")


class Guard(BaseHTTPMiddleware):
    """Lets through who reads, under a name of ours, with the token if there is one; adds the
    headers to all answers.
    """

    def __init__(self, app: ASGIApp, token: str | None, allowed_hosts: Collection[str]):
        super().__init__(app)
        self.token, self.allowed_hosts = token, {name.lower() for name in allowed_hosts}
        self.cookie = (
            "esper-" + sha256((token or "").encode()).hexdigest()[:8]
        )  # ports share cookies, tokens do not

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        is_new = self._is_right(request.query_params.get("token")) and request.url.path == "/"
        answer = self._refuse(request, is_new) or await call_next(request)
        answer.headers.update(HEADERS)
        if is_new:
            answer.headers.append(
                "set-cookie", f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"
            )
        return answer

    def _refuse(self, request: Request, is_new: bool) -> Response | None:
        name = re.sub(r":\d+$", "", request.headers.get("host", "").lower())
        is_number = (
            address_of(name.strip("[]")) is not None
        )  # nobody can make a number point elsewhere
        # another name was made to point here by somebody else's page
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

    def _is_right(self, given: str | None) -> bool:
        return self.token is not None and secrets.compare_digest(
            (given or "").encode(), self.token.encode()
        )


class Connection(H11Protocol):
    """Ends where a request does not come whole in time, or nobody takes the answer:

    strangers can do that, too.
    """

    deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_whole = self.cycle is not None and not self.cycle.response_complete
        (self._go_on if is_whole else self._wait)()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._go_on()

    def _wait(self) -> None:
        self.deadline = self.deadline or self.loop.call_later(PATIENCE, self.transport.abort)

    def _go_on(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None


class Feed:
    """One run's reader, shared by all who look; it answers one question at a time, in a thread."""

    def __init__(self, folder: Path):
        self.folder, self.lock, self.looked = folder, Lock(), -inf
        self.reader: RunReader | None = None
        self.row: dict[str, Any] = {
            "name": folder.name,
            "status": "being read",
        }  # the list's row, as of the stamp
        self.stamp: Stamp | None = None
        self.glance: asyncio.Task[None] | None = None
        self.asked = -inf  # when somebody last looked at this run alone

    async def ask(
        self, question: Callable[[RunReader], Answer], limit: CapacityLimiter | None = None
    ) -> Answer:
        async with self.lock:
            self.asked = self.asked if limit else time.monotonic()
            return await to_thread.run_sync(self._answer, question, limiter=limit)

    def _answer(self, question: Callable[[RunReader], Answer]) -> Answer:
        if self.reader is None:
            self.reader, self.looked = RunReader(self.folder), -inf
        if time.monotonic() - self.looked > TICK / 2:
            self.reader.refresh()
            self.looked = time.monotonic()
        return question(self.reader)

    def look(self, stamp: Stamp, limit: CapacityLimiter) -> "asyncio.Task[None]":
        """Bring the row up to date.

        Goes on beyond the request that asked, so that a long run is read once.
        """
        if self.glance is None or self.glance.done():
            self.glance = asyncio.create_task(self._look(stamp, limit))
        return self.glance

    async def _look(self, stamp: Stamp, limit: CapacityLimiter) -> None:
        try:
            self.row = await self.ask(header, limit)
        except Exception:  # of this run alone: the others are listed
            self.row = {"name": self.folder.name, "status": "damaged"}
        self.stamp = stamp
        self.close()

    def close(self) -> None:
        """Let go of what was read, unless the run goes on or somebody looks at it:

        memory must not grow with runs.
        """
        is_watched = time.monotonic() - self.asked < KEPT_SECONDS
        if self.row["status"] != "running" and not is_watched and not self.lock.locked():
            self.reader = None


class Site:
    """The runs of a folder, and the answers about them."""

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        self.feeds: dict[Path, Feed] = {}
        self.limit = CapacityLimiter(1)  # runs that are read at a time for the list
        self.is_closing: Callable[[], bool] = lambda: False

    async def open(self) -> dict[str, Feed]:
        """The runs that are there now, by name; what is no run folder has none."""
        paths = await to_thread.run_sync(find_runs, self.folder)
        self.feeds = {path: self.feeds.get(path) or Feed(path) for path in paths}
        return {path.name: feed for path, feed in self.feeds.items()}

    async def find(self, name: str) -> Feed:
        if feed := (await self.open()).get(name):
            return feed
        raise HTTPException(404, "There is no run of that name.")

    async def runs(self, request: Request) -> Response:
        """All runs, within a second; those that were never read to their end say so."""
        begun = time.monotonic()
        feeds = list((await self.open()).values())
        stamps = await to_thread.run_sync(lambda: [stamp_of(feed.folder) for feed in feeds])
        for feed in feeds:
            feed.close()
        news = [
            (feed, stamp) for feed, stamp in zip(feeds, stamps, strict=True) if feed.stamp != stamp
        ]
        news.sort(
            key=lambda pair: sum(size for _, size, _ in pair[1][2])
        )  # a long run keeps no short one waiting
        if news:
            patience = max(0.1, 1.0 - (time.monotonic() - begun))
            await asyncio.wait(
                [feed.look(stamp, self.limit) for feed, stamp in news], timeout=patience
            )
        ages = ({"age_seconds": max(0.0, time.time() - stamp[0])} for stamp in stamps)
        return _json(
            encode({"runs": [feed.row | age for feed, age in zip(feeds, ages, strict=True)]})
        )

    async def episode(self, request: Request) -> Response:
        feed = await self.find(request.path_params["name"])
        host, number = _whole(request, "host"), _whole(request, "round")
        found = await feed.ask(
            lambda reader: (lived := reader.episode(number, host)) and encode(episode_data(lived))
        )
        if not found:
            raise HTTPException(404, f"Host {host} has no episode in round {number}.")
        return _json(found)

    async def compare(self, request: Request) -> Response:
        names = list(dict.fromkeys(request.query_params.getlist("run")))[:MOST_COMPARED]
        found = [await (await self.find(name)).ask(_side) for name in names]
        sides, arms = [side for side, _ in found], [arm for _, own in found for arm in own]
        return _json(encode({"runs": sides, "standings": standings(arms)}))

    async def stream(self, request: Request) -> Response:
        feed, host = await self.find(request.path_params["name"]), _whole(request, "host")
        return StreamingResponse(self._follow(feed, host), media_type="text/event-stream")

    async def _follow(self, feed: Feed, host: int) -> AsyncIterator[str]:
        sent, told = Sent(), time.monotonic()
        while not self.is_closing():
            message = await feed.ask(
                lambda reader: (new := news(reader, host, sent)) and encode(new)
            )
            if message or time.monotonic() - told > HEARTBEAT:
                told = time.monotonic()
                yield f"data: {message}\n\n" if message else ": still here\n\n"
            await asyncio.sleep(TICK if sent.status == "running" else IDLE_TICK)


def _side(reader: RunReader) -> tuple[dict[str, Any], list[Arm]]:
    return {"header": header(reader), "curves": curves(reader.view)}, arms_of(
        reader.view, reader.folder.name
    )


def _whole(request: Request, name: str) -> int:
    text = request.query_params.get(name, "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise HTTPException(400, f"{name} must be a whole number.")
    return int(text)


async def _tell(request: Request, problem: Exception) -> Response:
    return PlainTextResponse(f"This run cannot be read: {type(problem).__name__}.", 404)


def build_app(
    folder: Path, token: str | None = None, allowed_hosts: Collection[str] = LOCAL_HOSTS
) -> Starlette:
    """The application; `app.state.site` holds the runs."""
    site = Site(folder)
    routes = [
        Route("/", lambda request: FileResponse(STATIC / "index.html")),
        Mount("/static", StaticFiles(directory=STATIC)),
        Route("/api/runs", site.runs),
        Route("/api/runs/{name}/episode", site.episode),
        Route("/api/runs/{name}/stream", site.stream),
        Route("/api/compare", site.compare),
    ]
    guard = Middleware(Guard, token=token, allowed_hosts=allowed_hosts)
    app = Starlette(
        routes=routes, middleware=[guard], exception_handlers={EsperError: _tell, OSError: _tell}
    )
    app.router.redirect_slashes = False
    app.state.site = site
    return app


def serve(
    folder: Path, host: str = "127.0.0.1", port: int = 8765, token: str | None = None
) -> None:
    """Show the runs in a folder to a browser until somebody ends it; away from this machine only
    with a token.
    """
    find_runs(folder)
    token = choose_token(host, token)
    with listen(host, port) as listener:
        shown = socket.gethostname() if host in ("0.0.0.0", "::") else host
        shown = f"[{shown}]" if ":" in shown else shown
        app = build_app(
            folder, token, {*LOCAL_HOSTS, shown, socket.gethostname(), socket.getfqdn()}
        )
        limits: dict[str, Any] = {
            "limit_concurrency": MOST_CONNECTIONS,
            "timeout_graceful_shutdown": 2,
        }
        quiet: dict[str, Any] = {
            "log_level": "error",
            "server_header": False,
            "proxy_headers": False,
        }
        server = uvicorn.Server(uvicorn.Config(app, http=Connection, ws="none", **limits, **quiet))
        app.state.site.is_closing = lambda: server.should_exit
        query = "" if token is None else f"?token={token}"
        print(f"http://{shown}:{listener.getsockname()[1]}/{query}  (Ctrl-C ends it)", flush=True)
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listener])


def choose_token(host: str, token: str | None) -> str | None:
    """The token that is asked for:

    the given one, a new one for an address that others reach, else none.
    """
    if token is None:
        is_local = host == "localhost" or getattr(address_of(host), "is_loopback", False)
        return None if is_local else secrets.token_urlsafe(32)
    if not _TOKEN.fullmatch(token):
        raise SettingError(
            "a token has at least 16 letters, digits, - or _. Leave it out to get one where needed."
        )
    return token


def address_of(name: str) -> IPv4Address | IPv6Address | None:
    with suppress(ValueError):
        return ip_address(name)
    return None


def listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except (OSError, OverflowError) as problem:
        raise SettingError(
            f"cannot listen on {host}:{port}: {problem}. Choose another --port or --host."
        ) from None
