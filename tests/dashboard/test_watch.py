"""`esper watch` on a terminal that only exists in the test: keys, sizes, a run that goes on."""

import asyncio
import fcntl
import importlib
import json
import re
import shutil
import sys
import threading
from itertools import combinations

import pytest

from cases import with_slow
from dashboard.test_drawing import CONFIG, WHOLE, grown_epochs, round_end, round_events, stage
from esper.dashboard.reader import RunReader
from esper.dashboard.watch import Panel, WatchApp, watch
from esper.leyline.errors import EsperError, MissingExtraError, SettingError
from esper.telemetry import events

SMALL, LARGE = (80, 24), (200, 60)


def lines_of(happened):
    return "".join(json.dumps(events.to_record(event)) + "\n" for event in happened)


def write_run(folder, happened=WHOLE, **config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (folder / "lock").touch()
    (folder / "events-0.jsonl").write_text(lines_of(happened))
    return folder


def append(folder, text):
    with (folder / "events-0.jsonl").open("a") as file:
        file.write(text)


def screen_of(app):
    strips = app.screen._compositor.render_strips(app.size)
    return "\n".join("".join(segment.text for segment in strip) for strip in strips)


async def until(pilot, claim):
    """Wait until a claim about the screen's text holds."""
    for _ in range(400):
        await pilot.pause(0.05)
        if claim(screen_of(pilot.app)):
            return
    raise AssertionError(screen_of(pilot.app))


def play(folder, script, size=SMALL):
    """Open the run, wait until it is read, and let the script press keys."""

    async def run():
        app = WatchApp(RunReader(folder))
        async with app.run_test(size=size) as pilot:
            seen = [""]
            await until(
                pilot,
                lambda text: (
                    seen.append(text) or (re.search(r"\d events", text) and seen[-2] == text)
                ),
            )
            await script(pilot)

    asyncio.run(run())


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "first")


# -- what is there ---------------------------------------------------------------------------------


def assert_in_place(app):
    shown = [panel for panel in app.query(Panel) if panel.display and panel.region.area]
    assert not any(one.region.overlaps(other.region) for one, other in combinations(shown, 2))
    assert all(app.screen.region.contains_region(panel.region) for panel in shown)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_everything_is_on_the_screen_at_both_sizes_and_nothing_overlaps(folder, size):
    async def script(pilot):
        text = screen_of(pilot.app)
        for fact in (
            "first",
            "task digits",
            "policy ppo",
            "stopped",
            "2 of 4 rounds",
            "slot",
            "alpha",
        ):
            assert fact in text
        for fact in (
            "r0c0",
            "r0c1",
            "BLENDING",
            "inverted_bo",
            "+0.0456 ± 0.0078",
            "accuracy grown",
            "accuracy twin",
        ):
            assert fact in text
        for fact in (
            "held-out loss",
            "GERMINATE",
            "accuracy_beyond_twin",
            "KL",
            "clip",
            "explained variance",
        ):
            assert fact in text
        for fact in (
            "first ratio gap",
            "entropy op",
            "blueprint",
            "blend",
            "events",
            "next host",
            "quit",
        ):
            assert fact in text
        assert_in_place(pilot.app)

    play(folder, script, size)


OTHERS = (LARGE, (80, 60), (200, 24), (120, 50))


@pytest.mark.parametrize("size", with_slow([SMALL, *OTHERS], OTHERS))
def test_a_host_with_many_slots_leaves_room_for_the_rest_and_can_be_scrolled(folder, size):
    append(
        folder,
        lines_of(stage(0, 4, f"r0c{slot}", "DORMANT", "GERMINATED") for slot in range(2, 30)),
    )

    async def script(pilot):
        assert_in_place(pilot.app)
        assert "r0c29" not in screen_of(pilot.app).partition("epoch by epoch")[0]
        pilot.app.query_one("#chain").focus()
        await pilot.press("end")
        await until(pilot, lambda text: "r0c29" in text.partition("epoch by epoch")[0])

    play(folder, script, size)


