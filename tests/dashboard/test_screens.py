"""What the pages show, and what they leave out, in a real browser."""

import shutil

import pytest

from dashboard.browsing import ready, violations
from dashboard.web_runs import append, grow_run, grown_epoch, ppo_round, ppo_run, seed_events
from esper.dashboard.report import write_report
from esper.telemetry.events import ActionTaken, to_record


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


def test_an_action_without_a_blend_is_shown_without_one(page, address, runs):
    folder = grow_run(runs / "kept", epochs=5)
    append(folder, ActionTaken(0, 5, "FOSSILIZE", "r0c0", "conv_light", None))
    page.goto(address + "#/run/kept")
    page.get_by_text("Last action: FOSSILIZE conv_light in r0c0 at epoch 5.").wait_for()
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


def test_a_long_list_of_gates_does_not_stretch_the_timeline(page, address, runs):
    folder = grow_run(runs / "judged", epochs=5)
    gate = {"type": "GateJudged", "host": 0, "slot": "r0c2", "module": None, "measured": 1.0}
    texts = {"gate": "G5", "needed": "much " * 20, "verdict": "failed", "reason": "so " * 20}
    append(folder, *seed_events(0, 5, "r0c2", "CULLED", "late")[0])
    append(folder, *({**gate, **texts, "epoch": epoch} for epoch in range(6, 20)))
    page.goto(address + "#/run/judged")
    page.locator(".seed", has_text="late").wait_for()
    before = page.locator(".timeline-box").bounding_box()["height"]
    page.locator(".seed", has_text="late").hover()
    page.get_by_role("complementary").get_by_text("G5").first.wait_for()
    assert page.locator(".timeline-box").bounding_box()["height"] == before
    shutil.rmtree(folder)


def test_a_chart_writes_its_numbers_in_whole_pixels(page, address):
    """uPlot multiplies the digits before "px" by the screen's pixel ratio."""
    page.goto(address + "#/run/grow")
    ready(page)
    fonts = page.evaluate(
        "[...charts].filter((c) => c.plot).map((c) => c.axes()[0].font.split('px')[0])"
    )
    assert fonts
    assert all(font.isdecimal() for font in fonts)


def test_ticks_are_round(page, address):
    page.goto(address)
    assert page.evaluate("roundTicks(0, 40, 9)") == [0, 5, 10, 15, 20, 25, 30, 35, 40]
    assert page.evaluate("roundTicks(-0.21, 0.13, 8)") == pytest.approx(
        [-0.2, -0.15, -0.1, -0.05, 0, 0.05, 0.1]
    )
    assert page.evaluate("ROUND_STEPS.every((n) => '125'.includes(n.toExponential()[0]))")
