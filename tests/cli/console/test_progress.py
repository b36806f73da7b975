"""A run on screen: a line per round where nobody looks, a live table where somebody does."""

import io
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from esper.cli.console import round_line, rounds_table, show_rounds
from esper.telemetry.events import RoundFinished
from esper.telemetry.wording import clock

FIRST = RoundFinished(
    round=0,
    decisions=120,
    mean_return=0.5,
    accuracy=0.8125,
    twin_accuracy=0.75,
    params_share=1.25,
    reward_parts={"accuracy_beyond_twin": 0.625, "rent": -0.125},
    ops={"WAIT": 100, "GERMINATE": 12, "CULL": 5, "FOSSILIZE": 3},
    germinated=12,
    fossilized=3,
    culled=5,
    refused=0,
    update={},
    seconds=2.0,
    flops={"episodes": 3_000_000, "learning": 1_000_000},
)
SECOND = replace(FIRST, round=1, decisions=240, mean_return=-0.25, seconds=4.0)


def drawn(thing, width=100):
    console = Console(file=io.StringIO(), width=width)
    console.print(thing)
    return console.file.getvalue()


def test_speed_and_time_left_are_those_of_the_round():
    assert round_line(SECOND, 10).endswith("30 decisions/s  0:32 left")


def test_after_the_last_round_nothing_is_left():
    assert round_line(replace(FIRST, round=9), 10).endswith(" 0:00 left")


def test_a_round_without_a_measured_time_has_no_speed():
    assert " 0 decisions/s" in round_line(replace(FIRST, seconds=0.0), 10)


def test_the_line_of_a_round_has_everything_in_one_line():
    assert round_line(FIRST, 10) == (
        "round 1/10  return +0.500  accuracy 81.25% (twin 75.00%)  1.25 x parameters  "
        "wait 100 germinate 12 cull 5 fossilize 3  4e+06 FLOPs (25.0% learning)  60 decisions/s  "
        "0:18 left"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3600, "1:00:00"), (36_125, "10:02:05")],
)
def test_time_reads_like_a_clock(seconds, text):
    assert clock(seconds) == text


def test_the_table_of_a_round_says_the_same_and_more():
    text = drawn(rounds_table(SECOND, 10, 0.5))
    for part in (
        "round 2 of 10",
        "-0.250 (best +0.500)",
        "81.25% grown, 75.00% twin",
        "1.25 x the host's",
        "12 germinated, 3 fossilized, 5 culled, 4 alive",
        "WAIT 100, GERMINATE 12, CULL 5, FOSSILIZE 3",
        "accuracy_beyond_twin +0.625, rent -0.125",
        "4e+06 FLOPs (25.0% learning)",
        "30 decisions/s",
        "0:32",
    ):
        assert part in text


def test_without_a_terminal_every_round_is_one_line_however_narrow():
    console = Console(file=io.StringIO(), width=40, force_terminal=False)
    with show_rounds(10, console) as show:
        show(FIRST)
        show(SECOND)
    lines = console.file.getvalue().splitlines()
    assert [line[:12] for line in lines] == ["round 1/10  ", "round 2/10  "]
    assert lines[0] == round_line(FIRST, 10)


def test_without_a_terminal_every_line_is_there_as_soon_as_its_round_is_over():
    console = Console(file=io.StringIO(), width=40, force_terminal=False)
    with show_rounds(10, console) as show:
        show(FIRST)
        assert console.file.getvalue().count("\n") == 1


def test_a_quiet_console_leaves_stderr_alone():
    """A rank that shows nothing may still have something to say."""
    before = sys.stderr
    with show_rounds(10, Console(quiet=True, force_terminal=True)) as show:
        show(FIRST)
        assert sys.stderr is before


def test_names_in_square_brackets_are_shown_as_they_are():
    console = Console(file=io.StringIO(), force_terminal=False)
    with show_rounds(10, console) as show:
        show(replace(FIRST, ops={"[red]WAIT": 1}))
    assert "[red]wait 1" in console.file.getvalue()


def test_on_a_terminal_the_last_round_is_a_live_table():
    console = Console(file=io.StringIO(), width=100, force_terminal=True, record=True)
    with show_rounds(10, console) as show:
        assert "round" not in console.file.getvalue()
        show(FIRST)
        show(SECOND)
    text = console.export_text()
    assert "round 2 of 10" in text
    assert "decisions/s" in text
    assert "round 1/10" not in text
    assert "\x1b[" in console.file.getvalue()


def test_an_error_inside_ends_the_live_table_and_comes_out():
    console = Console(file=io.StringIO(), force_terminal=True)

    def fail():
        with show_rounds(10, console) as show:
            show(FIRST)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert console.file.getvalue().endswith("\x1b[?25h")  # the cursor is back
