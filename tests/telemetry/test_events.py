"""Event records: plain data there and back, one line for people, nothing unknown."""

import json
from dataclasses import fields, replace

import pytest

from epoch_records import grown_epoch, taught_epoch
from esper.leyline.errors import SaveError
from esper.telemetry.events import (
    EVENT_TYPES,
    ActionRefused,
    ActionTaken,
    AnomalyFound,
    ArmFinished,
    BlocksCompiled,
    CheckpointSaved,
    CostsBooked,
    FossilJudged,
    GateJudged,
    GrowthHint,
    GrowthReported,
    HostBegan,
    HostEpoch,
    HostRolledBack,
    LedgerClosed,
    RankTimed,
    RemainsMeasured,
    RoundBegan,
    RoundFinished,
    SeedMeasured,
    StageChanged,
    from_record,
    to_record,
)

PART = {
    "slot": "r0c0",
    "module": "layer3",
    "blueprint": "norm",
    "stage": "fossil",
    "params": 48,
    "flops": 100,
}
PART |= {"without": 1.5, "gain": 0.5, "standard_error": 0.125}
REPORTED = GrowthReported(
    0,
    3,
    "loss",
    64,
    1.0,
    2.0,
    1.0,
    0.25,
    [PART],
    150,
    100,
    1100,
    1000,
    {"training": 9000},
    {"training": 65.0, "score": 2.0},
)
EVENTS = [
    REPORTED,
    ArmFinished("never", 1, 20, 100, 150, 0.5, 0.25, 1.5, 10**9, 3.0, 1, 2, 3),
    HostEpoch(0, 3, None, 1234, held_out_score=0.5),
    HostBegan(0, 3, 17, 41, {"examples": 1240, "noise": 0.25, "width": 4}),
    ActionTaken(0, 3, "GERMINATE", "r0c0", "norm", "linear"),
    ActionTaken(0, 3, "CULL", "r0c0", None, None),
    ActionRefused(0, 3, "CULL", "r0c0", "too young"),
    StageChanged(0, 3, "r0c0", "DORMANT", "GERMINATED", "norm", 0.0),
    StageChanged(0, 3, "r0c0", "RESETTING", "DORMANT", None, 0.0, module="layer3"),
    GateJudged(0, 3, "r0c0", "G2", None, "a gain", "not measured", "nothing was measured"),
    FossilJudged(0, 3, "r0c0", "norm", -0.25, 0.125, False),
    FossilJudged(0, 3, "r0c0", "norm", None, None, True),
    RemainsMeasured(0, 3, 0.5, 0.75, ["r0c1"], {"r0c0": 0.25}, 10**9),
    RemainsMeasured(0, 3, None, None, [], {}, 10**9),
    GrowthHint(0, 3, "the rate is low"),
    BlocksCompiled(0, 3, 6, 12.5),
    HostRolledBack(1, 3, "training loss is nan"),
    grown_epoch(0, 3, 0.5, None, 0.25, 1234, 10**9),
    LedgerClosed(0, 7, 1234, {"training": 1000}, {"training": 64}, {"training": 0.5}),
    SeedMeasured(0, 3, "r0c0", "BLENDING", "norm", 0.5, 2, 48, 0.25, 0.125),
    SeedMeasured(0, 3, "r0c0", "GERMINATED", "norm", 0.0, 0, 48, None, None),
    taught_epoch(2, 0, 3, 0.5, None, 0.25, 0.5, 1234, 10**9, -0.25, {"rent": -0.25}),
    RankTimed(2, 1, 4, 3.5),
    CostsBooked("learning", 2, {"learning": 1000}, {"learning": 64}, {"learning": 0.5}),
    RoundBegan(2),
    RoundFinished(
        2,
        48,
        0.5,
        0.75,
        0.5,
        1.5,
        {"rent": -0.5},
        {"WAIT": 20, "CULL": 4},
        1,
        2,
        3,
        0,
        {"lr": 0.1},
        3.5,
        {"episodes": 2000, "learning": 1000},
    ),
    AnomalyFound(2, "kl", None, 0.5, "host 1", True),
    CheckpointSaved(2, "round-000002.safetensors"),
]
every_event = pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)


def test_every_type_of_event_is_tested_here():
    assert {type(event) for event in EVENTS} == set(EVENT_TYPES.values())


@every_event
def test_a_record_comes_back_from_json_as_the_event_it_was(event):
    assert from_record(json.loads(json.dumps(to_record(event), allow_nan=False))) == event


@every_event
def test_a_record_names_its_type_and_all_its_fields(event):
    record = to_record(event)
    assert record.pop("type") == type(event).__name__
    assert list(record) == [field.name for field in fields(event)]


@every_event
def test_an_event_reads_as_one_line_with_its_numbers(event):
    text, *more = str(event).splitlines()
    assert bool(more) == isinstance(event, GrowthReported)
    when = {
        ArmFinished: "seed 1",
        RoundFinished: "round 2",
        AnomalyFound: "round 2",
        CheckpointSaved: "round 2",
        RoundBegan: "round 2",
    }
    when[RankTimed] = when[CostsBooked] = "round 2"
    when[LedgerClosed] = "host 0: 1e+03 FLOPs, at most 1,234 parameters"
    assert when.get(type(event), "epoch 3") in text


@pytest.mark.parametrize(
    "record",
    [
        {"type": "Unheard"},
        {"host": 0, "epoch": 3, "text": "no type"},
        {"type": "GrowthHint", "host": 0, "epoch": 3},
        {"type": "GrowthHint", "host": 0, "epoch": 3, "text": "x", "more": 1},
        {"type": None},
    ],
)
def test_a_record_of_another_shape_is_refused(record):
    with pytest.raises(SaveError, match="event record"):
        from_record(record)


@pytest.mark.parametrize(
    "event", [e for e in EVENTS if hasattr(e, "slot")], ids=lambda event: type(event).__name__
)
def test_an_event_in_a_slot_names_the_module_beside_its_id(event):
    assert "r0c0 (layer3)" in str(replace(event, module="layer3"))


def test_a_report_says_in_words_what_helps_and_what_it_costs():
    first, caution, part, size, cost = str(REPORTED).splitlines()
    assert "held-out loss 1.0000 on 64 examples" in first
    assert "2.0000, a gain of +1.0000 ± 0.2500" in first
    assert "garden.control() says" in caution
    assert (
        part.strip() == "r0c0 (layer3) norm, fossil: helps, +0.5000 ± 0.1250; 48 parameters, "
        "10.0% of the host's FLOPs"
    )
    assert "150, 1.50 x the host's" in size
    assert "1.1e+03, 1.10 x the host's" in size
    assert "training 1:05, measuring and deciding 0:02" in cost


@pytest.mark.parametrize(
    ("gain", "word"),
    [(0.5, "helps"), (-0.5, "hurts"), (0.2, "may be chance"), (0.0, "may be chance")],
)
def test_a_part_within_two_standard_errors_of_nothing_may_be_chance(gain, word):
    told = str(replace(REPORTED, parts=[{**PART, "gain": gain}], host_flops=None))
    assert f"fossil: {word}, " in told
    assert "FLOPs" not in told


def test_reading_a_record_leaves_it_as_it_was():
    record = to_record(EVENTS[2])
    from_record(record)
    assert record["type"] == "HostEpoch"
