"""The page and the report in a real browser:

live, by mouse and keyboard, accessible, and alone with its server.
"""

import shutil

import pytest

from cases import with_slow
from dashboard.browsing import ready, served, violations
from dashboard.web_runs import append, grow_run, grown_epoch, seed_events
from esper.dashboard.report import write_report
from esper.telemetry.events import to_record
from telemetry.test_events import REPORTED

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
