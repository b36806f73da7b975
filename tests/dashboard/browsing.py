"""A real browser for the tests of pages and reports: a server, and what makes a page ready."""

import shutil
import socket
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from esper.dashboard.server import build_app

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


@contextmanager
def served(runs, token=None):
    uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    app = build_app(runs, token)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
    app.state.site.is_closing = lambda: server.should_exit
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server.should_exit = True
        thread.join(20)


def ready(page):
    page.locator("canvas:visible, .runs tbody tr").first.wait_for()


def violations(page):
    """What axe finds that is serious: the rule, and where."""
    package = pytest.importorskip(
        "axe_playwright_python", reason="axe-playwright-python is not installed"
    )
    page.evaluate(Path(package.__file__).with_name("axe.min.js").read_text())
    found = page.evaluate("axe.run()")["violations"]
    return [
        (rule["id"], [node["target"] for node in rule["nodes"]])
        for rule in found
        if rule["impact"] in ("serious", "critical")
    ]
