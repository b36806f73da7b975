"""A browser, and a server with some runs, for all tests of pages; skipped where there is none."""

import pytest

from dashboard.browsing import CHROMIUM, served
from dashboard.web_runs import comparison, grow_run, ppo_run


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    grow_run(folder / "grow")
    grow_run(folder / "never", "never", test=0.8)
    ppo_run(folder / "ppo")
    comparison(folder / "arms")
    return folder


@pytest.fixture(scope="module")
def address(runs):
    with served(runs) as address:
        yield address


@pytest.fixture
def page(browser, address):
    """A fresh page; whatever it complains about or asks of others fails the test."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    page.set_default_timeout(15_000)
    wrong = []
    page.on(
        "console",
        lambda message: (
            wrong.append(message.text) if message.type in ("error", "warning") else None
        ),
    )
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request",
        lambda request: wrong.append(request.url) if not is_ours(request.url, address) else None,
    )
    yield page
    page.close()
    assert wrong == []


def is_ours(url, address):
    return url.startswith((address, "data:", "file:"))
