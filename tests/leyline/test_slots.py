"""Slot ids: which are canonical, and in what order they always come."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline.errors import EsperError, SlotIdError, UnknownNameError
from esper.leyline.slots import SlotConfig, ordered_slots, slot_position

positions = st.tuples(st.integers(0, 40), st.integers(0, 40))


@given(positions)
def test_a_canonical_id_gives_back_its_row_and_column(position):
    assert slot_position(f"r{position[0]}c{position[1]}") == position


@pytest.mark.parametrize("name", ["early", "mid", "late"])
def test_a_name_such_as_early_is_refused_with_what_to_write(name):
    with pytest.raises(SlotIdError) as caught:
        SlotConfig((name,))
    assert name in str(caught.value)
    assert all(right in str(caught.value) for right in ("'r0c0'", "'r0c1'", "'r0c2'"))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "r0",
        "c0",
        "r0c",
        "R0C0",
        "r00c0",
        "r0c01",
        "r-1c0",
        " r0c0",
        "r0c0 ",
        "r0c0\n",
        "r0c0x",
        3,
        None,
        "r1٣c0",
    ],
)
def test_only_canonical_ids_are_taken(name):
    with pytest.raises(SlotIdError):
        SlotConfig((name,))


def test_no_slots_is_refused():
    with pytest.raises(SlotIdError, match="slot_ids="):
        SlotConfig(())


def test_a_repeated_id_is_refused_by_name():
    with pytest.raises(SlotIdError, match="r0c1 appear twice"):
        SlotConfig(("r0c1", "r0c0", "r0c1"))


def test_ten_comes_after_two():
    assert SlotConfig(("r0c10", "r0c2", "r0c1")).slot_ids == ("r0c1", "r0c2", "r0c10")


def test_rows_come_before_columns():
    assert ordered_slots(["r10c0", "r2c5", "r2c10", "r1c7"]) == ("r1c7", "r2c5", "r2c10", "r10c0")


@given(st.permutations([(row, column) for row in (0, 2, 10) for column in (0, 1, 2, 10, 11)]))
def test_order_does_not_depend_on_the_order_given(shuffled):
    config = SlotConfig(tuple(f"r{row}c{column}" for row, column in shuffled))
    assert [slot_position(slot_id) for slot_id in config.slot_ids] == sorted(shuffled)


@given(st.permutations([f"r0c{column}" for column in range(12)]))
def test_order_does_not_depend_on_dict_insertion(shuffled):
    modules = {slot_id: f"layer{slot_id}" for slot_id in shuffled}
    config = SlotConfig(tuple(modules), modules)
    assert config == SlotConfig(tuple(f"r0c{i}" for i in range(12)), modules)
    assert [config.index_for_slot_id(f"r0c{column}") for column in range(12)] == list(range(12))


@given(st.sets(positions, min_size=1, max_size=12))
def test_index_and_id_are_each_others_inverse(chosen):
    config = SlotConfig(tuple(f"r{row}c{column}" for row, column in chosen))
    assert config.num_slots == len(chosen)
    assert all(
        config.slot_ids[config.index_for_slot_id(slot_id)] == slot_id for slot_id in config.slot_ids
    )


def test_the_default_is_one_row_of_three():
    assert SlotConfig.default().slot_ids == ("r0c0", "r0c1", "r0c2")


def test_a_grid_has_all_its_places():
    assert SlotConfig.for_grid(2, 2).slot_ids == ("r0c0", "r0c1", "r1c0", "r1c1")


@pytest.mark.parametrize("size", [(0, 1), (1, 0), (-1, 2)])
def test_an_empty_grid_is_refused(size):
    with pytest.raises(SlotIdError, match="at least 1"):
        SlotConfig.for_grid(*size)


def test_modules_get_slots_in_the_order_given():
    config = SlotConfig.for_modules(f"layer{index}" for index in range(11))
    assert config.modules["r0c10"] == "layer10"
    assert config.slot_ids[10] == "r0c10"


def test_modules_for_other_slots_are_refused():
    with pytest.raises(SlotIdError, match=r"'r0c0'.*'r0c1'"):
        SlotConfig(("r0c0", "r0c1"), {"r0c0": "layer"})


def test_an_unknown_slot_gets_the_nearest_one():
    with pytest.raises(UnknownNameError, match=r"slot 'r0c7'.*: r0c0, r0c1, r0c2"):
        SlotConfig.default().index_for_slot_id("r0c7")


def test_choosing_slots_keeps_their_modules_and_their_order():
    config = SlotConfig.for_modules(["a", "b", "c"])
    assert config.choose(["r0c2", "r0c0"]) == SlotConfig(
        ("r0c0", "r0c2"), {"r0c0": "a", "r0c2": "c"}
    )
    with pytest.raises(UnknownNameError, match="r0c7"):
        config.choose(["r0c7"])


def test_slot_errors_share_the_one_base():
    assert issubclass(SlotIdError, EsperError)
    assert issubclass(UnknownNameError, EsperError)
