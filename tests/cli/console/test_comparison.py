"""A comparison on screen and as a picture:

nothing cut off, nothing made up, names are text whatever is in them.
"""

import io
from xml.etree import ElementTree

import pytest
from rich.console import Console

from esper.cli.console import (
    arms_compared,
    compared_figure,
    differences,
    interval_figure,
    round_ticks,
)
from esper.dashboard.comparisons import pairs_of

SVG = "{http://www.w3.org/2000/svg}"
LONG = "greedy:epochs=1+5+9+13+17+21+25+29:blueprints=norm+conv_light+conv_heavy"


def estimate(mean, low=None, high=None, count=6):
    return {"mean": mean, "low": low, "high": high, "count": count}


def arm(accuracy, *, rate=1.0, minus=(), **changes):
    found = {"arm": "x", "rate": rate, "seeds": [0, 1, 2, 3, 4, 5], "episodes": 2560}
    found |= {
        "test_accuracy": accuracy,
        "test_loss": estimate(0.4567, 0.4, 0.5),
        "validation_accuracy": accuracy,
    }
    found |= {"final_params": 1402.0, "peak_params": 3127.5, "flops": 1.234e12, "seconds": 12.34}
    found |= {"germinated": 2.25, "fossilized": 1.5, "culled": 0.75, "epochs": 20.0}
    points = {"test_accuracy": {**estimate(0.0123, 0.001, 0.02), "verdict": "ahead"}}
    return {**found, "minus": dict.fromkeys(minus, points), **changes}


def results(**arms):
    return {"config": {"task": {"name": "blobs"}}, "arms": arms, "rows": []}


def beside_never(name):
    """That arm and the host left alone."""
    return results(
        **{
            name: arm(estimate(0.5, 0.4, 0.6), minus=["never"]),
            "never": arm(estimate(0.5, 0.4, 0.6)),
        }
    )


def printed(table, width=80):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


def rows_of(table, width=200):
    return [line.split() for line in printed(table, width).splitlines()]


# -- tables ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 200])
def test_an_arm_shows_what_it_reached_and_what_it_cost(width):
    text = printed(arms_compared(results(heuristic=arm(estimate(0.9123, 0.89, 0.93)))), width)
    for part in (
        "heuristic",
        "91.23%",
        "89.00 to 93.00",
        "0.4567",
        "1,402",
        "peak 3,128",
        "1.23e+12",
        "12.3 s",
        "2,560",
    ):
        assert part in text
    assert "2.2" in text
    assert "1.5, 0.8" in text


def test_at_80_columns_not_a_digit_is_missing():
    costs = {
        "final_params": 12345678,
        "peak_params": 12345678,
        "seconds": 12345.6,
        "fossilized": 10.0,
        "culled": 10.0,
    }
    text = printed(
        arms_compared(
            results(**{"final-equal-flops of heuristic": arm(estimate(1.0, 1.0, 1.0), **costs)})
        ),
        80,
    )
    for part in ("100.00%", "0.4567", "12345.6 s", "10.0, 10.0", "1.23e+12", "2.2", "2,560"):
        assert part in text
    assert (text.count("12,345,678"), text.count("100.00")) == (2, 3)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("table", [arms_compared, differences])
def test_a_long_name_is_folded_and_not_cut(table):
    shown = printed(table(beside_never(LONG)), 80)
    folded = "".join(
        line[: line.find("  ")].strip() for line in shown.splitlines() if line[:2].strip()
    )
    assert LONG in folded


def test_the_gap_to_the_oracle_is_a_column_where_there_is_one():
    found = results(
        heuristic=arm(estimate(0.5, 0.4, 0.6), minus=["oracle"]),
        oracle=arm(estimate(0.6, 0.5, 0.7)),
    )
    assert "oracle" in printed(arms_compared(found)).splitlines()[4]
    assert [
        line.split()[2] for line in printed(arms_compared(found)).splitlines() if "50.00%" in line
    ] == ["+1.23"]
    assert "+1.23" not in printed(arms_compared(beside_never("heuristic")))


def test_one_seed_is_said_to_be_one_seed():
    assert "one seed" in printed(arms_compared(results(never=arm(estimate(0.5, count=1)))))


def test_a_rate_that_is_not_the_tasks_own_is_named():
    text = printed(
        arms_compared(
            results(
                never=arm(estimate(0.5, 0.4, 0.6)), heuristic=arm(estimate(0.5, 0.4, 0.6), rate=0.5)
            )
        )
    )
    assert text.count("(rate x") == 1
    assert "(rate x 0.5)" in text


@pytest.mark.parametrize("table", [arms_compared, differences])
def test_a_name_is_never_markup(table):
    assert "[red]x[/red]" in printed(table(beside_never("[red]x[/red]")), 200)


