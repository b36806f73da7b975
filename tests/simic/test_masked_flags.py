"""The record of a decision says of each head whether its mask left a choice."""

import numpy as np
import pytest

from esper.leyline.factored_actions import OP_CULL, OP_GERMINATE, OP_WAIT
from esper.simic.round_summary import RoundTally
from null_sink import NullSink
from simic.growths import LORA, MLP, POINTS, grow

HEADS = ("op", "slot", "blueprint", "blend")
SLOT = 1
PLANTING = (OP_GERMINATE, SLOT, MLP, 0)


class DebugSink(NullSink):
    """Keeps the records of decisions."""

    def __init__(self):
        super().__init__()
        self.records = []

    def write_record(self, kind, record, severity):
        self.records.append(record)

    def wants(self, severity):
        return True


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    env = grow(POINTS, 1, tmp_path_factory.mktemp("twins"))
    env.reset(seed=0)
    return env


def masks_of(env, *closed):
    """Masks with two choices where PLANTING stands and one elsewhere; of `closed` heads one."""
    ops, slots, blueprints, blends = env.space.sizes
    masks = {
        "op": np.zeros((1, ops), bool),
        "slot": np.zeros((1, ops, slots), bool),
        "blueprint": np.zeros((1, slots, blueprints), bool),
        "blend": np.zeros((1, blends), bool),
    }
    for mask in masks.values():
        mask[..., 0] = True
    rows = {
        "op": masks["op"][0],
        "slot": masks["slot"][0, OP_GERMINATE],
        "blueprint": masks["blueprint"][0, SLOT],
        "blend": masks["blend"][0],
    }
    taken = dict(zip(HEADS, PLANTING, strict=True))
    for head, row in rows.items():
        row[:] = False
        row[taken[head]] = True
        row[taken[head] - 1] = head not in closed
    assert {head: int(row.sum()) for head, row in rows.items()} == {
        head: 1 if head in closed else 2 for head in HEADS
    }
    return masks


def flags(env, action, masks):
    """What the record of this decision says: the heads that are masked."""
    sink = DebugSink()
    tally = RoundTally(env, 0, sink)
    info = {"events": [[]], "reward_parts": [{}]}
    tally.take(0, np.array([action]), np.zeros(1), masks, info, np.ones(1, bool))
    (record,) = sink.records
    return {head for head in HEADS if record[f"{head}_masked"]}


@pytest.mark.parametrize("head", HEADS)
def test_a_mask_that_leaves_one_choice_is_flagged_on_its_head_alone(env, head):
    assert flags(env, PLANTING, masks_of(env)) == set()
    assert flags(env, PLANTING, masks_of(env, head)) == {head}


def test_the_flag_is_of_the_row_that_the_choices_before_lead_to(env):
    masks = masks_of(env, "slot", "blueprint")
    masks["slot"][0, OP_CULL] = True
    masks["blueprint"][0, 0, [MLP, LORA]] = True
    assert flags(env, (OP_GERMINATE, 0, MLP, 0), masks) == {"slot"}
    assert flags(env, (OP_CULL, 0, 0, 0), masks) == {"blueprint", "blend"}


def test_a_head_without_use_is_flagged_whatever_its_mask(env):
    assert flags(env, (OP_WAIT, 0, 0, 0), masks_of(env)) == {"slot", "blueprint", "blend"}
