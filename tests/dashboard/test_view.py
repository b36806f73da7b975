"""Folding events gives what people want to see:

episodes, seeds, verdicts, ops; and nothing breaks it.
"""

import json
import math
import sys
from array import array
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboard.generated import as_lines, folded, plain, play_ppo, runs
from epoch_records import grown_epoch, taught_epoch
from esper.dashboard.series import Series
from esper.dashboard.view import LOG_LINES, RunView
from esper.telemetry.events import (
    ActionRefused,
    ActionTaken,
    CheckpointSaved,
    CostsBooked,
    FossilJudged,
    GateJudged,
    HostRolledBack,
    LedgerClosed,
    RoundBegan,
    RoundFinished,
    SeedMeasured,
    StageChanged,
    to_record,
)


def view_of(*events, kind="ppo"):
    view = RunView(kind, {})
    for event in events:
        view.fold(to_record(event))
    assert view.unknown == 0
    return view


def moved(epoch, before, after, alpha=1.0, slot="r0c0", host=0):
    return StageChanged(host, epoch, slot, before, after, "norm", alpha)


def judged(epoch, gate, slot="r0c0"):
    return GateJudged(0, epoch, slot, gate, 0.5, "above 0", "passed", "it is")


def measured(epoch, gain, error, host=0):
    return SeedMeasured(host, epoch, "r0c0", "BLENDING", "norm", 0.5, 3, 32, gain, error)


def lived(epoch, host=0, number=0):
    return taught_epoch(number, host, epoch, 0.5, None, 0.75, 0.5, 438, 10**9, 0.25, {"rent": -0.5})


CULLED = [
    RoundBegan(0),
    judged(1, "G0"),
    moved(1, "DORMANT", "GERMINATED", 0.0),
    moved(1, "GERMINATED", "BLENDING"),
    judged(2, "G3"),
    moved(2, "BLENDING", "CULLED", 0.0),
    moved(2, "CULLED", "EMBARGOED", 0.0),
    moved(5, "EMBARGOED", "RESETTING", 0.0),
    moved(6, "RESETTING", "DORMANT", 0.0),
]


def test_a_span_is_a_seeds_way_with_its_verdicts_from_the_one_before_birth_on():
    (span,) = view_of(*CULLED).episodes[0].spans
    assert (span.fate, span.end, span.blueprint) == ("CULLED", 2, "norm")
    assert span.stages[:3] == [("GERMINATED", 1), ("BLENDING", 1), ("CULLED", 2)]
    assert span.stages[3:] == [("EMBARGOED", 2), ("RESETTING", 5), ("DORMANT", 6)]
    assert [verdict["gate"] for verdict in span.verdicts] == ["G0", "G3"]
    assert span.verdicts[0]["epoch"] == 1


def test_the_next_seed_of_a_slot_is_a_span_of_its_own():
    episode = view_of(*CULLED, judged(7, "G0"), moved(7, "DORMANT", "GERMINATED", 0.0)).episodes[0]
    first, second = episode.spans
    assert (first.fate, second.fate, second.end) == ("CULLED", None, None)
    assert episode.alive("r0c0") is second
    assert [len(first.verdicts), len(second.verdicts)] == [2, 1]


def test_a_fossil_keeps_its_alpha_when_the_slot_opens_again():
    (span,) = (
        view_of(
            *CULLED[:4],
            moved(3, "PROBATIONARY", "FOSSILIZED"),
            moved(3, "FOSSILIZED", "DORMANT", 0.0),
        )
        .episodes[0]
        .spans
    )
    assert (span.fate, span.end, span.alpha) == ("FOSSILIZED", 3, 1.0)
    assert span.stages[-1] == ("FOSSILIZED", 3)