def test_a_new_size_is_drawn_anew(folder):
    async def script(pilot):
        assert "mean of all hosts" not in screen_of(pilot.app)
        await pilot.resize_terminal(*LARGE)
        await until(pilot, lambda text: "╭─ host 0" in text and "mean of all hosts" in text)
        await pilot.resize_terminal(*SMALL)
        await until(pilot, lambda text: "─host 0" in text and "mean of all hosts" not in text)

    play(folder, script)


def test_a_grown_run_has_no_panels_of_ppo(tmp_path):
    folder = write_run(tmp_path / "grown", grown_epochs(4), command="run", policy="heuristic")

    async def script(pilot):
        text = screen_of(pilot.app)
        assert "policy heuristic" in text
        assert "4 of 4 epochs" in text
        assert "PPO" not in text
        assert "reward" not in text

    play(folder, script, LARGE)


def test_a_run_without_events_is_shown_as_one(tmp_path):
    async def script(pilot):
        text = screen_of(pilot.app)
        assert "no host" in text
        assert "no event" in text
        for key in ("n", "p", "space", "question_mark", "escape"):
            await pilot.press(key)

    play(write_run(tmp_path / "first", []), script)


# -- keys ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_keys_go_round_the_hosts(folder):
    async def script(pilot):
        for key, host in (
            ("n", "host 1 (2 of 2)"),
            ("n", "host 0 (1 of 2)"),
            ("p", "host 1 (2 of 2)"),
        ):
            await pilot.press(key)
            await until(pilot, lambda text, host=host: host in text)
        assert "EMBARGOED" in screen_of(pilot.app)

    play(folder, script)


def test_q_quits(folder):
    async def script(pilot):
        await pilot.press("q")
        assert pilot.app._exit

    play(folder, script)


@pytest.mark.slow
def test_a_filter_is_applied_while_it_is_typed_kept_by_enter_and_dropped_by_escape(folder):
    async def script(pilot):
        await pilot.press("slash", *"action")
        await until(pilot, lambda text: "filter 'action': 9 of" in text)
        await pilot.press("space", *"cull", "enter")
        await until(pilot, lambda text: "filter 'action cull': 3 of" in text)
        assert "CULL in r0c0" in screen_of(pilot.app)
        await pilot.press("n")  # keys are keys again
        await until(pilot, lambda text: "host 1 (2 of 2)" in text)
        await pilot.press("escape")
        await until(pilot, lambda text: "filter '" not in text)

    play(folder, script)


def test_a_filter_is_never_markup(folder):
    async def script(pilot):
        await pilot.press("slash", "left_square_bracket", "slash", "right_square_bracket")
        await until(pilot, lambda text: "filter '[/]': 0 of" in text)

    play(folder, script)


def test_keys_are_answered_while_the_run_is_being_read_and_nothing_is_drawn_half_read(
    folder, monkeypatch
):
    reader = RunReader(folder)
    app = WatchApp(reader)
    go_on, refresh, show = threading.Event(), reader.refresh, Panel.show
    reader.refresh = lambda: go_on.wait(30) and refresh()
    drawn = []
    monkeypatch.setattr(
        Panel, "show", lambda panel, moment: drawn.append(app.is_reading) or show(panel, moment)
    )

    async def run():
        async with app.run_test(size=SMALL) as pilot:
            await until(pilot, lambda text: "reading" in text)
            await pilot.press("n", "slash", "x")
            await until(pilot, lambda text: app.wanted == "x")
            await pilot.press("escape")
            go_on.set()
            await until(pilot, lambda text: "2 of 4 rounds" in text and "host 1 (2 of 2)" in text)

    asyncio.run(run())
    assert True not in drawn


# -- a run that goes on ----------------------------------------------------------------------------


