"""Looks at every page of the built site, and takes docs/pictures/site_*.png: make docs, then python docs/make_pictures_site.py

Says which requests left this machine and which pages are wider than the screen; there should be none.
"""

import functools
import http.server
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
SIZES = {360: 780, 1280: 900}
SHOWN = {
    (360, "light"): "life.html",
    (360, "dark"): "start.html",
    (1280, "light"): "results.html",
    (1280, "dark"): "api.html",
}
"""what the four pictures show"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A server that does not print its requests."""

    def log_message(self, *parts: object) -> None:
        """Nothing."""


@contextmanager
def served(site: Path) -> Iterator[str]:
    """The address of the built site."""
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def look(
    browser: Browser, address: str, pages: list[str], pictures: Path | None
) -> tuple[set[str], list[str]]:
    """Requests to anybody else, and pages that are wider than the screen."""
    outside, wide = set(), []
    for width, height in SIZES.items():
        for scheme in ("light", "dark"):
            page = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme=scheme
            )
            page.on("request", lambda request: outside.add(request.url))
            for name in pages:
                page.goto(address + name)
                over = page.evaluate(
                    "document.documentElement.scrollWidth - document.documentElement.clientWidth"
                )
                if over > 0:
                    wide.append(f"{name} at {width}: {over} pixels")
                if pictures is not None and SHOWN[width, scheme] == name:
                    page.wait_for_timeout(300)
                    page.screenshot(path=pictures / f"site_{width}_{scheme}.png")
            page.close()
    own = (address, "data:", "blob:")
    return {url for url in outside if not url.startswith(own)}, wide


def pages_of(site: Path) -> list[str]:
    """All pages, as addresses on the site."""
    return sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))


if __name__ == "__main__":
    site = ROOT / "site"
    with served(site) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        outside, wide = look(browser, address, pages_of(site), PICTURES)
        browser.close()
    print("requests to others:", *(sorted(outside) or ["none"]))
    print("wider than the screen:", *(wide or ["none"]))
    sys.exit(bool(outside or wide))