def test_a_rollback_may_cull_what_had_been_a_fossil():
    events = [
        *CULLED[:4],
        moved(3, "PROBATIONARY", "FOSSILIZED"),
        moved(3, "FOSSILIZED", "DORMANT", 0.0),
    ]
    back = [HostRolledBack(0, 4, "loss is NaN"), moved(4, "PROBATIONARY", "CULLED", 0.0)]
    episode = view_of(*events, *back).episodes[0]
    (span,) = episode.spans
    assert (span.fate, span.end) == ("CULLED", 4)
    assert episode.rollbacks == [{"epoch": 4, "reason": "loss is NaN"}]


def test_what_was_not_measured_is_none_and_never_zero():
    episode = view_of(
        *CULLED[:4], measured(2, 0.25, 0.125), measured(3, None, None), lived(3)
    ).episodes[0]
    (span,) = episode.spans
    assert (span.contribution, span.standard_error, span.age, span.params) == (None, None, 3, 32)
    assert span.readings.thinned(9)["contribution"] == [0.25, None]
    assert episode.epochs.last("held_out_loss") is None
    assert math.isnan(episode.epochs.column("held_out_loss")[0])


def test_a_seed_whose_birth_was_not_told_is_shown_from_where_it_is_seen():
    (span,) = view_of(RoundBegan(0), measured(4, 0.25, 0.125)).episodes[0].spans
    assert span.stages == [("BLENDING", 4)]


@pytest.mark.parametrize("kind", ["ppo", "run"])
def test_epochs_are_those_of_the_events_in_either_kind_of_run(kind):
    epoch = 4
    birth = moved(4, "DORMANT", "GERMINATED", 0.0)
    view = view_of(
        judged(4, "G0"), birth, measured(4, 0.5, 0.5), HostRolledBack(0, 4, "NaN"), kind=kind
    )
    (span,) = view.episodes[0].spans
    assert span.stages == [("GERMINATED", epoch)]
    assert (
        span.readings.last("epoch")
        == span.verdicts[0]["epoch"]
        == view.episodes[0].rollbacks[0]["epoch"]
        == epoch
    )
    assert view.log[1].text == f"epoch {epoch}: r0c0 norm DORMANT -> GERMINATED"


def test_actions_are_counted_whether_refused_or_not():
    taken = ActionTaken(0, 1, "GERMINATE", "r0c1", "norm", "linear")
    assert view_of(taken, ActionRefused(0, 2, "CULL", "r0c0", "young")).episodes[0].actions == 2


def test_slots_are_in_the_order_of_execution():
    view = view_of(
        *(moved(1, "DORMANT", "GERMINATED", 0.0, slot) for slot in ("r0c10", "r0c2", "r0c10"))
    )
    assert view.slots == ["r0c2", "r0c10"]


@given(runs(kinds=["ppo"], most_ranks=1))
def test_ops_counted_while_a_round_is_lived_are_those_it_is_said_to_have_had(run):
    kind, files = run
    view = RunView(kind, {})
    for record in files[0]:
        is_end = record.get("type") == "RoundFinished"
        assert not is_end or view.ops == Counter(record["ops"])
        view.fold(record)
        assert not is_end or view.ops == Counter(record["ops"])


def test_ops_of_a_rank_that_is_a_round_behind_do_not_count():
    view = RunView("ppo", {})
    for rank, number in ((0, 4), (1, 3)):
        view.fold(to_record(RoundBegan(number)), rank)
        view.fold(to_record(lived(2, rank, number)), rank)
    assert (view.round, view.ops) == (4, {"WAIT": 1})
    view.fold(to_record(RoundBegan(4)), 1)
    view.fold(to_record(lived(2, 1, 4)), 1)
    assert view.ops == {"WAIT": 2}


def test_in_a_grow_run_an_epoch_without_an_action_is_a_wait():
    reading = (0.5, 0.5, 0.5, 438, 10)
    cull = ActionTaken(0, 2, "CULL", "r0c0", None, None)
    view = view_of(
        *(grown_epoch(0, epoch, *reading) for epoch in (1, 2)),
        cull,
        grown_epoch(0, 3, *reading),
        kind="run",
    )
    assert view.ops == {"WAIT": 1, "CULL": 1}


