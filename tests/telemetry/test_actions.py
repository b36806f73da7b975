"""The record of one decision: its keys are a contract, its names come from the tables."""

import inspect
import itertools
import json

import pytest

from esper.leyline.factored_actions import DEFAULT_SPACE, ActionSpace, look_up
from esper.leyline.slots import SlotConfig
from esper.telemetry.events import ACTION_TAKEN, emit_last_action

KEYS = [
    "kind",
    "env_id",
    "inner_epoch",
    "op",
    "slot_id",
    "blueprint_id",
    "blend_id",
    "op_masked",
    "slot_masked",
    "blueprint_masked",
    "blend_masked",
    "action_success",
]
HEADS = ("op", "slot", "blueprint", "blend")
SMALL = ActionSpace.of(SlotConfig.default(), ("mlp", "lora"))
WHAT = {"env_id": 3, "epoch": 7, "slot_idx": 1, "blueprint_idx": 2, "blend_idx": 1, "op_idx": 1}
HOW = {"slot_id": "r0c1", "masked": dict.fromkeys(HEADS, False), "success": True}


def test_the_record_has_exactly_these_keys_in_this_order():
    assert list(emit_last_action(**WHAT, **HOW)) == KEYS
    assert ACTION_TAKEN == "ACTION_TAKEN"


def test_the_record_says_who_when_and_how_it_went():
    record = emit_last_action(**WHAT, **HOW | {"success": False})
    assert (record["kind"], record["env_id"], record["inner_epoch"]) == ("last_action", 3, 7)
    assert (record["slot_id"], record["action_success"]) == ("r0c1", False)


@pytest.mark.parametrize("space", [DEFAULT_SPACE, SMALL], ids=["default", "small"])
def test_names_are_the_ones_that_the_tables_have(space):
    for op, slot, blueprint, blend in itertools.product(*map(range, space.sizes)):
        indices = {"op_idx": op, "slot_idx": slot, "blueprint_idx": blueprint, "blend_idx": blend}
        names = look_up(space, op, slot, blueprint, blend)
        record = emit_last_action(**WHAT | indices, **HOW | {"slot_id": names[1]}, space=space)
        assert tuple(record[key] for key in ("op", "slot_id", "blueprint_id", "blend_id")) == names


@pytest.mark.parametrize("head", HEADS)
def test_every_head_is_masked_by_itself(head):
    record = emit_last_action(**WHAT, **HOW | {"masked": {head: True}})
    assert {name for name in HEADS if record[f"{name}_masked"]} == {head}


def test_everything_is_passed_by_name():
    parameters = inspect.signature(emit_last_action).parameters.values()
    assert {parameter.kind for parameter in parameters} == {inspect.Parameter.KEYWORD_ONLY}
    assert [
        parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty
    ] == [
        "env_id",
        "epoch",
        "slot_idx",
        "blueprint_idx",
        "blend_idx",
        "op_idx",
        "slot_id",
        "masked",
        "success",
    ]
    with pytest.raises(TypeError, match="positional"):
        emit_last_action(3, 7, 1, 2, 1, 1, "r0c1", {}, True)


def test_a_record_is_plain_data():
    record = emit_last_action(**WHAT, **HOW)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
