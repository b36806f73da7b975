"""The growth policy runs with any number of slots, carries its memory, and can be trained."""

import math

import pytest
import torch
from torch.nn import functional as F

from esper.leyline.errors import UnknownNameError
from esper.leyline.factored_actions import (
    NUM_BLENDS,
    NUM_BLUEPRINTS,
    NUM_OPS,
    OP_CULL,
    OP_FOSSILIZE,
    OP_GERMINATE,
    OP_WAIT,
    FactoredAction,
    LifecycleOp,
)
from esper.tamiyo.network import FactoredRecurrentActorCritic
from tamiyo.policy_cases import (
    HEADS,
    STATE_DIM,
    as_arguments,
    at,
    build,
    joint_masks,
    live,
    plain_masks,
)

ALL_SLOT_COUNTS = [1, 2, 3, 4, 5, 8]
HOSTS, STEPS = 3, 4


def sizes(slots):
    return {"op": NUM_OPS, "slot": slots, "blueprint": NUM_BLUEPRINTS, "blend": NUM_BLENDS}


def masks_of(kind, *shape, slots):
    make = {"none": lambda *_, **__: {}, "plain": plain_masks, "joint": joint_masks}[kind]
    return make(*shape, slots=slots)


# -- shapes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", "plain", "joint"])
@pytest.mark.parametrize("slots", ALL_SLOT_COUNTS)
def test_forward_gives_logits_of_every_head_values_and_the_state(slots, kind):
    net = build(slots)
    masks = masks_of(kind, HOSTS, STEPS, slots=slots)
    said = net(torch.randn(HOSTS, STEPS, STATE_DIM), **as_arguments(masks))
    shapes = {name: tuple(tensor.shape) for name, tensor in said.items() if name != "hidden"}
    assert shapes == {
        **{f"{head}_logits": (HOSTS, STEPS, size) for head, size in sizes(slots).items()},
        "value": (HOSTS, STEPS),
    }
    assert [part.shape for part in said["hidden"]] == [(1, HOSTS, net.memory_width)] * 2


@pytest.mark.parametrize("kind", ["none", "plain", "joint"])
@pytest.mark.parametrize("shape", [(HOSTS,), (HOSTS, STEPS)])
@pytest.mark.parametrize("slots", ALL_SLOT_COUNTS)
def test_get_action_decides_for_one_step_or_many(slots, shape, kind):
    net = build(slots)
    masks = masks_of(kind, *shape, slots=slots)
    choices, log_probs, values, hidden = net.get_action(
        torch.randn(*shape, STATE_DIM), **as_arguments(masks)
    )
    assert tuple(choices) == tuple(log_probs) == HEADS
    for head, size in sizes(slots).items():
        assert choices[head].shape == log_probs[head].shape == shape
        assert choices[head].dtype == torch.int64
        assert ((choices[head] >= 0) & (choices[head] < size)).all()
        assert (log_probs[head] <= 0).all()
    assert values.shape == shape
    assert [part.shape for part in hidden] == [(1, HOSTS, net.memory_width)] * 2


@pytest.mark.parametrize("kind", ["none", "plain", "joint"])
@pytest.mark.parametrize("slots", ALL_SLOT_COUNTS)
def test_evaluate_actions_judges_every_step_of_every_host(slots, kind):
    net = build(slots)
    states, masks = torch.randn(HOSTS, STEPS, STATE_DIM), masks_of(kind, HOSTS, STEPS, slots=slots)
    choices, old, *_ = net.get_action(states, **as_arguments(masks))
    begin = net.get_initial_hidden(HOSTS)
    log_probs, values, entropy, hidden = net.evaluate_actions(
        states, choices, **as_arguments(masks), hidden=begin
    )
    assert tuple(log_probs) == tuple(entropy) == HEADS
    assert {t.shape for t in (*log_probs.values(), *entropy.values(), values)} == {(HOSTS, STEPS)}
    assert [part.shape for part in hidden] == [(1, HOSTS, net.memory_width)] * 2
    for head in HEADS:
        torch.testing.assert_close(log_probs[head], old[head], rtol=0, atol=1e-6)
        assert ((entropy[head] >= 0) & (entropy[head] <= 1 + 1e-6)).all()