def test_a_round_begins_new_episodes_for_all_who_lived_in_the_one_before():
    first = [RoundBegan(0), *(lived(2, host) for host in range(3))]
    view = view_of(*first, RoundBegan(1))
    assert sorted(view.episodes) == [0, 1, 2]
    assert all(
        episode.round == 1 and episode.epochs.rows == 0 for episode in view.episodes.values()
    )
    later = view_of(*first, RoundBegan(1), lived(2, 1, 1), RoundBegan(2))
    assert sorted(later.episodes) == [1]


def finished(number, update):
    ops = {"WAIT": 3, "CULL": 0}
    return RoundFinished(
        number, 9, 0.5, 0.75, 0.5, 1.5, {"rent": -1.0}, ops, 1, 2, 3, 0, update, 1.5
    )


def test_a_finished_round_is_a_row_with_its_update():
    heads = {
        "op": {"entropy": 0.5, "clip_fraction": 0.25},
        "slot": {"entropy": None, "clip_fraction": 0.5},
    }
    update = {
        "approx_kl": 0.125,
        "value_loss": None,
        "heads": heads,
        "first_ratio_gap": {"op": None, "joint": 0.25},
    }
    view = view_of(finished(0, {}), finished(1, update), CheckpointSaved(2, "round-2"))
    rows = view.rounds.thinned(9)
    assert rows["round"] == [0, 1]
    assert (rows["part.rent"], rows["op.WAIT"], rows["accuracy"]) == (
        [-1, -1],
        [3, 3],
        [0.75, 0.75],
    )
    assert (rows["kl"], rows["value_loss"], rows["first_ratio_gap"]) == (
        [None, 0.125],
        [None, None],
        [None, 0.25],
    )
    assert (rows["entropy.op"], rows["entropy.slot"], rows["clip.slot"]) == (
        [None, 0.5],
        [None, None],
        [None, 0.5],
    )
    assert view.round == 1


def test_a_run_that_keeps_few_records_shows_its_rounds_and_takes_episodes_as_they_come():
    view = view_of(finished(4, {}), HostRolledBack(0, 3, "NaN"), lived(4))
    assert (view.round, view.episodes[0].rollbacks[0]["epoch"], view.episodes[0].epochs.rows) == (
        4,
        3,
        1,
    )
    assert view.ops == {"WAIT": 3, "CULL": 0}


def size_of(view):
    return (
        len(plain(view))
        - len(json.dumps(view.rounds.columns, default=list))
        - len(json.dumps(view.anomalies))
    )


def test_what_a_view_holds_does_not_grow_with_events():
    class Steady:  # the same round again and again
        choice = staticmethod(lambda options: options[-1])
        random = staticmethod(lambda: 0.5)

    sizes = []
    for rounds in (10, 40):
        events = play_ppo(Steady, 1, 4, rounds, 9)[0]
        view = view_of(*events)
        assert len(events) > LOG_LINES / 2 * rounds / 10
        assert len(view.newest) <= LOG_LINES
        view.newest.clear()
        sizes.append(size_of(view))
    assert sizes[1] - sizes[0] < 4000, sizes  # rounds have 30 numbers a row
    assert sys.getsizeof(view.episodes) < 1000


SOUND = to_record(lived(2))
BROKEN = [
    {},
    {"type": None},
    {"type": ["HostEpoch"]},
    {"type": "FromTheFuture", "host": 0},
    {"type": "StageChanged"},
    {**SOUND, "extra": 1},
    {**SOUND, "host": "0"},
    {**SOUND, "epoch": None},
    {**SOUND, "epoch": True},
    {**SOUND, "params": "many"},
    {**SOUND, "params": 10**400},
    {**SOUND, "reward_parts": [1]},
    {**SOUND, "reward_parts": {"rent": "high"}},
    to_record(moved(1, "DORMANT", "GERMINATED", slot="../etc")),
    {**to_record(measured(1, 0.5, 0.5)), "contribution": "<script>"},
    {**to_record(measured(1, 0.5, 0.5)), "slot": {}},
    {**to_record(finished(0, {})), "update": {"heads": 3}},
    {**to_record(finished(0, {})), "update": {"heads": {"op": {}}}},
    {**to_record(finished(0, {})), "ops": {"WAIT": "x"}},
    {**to_record(LedgerClosed(0, 0, 1, {}, {}, {})), "flops": {"training": "x"}},
    {**to_record(CostsBooked("twins", 0, {}, {}, {})), "seconds": {"training": "x"}},
    {**to_record(CostsBooked("twins", 0, {}, {}, {})), "flops": {"training": 10**400}},
]


