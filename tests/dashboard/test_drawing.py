"""What a terminal shows of a run, line by line, without a terminal."""

import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from epoch_records import grown_epoch
from esper.dashboard import drawing
from esper.dashboard.drawing import Moment, choose_lines
from esper.dashboard.reader import RunSummary
from esper.dashboard.view import RunView
from esper.telemetry import events

CONFIG = {"task": {"name": "digits", "epochs": 4}, "rounds": 4, "hosts": 2}
UPDATE = {
    "approx_kl": 0.0123,
    "clip_fraction": 0.25,
    "explained_variance": 0.5,
    "first_ratio_gap": {"op": 1e-7, "joint": 2e-7},
    "heads": {
        name: {"entropy": 0.75, "clip_fraction": 0.1}
        for name in ("op", "slot", "blueprint", "blend")
    },
}
PANELS = [
    value
    for name, value in vars(drawing).items()
    if name.startswith("draw_") and name != "draw_curves"
]


def stage(host, epoch, slot, before, after, alpha=0.0, blueprint="conv_small"):
    return events.StageChanged(host, epoch, slot, before, after, blueprint, alpha)


def measured(host, epoch, slot, stage, age, blueprint="conv_small", gain=0.0456, error=0.0078):
    return events.SeedMeasured(host, epoch, slot, stage, blueprint, 0.75, age, 97, gain, error)


def host_epoch(number, host, epoch, reward=0.5):
    parts = {"accuracy_beyond_twin": reward, "rent": -0.125}
    return events.HostEpoch(
        round=number,
        host=host,
        epoch=epoch,
        train_loss=2.0 / epoch,
        held_out_loss=2.5 / epoch,
        held_out_accuracy=0.2 * epoch,
        twin_accuracy=0.1 * epoch,
        params=500 + host,
        flops=1000 * epoch,
        reward=reward - 0.125,
        reward_parts=parts,
    )


def round_events(number):
    """Two hosts: one fossilizes a seed in r0c0 and tries another in r0c1, the other culls."""
    return [
        events.RoundBegan(number),
        events.ActionTaken(0, 1, "GERMINATE", "r0c0", "conv_small", "linear"),
        stage(0, 1, "r0c0", "DORMANT", "GERMINATED"),
        stage(0, 1, "r0c0", "GERMINATED", "BLENDING", 0.75),
        measured(0, 2, "r0c0", "BLENDING", 1),
        host_epoch(number, 0, 2),
        events.ActionTaken(1, 1, "GERMINATE", "r0c0", "depthwise", "linear"),
        stage(1, 1, "r0c0", "DORMANT", "GERMINATED", blueprint="depthwise"),
        host_epoch(number, 1, 2),
        stage(0, 2, "r0c0", "BLENDING", "PROBATIONARY", 1.0),
        stage(0, 2, "r0c0", "PROBATIONARY", "FOSSILIZED", 1.0),
        stage(0, 2, "r0c0", "FOSSILIZED", "DORMANT"),
        host_epoch(number, 0, 3),
        events.ActionTaken(1, 2, "CULL", "r0c0", None, None),
        stage(1, 2, "r0c0", "GERMINATED", "CULLED", blueprint="depthwise"),
        stage(1, 2, "r0c0", "CULLED", "EMBARGOED", blueprint="depthwise"),
        host_epoch(number, 1, 3),
        stage(0, 3, "r0c1", "DORMANT", "GERMINATED", blueprint="inverted_bottleneck"),
        stage(0, 3, "r0c1", "GERMINATED", "BLENDING", 0.75, "inverted_bottleneck"),
        measured(0, 4, "r0c1", "BLENDING", 1, "inverted_bottleneck"),
        host_epoch(number, 0, 4),
        host_epoch(number, 1, 4),
    ]


