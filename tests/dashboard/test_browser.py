"""The page and the report in a real browser:

live, by mouse and keyboard, accessible, and alone with its server.
"""

import shutil
import socket
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from cases import with_slow
from dashboard.web_runs import (
    append,
    comparison,
    grow_run,
    grown_epoch,
    ppo_round,
    ppo_run,
    seed_events,
)
from esper.dashboard.report import write_report
from esper.dashboard.server import build_app
from esper.telemetry.events import to_record
from telemetry.test_events import REPORTED

playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe_package = pytest.importorskip(
    "axe_playwright_python", reason="axe-playwright-python is not installed"
)
uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed")
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
AXE = Path(axe_package.__file__).with_name("axe.min.js")
PAGES = (
    "#/",
    "#/run/ppo",
    "#/run/grow",
    "#/run/never",
    "#/compare?run=grow&run=never",
    "#/comparison/arms",
)
MORE_PAGES = ("#/run/ppo", "#/run/never", "#/compare?run=grow&run=never")
BAD = "<img src=x onerror=document.title='hacked'><script>document.title='hacked'</script>"


@pytest.fixture(scope="module")
def browser():
    with playwright_api.sync_playwright() as playwright:
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


@contextmanager
def served(runs, token=None):
    app = build_app(runs, token)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
    app.state.site.is_closing = lambda: server.should_exit
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server.should_exit = True
        thread.join(20)


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


def ready(page):
    page.locator("canvas:visible, .runs tbody tr").first.wait_for()


def violations(page):
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run()")["violations"]
    return [
        (rule["id"], [node["target"] for node in rule["nodes"]])
        for rule in found
        if rule["impact"] in ("serious", "critical")
    ]


def test_what_is_appended_appears(page, address, runs):
    folder = grow_run(runs / "live", epochs=2)
    page.goto(address + "#/run/live")
    page.wait_for_selector("main[data-events]")
    before = page.locator(".seed").count()
    append(
        folder,
        *(event for batch in seed_events(0, 2, "r0c2", "CULLED", "brand_new") for event in batch),
    )
    append(folder, grown_epoch(0, 2, 0.877))
    page.get_by_role("option", name="brand_new in r0c2").wait_for()
    page.get_by_text("87.7 %").first.wait_for()
    assert page.locator(".seed").count() == before + 1
    page.get_by_role("log").get_by_text("brand_new").first.wait_for()
    shutil.rmtree(folder)


@pytest.mark.slow
def test_a_page_that_is_open_for_long_does_not_grow(page, address, runs):
    folder = grow_run(runs / "long", epochs=2)
    page.goto(address + "#/run/long")
    page.wait_for_selector("main[data-events]")
    page.locator("canvas").first.wait_for()
    canvases = page.locator("canvas").count()
    for start in (2, 600, 1200):
        append(folder, *(grown_epoch(0, epoch) for epoch in range(start, start + 598)))
        page.get_by_role("log").get_by_text(f"host 0, epoch {start + 598}:").wait_for()
    assert page.locator(".log li").count() == 200
    assert page.locator("canvas").count() == canvases
    shutil.rmtree(folder)


def test_a_loop_of_ones_own_shows_modules_scores_and_what_it_is_worth(page, address, runs):
    folder = grow_run(runs / "own", "never", epochs=2, command="garden", run="a1")
    seed = [
        to_record(event) if not isinstance(event, dict) else event
        for event in seed_events(0, 0, "r0c0", "CULLED")[0]
    ]
    append(folder, *({**record, "module": "encoder.layer3"} for record in seed))
    append(
        folder,
        {
            **to_record(grown_epoch(0, 2)),
            "held_out_loss": None,
            "held_out_accuracy": None,
            "held_out_score": 0.625,
        },
    )
    page.goto(address + "#/run/own")
    page.get_by_role("option", name="conv_light in encoder.layer3").wait_for()
    assert page.locator("svg.timeline text", has_text="layer3").count() == 1
    page.get_by_text("held-out score, mean, higher is better: 0.625").wait_for()
    assert page.get_by_role("heading", name="Was it worth it?").count() == 0
    append(folder, REPORTED)
    row = page.get_by_role("row", name="layer3")
    row.wait_for()
    assert "0.5 ± 0.125" in row.inner_text()
    assert "1.50 × the host's" in page.locator("#run-worth").inner_text()
    shutil.rmtree(folder)


