"""Entropy is exact over all cases, is paid where a choice was possible and not only where it was
made, and ignores what an unused head happened to store."""

import math

import pytest
import torch

from esper.leyline.factored_actions import (
    NUM_BLENDS,
    NUM_BLUEPRINTS,
    NUM_OPS,
    OP_CULL,
    OP_FOSSILIZE,
    OP_GERMINATE,
    OP_WAIT,
)
from esper.tamiyo.actor_critic import over
from esper.tamiyo.heads import Head, HeadSpec, openings
from esper.tamiyo.network import RecurrentActorCritic
from tamiyo.policy_cases import (
    HEADS,
    STATE_DIM,
    as_arguments,
    build,
    end_of,
    ends_of,
    gradients,
    joint_masks,
    plain_masks,
    sharpen,
    some_of,
)

SMALL = {"num_blueprints": 3, "num_blends": 2}
SLOTS = 2


def small(seed=0, sharpness=100.0):
    return build(SLOTS, seed=seed, sharpness=sharpness, hidden_dim=16, head_dim=8, **SMALL)


def waits(*shape):
    return {head: torch.zeros(shape, dtype=torch.long) for head in HEADS}


def enumerate_all(net, features, masks):
    """Every decision that can be made in one row, with its probability; and each head's expected
    entropy.

    Returns:
        {choices: probability}, {head: entropy in nats}, {head: entropy, normalised in each case}
    """
    joint = {}
    nats, shares = dict.fromkeys(HEADS, 0.0), dict.fromkeys(HEADS, 0.0)

    def walk(place, made, probability):
        if place == len(net.spec.heads):
            joint[tuple(made.values())] = probability
            return
        head = net.spec.heads[place]
        if head.used_by is not None and made["op"] not in head.used_by:
            walk(place + 1, {**made, head.name: 0}, probability)
            return
        mask = masks[head.name]
        mask = mask[made[head.mask_by]] if mask.dim() == 2 else mask
        logits = net._case(
            place, features, {}, {k: torch.tensor([v]) for k, v in made.items()}
        ).logits
        valid = mask.nonzero().squeeze(1).tolist()
        probs = torch.softmax(logits[0].double()[mask], -1)
        entropy = float(-(probs * probs.log()).sum())
        nats[head.name] += probability * entropy
        shares[head.name] += probability * entropy / math.log(len(valid)) if len(valid) > 1 else 0.0
        for choice, prob in zip(valid, probs.tolist(), strict=True):
            walk(place + 1, {**made, head.name: choice}, probability * prob)

    walk(0, {}, 1.0)
    return joint, nats, shares


@torch.no_grad()
def enumerated(net, states, masks):
    """`enumerate_all` for each of N rows of one step."""
    features = net._features(states, net.get_initial_hidden(len(states)), None)[0]
    rows = []
    for row in range(len(states)):
        of_row = over(features, lambda part, row=row: part[row])
        masks_of_row = {head: mask[row, 0] for head, mask in masks.items()}
        rows.append(enumerate_all(net, of_row, masks_of_row))
    return rows


# -- exactness -------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("make", ["joint", "plain"])
@pytest.mark.parametrize("seed", range(3))
def test_expected_entropy_equals_the_enumeration_of_all_decisions(seed, make):
    net, states = small(seed), torch.randn(6, 1, STATE_DIM)
    if make == "joint":
        masks = joint_masks(6, 1, slots=SLOTS, blueprints=3, blends=2)
    else:
        masks = {
            head: some_of(6, 1, size)
            for head, size in zip(HEADS, (NUM_OPS, SLOTS, 3, 2), strict=True)
        }
    found = net.evaluate_actions(states, waits(6, 1), masks, net.get_initial_hidden(6))
    for row, (joint, _, shares) in enumerate(enumerated(net, states, masks)):
        assert sum(joint.values()) == pytest.approx(1, abs=1e-6)
        for head in HEADS:
            assert float(found.entropy[head][row, 0]) == pytest.approx(shares[head], abs=1e-6)


def even_masks(rows):
    """Three of four ops and two choices in every other row:

    each head's normalised entropy has one scale.
    """
    masks = joint_masks(rows, 1, slots=SLOTS, blueprints=3, blends=2)
    masks["op"][:] = torch.tensor([True, True, True, False])
    masks["slot"][:] = True
    masks["blueprint"][:] = torch.tensor([[True, False, True], [False, True, True]])
    masks["blend"][:] = True
    return masks, {
        "op": math.log(3),
        "slot": math.log(2),
        "blueprint": math.log(2),
        "blend": math.log(2),
    }