@pytest.mark.parametrize("slots", [2, 3, 5, 8])
def test_the_slots_and_their_largest_entropy_follow_the_number_of_slots(slots):
    net = build(slots)
    assert net.num_slots == slots
    assert net.max_entropies["slot"] == max(math.log(slots), 1)
    assert net.max_entropies["blueprint"] == math.log(NUM_BLUEPRINTS)
    assert f"slot of {slots}, blueprint of {NUM_BLUEPRINTS}, " in net.describe()


def test_the_sizes_of_a_run_with_its_own_blueprints_are_used():
    net = build(2, num_blueprints=4, num_blends=1)
    choices, log_probs, *_ = net.get_action(torch.randn(500, STATE_DIM))
    assert int(choices["blueprint"].max()) == 3
    assert (choices["blend"] == 0).all()
    assert (log_probs["blend"] == 0).all()


def test_a_fresh_policy_is_close_to_even():
    net = FactoredRecurrentActorCritic(STATE_DIM, 3)
    said = net(torch.randn(20, 5, STATE_DIM))
    for head, size in sizes(3).items():
        assert (said[f"{head}_logits"].softmax(-1) * size - 1).abs().max() < 0.2


@pytest.mark.parametrize("probability", [0.2, 0.5, 0.8])
def test_a_fresh_policy_seldom_plants_or_culls_and_keeps_as_often_as_it_waits(probability):
    net = build(3)
    net.lean_to_wait(probability)

    def chances(*possible):
        mask = torch.zeros(HOSTS, 1, NUM_OPS, dtype=torch.bool)
        mask[..., list(possible)] = True
        said = net(torch.randn(HOSTS, 1, STATE_DIM), op_mask=mask)
        return said["op_logits"].masked_fill(~mask, -math.inf).softmax(-1)[..., list(possible)]

    alone = torch.tensor([probability, 1 - probability]).expand(HOSTS, 1, 2)
    for change in (OP_GERMINATE, OP_CULL):
        torch.testing.assert_close(chances(OP_WAIT, change), alone, atol=0.03, rtol=0)
    even = torch.full((HOSTS, 1, 2), 0.5)
    torch.testing.assert_close(chances(OP_WAIT, OP_FOSSILIZE), even, atol=0.03, rtol=0)


def test_a_fresh_policy_values_every_state_alike():
    """A random value is noise in the first advantages, and hides a reward that is rare."""
    torch.manual_seed(0)
    net = FactoredRecurrentActorCritic(STATE_DIM, 3)
    values = net.look(torch.randn(200, STATE_DIM), net.get_initial_hidden(200))
    assert values.abs().max() < 0.1
    assert values.std() > 0  # not exactly alike, so that every layer learns from the first step on


# -- choosing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [2, 5])
def test_the_deterministic_mode_takes_the_likeliest_and_draws_nothing(slots):
    net, states = build(slots, sharpness=100), torch.randn(200, 1, STATE_DIM)
    masks = joint_masks(200, 1, slots=slots)
    choices, *_ = net.get_action(states, **as_arguments(masks), deterministic=True)
    torch.manual_seed(77)
    before = torch.get_rng_state()
    again, *_ = net.get_action(states, **as_arguments(masks), deterministic=True)
    assert torch.equal(torch.get_rng_state(), before)
    said = net(states, **as_arguments(masks))
    is_planted = choices["op"] == OP_GERMINATE
    used = {
        "op": choices["op"] >= 0,
        "slot": choices["op"] != OP_WAIT,
        "blueprint": is_planted,
        "blend": is_planted,
    }
    for head in HEADS:
        assert torch.equal(choices[head], again[head])
        assert used[head].any()
        assert torch.equal(
            choices[head], torch.where(used[head], said[f"{head}_logits"].argmax(-1), 0)
        )