@pytest.mark.parametrize("record", BROKEN, ids=lambda record: json.dumps(record)[:60])
def test_a_record_that_is_not_understood_only_counts(record):
    view = view_of(*CULLED, lived(7))
    before = plain(view)
    view.fold(record)
    assert (view.unknown, view.events) == (1, len(CULLED) + 2)
    assert view.log[-1].text
    view.newest.pop()
    view.unknown, view.events = 0, view.events - 1
    assert plain(view) == before


def test_text_from_events_obeys_no_terminal_and_stays_short():
    reason = "\x1b[2J\r\n" + "x" * 10_000
    (line,) = view_of(HostRolledBack(0, 4, reason)).log
    assert line.text.isprintable()
    assert len(line.text) < 500


def test_the_log_numbers_all_events_and_keeps_the_newest():
    view = view_of(RoundBegan(0), *(lived(epoch) for epoch in range(2 * LOG_LINES)))
    assert [line.number for line in view.log] == list(range(LOG_LINES + 1, 2 * LOG_LINES + 1))
    view.fold(to_record(RoundBegan(1)))
    assert (view.log[-1].kind, view.log[-1].round, view.log[-1].host) == ("RoundBegan", 1, None)
    assert len(view.log) == LOG_LINES


@given(runs())
def test_looking_changes_nothing(run):
    kind, files = run
    view = RunView(kind, folded(kind, {}).config)
    for rank, records in files.items():
        for record in records:
            view.fold(record, rank)
            assert view.log
            assert view.ops is not None
    assert plain(view) == plain(folded(kind, files))
    assert json.loads(as_lines(files[0]).split(b"\n")[0]) == files[0][0]


NUMBERS = st.none() | st.floats(allow_nan=False, allow_infinity=False)
ROWS = st.lists(
    st.dictionaries(st.sampled_from("abc"), NUMBERS, min_size=1), min_size=1, max_size=40
)


@given(ROWS)
def test_columns_are_of_equal_length_and_gaps_are_not_measured(rows):
    series = Series()
    for row in rows:
        series.append(**row)
    for name in {name for row in rows for name in row}:
        assert series.thinned(99)[name] == [row.get(name) for row in rows]
        assert len(series.column(name)) == series.rows == len(rows)
        assert series.last(name) == rows[-1].get(name)
    assert series.last("z") is None
    assert len(series.column("z")) == len(rows)


@given(ROWS, st.integers(1, 50))
def test_thinned_rows_are_few_and_have_both_ends(rows, points):
    series = Series()
    for place, row in enumerate(rows):
        series.append(row=place, **row)
    thin = series.thinned(points)
    assert len(thin["row"]) == min(points, len(rows)) or len(thin["row"]) <= points < len(rows)
    assert thin["row"] == sorted(set(thin["row"]))
    assert thin["row"][-1] == len(rows) - 1
    if points >= 2:
        assert thin["row"][0] == 0


def test_a_thinned_curve_keeps_its_peaks():
    series = Series()
    for row in range(1000):
        series.append(
            a={333: 9.0, 334: -9.0}.get(row, 0.5), b=None if row % 2 else float(row == 500), c=None
        )
    thin = series.thinned(12)
    assert len(thin["a"]) == 12
    assert {9.0, -9.0} <= set(thin["a"])
    assert 1.0 in thin["b"]
    assert set(thin["c"]) == {None}


