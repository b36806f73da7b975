"""A specification of heads is complete and free of contradictions, or it is refused with the
reason.
"""

import pytest

from esper.leyline.errors import SettingError
from esper.leyline.factored_actions import (
    DEFAULT_SPACE,
    NUM_BLENDS,
    NUM_BLUEPRINTS,
    NUM_OPS,
    OP_CULL,
    OP_FOSSILIZE,
    OP_GERMINATE,
    OP_WAIT,
    ActionSpace,
)
from esper.leyline.slots import SlotConfig
from esper.tamiyo.heads import Head, HeadSpec


def test_growth_chooses_op_slot_blueprint_blend_in_this_order():
    spec = HeadSpec.growth(5, NUM_BLUEPRINTS, NUM_BLENDS)
    assert spec.names == ("op", "slot", "blueprint", "blend")
    assert spec.sizes == (NUM_OPS, 5, NUM_BLUEPRINTS, NUM_BLENDS)
    assert spec.chained


def test_slot_is_masked_by_op_and_blueprint_by_slot():
    assert [head.mask_by for head in HeadSpec.growth(*DEFAULT_SPACE.sizes[1:]).heads] == [
        None,
        "op",
        "slot",
        None,
    ]


def test_waiting_uses_no_head_but_op_and_only_germinating_uses_blueprint_and_blend():
    spec = HeadSpec.growth(*DEFAULT_SPACE.sizes[1:])
    used = {
        op: [head.name for head in spec.heads if op in spec.uses(head)]
        for op in (OP_WAIT, OP_GERMINATE, OP_CULL, OP_FOSSILIZE)
    }
    assert used == {
        OP_WAIT: ["op"],
        OP_GERMINATE: ["op", "slot", "blueprint", "blend"],
        OP_CULL: ["op", "slot"],
        OP_FOSSILIZE: ["op", "slot"],
    }


def test_the_heads_of_a_space_have_its_sizes():
    space = ActionSpace(SlotConfig(["r0c0", "r0c1"]), (None, "norm", "mlp"), ("linear",))
    assert HeadSpec.growth(*space.sizes[1:]).sizes == space.sizes == (NUM_OPS, 2, 3, 1)


def test_foreign_actions_are_independent_heads_that_are_always_used():
    spec = HeadSpec.independent([3, 5, 7])
    assert spec.sizes == (3, 5, 7)
    assert len(set(spec.names)) == 3
    assert not spec.chained
    assert all(spec.uses(head) == (0, 1, 2) for head in spec.heads)


@pytest.mark.parametrize(
    ("heads", "chained", "reason"),
    [
        ((), False, "head"),
        ((Head("a", 2), Head("a", 3)), False, "all different"),
        ((Head("a", 2), Head("b", 2, mask_by="a")), False, "'b' .*chained"),
        ((Head("a", 2), Head("b", 2, used_by=(1,))), False, "'b' .*chained"),
        ((Head("a", 2, mask_by="b"), Head("b", 2)), True, "'a' .*masked .*'b'"),
        ((Head("a", 2), Head("b", 2, mask_by="c")), True, "'b' .*masked .*'c'"),
        ((Head("a", 2, used_by=(0,)),), True, "'a'.*first head"),
        ((Head("a", 2), Head("b", 2, used_by=(1, 2))), True, r"'b' .*\(1, 2\).* 2 .*'a'"),
        ((Head("a", 2), Head("b", 2, used_by=())), True, r"'b' .*\(\).* 2 .*'a'"),
        (
            (Head("a", 3), Head("b", 2, used_by=(1,)), Head("c", 2, used_by=(1, 2))),
            True,
            r"'c' .*\(1, 2\).*'b' .*\(1,\)",
        ),
        ((Head("a", 3), Head("b", 2, used_by=(1,)), Head("c", 2)), True, "put 'c' first"),
    ],
)
def test_a_contradiction_is_refused_with_its_reason(heads, chained, reason):
    with pytest.raises(SettingError, match=reason):
        HeadSpec(heads, chained)