@pytest.mark.parametrize("op", LifecycleOp)
def test_what_one_host_chose_is_an_action_in_words_as_it_is(op):
    op_mask = torch.arange(NUM_OPS)[None] == op
    choices, *_ = build().get_action(torch.randn(1, STATE_DIM), op_mask=op_mask)
    action = FactoredAction.from_indices(
        choices["slot"], choices["blueprint"], choices["blend"], choices["op"]
    )
    assert action.op is op
    assert action.slot_idx == int(choices["slot"])


@pytest.mark.parametrize("slots", [2, 5])
def test_draws_differ_but_repeat_with_the_generator(slots):
    net, states = build(slots), torch.randn(200, STATE_DIM)
    one, two, three = (
        net.get_action(states, generator=torch.Generator().manual_seed(seed))[0]
        for seed in (1, 1, 2)
    )
    for head in HEADS:
        assert torch.equal(one[head], two[head])
        assert not torch.equal(one[head], three[head])


@pytest.mark.parametrize("slots", [2, 5])
def test_everything_that_is_possible_is_drawn_sooner_or_later(slots):
    choices, *_ = build(slots).get_action(torch.randn(4000, STATE_DIM))
    for head, size in sizes(slots).items():
        used = choices[head] if head == "op" else choices[head][choices["op"] == OP_GERMINATE]
        assert used.unique().tolist() == list(range(size))


def test_heads_that_the_op_does_not_use_choose_0_with_certainty():
    net = build(4)
    choices, log_probs, *_ = net.get_action(torch.randn(500, STATE_DIM))
    unused = {"slot": choices["op"] == OP_WAIT}
    unused["blueprint"] = unused["blend"] = choices["op"] != OP_GERMINATE
    for head, rows in unused.items():
        assert rows.any()
        assert (choices[head][rows] == 0).all()
        assert (log_probs[head][rows] == 0).all()
        assert (log_probs[head][~rows] < 0).all()


@pytest.mark.parametrize(
    ("waits", "asked"), [([True] * 3, 1), ([True, False, True], 4), ([False] * 3, 4)]
)
def test_heads_that_nobody_uses_are_not_asked_and_the_decision_is_the_same(
    waits, asked, monkeypatch
):
    net, cases, real = build(3), [], FactoredRecurrentActorCritic._case
    masks, waits = joint_masks(HOSTS, slots=3), torch.tensor(waits)
    masks["op"] = F.one_hot(torch.where(waits, OP_WAIT, OP_GERMINATE), NUM_OPS).bool()
    states, noise = torch.randn(HOSTS, STATE_DIM), torch.rand(HOSTS, len(HEADS), 16)
    monkeypatch.setattr(
        FactoredRecurrentActorCritic, "_case", lambda *all: (cases.append(None), real(*all))[1]
    )
    choices, log_probs, _, _ = net.get_action(states, None, masks, noise=noise)
    assert len(cases) == asked
    stored, given = (
        {head: found[:, None] for head, found in each.items()} for each in (choices, masks)
    )
    judged = net.evaluate_actions(states[:, None], stored, given, net.get_initial_hidden(HOSTS))
    for head in HEADS:
        assert torch.allclose(log_probs[head], judged.log_probs[head][:, 0], atol=1e-6)
        assert head == "op" or choices[head][waits].eq(0).all()
    drawn = torch.Generator().manual_seed(0)
    net.get_action(states, None, masks, generator=drawn)
    own = torch.Generator().manual_seed(0)
    for size in sizes(3).values():
        torch.rand(HOSTS, size, generator=own)
    assert torch.equal(
        drawn.get_state(), own.get_state()
    )  # from a shared stream every head draws, whoever uses it


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [2, 5])
def test_two_steps_in_turn_equal_one_sequence_of_two(slots):
    net, states = build(slots, sharpness=50), torch.randn(6, 2, STATE_DIM)
    masks = joint_masks(6, 2, slots=slots)
    whole = net.get_action(states, **as_arguments(masks), deterministic=True)
    hidden = None
    for step in range(2):
        *found, hidden = net.get_action(
            states[:, step], hidden, **as_arguments(at(step, masks)), deterministic=True
        )
        for head in HEADS:
            assert torch.equal(found[0][head], whole[0][head][:, step])
            torch.testing.assert_close(found[1][head], whole[1][head][:, step], rtol=0, atol=1e-5)
        torch.testing.assert_close(found[2], whole[2][:, step], rtol=0, atol=1e-5)
    torch.testing.assert_close(hidden, whole[3], rtol=0, atol=1e-6)


