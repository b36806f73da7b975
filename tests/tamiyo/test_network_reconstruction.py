"""Judging whole sequences afterwards gives the log-probabilities of the decisions as they were
made, step by step.
"""

import pytest
import torch
from torch import nn

from esper.leyline.factored_actions import OP_CULL, OP_FOSSILIZE, OP_GERMINATE
from esper.tamiyo.heads import Head, HeadSpec
from esper.tamiyo.network import RecurrentActorCritic
from tamiyo.policy_cases import HEADS, STATE_DIM, build, joint_masks, live, plain_masks, ratios

HOSTS, STEPS = 16, 20


def a_rollout(seed, sharpness=1.0, make=joint_masks, **sizes):
    """A network, what it saw (episodes begin anew here and there), and what it did."""
    net = build(seed=seed, sharpness=sharpness, **sizes)
    states, masks = torch.randn(HOSTS, STEPS, STATE_DIM), make(HOSTS, STEPS)
    starts = torch.rand(HOSTS, STEPS) < 0.1
    begin = tuple(torch.randn_like(part) for part in net.get_initial_hidden(HOSTS))
    choices, log_probs, values, hidden = live(net, states, masks, starts, begin)
    assert len(choices["op"].unique()) > 2
    return net, (states, choices, masks, begin, starts), (log_probs, values, hidden)


@pytest.mark.parametrize("make", [joint_masks, plain_masks])
@pytest.mark.parametrize(("sharpness", "bound"), [(1, 1e-6), (100, 1e-6), (1000, 1e-5)])
@pytest.mark.parametrize("seed", range(4))
def test_without_a_step_of_the_optimiser_every_ratio_is_one(seed, sharpness, bound, make):
    """The sharpest logits are in the tens; float32 knows them to some 1e-6 only."""
    net, stored, (log_probs, values, hidden) = a_rollout(seed, sharpness, make)
    found = net.evaluate_actions(*stored)
    assert max(ratios(found.log_probs, log_probs).values()) <= bound
    torch.testing.assert_close(found.values, values, rtol=0, atol=2e-6)
    torch.testing.assert_close(found.hidden, hidden, rtol=0, atol=1e-6)


@pytest.mark.parametrize("seed", range(2))
def test_ratios_are_one_at_the_size_that_is_used_in_runs(seed):
    net, stored, (log_probs, *_) = a_rollout(seed, 100, hidden_dim=128, head_dim=64)
    assert max(ratios(net.evaluate_actions(*stored).log_probs, log_probs).values()) <= 1e-6


def test_ratios_are_one_for_independent_heads():
    torch.manual_seed(3)
    net = RecurrentActorCritic(
        STATE_DIM, HeadSpec.independent([3, 5, 7]), hidden_dim=16, head_dim=8
    )
    states = torch.randn(6, 9, STATE_DIM)
    masks = {head.name: torch.rand(6, 9, head.size) < 0.7 for head in net.spec.heads}
    for mask in masks.values():
        mask[..., 0] = True
    choices, log_probs, *_ = live(net, states, masks)
    found = net.evaluate_actions(states, choices, masks, net.get_initial_hidden(6))
    assert max(ratios(found.log_probs, log_probs).values()) <= 1e-6
    other = {**choices, "action_0": (choices["action_0"] + 1) % 3}
    again = net.evaluate_actions(states, other, masks, net.get_initial_hidden(6))
    assert torch.equal(found.log_probs["action_1"], again.log_probs["action_1"])


def test_ratios_are_one_for_a_chain_that_is_not_growth():
    heads = (Head("a", 3), Head("b", 4, "a"), Head("c", 2, "b", (0, 2)), Head("d", 5, "a", (2,)))
    torch.manual_seed(4)
    net = RecurrentActorCritic(STATE_DIM, HeadSpec(heads, chained=True), hidden_dim=16, head_dim=8)
    states = torch.randn(8, 15, STATE_DIM)
    rows = {"a": (3,), "b": (3, 4), "c": (4, 2), "d": (3, 5)}
    masks = {name: torch.rand(8, 15, *shape) < 0.6 for name, shape in rows.items()}
    for mask in masks.values():
        mask[..., 0] |= ~mask.any(-1)
    choices, log_probs, *_ = live(net, states, masks)
    found = net.evaluate_actions(states, choices, masks, net.get_initial_hidden(8))
    assert max(ratios(found.log_probs, log_probs).values()) <= 1e-6