@torch.no_grad()
def test_the_heads_entropies_add_up_to_that_of_the_whole_decision():
    net, states = small(), torch.randn(4, 1, STATE_DIM)
    masks, scale = even_masks(4)
    found = net.evaluate_actions(states, waits(4, 1), masks, net.get_initial_hidden(4))
    for row, (joint, nats, _) in enumerate(enumerated(net, states, masks)):
        whole = -sum(p * math.log(p) for p in joint.values())
        assert sum(nats.values()) == pytest.approx(whole, abs=1e-6)
        assert sum(
            float(found.entropy[head][row, 0]) * scale[head] for head in HEADS
        ) == pytest.approx(whole, abs=2e-6)


@torch.no_grad()
def test_stored_decisions_have_the_probabilities_of_the_enumeration():
    net, states = small(), torch.randn(1, 1, STATE_DIM)
    masks = joint_masks(1, 1, slots=SLOTS, blueprints=3, blends=2)
    masks["op"][:] = True
    ((joint, _, _),) = enumerated(net, states, masks)
    rows = len(joint)
    actions = {
        head: torch.tensor([made[place] for made in joint])[:, None]
        for place, head in enumerate(HEADS)
    }
    repeated = {head: mask.expand(rows, *mask.shape[1:]) for head, mask in masks.items()}
    found = net.evaluate_actions(
        states.expand(rows, -1, -1), actions, repeated, net.get_initial_hidden(rows)
    )
    together = sum(found.log_probs.values())[:, 0].exp()
    assert together.tolist() == pytest.approx(list(joint.values()), abs=1e-6)


@torch.no_grad()
def test_the_mean_surprise_of_draws_estimates_the_same_entropy():
    net, draws = small(sharpness=30), 20_000
    state = torch.randn(1, STATE_DIM)
    masks, _ = even_masks(1)
    ((joint, _, _),) = enumerated(net, state[:, None], masks)
    exact = -sum(p * math.log(p) for p in joint.values())
    repeated = {head: mask[:, 0].expand(draws, *mask.shape[2:]) for head, mask in masks.items()}
    _, log_probs, *_ = net.get_action(state.expand(draws, -1), **as_arguments(repeated))
    surprise = -sum(log_probs.values())
    assert abs(float(surprise.mean()) - exact) < 4 * float(surprise.std()) / math.sqrt(draws)


@torch.no_grad()
def test_on_a_table_of_two_by_three_the_entropy_is_the_closed_form():
    spec = HeadSpec((Head("first", 2), Head("second", 3, used_by=(1,))), chained=True)
    net = sharpen(RecurrentActorCritic(STATE_DIM, spec, hidden_dim=8, head_dim=8), 0)
    with torch.no_grad():
        net.policy_heads["first"][-1].bias.copy_(torch.tensor([0.25, 0.75]).log())
        net.policy_heads["second"][-1].bias.copy_(torch.tensor([0.5, 0.3, 0.2]).log())
    stored = {
        "first": torch.zeros(1, 1, dtype=torch.long),
        "second": torch.zeros(1, 1, dtype=torch.long),
    }
    found = net.evaluate_actions(
        torch.randn(1, 1, STATE_DIM), stored, {}, net.get_initial_hidden(1)
    )
    first = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) / math.log(2)
    second = -(0.5 * math.log(0.5) + 0.3 * math.log(0.3) + 0.2 * math.log(0.2)) / math.log(3)
    assert float(found.entropy["first"]) == pytest.approx(first, abs=1e-6)
    assert float(found.entropy["second"]) == pytest.approx(0.75 * second, abs=1e-6)


# -- a head that was possible but not taken --------------------------------------------------------


def entropy_gradient(net, head, op_bias=0.0, op=OP_WAIT):
    """Gradients of one head's entropy where `op` was stored, with GERMINATE's logit shifted; and
    π(GERMINATE).
    """
    states = torch.linspace(-1, 1, STATE_DIM).expand(1, 1, -1)
    with torch.no_grad():
        for layer in ends_of(net.policy_heads):
            if layer.bias is not None:
                layer.bias.zero_()
        net.policy_heads["op"][-1].bias[OP_GERMINATE] += op_bias
    stored = {**waits(1, 1), "op": torch.full((1, 1), op)}
    net.zero_grad()
    found = net.evaluate_actions(states, stored, {}, net.get_initial_hidden(1))
    found.entropy[head].sum().backward()
    chance = float(net(states)["op_logits"].detach().softmax(-1)[0, 0, OP_GERMINATE])
    return gradients(net), chance


@pytest.mark.parametrize("head", ["slot", "blueprint", "blend"])
def test_a_head_that_was_possible_but_not_taken_still_gets_an_entropy_gradient(head):
    found, _ = entropy_gradient(small(), head)
    assert (found[end_of(head)] != 0).any()
    taken, _ = entropy_gradient(small(), head, op=OP_GERMINATE)
    assert all(torch.equal(found[name], taken[name]) for name in found if found[name] is not None)


