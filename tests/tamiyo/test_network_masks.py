"""The network chooses nothing that a mask forbids, whatever its weights would like, and says where
nothing is left.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import is_legal
from esper.leyline.errors import MaskError
from esper.leyline.factored_actions import (
    NUM_BLUEPRINTS,
    OP_CULL,
    OP_GERMINATE,
    OP_WAIT,
    ActionSpace,
    FactoredAction,
)
from esper.leyline.legality import GrowthView
from esper.leyline.reports import SeedMetrics, SeedStateReport
from esper.leyline.slots import SlotConfig
from esper.leyline.stages import SeedStage
from esper.tamiyo.heads import HeadSpec
from esper.tamiyo.masks import masks_for
from esper.tamiyo.network import RecurrentActorCritic
from tamiyo.policy_cases import (
    HEADS,
    STATE_DIM,
    as_arguments,
    build,
    ends_of,
    joint_masks,
    plain_masks,
    sharpen,
)


def chosen_rows(masks, choices):
    """Each head's mask in the case of the choices made, [.., size], and where the op uses the
    head.
    """
    op, slot = choices["op"], choices["slot"]
    rows = {"op": masks["op"], "blend": masks["blend"]}
    for head, by in (("slot", op), ("blueprint", slot)):
        mask = masks[head]
        is_plain = mask.dim() == op.dim() + 1
        rows[head] = mask if is_plain else mask.take_along_dim(by[..., None, None], -2).squeeze(-2)
    planted = op == OP_GERMINATE
    return rows, {"op": op >= 0, "slot": op != OP_WAIT, "blueprint": planted, "blend": planted}


def assert_allowed(masks, choices):
    rows, used = chosen_rows(masks, choices)
    for head in HEADS:
        allowed = rows[head].gather(-1, choices[head][..., None]).squeeze(-1)
        assert allowed[used[head]].all(), head
        assert (choices[head][~used[head]] == 0).all(), head


@pytest.mark.parametrize("make", [plain_masks, joint_masks])
@pytest.mark.parametrize("slots", [2, 5])
def test_a_masked_entry_has_next_to_no_probability_in_forward(slots, make):
    net, masks = build(slots, sharpness=100), make(40, 5, slots=slots)
    said = net(torch.randn(40, 5, STATE_DIM), **as_arguments(masks))
    likeliest = {head: said[f"{head}_logits"].argmax(-1) for head in HEADS}
    rows, _ = chosen_rows(masks, likeliest)
    for head in HEADS:
        probs = said[f"{head}_logits"].softmax(-1)
        assert (~rows[head]).any()
        assert (probs[~rows[head]] < 0.01).all()
        assert (probs[rows[head]] > 0).all()


@pytest.mark.parametrize("make", [plain_masks, joint_masks])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("slots", [2, 5])
def test_a_masked_entry_is_never_chosen(slots, deterministic, make):
    net, masks = build(slots, sharpness=100), make(20_000, slots=slots)
    choices, log_probs, *_ = net.get_action(
        torch.randn(20_000, STATE_DIM), **as_arguments(masks), deterministic=deterministic
    )
    assert_allowed(masks, choices)
    assert all((log_prob > -200).all() for log_prob in log_probs.values())


def test_a_conditional_mask_is_read_at_the_choice_made_before():
    net, masks = build(), joint_masks(300)
    masks["op"][:] = torch.tensor([False, True, True, False])
    masks["slot"][:] = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]], dtype=torch.bool)
    masks["blueprint"][:] = torch.eye(NUM_BLUEPRINTS, dtype=torch.bool)[[5, 7, 9]]
    choices, *_ = net.get_action(torch.randn(300, STATE_DIM), **as_arguments(masks))
    planted = choices["op"] == OP_GERMINATE
    assert 50 < int(planted.sum()) < 250
    assert (choices["op"][~planted] == OP_CULL).all()
    assert torch.equal(choices["slot"], torch.where(planted, 1, 2))
    assert torch.equal(choices["blueprint"], torch.where(planted, 7, 0))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("place", [0, -1])
def test_heads_of_different_sizes_keep_to_their_own_masks(place, deterministic):
    spec = HeadSpec.independent([3, 5, 7])
    net = sharpen(RecurrentActorCritic(STATE_DIM, spec, hidden_dim=16, head_dim=8), 500)
    masks = {head.name: torch.zeros(2000, head.size, dtype=torch.bool) for head in spec.heads}
    for mask in masks.values():
        mask[:, place] = True
    choices, log_probs, *_ = net.get_action(
        torch.randn(2000, STATE_DIM), None, masks, deterministic
    )
    for head in spec.heads:
        assert (choices[head.name] == (0 if place == 0 else head.size - 1)).all()
        assert (log_probs[head.name] == 0).all()


@pytest.mark.parametrize("deterministic", [False, True])
def test_negative_logits_do_not_lead_to_a_masked_choice(deterministic):
    net, masks = build(5), joint_masks(500, slots=5)
    with torch.no_grad():
        for layer in ends_of(net.policy_heads):
            if layer.bias is not None:
                layer.bias.fill_(-1000.0)
    choices, *_ = net.get_action(
        torch.randn(500, STATE_DIM), **as_arguments(masks), deterministic=deterministic
    )
    assert_allowed(masks, choices)


# -- nothing allowed -------------------------------------------------------------------------------


def test_a_host_without_any_choice_is_refused_by_host_and_head():
    net, masks = build(), joint_masks(4)
    masks["op"][:] = torch.arange(4) == OP_CULL
    masks["slot"][2, OP_CULL] = False
    with pytest.raises(MaskError, match="host 2, head 'slot': "):
        net.get_action(torch.randn(4, STATE_DIM), None, masks)


@pytest.mark.parametrize("way", ["forward", "get_action"])
def test_a_step_without_any_choice_is_refused_by_host_head_and_step(way):
    net, masks = build(), joint_masks(4, 6)
    masks["blend"][3, 5] = False
    with pytest.raises(MaskError, match="host 3, head 'blend', step 5: "):
        getattr(net, way)(torch.randn(4, 6, STATE_DIM), **as_arguments(masks))


def test_an_empty_row_of_a_case_that_did_not_happen_is_no_error():
    net, masks = build(), joint_masks(4)
    masks["op"][:] = torch.arange(4) == OP_WAIT
    masks["slot"][:, OP_CULL] = False
    choices, *_ = net.get_action(torch.randn(4, STATE_DIM), **as_arguments(masks))
    assert (choices["op"] == OP_WAIT).all()


@pytest.mark.parametrize("head", HEADS)
def test_learning_from_a_mask_that_allows_nothing_is_refused_as_acting_is(head):
    net, states, masks = build(), torch.randn(4, 6, STATE_DIM), joint_masks(4, 6)
    masks["op"][:] = True
    masks["slot"][:] = True
    masks["blueprint"][:] = True
    choices, *_ = net.get_action(states, None, masks)
    net.evaluate_actions(states, choices, masks)
    masks[head][3, 5] = False
    with pytest.raises(MaskError, match=f"row 3, head '{head}', step 5: the mask allows nothing"):
        net.evaluate_actions(states, choices, masks)


def test_learning_from_an_empty_row_of_a_case_that_cannot_happen_is_no_error():
    net, states, masks = build(), torch.randn(4, 6, STATE_DIM), joint_masks(4, 6)
    masks["op"][:] = torch.arange(4) == OP_WAIT
    masks["slot"][:, :, OP_CULL] = False
    choices, *_ = net.get_action(states, None, masks)
    said = net.evaluate_actions(states, choices, masks)
    masks["slot"][:, :, OP_CULL] = True
    again = net.evaluate_actions(states, choices, masks)
    for name in HEADS:
        assert torch.equal(said.entropy[name], again.entropy[name])
        assert torch.equal(said.log_probs[name], again.log_probs[name])


# -- any mask at all -------------------------------------------------------------------------------


def rows_of(count, size):
    """Strategy: `count` rows of `size` flags, each with at least one true."""
    row = st.integers(1, 2**size - 1).map(
        lambda bits: [bool(bits >> place & 1) for place in range(size)]
    )
    return st.lists(row, min_size=count, max_size=count)


@given(st.data(), st.sampled_from([1, 2, 3, 5]), st.booleans(), st.integers(0, 1000))
def test_any_masks_give_choices_that_they_allow(data, slots, deterministic, seed):
    net = build(slots, seed=seed, sharpness=200, hidden_dim=8, head_dim=8)
    drawn = {
        "op": data.draw(rows_of(2, 4)),
        "slot": [data.draw(rows_of(4, slots)) for _ in range(2)],
        "blueprint": [data.draw(rows_of(slots, NUM_BLUEPRINTS)) for _ in range(2)],
        "blend": data.draw(rows_of(2, 3)),
    }
    masks = {head: torch.tensor(rows).repeat_interleave(20, 0) for head, rows in drawn.items()}
    choices, *_ = net.get_action(
        torch.randn(40, STATE_DIM), **as_arguments(masks), deterministic=deterministic
    )
    assert_allowed(masks, choices)


def a_slot(slot_id):
    """Strategy: the report of a slot in any stage, of any age, measured or not."""
    return st.builds(
        lambda stage, age, known: SeedStateReport(
            slot_id,
            stage,
            seed_age_epochs=age,
            metrics=SeedMetrics(counterfactual_contribution=known),
        ),
        st.sampled_from(SeedStage),
        st.integers(0, 3),
        st.sampled_from([None, 0.1]),
    )


@settings(max_examples=40)
@given(
    st.data(),
    st.integers(1, 4),
    st.sampled_from([None, 1, 2]),
    st.integers(0, 2),
    st.none() | st.integers(0, 40),
)
def test_what_the_network_chooses_under_a_populations_masks_is_legal(
    data, slots, max_seeds, total, budget
):
    ids = [f"r0c{column}" for column in range(slots)]
    space = ActionSpace(SlotConfig(ids), (None, "norm", "conv_light", "conv_heavy"))
    prices = {"norm": 4, "conv_light": 20, "conv_heavy": 60}
    costs = {
        (slot, name, blend): price + (3 if blend == "gated" else 0)
        for slot in ids
        for name, price in prices.items()
        for blend in space.blends
    }
    view = GrowthView(
        space=space,
        reports={slot: data.draw(a_slot(slot)) for slot in ids},
        seeds_used=total,
        max_seeds=max_seeds,
        params_used=0,
        budget=budget,
        costs=costs,
        ramp=data.draw(st.sampled_from([None, 0, 1, 2, 3])),
    )
    masks = {
        head: torch.as_tensor(mask).expand(30, *mask.shape)
        for head, mask in masks_for(view).items()
    }
    net = build(slots, sharpness=100, hidden_dim=8, head_dim=8, num_blueprints=4)
    choices, *_ = net.get_action(torch.randn(30, STATE_DIM), **as_arguments(masks))
    for op, slot, blueprint, blend in set(
        zip(*(choices[head].tolist() for head in HEADS), strict=True)
    ):
        action = FactoredAction.from_indices(
            op_idx=op, slot_idx=slot, blueprint_idx=blueprint, blend_idx=blend, space=space
        )
        assert is_legal(action, view)