def test_a_comparison_shows_arms_paired_differences_and_loss_against_flops(page, address):
    page.goto(address)
    page.get_by_role("link", name="arms").click()
    arms = page.get_by_role("img", name="Arms. never: 50.4 %; heuristic: 80.2 %")
    arms.wait_for()
    assert arms.locator(".one").count() == 15
    assert arms.locator(".interval").count() == 3
    pairs = page.get_by_role("img", name="Paired differences")
    assert "heuristic: +29.80 points, ahead" in pairs.get_attribute("aria-label")
    assert pairs.locator(".one").count() == 10
    page.get_by_label("against", exact=True).select_option("heuristic")
    assert "first round 6: " in pairs.get_attribute("aria-label")
    page.get_by_label("shown", exact=True).select_option("test_loss")
    assert "heuristic: 0.198" in page.locator("svg.dots").first.get_attribute("aria-label")
    page.get_by_role("img", name="Chart: Held-out loss against FLOPs").wait_for()
    assert page.get_by_role("region", name="Differences, paired by host seed").count() == 1


def test_a_comparison_is_not_ticked_to_be_compared_with_runs(page, address):
    page.goto(address)
    page.get_by_role("link", name="arms").wait_for()
    assert page.get_by_label("compare grow").count() == 1
    assert page.get_by_label("compare arms").count() == 0


