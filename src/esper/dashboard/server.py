"""`esper serve`: where the page is listened for, and who may come. What it answers is in `web`."""

import re
import secrets
import socket
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from esper.dashboard.runs import find_runs
from esper.leyline.errors import SettingError

_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,}")


def serve(folder: Path, host: str = "127.0.0.1", port: int = 8765, token: str | None = None) -> None:
    """Show the runs in a folder to a browser until somebody ends it; away from this machine only with a token."""
    try:
        import uvicorn

        from esper.dashboard.web import LOCAL_HOSTS, build_app
    except ModuleNotFoundError as problem:
        raise SettingError(
            f"esper serve needs starlette and uvicorn ({problem.name} is missing): pip install 'esper-lite[web]'"
        ) from problem
    find_runs(folder)
    token = choose_token(host, token)
    with listen(host, port) as listener:
        shown = socket.gethostname() if host in ("0.0.0.0", "::") else host
        shown = f"[{shown}]" if ":" in shown else shown
        app = build_app(folder, token, {*LOCAL_HOSTS, shown, socket.gethostname(), socket.getfqdn()})
        config = uvicorn.Config(
            app, log_level="warning", server_header=False, proxy_headers=False, timeout_graceful_shutdown=2
        )
        server = uvicorn.Server(config)
        app.state.site.is_closing = lambda: server.should_exit
        query = "" if token is None else f"?token={token}"
        print(f"http://{shown}:{listener.getsockname()[1]}/{query}  (Ctrl-C ends it)", flush=True)
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listener])


def choose_token(host: str, token: str | None) -> str | None:
    """The token that is asked for: the given one, a new one for an address that others reach, else none."""
    if token is None:
        return None if is_local(host) else secrets.token_urlsafe(32)
    if not _TOKEN.fullmatch(token):
        raise SettingError("a token has at least 16 letters, digits, - or _. Leave it out to get one where needed.")
    return token


def is_local(host: str) -> bool:
    """Whether only this machine can reach an address."""
    return host == "localhost" or getattr(address_of(host), "is_loopback", False)


def address_of(name: str) -> IPv4Address | IPv6Address | None:
    """The address that a name is, if it is one."""
    try:
        return ip_address(name)
    except ValueError:
        return None


def listen(host: str, port: int) -> socket.socket:
    """A socket at an address that is free."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as problem:
        raise SettingError(
            f"cannot listen on {host}, port {port}: {problem}. Choose another --port or --host."
        ) from None