def round_end(number, seconds=10.0):
    return events.RoundFinished(
        round=number,
        decisions=6 * (number + 1),
        mean_return=0.25 * number,
        accuracy=0.8,
        twin_accuracy=0.4,
        params_share=1.5,
        reward_parts={"accuracy_beyond_twin": 0.625, "rent": -0.25},
        ops={"WAIT": 3, "GERMINATE": 2, "CULL": 1, "FOSSILIZE": 0},
        germinated=2,
        fossilized=1,
        culled=1,
        refused=0,
        update=UPDATE,
        seconds=seconds,
    )


def grown_epochs(count):
    return [grown_epoch(0, epoch, None, 1.0, 0.5, 438, 1000) for epoch in range(1, count + 1)]


def moment_of(happened, host=0, kind="ppo", **changes):
    view = RunView(kind, CONFIG)
    for event in happened:
        view.fold(events.to_record(event))
    assert view.unknown == 0
    done = view.rounds.rows if kind == "ppo" else 3
    summary = RunSummary(
        "first", Path("first"), kind, "digits", kind, "running", done, 4, 0.8, 500, 1.0, view.events
    )
    return Moment(view, summary, view.episodes.get(host), **changes)


WHOLE = [
    *round_events(0),
    round_end(0),
    *round_events(1),
    round_end(1, seconds=20.0),
    *round_events(2),
]


def drawn(picture, width):
    """What a panel shows, without the blanks at the end of lines."""
    console = Console(file=io.StringIO(), width=max(1, width), color_system=None)
    console.print(picture)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def text_of(draw, moment, width=78, height=24):
    return drawn(draw(moment, width, height)[1], width)


# -- strokes ---------------------------------------------------------------------------------------


@given(st.lists(st.floats(), max_size=40), st.integers(1, 30), st.integers(1, 4))
def test_a_curve_fills_its_place_whatever_it_is_given(values, width, height):
    lines = drawn(drawing.spark(values, "green", height), width).splitlines()
    assert len(lines) == height
    assert len(lines[-1]) == width


def test_a_curve_shows_only_what_is_measured():
    assert drawn(drawing.spark([0.0, math.nan, math.inf, 1.0], "green"), 2) == "▁█"


def test_a_bar_is_as_long_as_its_share():
    assert [len(drawn(drawing.bar(share, 8), 8)) for share in (0.0, 0.5, 1.0, 7.0)] == [0, 4, 8, 8]


# -- the chain of slots ----------------------------------------------------------------------------


def test_a_host_whose_clock_is_compute_shows_the_share_it_has_used():
    told = [
        replace(host_epoch(0, 0, epoch), steps=10 - epoch, share=0.2 * epoch) for epoch in (1, 2)
    ]
    moment = moment_of([events.RoundBegan(0), *told])
    assert "compute" not in drawing.draw_chain(moment, 78, 24)[0]
    moment.view.config = {**CONFIG, "task": {**CONFIG["task"], "clock": "compute"}}
    assert drawing.draw_chain(moment, 78, 24)[0].endswith("40.0% of its compute, 8 steps")


def chain_of(moment, width=78):
    last_action, heads, *rows = text_of(drawing.draw_chain, moment, width).splitlines()
    assert last_action.startswith("last action: ")
    assert heads.split() == [
        "slot",
        "stage",
        "blueprint",
        "alpha",
        "contribution",
        "age",
        "fossils",
    ]
    return rows


@pytest.mark.parametrize("width", [78, 196])
def test_a_live_seed_shows_stage_blueprint_alpha_contribution_and_age(width):
    _, row = chain_of(moment_of(WHOLE), width)
    assert row.startswith("r0c1 BLENDING inverted_bottleneck █")
    assert row.split()[-6:] == ["0.75", "+0.0456", "±", "0.0078", "1", "0"]


def test_a_slot_is_called_by_its_module_also_where_nothing_was_planted():
    view = moment_of(
        [*WHOLE, events.ActionTaken(0, 4, "CULL", "r0c1", None, None, module="layer3")]
    )
    assert [row.split()[0] for row in chain_of(view, 120)] == ["r0c0", "layer3"]


def test_a_fossil_leaves_its_slot_open_and_is_counted():
    row, _ = chain_of(moment_of(WHOLE))
    assert row.split() == ["r0c0", "DORMANT", "conv_small", "fossilized", "at", "epoch", "2", "1"]