@pytest.mark.slow
def test_a_report_of_a_comparison_opens_from_disk(page, runs, tmp_path):
    write_report([runs / "arms", runs / "grow"], tmp_path / "report.html")
    page.goto((tmp_path / "report.html").as_uri())
    page.get_by_role("img", name="Arms. never").wait_for()
    page.get_by_role("img", name="Chart: Held-out loss against FLOPs").wait_for()
    assert violations(page) == []
    page.set_viewport_size({"width": 360, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def strip_ends(page):
    """The values at the ends of the axis above the lanes."""
    return page.locator("svg.timeline text.tick").all_text_contents()


def test_the_timelines_axis_starts_where_the_curves_part_unless_all_is_asked_for(
    page, address, runs
):
    folder = grow_run(runs / "parted", epochs=1)
    for epoch, accuracy in enumerate((0.1, 0.2, 0.8, 0.82, 0.86, 0.83, 0.84, 0.81, 0.85)):
        append(folder, grown_epoch(0, epoch + 1, accuracy))
    page.goto(address + "#/run/parted")
    page.get_by_role("button", name="full range").wait_for()
    assert {"80.0 %", "86.0 %"} <= set(strip_ends(page))
    page.get_by_role("button", name="full range").click()
    assert {"10.0 %", "86.0 %"} <= set(strip_ends(page))
    assert "80.0 %" not in strip_ends(page)
    page.get_by_role("button", name="full range").click()
    assert "80.0 %" in strip_ends(page)
    shutil.rmtree(folder)


def test_a_removed_fossil_says_so_on_its_bar_and_in_the_key(page, address, runs):
    folder = grow_run(runs / "removed", epochs=5)
    judged = {
        "type": "FossilJudged",
        "host": 0,
        "epoch": 5,
        "slot": "r0c0",
        "module": None,
        "blueprint": "conv_light",
        "contribution": -0.1,
        "standard_error": 0.01,
        "is_kept": False,
    }
    append(folder, judged)
    page.goto(address + "#/run/removed")
    seed = page.locator(".seed", has_text="conv_light")
    seed.locator(".mark.removed").wait_for()
    page.get_by_role("list", name="Key").get_by_text("removed", exact=True).wait_for()
    assert "removed at epoch 5" in seed.get_attribute("aria-label")
    assert any("removed" in text for text in seed.locator(".seed-name").all_text_contents())
    shutil.rmtree(folder)


def test_the_key_shows_only_what_occurs(page, address):
    page.goto(address + "#/run/never")
    page.wait_for_selector("main[data-events]")
    key = page.get_by_role("list", name="Key").get_by_role("listitem")
    assert key.all_text_contents() == ["held-out accuracy"]
    page.goto(address + "#/run/grow")
    page.locator(".seed").first.wait_for()
    assert set(key.all_text_contents()) == {
        "held-out accuracy",
        "blending",
        "probation",
        "kept",
        "culled",
        "fossil, part of the host from then on",
    }


@pytest.mark.parametrize(
    ("values", "shape"),
    [
        ([3, 3, 3, 3, 3, 3], "constant"),
        ([None, 3, None, None, None, None], "constant"),
        ([0, 2, 4, 6, 8, 10], "straight"),
        ([0, 2.2, 4, 5.9, 8, 10], "straight"),
        ([0, 2, 4, 6, None, None], "line"),
        ([0, 6, 8, 9, 9.5, 10], "line"),
        ([1, 0, 1, 0, 1, 0], "line"),
    ],
)
def test_a_line_that_tells_nothing_is_known_as_such(page, address, values, shape):
    page.goto(address)
    assert page.evaluate("y => shapeOf([1, 2, 3, 4, 5, 6], y)", values) == shape


def test_no_chart_is_constant_or_straight_and_one_line_names_what_is(page, address):
    page.goto(address + "#/run/grow")
    ready(page)
    drawn = page.evaluate(
        """[...charts].filter((chart) => !chart.figure.hidden).flatMap((chart) =>
            chart.shown.map((line) => shapeOf(chart.spec.x, line.y)))"""
    )
    assert set(drawn) == {"line"}
    note = page.locator("#episode .left-out").inner_text()
    assert "flops since birth, all phases: from 0 to 5M in a straight line" in note
    assert "contribution ± standard error, r0c0: 0.25" in note


def test_a_twin_is_drawn_beside_a_line_even_if_it_is_constant(page, address):
    page.goto(address)
    series = [
        {"label": "grown", "y": [0, 6, 8, 9, 9.5]},
        {"label": "twin", "y": [4, 4, 4, 4, 4], "isReference": True},
    ]
    ask = "series => partedByInformation({ x: [1, 2, 3, 4, 5], series }).drawn.length"
    assert page.evaluate(ask, series) == 2
    assert page.evaluate(ask, series[1:]) == 0


def test_a_run_of_ppo_with_twelve_hosts_fits_into_three_screens(page, address, runs):
    folder = ppo_run(runs / "dozen", rounds=0, hosts=12, rounds_planned=6)
    for number in range(6):
        append(folder, *ppo_round(number, hosts=12))
    page.set_viewport_size({"width": 1280, "height": 800})
    page.goto(address + "#/run/dozen")
    page.get_by_text("6 of 6").wait_for()
    ready(page)
    assert page.locator(".chart:visible").count() >= 15
    assert page.evaluate("document.documentElement.scrollHeight") <= 3 * 800
    page.get_by_text("Ledger of each host").click()
    page.get_by_text("Host by host").click()
    ledger = page.get_by_role("region", name="What each host's newest episode cost")
    assert ledger.get_by_role("row").count() == 1 + 2 * 12
    shutil.rmtree(folder)


def test_lists_show_the_loss_of_a_loop_without_accuracy(page, address, runs):
    folder = grow_run(runs / "lossy", "never", epochs=0, seeds=(0,), command="garden", run="a1")
    for epoch in range(3):
        append(folder, {**to_record(grown_epoch(0, epoch)), "held_out_accuracy": None})
    page.goto(address)
    page.get_by_role("row", name="lossy").get_by_text("loss 0.7333").wait_for()
    page.goto(address + "#/run/lossy")
    page.get_by_role("definition").get_by_text("loss 0.7333").wait_for()
    assert page.get_by_role("list", name="Key").inner_text() == "held-out loss"
    shutil.rmtree(folder)


def test_ticks_are_round(page, address):
    page.goto(address)
    assert page.evaluate("roundTicks(0, 40, 9)") == [0, 5, 10, 15, 20, 25, 30, 35, 40]
    assert page.evaluate("roundTicks(-0.21, 0.13, 8)") == pytest.approx(
        [-0.2, -0.15, -0.1, -0.05, 0, 0.05, 0.1]
    )
    assert page.evaluate("ROUND_STEPS.every((n) => '125'.includes(n.toExponential()[0]))")


def test_pointing_at_a_seed_shows_what_its_gates_saw(page, address):
    page.goto(address + "#/run/grow")
    panel = page.get_by_role("complementary", name="Gate evidence")
    page.get_by_role("option", name="conv_light in r0c0").hover()
    panel.get_by_text("G5 ✓ passed").wait_for()
    assert "a paired counterfactual" in panel.inner_text()
    page.get_by_role("option", name="depthwise in r0c1").hover()
    panel.get_by_text("G5 ✗ failed").wait_for()


def test_the_keyboard_reaches_every_seed(page, address):
    page.goto(address + "#/run/grow")
    page.wait_for_selector(".seed")
    page.locator("#host").focus()
    page.keyboard.press("Tab")
    panel = page.get_by_role("complementary", name="Gate evidence")
    panel.get_by_role("heading", name="conv_light in r0c0").wait_for()
    page.keyboard.press("ArrowDown")
    panel.get_by_role("heading", name="depthwise in r0c1").wait_for()
    assert page.evaluate("document.activeElement.getAttribute('aria-selected')") == "true"
    assert (
        page.evaluate("getComputedStyle(document.activeElement.querySelector('.ring')).strokeWidth")
        == "3px"
    )
    page.keyboard.press("ArrowUp")
    panel.get_by_role("heading", name="conv_light in r0c0").wait_for()


def test_fates_are_told_by_shape_and_word(page, address):
    page.goto(address + "#/run/grow")
    page.wait_for_selector(".seed")
    shapes = page.eval_on_selector_all(
        ".seed .mark", "marks => marks.map(mark => mark.getAttribute('d'))"
    )
    assert len(set(shapes)) == 2
    assert {"kept", "culled"} <= set(page.locator(".seed .seed-name").all_text_contents())


def test_an_older_round_and_another_host_can_be_chosen(page, address):
    page.goto(address + "#/run/ppo")
    page.get_by_role("option", name="conv_light in r0c1").wait_for()
    page.get_by_label("round", exact=True).fill("0")
    page.keyboard.press("Enter")
    page.get_by_role("option", name="conv_light in r0c0").wait_for()
    page.get_by_label("host", exact=True).select_option("1")
    page.wait_for_url("**host=1&round=0")
    page.get_by_role("button", name="latest").click()
    page.get_by_role("option", name="conv_light in r0c1").wait_for()


def test_two_runs_are_compared(page, address):
    page.goto(address)
    page.get_by_label("compare grow").check()
    assert page.get_by_role("button", name="Compare").is_disabled()
    page.get_by_label("compare never").check()
    page.get_by_role("button", name="Compare 2").click()
    page.get_by_role("img", name="Chart: Held-out accuracy, mean over hosts. grow").wait_for()
    assert (
        "+10.00 (+10.00 to +10.00) over never"
        in page.get_by_role("region", name="Policies and controls").inner_text()
    )


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
@pytest.mark.parametrize("place", with_slow(PAGES, MORE_PAGES))
def test_axe_finds_nothing_serious(page, address, place, scheme):
    page.emulate_media(color_scheme=scheme)
    page.goto(address + place)
    ready(page)
    assert violations(page) == []


@pytest.mark.parametrize("width", [360, 1280, 3840])
@pytest.mark.parametrize("place", with_slow(PAGES, MORE_PAGES))
def test_nothing_has_to_be_scrolled_sideways(page, address, place, width):
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(address + place)
    ready(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_text_from_events_is_never_html(page, address, runs):
    folder = grow_run(runs / "hostile", epochs=2, policy=BAD)
    append(
        folder, *(event for batch in seed_events(0, 2, "r0c2", "CULLED", BAD) for event in batch)
    )
    append(folder, {"type": "HostRolledBack", "host": 0, "epoch": 2, "reason": BAD})
    page.goto(address + "#/run/hostile")
    page.locator(".seed", has_text="<img").first.hover()
    page.get_by_role("complementary").get_by_text("onerror").first.wait_for()
    page.get_by_role("log").get_by_text("onerror").first.wait_for()
    assert page.locator("main img, main script").count() == 0
    assert "hacked" not in page.title()
    shutil.rmtree(folder)


def test_a_token_opens_the_page_and_does_not_stay_in_the_address(browser, runs):
    with served(runs, "a-token-of-more-than-16-letters") as address:
        page = browser.new_page()
        assert page.goto(address).status == 401
        page.goto(address + "?token=a-token-of-more-than-16-letters#/run/grow")
        page.locator(".seed").first.wait_for()
        assert page.url == address + "#/run/grow"
        assert page.evaluate("document.cookie") == ""
        page.close()


@pytest.mark.slow
@pytest.mark.parametrize("names", [["grow"], ["grow", "never", "ppo"]])
def test_a_report_opens_from_disk_and_prints(page, runs, tmp_path, names):
    write_report([runs / name for name in names], tmp_path / "report.html")
    page.goto((tmp_path / "report.html").as_uri())
    page.locator(".seed").first.wait_for()
    page.get_by_role("heading", name="How to reproduce").first.wait_for()
    for title in ("Final table", "Growth", "Ledger", "Gate decisions", "Configuration"):
        assert page.get_by_role("heading", name=title, exact=True).count() >= 1
    page.get_by_role("option", name="conv_light in r0c0").first.hover()
    page.get_by_role("complementary").get_by_text("G5 ✓ passed").first.wait_for()
    assert violations(page) == []
    assert page.pdf(prefer_css_page_size=True).startswith(b"%PDF")
    page.set_viewport_size({"width": 360, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
