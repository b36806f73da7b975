"""The driver of the campaign sees what it is to see, and the page has the counts that it left."""

import json
import os
import random
import signal
import time
from collections import Counter

import pytest

from faults.commands import Bad
from tools.faults import table
from tools.faults.driver import CLEAR, SAME, Group, Over, Skipped, brief, play
from tools.faults.soak import require_flat


def of_number(*outcomes):
    """A case that does what is listed for its number."""

    def case(draw, number, place):
        found = outcomes[number]
        return found() if callable(found) else found

    return case


def raising(problem):
    def act():
        raise problem

    return act


def test_every_way_to_fail_is_told_with_the_case_that_failed():
    ends = [
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        raising(Bad("silently another result")),
        lambda: time.sleep(30),
        lambda: "no such verdict",
        SAME,
    ]
    groups = [Group("disk", "all", of_number(*ends), len(ends), seconds=0.5)]
    told = play(groups, say=lambda line: None)["disk/all"]
    assert sorted(key for key, _ in told.bad) == [f"disk/all/{number}" for number in range(4)]
    assert told.verdicts == {SAME: 1}
    assert table.is_bad(table.counted({"disk/all": told}, 0, 0.1, 1.0))


def test_a_sweep_ends_where_nothing_fails_any_more_and_one_without_an_end_fails():
    def until(last):
        def case(draw, number, place):
            if number > last:
                raise Over
            return CLEAR

        return case

    groups = [
        Group("disk", "ends", until(5), 50, sweep=True),
        Group("disk", "does not", until(99), 8, sweep=True),
    ]
    told = play(groups, say=lambda line: None)
    assert (told["disk/ends"].verdicts, told["disk/ends"].bad) == ({CLEAR: 5}, [])
    assert told["disk/does not"].verdicts == {CLEAR: 8}
    assert len(told["disk/does not"].bad) == 1


def test_a_case_can_be_played_again_and_draws_the_same(tmp_path):
    def case(draw, number, place):
        with open(tmp_path / "drawn", "a") as file:
            file.write(f"{number} {draw.random()}\n")
        return Counter({SAME: 3})

    groups = [Group("power", "drawn", case, 4)]
    assert play(groups, seed=5)["power/drawn"].verdicts == {SAME: 12}
    all_of_them = (tmp_path / "drawn").read_text().splitlines()
    (tmp_path / "drawn").unlink()
    play(groups, seed=5, only="power/drawn/2")
    assert (tmp_path / "drawn").read_text().splitlines() == [
        line for line in all_of_them if line.startswith("2 ")
    ]
    assert len(set(all_of_them)) == 4
    assert str(random.Random("5/power/drawn/2").random()) in "".join(all_of_them)


def test_what_cannot_be_tried_is_said_and_what_is_too_little_fails():
    told = play([Group("power", "disks", of_number(raising(Skipped("no loop devices"))))])
    found = table.counted(told, 0, 1.0, 1.0)
    assert "no loop devices" in table.rendered(found)
    assert table.too_few(found) == {"power": 0}


def test_a_traceback_is_told_by_its_last_place_in_the_package():
    frames = (
        'File "/a/src/esper/cli/app.py", line 3, in main\n  File "/lib/json.py", line 9, in loads'
    )
    text = f"Bad: x\n  {frames}\nValueError: y"
    assert brief(text).endswith("esper/cli/app.py:3:main: ValueError: y")


@pytest.mark.parametrize("column", [1, 2, 3])
def test_what_grows_without_end_is_seen(column):
    flat = [[number, 100 << 20, 12, 1] for number in range(100)]
    require_flat(flat, "rounds")
    growing = [
        [
            *row[:column],
            row[column] + (row[0] << 18 if column == 1 else row[0] // 30),
            *row[column + 1 :],
        ]
        for row in flat
    ]
    with pytest.raises(Bad, match="rounds"):
        require_flat(growing, "rounds")


def test_the_page_has_the_table_of_the_counts_beside_it():
    found = json.loads(table.RESULTS.read_text())
    page = table.PAGE.read_text(encoding="utf-8")
    assert table.paged(page, found) == page
    assert not table.is_bad(found)