@pytest.mark.parametrize(
    ("arms", "pairs"),
    [
        ("never heuristic sham start", ["heuristic never", "heuristic sham", "heuristic start"]),
        ("never search:seed=9 p.st", ["p.st never", "p.st search:seed=9"]),
        ("heuristic p.st", ["p.st heuristic"]),
        ("never heuristic p.st", ["heuristic never", "p.st never", "p.st heuristic"]),
        (
            "heuristic random:seed=3 heuristic:share=1",
            [
                "heuristic random:seed=3",
                "heuristic:share=1 random:seed=3",
                "heuristic:share=1 heuristic",
            ],
        ),
        ("never random schedule", ["random never", "schedule never", "schedule random"]),
        ("heuristic", []),
    ],
)
def test_a_policy_is_held_against_all_controls_and_the_policies_before_it(arms, pairs):
    names = arms.split()
    found = results(
        **{
            name: arm(estimate(0.5, 0.4, 0.6), minus=[o for o in names if o != name])
            for name in names
        }
    )
    lines = [line for line in rows_of(differences(found)) if line and line[0] in names]
    assert lines == [[*pair.split(), "+1.23", "+0.10", "to", "+2.00", "ahead"] for pair in pairs]


def test_a_final_network_is_held_against_the_arm_that_it_follows_and_no_other():
    names = [
        "never",
        "random",
        "a of b.st",
        "final of random",
        "final of a of b.st",
        "final-whole of a of b.st",
    ]
    assert pairs_of(names) == [
        ("random", "final of random"),
        ("a of b.st", "never"),
        ("a of b.st", "random"),
        ("a of b.st", "final of a of b.st"),
        ("a of b.st", "final-whole of a of b.st"),
    ]


def test_a_checkpoint_that_does_not_say_its_episodes_is_not_one_that_had_none():
    shown = [
        rows_of(arms_compared(results(x=arm(estimate(0.5), episodes=given)))) for given in (None, 0)
    ]
    assert [next(line[-1] for line in lines if line[:1] == ["x"]) for lines in shown] == ["?", "0"]


def test_what_is_unsupported_is_printed_as_that():
    found = beside_never("heuristic")
    found["arms"]["heuristic"]["minus"]["never"]["test_accuracy"]["verdict"] = "unsupported"
    assert "unsupported" in printed(differences(found))


# -- the picture -----------------------------------------------------------------------------------


def drawn(svg):
    """Texts, dots and bars of a picture that is well-formed XML."""
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    texts = [element.text for element in root.iter(f"{SVG}text")]
    dots = [float(element.get("cx")) for element in root.iter(f"{SVG}circle")]
    lines = [element for element in root.iter(f"{SVG}line") if element.get("class") == "bar"]
    return texts, dots, [(float(line.get("x1")), float(line.get("x2"))) for line in lines]


def test_a_figure_has_a_dot_and_a_bar_per_arm_at_their_places():
    found = results(never=arm(estimate(0.5, 0.4, 0.6)), heuristic=arm(estimate(0.8, 0.7, 0.9)))
    texts, dots, bars = drawn(compared_figure(found))
    assert "blobs: test accuracy" in texts
    assert "per cent, 95 % interval, 6 seeds" in texts
    assert {"never", "heuristic", "50", "80"} <= set(texts)
    assert len(dots) == len(bars) == 2
    (low, high), (low2, high2) = bars
    assert dots == pytest.approx([(low + high) / 2, (low2 + high2) / 2], abs=0.2)
    assert (dots[1] - dots[0]) / (high - low) == pytest.approx(1.5, abs=0.01)
    assert 170 < low < high2 < 720


def test_one_seed_is_a_dot_without_a_bar():
    texts, dots, bars = drawn(compared_figure(results(never=arm(estimate(0.5, count=1)))))
    assert (len(dots), bars) == (1, [])
    assert "50" in texts


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "a\"b'&c", "</text>"])
def test_names_are_text_whatever_is_in_them(name):
    texts, _, _ = drawn(
        interval_figure([(name[:20], 1.0, 0.5, 1.5)], f"title {name}", f"unit {name}")
    )
    assert {name[:20], f"title {name}", f"unit {name}"} <= set(texts)


def test_of_a_long_name_the_end_is_shown_beside_the_bars():
    texts, _, _ = drawn(interval_figure([(LONG, 1.0, 0.5, 1.5)], "t", "u"))
    (label,) = (text for text in texts if text.endswith("conv_heavy"))
    assert label.startswith("…")
    assert LONG.endswith(label[1:])
    assert len(label) == 20


@pytest.mark.parametrize("table", [arms_compared, differences])
def test_a_checkpoints_arm_is_called_by_its_run_and_round(table):
    text = printed(table(beside_never("runs/first/checkpoints/round-000012.safetensors")), 80)
    assert "first round 12" in text
    assert "safetensors" not in text


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (64.3, 73.9, [66, 68, 70, 72]),
        (-0.21, 0.13, [-0.2, -0.15, -0.1, -0.05, 0, 0.05, 0.1]),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (1234, 98765, [20_000, 40_000, 60_000, 80_000]),
    ],
)
def test_ticks_are_1_2_or_5_times_a_power_of_ten_apart(low, high, ticks):
    assert round_ticks(low, high) == pytest.approx(ticks)


def test_the_ticks_of_a_figure_are_round():
    texts, _, _ = drawn(interval_figure([("a", 63.217, 61.02, 66.9)], "t", "u"))
    assert {"61", "62", "63", "64", "65", "66", "67"} <= set(texts)


@pytest.mark.parametrize("value", [0.0, 50.0, -3.0])
def test_values_that_are_all_equal_can_be_drawn(value):
    _, dots, _ = drawn(
        interval_figure([("a", value, value, value), ("b", value, None, None)], "t", "u")
    )
    assert dots[0] == dots[1]
    assert 170 < dots[0] < 720