def test_an_empty_slot_says_what_became_of_its_seed():
    row, other = chain_of(moment_of(WHOLE, host=1))
    assert row.split() == ["r0c0", "EMBARGOED", "depthwise", "culled", "at", "epoch", "2", "0"]
    assert other.split() == ["r0c1", "DORMANT", "never", "planted", "0"]


@pytest.mark.parametrize(
    ("action", "line"),
    [
        (
            events.ActionTaken(0, 4, "GERMINATE", "r0c1", "norm", "gated"),
            "last action: GERMINATE norm (gated) in r0c1 at epoch 4",
        ),
        (
            events.ActionTaken(0, 4, "CULL", "r0c1", None, None, module="layer3"),
            "last action: CULL in layer3 at epoch 4",
        ),
        (
            events.ActionTaken(0, 4, "FOSSILIZE", "r0c1", "norm", None),
            "last action: FOSSILIZE norm in r0c1 at epoch 4",
        ),
        (
            events.ActionRefused(0, 4, "CULL", "r0c1", "it is too young"),
            "last action: CULL in r0c1 at epoch 4, refused: it is too young",
        ),
    ],
)
def test_the_last_action_of_the_chosen_host_is_shown(action, line):
    happened = [*WHOLE, action]
    assert text_of(drawing.draw_chain, moment_of(happened)).splitlines()[0] == line
    other = text_of(drawing.draw_chain, moment_of(happened, host=1)).splitlines()[0]
    assert other.startswith("last action: ")
    assert other != line


def test_a_host_that_was_left_alone_had_no_action():
    happened = [events.RoundBegan(0), measured(0, 4, "r0c1", "BLENDING", 1)]
    assert "no action yet" in text_of(drawing.draw_chain, moment_of(happened))


def test_the_header_says_what_the_run_has_cost():
    ledger = events.LedgerClosed(0, 7, 535, {"training": 700}, {"training": 7}, {"training": 0.5})
    costs = [
        events.CostsBooked("twins", 0, {"training": 200}, {"training": 2}, {"training": 0.5}),
        events.CostsBooked("learning", 0, {"learning": 100}, {"learning": 6}, {"learning": 0.5}),
    ]
    picture = text_of(drawing.draw_header, moment_of([*costs, ledger, *WHOLE]), 140)
    assert "1e+03 FLOPs (twins 20.0%, learning 10.0%)" in picture
    assert "FLOPs" not in text_of(drawing.draw_header, moment_of(WHOLE), 140)


def test_a_seed_without_evidence_says_so():
    happened = [*round_events(0), measured(0, 4, "r0c1", "BLENDING", 1, gain=None, error=None)]
    assert "not measured" in text_of(drawing.draw_chain, moment_of(happened))


# -- numbers ---------------------------------------------------------------------------------------


def test_the_rest_takes_as_long_as_the_newest_rounds():
    assert drawing.seconds_left(moment_of(WHOLE)) == 2 * 15.0


def test_without_rounds_the_pace_that_was_seen_counts():
    moment = moment_of(grown_epochs(3), kind="run")
    assert drawing.seconds_left(moment) is None
    assert drawing.seconds_left(replace(moment, seen=[(100.0, 1), (104.0, 3)])) == 2.0


def test_a_run_that_does_not_say_how_long_it_is_has_no_eta():
    moment = moment_of(grown_epochs(3), kind="run", seen=[(100.0, 1), (104.0, 3)])
    moment = replace(moment, summary=replace(moment.summary, total=0))
    assert "3 of ? epochs · ETA not known" in text_of(drawing.draw_header, moment)


def test_the_header_has_name_task_policy_status_progress_and_eta():
    text = text_of(drawing.draw_header, moment_of(WHOLE))
    for fact in ("first", "digits", "ppo", "▶ running", " 50% ", "2 of 4 rounds", "ETA 0:30"):
        assert fact in text