@pytest.mark.parametrize("slots", [2, 5])
def test_the_past_matters_until_the_state_is_reset(slots):
    net, states = build(slots), torch.randn(6, STATE_DIM)
    fresh = net.look(states, net.get_initial_hidden(6))
    _, _, _, hidden = net.get_action(torch.randn(6, STATE_DIM))
    assert not torch.isclose(net.look(states, hidden), fresh).any()
    assert torch.equal(net.look(states, net.get_initial_hidden(6)), fresh)
    assert all((part == 0).all() for part in net.get_initial_hidden(6))


def test_a_beginning_inside_a_row_equals_two_rows():
    net, states, masks = build(), torch.randn(5, 9, STATE_DIM), joint_masks(5, 9)
    starts = torch.zeros(5, 9, dtype=torch.bool)
    starts[:, 4] = True
    choices, *_ = live(net, states, masks, starts)
    whole = net.evaluate_actions(states, choices, masks, net.get_initial_hidden(5), starts)
    for part in (slice(0, 4), slice(4, 9)):
        apart = net.evaluate_actions(
            states[:, part],
            {head: choice[:, part] for head, choice in choices.items()},
            {head: mask[:, part] for head, mask in masks.items()},
            net.get_initial_hidden(5),
        )
        torch.testing.assert_close(whole.values[:, part], apart.values, rtol=0, atol=1e-6)
        for head in HEADS:
            torch.testing.assert_close(
                whole.log_probs[head][:, part], apart.log_probs[head], rtol=0, atol=1e-6
            )
            torch.testing.assert_close(
                whole.entropy[head][:, part], apart.entropy[head], rtol=0, atol=1e-6
            )
    torch.testing.assert_close(whole.hidden, apart.hidden, rtol=0, atol=1e-6)


def test_what_came_before_a_beginning_reaches_nothing_after_it():
    net, states, masks = build(sharpness=30), torch.randn(4, 8, STATE_DIM), joint_masks(4, 8)
    starts = torch.zeros(4, 8, dtype=torch.bool)
    starts[:, 3] = True
    choices, *_ = live(net, states, masks, starts)
    hidden = net.get_initial_hidden(4)
    disturbed = states.clone()
    disturbed[:, :3] += torch.randn(4, 3, STATE_DIM)
    one, other = (
        net.evaluate_actions(seen, choices, masks, hidden, starts) for seen in (states, disturbed)
    )
    assert not torch.equal(one.values[:, :3], other.values[:, :3])
    assert torch.equal(one.values[:, 3:], other.values[:, 3:])
    for head in HEADS:
        assert torch.equal(one.log_probs[head][:, 3:], other.log_probs[head][:, 3:])
        assert torch.equal(one.entropy[head][:, 3:], other.entropy[head][:, 3:])
    assert torch.equal(one.hidden[0], other.hidden[0])


def test_looking_ahead_does_not_move_the_state():
    net, states = build(), torch.randn(6, STATE_DIM)
    _, _, _, hidden = net.get_action(torch.randn(6, STATE_DIM))
    before = [part.clone() for part in hidden]
    values = net.look(states, hidden)
    assert all(torch.equal(part, kept) for part, kept in zip(hidden, before, strict=True))
    _, _, expected, _ = net.get_action(states, hidden)
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-6)