@pytest.mark.parametrize("head", HEADS)
def test_a_mask_that_is_missing_when_learning_shows_in_the_ratio(head):
    net, (states, choices, masks, begin, starts), (log_probs, *_) = a_rollout(0)
    rest = {name: mask for name, mask in masks.items() if name != head}
    assert (
        ratios(net.evaluate_actions(states, choices, rest, begin, starts).log_probs, log_probs)[
            head
        ]
        > 0.1
    )


@pytest.mark.parametrize("forgotten", ["starts", "begin"])
def test_a_wrong_memory_when_learning_shows_in_the_ratio(forgotten):
    net, (states, choices, masks, begin, starts), (log_probs, *_) = a_rollout(0, 100)
    if forgotten == "starts":
        starts = None
    else:
        begin = net.get_initial_hidden(HOSTS)
    assert (
        ratios(net.evaluate_actions(states, choices, masks, begin, starts).log_probs, log_probs)[
            "joint"
        ]
        > 0.1
    )


def test_judging_draws_nothing():
    net, stored, _ = a_rollout(1, 100)
    found = []
    for seed in (5, 6):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        found.append(net.evaluate_actions(*stored))
        assert torch.equal(torch.get_rng_state(), before)
    for head in HEADS:
        assert torch.equal(found[0].log_probs[head], found[1].log_probs[head])
        assert torch.equal(found[0].entropy[head], found[1].entropy[head])


def forced(net, states, **choices):
    """Log-probabilities of the same stored decision at every step."""
    shape = states.shape[:2]
    actions = {head: torch.full(shape, choices.get(head, 0)) for head in HEADS}
    return net.evaluate_actions(states, actions, {}, net.get_initial_hidden(len(states))).log_probs


def test_later_heads_are_judged_in_the_case_of_the_stored_earlier_choices():
    net, states = build(sharpness=100), torch.randn(4, 5, STATE_DIM)
    culled, kept = (forced(net, states, op=op, slot=1)["slot"] for op in (OP_CULL, OP_FOSSILIZE))
    assert not torch.isclose(culled, kept).any()
    base = forced(net, states, op=OP_GERMINATE, slot=1, blueprint=2, blend=1)
    other_slot = forced(net, states, op=OP_GERMINATE, slot=2, blueprint=2, blend=1)
    assert not torch.isclose(base["blueprint"], other_slot["blueprint"]).any()
    assert not torch.isclose(base["blend"], other_slot["blend"]).any()
    other_blueprint = forced(net, states, op=OP_GERMINATE, slot=1, blueprint=3, blend=1)
    assert torch.equal(base["slot"], other_blueprint["slot"])
    assert not torch.isclose(base["blend"], other_blueprint["blend"]).any()


def test_there_is_nothing_random_in_training_mode():
    net, stored, _ = a_rollout(2)
    assert not [m for m in net.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    assert net.lstm.dropout == 0
    found = []
    for mode in (True, True, False):
        net.train(mode)
        found.append(net.evaluate_actions(*stored))
    for other in found[1:]:
        assert torch.equal(found[0].values, other.values)
        assert all(torch.equal(found[0].log_probs[head], other.log_probs[head]) for head in HEADS)


def test_log_probabilities_and_values_are_float32_under_autocast():
    net, (states, _, masks, begin, starts), _ = a_rollout(0, 30)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        choices, log_probs, values, _ = live(net, states, masks, starts, begin)
        found = net.evaluate_actions(states, choices, masks, begin, starts)
    tensors = [
        *log_probs.values(),
        values,
        found.values,
        *found.log_probs.values(),
        *found.entropy.values(),
    ]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    exact = net.evaluate_actions(states, choices, masks, begin, starts)
    assert not torch.equal(exact.values, found.values)  # autocast was at work
