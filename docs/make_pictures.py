"""Takes the pictures of browser and report in docs/pictures from runs that are there.

python docs/make_pictures.py RUNS --run NAME [--host 0] [--round 3] [--compare NAME NAME] [--report NAME ...]
                             [--comparison NAME]
python docs/make_pictures.py RUNS --decides NAME

The second call takes report_decides.png alone, from a run that `benchmarks/policies.py show` left.
"""

import argparse
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from playwright.sync_api import Browser, Page, sync_playwright

from esper.dashboard.report import write_report
from esper.dashboard.server import build_app

PICTURES = Path(__file__).parent / "pictures"
SIZES = {360: (780, 2), 1280: (900, 2), 2560: (1440, 1)}
"""width -> height and device pixels per pixel"""


@contextmanager
def served(runs: Path) -> Iterator[str]:
    """The address at which the runs are shown."""
    app = build_app(runs)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
    app.state.site.is_closing = lambda: server.should_exit
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server.should_exit = True
        thread.join()


def open_page(browser: Browser, address: str, width: int, scheme: str, wanted: str) -> Page:
    """A page with its drawings done."""
    height, pixels = SIZES[width]
    page = browser.new_page(
        viewport={"width": width, "height": height},
        color_scheme=scheme,
        device_scale_factor=pixels,
        reduced_motion="reduce",
    )
    page.goto(address)
    page.locator(wanted).first.wait_for()
    page.wait_for_timeout(300)
    return page


def take_pictures(browser: Browser, address: str, run: str, compared: list[str]) -> None:
    for width in SIZES:
        for scheme in ("light", "dark"):
            page = open_page(browser, address + run, width, scheme, ".seed")
            if width == 1280:
                page.locator(".timeline-box").screenshot(
                    path=PICTURES / f"web_timeline_{scheme}.png"
                )
            kept = page.locator(".seed:has(.mark.kept)")
            (kept if kept.count() else page.locator(".seed")).first.hover()
            page.screenshot(path=PICTURES / f"web_{width}_{scheme}.png")
            page.close()
    page = open_page(browser, address + "#/", 1280, "light", ".runs tbody tr")
    page.screenshot(path=PICTURES / "web_runs.png")
    if compared:
        query = "&".join(f"run={name}" for name in compared)
        page = open_page(browser, f"{address}#/compare?{query}", 1280, "light", "canvas:visible")
        page.screenshot(path=PICTURES / "web_compare.png")


def take_comparison(browser: Browser, address: str, name: str) -> None:
    """The page of a folder of `esper compare`, down to its curves."""
    page = open_page(browser, f"{address}#/comparison/{name}", 1280, "light", "canvas")
    curves = page.locator(".chart.wide:has(canvas)").bounding_box()
    assert curves is not None
    page.set_viewport_size({"width": 1280, "height": int(curves["y"] + curves["height"] + 16)})
    page.screenshot(path=PICTURES / "web_comparison.png")


def take_report(browser: Browser, runs: list[Path]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.html")
        write_report(runs, file)
        page = open_page(browser, file.as_uri(), 1280, "light", ".seed")
        page.set_viewport_size({"width": 800, "height": 1130})
        page.wait_for_timeout(300)
        page.screenshot(path=PICTURES / "report.png")


def take_decision(browser: Browser, run: Path) -> None:
    """The growth of a run's first host in its report, pointing at a seed that was culled."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.html")
        write_report([run], file)
        page = open_page(browser, file.as_uri(), 1280, "light", ".seed")
        page.set_viewport_size(
            {"width": 1280, "height": 2400}
        )  # nothing scrolls, or the pointer would be over another seed
        page.wait_for_timeout(300)
        part = page.locator(".growth-part").first
        part.locator("summary").click()
        part.locator(".seed:has(.mark.culled)").last.hover()
        part.screenshot(path=PICTURES / "report_decides.png")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, help="the folder that the runs are in")
    parser.add_argument("--run", help="the run whose page is taken")
    parser.add_argument(
        "--decides", help="a run in which a policy culls one seed and keeps another"
    )
    parser.add_argument("--host", type=int, default=0)
    parser.add_argument("--round", type=int)
    parser.add_argument("--compare", nargs="*", default=[])
    parser.add_argument("--comparison", help="the folder of esper compare whose page is taken")
    parser.add_argument(
        "--report", nargs="*", default=[], help="runs in the report; the one of --run if not given"
    )
    options = parser.parse_args()
    if not (options.run or options.decides or options.comparison):
        parser.error("name the run of --run or of --decides, or the folder of --comparison")
    PICTURES.mkdir(exist_ok=True)
    place = f"#/run/{options.run}?host={options.host}" + (
        f"&round={options.round}" if options.round is not None else ""
    )
    with served(options.runs) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        if options.decides:
            take_decision(browser, options.runs / options.decides)
        if options.comparison:
            take_comparison(browser, address, options.comparison)
        if options.run:
            take_pictures(browser, address, place, options.compare)
            take_report(browser, [options.runs / name for name in options.report or [options.run]])
        browser.close()


if __name__ == "__main__":
    main()