@pytest.mark.parametrize("head", ["blueprint", "blend"])
def test_that_gradient_is_weighted_by_the_probability_of_the_op(head):
    likely, much = entropy_gradient(small(), head, 2.0)
    rare, little = entropy_gradient(small(), head, -2.0)
    assert much > 5 * little
    name = end_of(head)
    torch.testing.assert_close(rare[name] / little, likely[name] / much, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("head", ["slot", "blueprint", "blend"])
def test_the_weight_itself_has_no_gradient_so_that_no_earlier_head_is_bribed(head):
    found, _ = entropy_gradient(small(), head)
    for earlier in HEADS[: HEADS.index(head)]:
        grad = found[end_of(earlier)]
        assert grad is None or (grad == 0).all()


def test_a_head_whose_op_is_masked_gets_no_entropy_gradient():
    net, states, masks = build(), torch.randn(3, 2, STATE_DIM), plain_masks(3, 2)
    masks["op"][:] = torch.arange(NUM_OPS) != OP_GERMINATE
    found = net.evaluate_actions(states, waits(3, 2), masks, net.get_initial_hidden(3))
    assert (found.entropy["blueprint"] == 0).all()
    found.entropy["blueprint"].sum().backward()
    assert (net.policy_heads["blueprint"].last.weight.grad == 0).all()


# -- what counts for the mean ----------------------------------------------------------------------


def test_a_step_counts_for_a_head_only_if_it_had_a_choice_there():
    net, masks = build(slots=2), joint_masks(5, 1, slots=2)
    masks["op"][:] = torch.tensor([True, False, True, False])  # WAIT or CULL
    masks["slot"][:] = torch.tensor([True, False])
    masks["blueprint"][:] = masks["blend"][:] = True
    masks["op"][0] = torch.tensor([True, False, False, False])  # host 0 can only wait
    masks["slot"][2, 0, OP_CULL] = True  # host 2 has two slots to cull in
    masks["slot"][3, 0, OP_FOSSILIZE] = True  # host 3 would have two, but cannot fossilize
    masks["op"][4] = torch.tensor([True, True, False, False])  # host 4 can plant, in one slot
    found = net.evaluate_actions(
        torch.randn(5, 1, STATE_DIM), waits(5, 1), masks, net.get_initial_hidden(5)
    )
    is_open = dict(zip(HEADS, openings(net.spec, masks, torch.zeros(5, 1)), strict=True))
    assert {head: rows[:, 0].tolist() for head, rows in is_open.items()} == {
        "op": [False, True, True, True, True],
        "slot": [False, False, True, False, False],
        "blueprint": [False, False, False, False, True],
        "blend": [False, False, False, False, True],
    }
    for head, rows in is_open.items():
        assert torch.equal(found.entropy[head] > 0, rows)


def test_without_masks_every_head_with_more_than_one_choice_counts():
    net = build(1)
    found = net.evaluate_actions(
        torch.randn(2, 3, STATE_DIM), waits(2, 3), {}, net.get_initial_hidden(2)
    )
    is_open = dict(zip(HEADS, openings(net.spec, {}, torch.zeros(2, 3)), strict=True))
    assert {head: bool(rows.all()) for head, rows in is_open.items()} == {
        "op": True,
        "slot": False,
        "blueprint": True,
        "blend": True,
    }
    assert (found.entropy["slot"] == 0).all()


# -- stored choices of unused heads ----------------------------------------------------------------


@pytest.mark.parametrize("make", [joint_masks, plain_masks])
@pytest.mark.parametrize("head", ["slot", "blueprint", "blend"])
def test_stored_choices_of_unused_heads_change_nothing_by_one_bit(head, make):
    net, states, masks = build(sharpness=30), torch.randn(16, 10, STATE_DIM), make(16, 10)
    masks["op"][:] = True
    stored, *_ = net.get_action(states, **as_arguments(masks))
    unused = stored["op"] == OP_WAIT if head == "slot" else stored["op"] != OP_GERMINATE
    size = {"slot": 3, "blueprint": NUM_BLUEPRINTS, "blend": NUM_BLENDS}[head]
    poisoned = {
        **stored,
        head: torch.where(unused, torch.randint(1, size, unused.shape), stored[head]),
    }
    assert int((poisoned[head] != stored[head]).sum()) > 20
    weights = torch.randn(4, 16, 10)
    found, slopes = [], []
    for actions in (stored, poisoned):
        net.zero_grad()
        found.append(net.evaluate_actions(states, actions, masks, net.get_initial_hidden(16)))
        said = found[-1]
        (
            torch.stack([said.log_probs[name] + said.entropy[name] for name in HEADS]) * weights
        ).sum().backward()
        slopes.append(gradients(net))
    for name in HEADS:
        assert torch.equal(found[0].log_probs[name], found[1].log_probs[name])
        assert torch.equal(found[0].entropy[name], found[1].entropy[name])
    assert (found[0].log_probs[head][unused] == 0).all()
    for name, slope in slopes[0].items():
        assert slope is None or torch.equal(slope, slopes[1][name]), name