def test_the_order_of_a_row_s_values_does_not_count():
    series = Series()
    series.append(a=1.0, b=2.0)
    series.append(b=4.0, a=3.0)
    assert series.thinned(9) == {"a": [1.0, 3.0], "b": [2.0, 4.0]}


def test_a_row_that_is_refused_leaves_nothing_behind():
    series = Series()
    series.append(a=1.0, b=2.0)
    for row in ({"a": 1.0, "b": "x"}, {"a": 1.0, "b": 1.0, "c": "x"}, {"a": 10**400}):
        with pytest.raises((TypeError, OverflowError)):
            series.append(**row)
    assert (series.rows, series.columns) == (1, {"a": array("d", [1.0]), "b": array("d", [2.0])})


def test_a_host_that_is_dealt_to_another_rank_has_its_next_episode_there():
    view = RunView("ppo", {})
    for number, rank in ((0, 0), (1, 1)):
        view.fold(to_record(RoundBegan(number)), rank)
        for epoch in (1, 2):
            view.fold(to_record(lived(epoch, 5, number)), rank)
    view.fold(to_record(lived(3, 5, 0)), 0)  # a file that is read late
    episode = view.episodes[5]
    assert (episode.rank, episode.round, episode.epochs.last("epoch")) == (1, 1, 2)
    assert len(episode.epochs.column("epoch")) == 2


def test_late_verdicts_belong_to_the_newest_fossil_of_their_slot_first():
    fossils = [moved(epoch, "PROBATIONARY", "FOSSILIZED", 1.0) for epoch in (2, 5)]
    births = [moved(epoch, "DORMANT", "GERMINATED", 0.0) for epoch in (1, 4)]
    late = [FossilJudged(0, 9, "r0c0", "norm", gain, 0.1, gain > 0) for gain in (-0.5, 0.25)]
    view = view_of(births[0], fossils[0], births[1], fossils[1], *late)
    older, newer = view.episodes[0].spans
    assert (newer.end, newer.removed, newer.contribution) == (5, 9, -0.5)
    assert (older.end, older.removed, older.contribution) == (2, None, 0.25)
    assert [span.verdicts[-1]["verdict"] for span in (older, newer)] == ["passed", "failed"]
    assert view.unknown == 0
    assert "removed" in view.log[-2].text


def judged_fossil(config, gain, is_kept):
    """The verdict of late pruning on one fossil of a run with this configuration."""
    view = RunView("run", config)
    for event in (
        moved(1, "DORMANT", "GERMINATED", 0.0),
        moved(2, "PROBATIONARY", "FOSSILIZED", 1.0),
        FossilJudged(0, 9, "r0c0", "norm", gain, 0.1, is_kept),
    ):
        view.fold(to_record(event))
    assert view.unknown == 0
    return view.episodes[0].spans[0].verdicts[-1]


@pytest.mark.parametrize(
    ("config", "needed"),
    [
        ({"settings": {"least_gain": 0.25}}, "contribution above 0.25"),
        ({"settings": {"least_gain": 0.0}}, "contribution above 0"),
        ({}, "contribution above 0"),  # the commands have no such setting
    ],
)
def test_what_a_fossil_needs_is_the_run_s_own_least_gain(config, needed):
    assert judged_fossil(config, 0.125, False)["needed"] == needed


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_fossil_s_verdict_is_the_one_that_the_event_carries(is_kept):
    verdict = judged_fossil({"settings": {"least_gain": 0.25}}, 0.125, is_kept)
    assert verdict["verdict"] == ("passed" if is_kept else "failed")
    assert verdict["reason"] == "contribution +0.1250 ± 0.1000"


@pytest.mark.parametrize("settings", [{}, {"least_gain": "much"}, {"least_gain": None}])
def test_a_least_gain_that_is_not_recorded_is_not_guessed(settings):
    assert "not recorded" in judged_fossil({"settings": settings}, 0.5, True)["needed"]