def test_following_gives_the_state_that_acting_ends_with():
    net, states, masks = build(), torch.randn(4, 7, STATE_DIM), joint_masks(4, 7)
    starts = torch.rand(4, 7) < 0.3
    begin = tuple(torch.randn_like(part) for part in net.get_initial_hidden(4))
    *_, hidden = live(net, states, masks, starts, begin)
    torch.testing.assert_close(net.follow(states, begin, starts), hidden, rtol=0, atol=1e-6)


def test_rows_without_a_state_begin_episodes():
    net, states = build(), torch.randn(2, 3, STATE_DIM)
    choices, *_ = net.get_action(states)
    begun = net.evaluate_actions(states, choices, hidden=net.get_initial_hidden(2))
    said = net.evaluate_actions(states, choices)
    assert torch.equal(said.values, begun.values)
    assert all(torch.equal(said.log_probs[head], begun.log_probs[head]) for head in HEADS)


def test_the_first_state_lies_on_the_device_that_is_named():
    net = build()
    here = net.get_initial_hidden(4)
    there = net.get_initial_hidden(4, torch.device("meta"))
    assert [part.device.type for part in (*here, *there)] == ["cpu", "cpu", "meta", "meta"]
    assert {part.shape for part in (*here, *there)} == {(1, 4, net.memory_width)}


def test_masks_by_argument_are_masks_by_head_and_no_others():
    net, states, masks = build(), torch.randn(6, STATE_DIM), joint_masks(6)
    by_head = net.get_action(states, None, masks, deterministic=True)
    by_argument = net.get_action(states, **as_arguments(masks), deterministic=True)
    mixed = {"op_mask": masks["op"], "blend_mask": None}
    some = net.get_action(states, None, {"slot": masks["slot"]}, True, **mixed)
    only = {"op": masks["op"], "slot": masks["slot"]}
    assert all(torch.equal(by_head.choices[h], by_argument.choices[h]) for h in HEADS)
    expected = net.get_action(states, None, only, True)
    assert all(torch.equal(some.choices[h], expected.choices[h]) for h in HEADS)
    with pytest.raises(UnknownNameError, match=r"'slots_mask'\. Did you mean 'slot_mask'"):
        net.get_action(states, slots_mask=masks["slot"])


# -- training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [2, 5])
@pytest.mark.parametrize(
    ("part", "apart"),
    [
        ("log_probs", "value_head"),
        ("entropy", "value_head"),
        ("values", ("policy_heads", "questions")),
    ],
)
def test_gradients_reach_every_parameter(slots, part, apart):
    """Log-probabilities, entropy and values each teach all that they are made of; together that is
    everything.
    """
    net, states = build(slots), torch.randn(16, 5, STATE_DIM)
    masks = joint_masks(16, 5, slots=slots)
    choices, *_ = net.get_action(states, **as_arguments(masks))
    log_probs, values, entropy, _ = net.evaluate_actions(
        states, choices, **as_arguments(masks), hidden=net.get_initial_hidden(16)
    )
    parts = {
        "log_probs": sum(log_probs.values()),
        "entropy": sum(entropy.values()),
        "values": values.square(),
    }
    parts[part].sum().backward()
    for name, parameter in net.named_parameters():
        if name.startswith(apart):
            assert parameter.grad is None, name
        else:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            assert (parameter.grad != 0).any(), name


@pytest.mark.parametrize("slots", [2, 5])
def test_a_minimal_training_loop_lowers_its_loss(slots):
    net, states = build(slots), torch.randn(12, 6, STATE_DIM)
    masks = joint_masks(12, 6, slots=slots)
    wanted, *_ = net.get_action(states, **as_arguments(masks))
    returns = torch.randn(12, 6)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(25):
        log_probs, values, _, _ = net.evaluate_actions(
            states, wanted, **as_arguments(masks), hidden=net.get_initial_hidden(12)
        )
        loss = F.mse_loss(values, returns) - sum(log_probs.values()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