def test_a_running_run_is_followed_until_it_is_over(folder):
    with (folder / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        async def script(pilot):
            assert "▶ running" in screen_of(pilot.app)
            assert "ETA 0:30" in screen_of(pilot.app)
            append(folder, lines_of([round_end(2, 30.0)]))
            await until(pilot, lambda text: "3 of 4 rounds" in text and "ETA 0:20" in text)
            append(folder, lines_of([*round_events(3), round_end(3)]))
            fcntl.flock(lock, fcntl.LOCK_UN)
            await until(pilot, lambda text: "■ finished" in text and "4 of 4 rounds" in text)
            assert "ETA" not in screen_of(pilot.app)

        play(folder, script)


def test_a_torn_last_line_is_read_when_it_is_whole(folder):
    line = lines_of([events.HostRolledBack(0, 3, "the loss is torn")])
    append(folder, line[:40])

    async def script(pilot):
        assert "torn" not in screen_of(pilot.app)
        append(folder, line[40:])
        await until(pilot, lambda text: "the loss is torn" in text)
        assert "not understood" not in screen_of(pilot.app)

    play(folder, script)


def test_text_from_events_is_shown_as_it_is(folder):
    hostile = "[red]x[/red] [/] [@click=app.quit]y[/]"
    append(
        folder,
        lines_of(
            [events.HostRolledBack(0, 3, hostile), stage(0, 3, "r0c1", "X", "[b]", 0.5, "[/b]")]
        ),
    )

    async def script(pilot):
        text = screen_of(pilot.app)
        assert hostile in text
        assert "r0c1 [/b] X -> [b]" in text

    play(folder, script, LARGE)


@pytest.mark.slow
def test_whoever_scrolled_back_in_the_log_is_left_there(folder):
    async def script(pilot):
        log = pilot.app.query_one("#log")
        await pilot.press("home")
        await until(pilot, lambda text: "round 0 begins" in text)
        append(folder, lines_of([round_end(2)]))
        await until(pilot, lambda text: "3 of 4 rounds" in text)
        assert log.scroll_offset.y == 0
        await pilot.press("end")
        await until(pilot, lambda text: "round 2: return" in text)
        append(folder, lines_of(round_events(3)))
        await until(pilot, lambda text: "r3 h1    epoch 4:" in text)

    play(folder, script)


def test_a_folder_that_vanishes_is_told_and_the_picture_stays(folder):
    async def script(pilot):
        shutil.rmtree(folder)
        await until(pilot, lambda text: "no config.json" in text)
        assert "BLENDING" in screen_of(pilot.app)

    play(folder, script, LARGE)


# -- plain terminals -------------------------------------------------------------------------------


@pytest.mark.slow
def test_without_colour_the_same_text_is_there(folder, monkeypatch):
    found = []

    async def script(pilot):
        await pilot.press("space")
        await pilot.pause()
        found.append((screen_of(pilot.app), pilot.app.no_color))

    play(folder, script)
    monkeypatch.setenv("NO_COLOR", "1")
    play(folder, script)
    (coloured, _), (plain, is_plain) = found
    assert is_plain
    assert plain == coloured


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda folder: None, lambda folder: folder.mkdir()])
def test_what_is_no_run_folder_is_refused(tmp_path, make):
    make(tmp_path / "other")
    with pytest.raises(EsperError, match=r"other .*no config\.json"):
        watch(tmp_path / "other")


def test_without_a_terminal_it_says_so(folder, monkeypatch):
    monkeypatch.setattr(sys, "__stdin__", None)
    with pytest.raises(SettingError, match="`esper runs`"):
        watch(folder)


def test_without_textual_it_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "esper.dashboard.watch")
    monkeypatch.setitem(sys.modules, "textual", None)
    with pytest.raises(MissingExtraError, match="pip install 'esper-lite\\[tui\\]'"):
        importlib.import_module("esper.dashboard.watch")