def test_each_curve_has_its_newest_value_and_its_range():
    grown, twin, loss = text_of(drawing.draw_episode, moment_of(WHOLE), height=3).splitlines()
    assert grown.startswith("accuracy grown 80.00%")
    assert grown.endswith("40.00% to 80.00%")
    assert twin.startswith("accuracy twin  40.00%")
    assert twin.endswith("20.00% to 40.00%")
    assert "0.6250" in loss


def test_a_host_without_a_twin_has_no_curve_for_one():
    text = text_of(drawing.draw_episode, moment_of(grown_epochs(3), kind="run"))
    assert "accuracy grown" in text
    assert "twin" not in text


def test_ops_are_those_of_the_round_that_is_lived():
    title, picture = drawing.draw_ops(moment_of(WHOLE), 30, 5)
    counts = {line.split()[0]: int(line.split()[1]) for line in drawn(picture, 30).splitlines()}
    assert counts == {"WAIT": 3, "GERMINATE": 2, "CULL": 1, "FOSSILIZE": 0}
    assert "6 decisions" in title


@pytest.mark.parametrize(("width", "height"), [(28, 5), (80, 9)])
def test_reward_parts_are_summed_over_the_episode(width, height):
    title, picture = drawing.draw_reward(moment_of(WHOLE), width, height)
    text = drawn(picture, width)
    assert "+1.500" in text
    assert "-0.375" in text
    assert "sum +1.125" in title
    assert ("-0.250" in text) == (width == 80)  # the last round's mean


@pytest.mark.parametrize(("width", "height"), [(26, 5), (80, 9)])
def test_the_health_of_an_update_fits_both_sizes(width, height):
    lines = text_of(drawing.draw_health, moment_of(WHOLE), width, height).splitlines()
    assert len(lines) <= height
    text = " ".join(" ".join(lines).split())
    for fact in (
        "KL 0.0123",
        "clip 0.25",
        "explained variance 0.50",
        "first ratio gap 2.0e-07",
        "entropy op 0.75",
    ):
        assert fact in text
    for head in ("slot", "blueprint", "blend"):
        assert f"{head} 0.75" in text


def test_an_anomaly_is_named():
    anomaly = events.AnomalyFound(1, "ratio_explosion", 9.0, 5.0, "", True)
    title, picture = drawing.draw_health(moment_of([*WHOLE, anomaly]), 80, 9)
    assert "1 anomaly!" in title
    assert "! round 1: ratio_explosion is 9.0" in drawn(picture, 80)


# -- the log ---------------------------------------------------------------------------------------


def test_a_filter_wants_all_its_words_in_kind_text_or_place():
    log = moment_of(WHOLE).view.log
    assert {line.kind for line in choose_lines(log, "ACTION")} == {"ActionTaken"}
    assert [(line.round, line.host) for line in choose_lines(log, "actiontaken CULL r2")] == [
        (2, 1)
    ]
    assert choose_lines(log, "") == list(log)
    assert choose_lines(log, "nowhere") == []


def test_text_from_events_is_neither_markup_nor_a_command_to_the_terminal():
    happened = [*WHOLE, events.HostRolledBack(0, 3, "[bold red]x[/] [/nothing]\x1b[2J\nnext")]
    last = drawing.draw_log(moment_of(happened), 78, 24)[1].plain.splitlines()[-1]
    assert "[bold red]x[/] [/nothing]" in last
    assert last.isprintable()


# -- all panels ------------------------------------------------------------------------------------

MOMENTS = [
    moment_of([]),
    moment_of(WHOLE),
    moment_of(WHOLE, host=1, wanted="cull"),
    moment_of([events.RoundBegan(0)]),
]
MOMENTS += [moment_of(grown_epochs(3), kind="run"), moment_of([], kind="run", note="reading")]


@given(st.sampled_from(MOMENTS), st.integers(0, 220), st.integers(0, 70))
def test_every_panel_can_be_drawn_at_every_size(moment, width, height):
    for draw in PANELS:
        text = text_of(draw, moment, width, height)
        assert text.strip() or width < 20 or height < 5, draw
