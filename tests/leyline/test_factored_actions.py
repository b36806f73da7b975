"""Op, slot, blueprint and blend: tables, enums and the lookup between them."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from esper.kasmina.blueprints import COPY, COPY_ZERO
from esper.leyline import factored_actions as fa
from esper.leyline.errors import SettingError, UnknownNameError
from esper.leyline.factored_actions import (
    DEFAULT_SPACE,
    ActionSpace,
    BlendAction,
    BlueprintAction,
    FactoredAction,
    LifecycleOp,
)
from esper.leyline.slots import SlotConfig


def action(space=DEFAULT_SPACE, op=0, slot=0, blueprint=0, blend=0):
    return FactoredAction.from_indices(
        slot_idx=slot, blueprint_idx=blueprint, blend_idx=blend, op_idx=op, space=space
    )


def test_the_ops_have_their_fixed_numbers():
    assert {op.name: int(op) for op in LifecycleOp} == {
        "WAIT": 0,
        "GERMINATE": 1,
        "CULL": 2,
        "FOSSILIZE": 3,
    }


def test_the_op_constants_are_the_enum():
    assert tuple(LifecycleOp) == (fa.OP_WAIT, fa.OP_GERMINATE, fa.OP_CULL, fa.OP_FOSSILIZE)


@pytest.mark.parametrize("op", LifecycleOp)
def test_a_constant_with_the_number_of_another_op_stops_the_import(op):
    constants = {f"OP_{known.name}": int(known) for known in LifecycleOp}
    fa.require_op_numbers(constants)
    with pytest.raises(SettingError, match=rf"OP_{op.name} is 9\b"):
        fa.require_op_numbers(constants | {f"OP_{op.name}": 9})


@pytest.mark.parametrize("flags", [(), ("-O",)])
def test_the_constants_are_bound_by_name_and_checked_at_import(flags, tmp_path):
    source = Path(fa.__file__).read_text()
    assert source.count('OP_NAMES.index("CULL")') == 1
    wrong = tmp_path / "wrong_constants.py"
    wrong.write_text(source.replace('OP_NAMES.index("CULL")', 'OP_NAMES.index("FOSSILIZE")'))
    env = {**os.environ, "PYTHONPATH": str(Path(fa.__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, *flags, str(wrong)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "OP_CULL is 3" in done.stderr


def test_the_blends_have_their_fixed_numbers():
    assert {blend.name: int(blend) for blend in BlendAction} == {
        "LINEAR": 0,
        "SIGMOID": 1,
        "GATED": 2,
    }


def test_noop_is_blueprint_zero_without_an_id():
    assert BlueprintAction(0) is BlueprintAction.NOOP
    assert BlueprintAction.NOOP.to_blueprint_id() is None


def test_conv_light_is_blueprint_one():
    assert BlueprintAction(1) is BlueprintAction.CONV_LIGHT


@pytest.mark.parametrize(
    ("count", "table", "enum"),
    [
        (fa.NUM_OPS, fa.OP_NAMES, LifecycleOp),
        (fa.NUM_BLENDS, fa.BLEND_IDS, BlendAction),
        (fa.NUM_BLUEPRINTS, fa.BLUEPRINT_IDS, BlueprintAction),
    ],
)
def test_every_table_is_as_long_as_its_enum(count, table, enum):
    assert count == len(table) == len(enum)


@pytest.mark.parametrize("op", LifecycleOp)
def test_every_op_has_its_name_at_its_number(op):
    assert fa.OP_NAMES[op] == op.name


@pytest.mark.parametrize("blend", BlendAction)
def test_every_blend_has_its_id_at_its_number(blend):
    assert fa.BLEND_IDS[blend] == blend.to_algorithm_id() == blend.name.lower()


@pytest.mark.parametrize("blueprint", BlueprintAction)
def test_every_blueprint_has_its_id_at_its_number(blueprint):
    assert fa.BLUEPRINT_IDS[blueprint] == blueprint.to_blueprint_id()


def test_copies_have_their_numbers_in_the_tables():
    assert fa.BLUEPRINT_IDS[BlueprintAction.COPY] == COPY
    assert fa.BLUEPRINT_IDS[BlueprintAction.COPY_ZERO] == COPY_ZERO
    assert {action.to_blueprint_id() for action in fa.COPY_BLUEPRINTS} == {COPY, COPY_ZERO}


def test_the_image_blueprints_are_the_eight_of_the_specification():
    assert {blueprint.to_blueprint_id() for blueprint in fa.CNN_BLUEPRINTS} == {
        "conv_light",
        "conv_heavy",
        "depthwise",
        "attention",
        "norm",
        "bottleneck",
        "inverted_bottleneck",
        "conv_small",
    }


def test_the_sequence_blueprints_are_the_five_of_the_specification():
    names = {blueprint.to_blueprint_id() for blueprint in fa.TRANSFORMER_BLUEPRINTS}
    assert names == {"lora", "mlp", "mlp_small", "attention", "norm"}


def test_the_vector_blueprints_are_one_low_rank_and_three_widths():
    names = {blueprint.to_blueprint_id() for blueprint in fa.VECTOR_BLUEPRINTS}
    assert names == {"lora", "mlp", "mlp_small", "mlp_tiny"}


@pytest.mark.parametrize("op", LifecycleOp)
def test_every_op_is_found_by_its_index(op):
    assert action(op=int(op)).op is op


@pytest.mark.parametrize("blueprint", BlueprintAction)
def test_every_blueprint_is_found_by_its_index(blueprint):
    assert action(blueprint=int(blueprint)).blueprint_id == blueprint.to_blueprint_id()


@pytest.mark.parametrize("blend", BlendAction)
def test_every_blend_is_found_by_its_index(blend):
    assert action(blend=int(blend)).blend_algorithm_id == blend.to_algorithm_id()


def test_every_slot_of_the_default_space_is_found_by_its_index():
    found = [action(slot=index) for index in range(3)]
    assert [(each.slot_idx, each.slot_id) for each in found] == [
        (0, "r0c0"),
        (1, "r0c1"),
        (2, "r0c2"),
    ]


def test_a_run_has_its_own_slots_blueprints_and_blends():
    space = ActionSpace.of(SlotConfig(("r1c0", "r0c5")), ("mine", "lora"), ("gated",))
    found = action(space, op=1, slot=1, blueprint=1, blend=0)
    assert (found.slot_id, found.blueprint_id, found.blend_algorithm_id) == (
        "r1c0",
        "mine",
        "gated",
    )


def test_sizes_are_in_the_order_op_slot_blueprint_blend():
    assert ActionSpace.of(SlotConfig.for_grid(1, 5), ("a", "b"), ("linear",)).sizes == (4, 5, 3, 1)


@pytest.mark.parametrize(
    ("head", "size"), [("op", 4), ("slot", 3), ("blueprint", 15), ("blend", 3)]
)
@pytest.mark.parametrize("below", [True, False])
def test_an_index_outside_the_space_is_refused_by_head(head, size, below):
    with pytest.raises(SettingError, match=rf"{head} index .* 0 to {size - 1}"):
        action(**{head: -1 if below else size})


def test_a_smaller_space_refuses_what_the_default_one_has():
    with pytest.raises(SettingError, match="slot index 2"):
        action(ActionSpace(SlotConfig(("r0c0",))), slot=2)


@pytest.mark.parametrize("ids", [(), (None,), ("conv_light",), (None, "a", None)])
def test_a_space_starts_with_no_blueprint_and_has_one_more(ids):
    with pytest.raises(SettingError, match=r"blueprint_ids .*ActionSpace.of"):
        ActionSpace(SlotConfig.default(), ids)


def test_a_space_lists_each_blueprint_once():
    with pytest.raises(SettingError, match="repeat"):
        ActionSpace.of(SlotConfig.default(), ("a", "a"))


def test_a_space_without_blends_is_refused():
    with pytest.raises(SettingError, match="no blends"):
        ActionSpace.of(SlotConfig.default(), ("a",), ())


def test_a_misspelled_blend_gets_the_nearest_one():
    with pytest.raises(UnknownNameError, match=r"'sigmod'.*'sigmoid'"):
        ActionSpace.of(SlotConfig.default(), ("a",), ("sigmod",))


def test_names_are_turned_back_into_their_indices():
    assert DEFAULT_SPACE.blueprint_index("conv_light") == BlueprintAction.CONV_LIGHT
    assert DEFAULT_SPACE.blend_index("gated") == BlendAction.GATED


def test_an_unknown_blueprint_gets_the_nearest_one():
    with pytest.raises(UnknownNameError, match=r"'conv_ligth'.*'conv_light'"):
        DEFAULT_SPACE.blueprint_index("conv_ligth")


# -- names from the tables alone -------------------------------------------------------------------

SPACES = {
    "default": DEFAULT_SPACE,
    "own": ActionSpace.of(
        SlotConfig(("r0c10", "r0c2", "r1c0")), ("mine", "lora"), ("gated", "linear")
    ),
    "least": ActionSpace.of(SlotConfig(("r0c0",)), ("norm",), ("sigmoid",)),
}


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_looking_up_says_what_the_action_says_for_every_index_of_a_space(space):
    for op, slot, blueprint, blend in itertools.product(*map(range, space.sizes)):
        found = action(space, op, slot, blueprint, blend)
        names = (found.op.name, found.slot_id, found.blueprint_id, found.blend_algorithm_id)
        assert fa.look_up(space, op, slot, blueprint, blend) == names


@pytest.mark.parametrize("head", ["op", "slot", "blueprint", "blend"])
def test_looking_up_refuses_an_index_outside_the_space(head):
    places = {"op": 0, "slot": 0, "blueprint": 0, "blend": 0, head: -1}
    with pytest.raises(SettingError, match=f"{head} index -1"):
        fa.look_up(DEFAULT_SPACE, **places)


def test_a_table_that_differs_from_its_enum_is_caught_by_a_look_up(monkeypatch):
    monkeypatch.setattr(fa, "OP_NAMES", ("WAIT", "CULL", "GERMINATE", "FOSSILIZE"))
    assert fa.look_up(DEFAULT_SPACE, 0, 0, 0, 0)[0] == "WAIT"
    with pytest.raises(AssertionError, match="CULL"):
        fa.look_up(DEFAULT_SPACE, 1, 0, 1, 0)


LOOK_UP = """
from esper.leyline import factored_actions as fa

def refuse(**indices):
    raise SystemExit("an action was built")

fa.FactoredAction.from_indices = refuse
{doctor}
print(fa.look_up(fa.DEFAULT_SPACE, 1, 2, 1, 0))
"""


def run_look_up(*flags, doctor=""):
    command = [sys.executable, *flags, "-c", LOOK_UP.format(doctor=doctor)]
    env = {**os.environ, "PYTHONPATH": str(Path(fa.__file__).parents[2])}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    return done.returncode, (done.stdout + done.stderr).strip()


@pytest.mark.parametrize("flags", [(), ("-O",)])
def test_a_look_up_builds_no_action(flags):
    assert run_look_up(*flags) == (0, "('GERMINATE', 'r0c2', 'conv_light', 'linear')")


def test_an_optimised_python_reads_the_tables_as_they_are():
    doctor = "fa.OP_NAMES = ('WAIT', 'SOW', 'CULL', 'FOSSILIZE')"
    assert run_look_up("-O", doctor=doctor) == (0, "('SOW', 'r0c2', 'conv_light', 'linear')")
