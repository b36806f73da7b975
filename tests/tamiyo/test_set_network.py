"""The growth policy reads sets:

no number of slots or blueprints is in its weights, and their order and padding change nothing.
"""

import pytest
import torch

from esper.leyline.errors import SettingError
from esper.leyline.factored_actions import NUM_OPS, OP_GERMINATE, OP_WAIT
from esper.tamiyo.layout import BASE_ROW, BLUEPRINT_ROW, PAIR_ROW, SLOT_ROW, ObservationLayout
from esper.tamiyo.masks import pad_masks
from esper.tamiyo.network import FactoredRecurrentActorCritic
from tamiyo.policy_cases import HEADS, joint_masks, live, ratios, sharpen

ROWS = (BASE_ROW, SLOT_ROW, BLUEPRINT_ROW, PAIR_ROW)
HOSTS, STEPS = 4, 6


def build(layout, blends=("linear", "sigmoid", "gated"), seed=0, sharpness=30.0):
    torch.manual_seed(seed)
    net = FactoredRecurrentActorCritic(
        layout.width, layout.num_slots, hidden_dim=32, head_dim=16, layout=layout, blends=blends
    )
    net = sharpen(net, sharpness)
    net.observation_stats.update(observations(50, layout, seed=9))
    return net


def rows_of(row, *shape, draw):
    """Random rows of a kind: absent numbers are 0 with their flag."""
    numbers = torch.randn(*shape, len(row.numbers), generator=draw)
    rest = len(row.optional) + len(row.switches)
    flags = (torch.rand(*shape, rest, generator=draw) < 0.7).float()
    flags[..., len(row.optional)] = 1.0  # the row is there
    whole = torch.cat([numbers, flags], -1)
    whole[..., : len(row.numbers)] *= row.presence(whole)
    return whole


def parts_of(lead, layout, seed=0):
    draw = torch.Generator().manual_seed(seed)
    lead = (lead,) if isinstance(lead, int) else lead
    slots, blueprints = layout.num_slots, layout.num_blueprints
    shapes = ((), (slots,), (blueprints,), (slots, blueprints))
    return [rows_of(row, *lead, *shape, draw=draw) for row, shape in zip(ROWS, shapes, strict=True)]


def joined(parts, lead):
    lead = (lead,) if isinstance(lead, int) else lead
    return torch.cat([part.reshape(*lead, -1) for part in parts], -1)


def observations(lead, layout, seed=0):
    return joined(parts_of(lead, layout, seed), lead)


def logits_of(net, states, masks):
    """Log-probabilities of every choice of each head in every case, and values."""
    hidden = net.get_initial_hidden(len(states))
    features, _ = net._features(states, hidden, None)
    rows = type(features)(*(part.flatten(0, 1) for part in features))
    flat = {name: mask.flatten(0, 1) for name, mask in masks.items()}
    return [net._cases(index, rows, flat)[0] for index in range(4)], net._values(features)


# -- order -----------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("slots", [2, 3, 8])
def test_a_permutation_of_slots_permutes_the_answer(slots):
    layout = ObservationLayout(slots, 5)
    net = build(layout, sharpness=300)
    lead = (HOSTS, STEPS)
    base, of_slots, of_blueprints, pairs = parts_of(lead, layout)
    masks = joint_masks(*lead, slots=slots, blueprints=5)
    order = torch.arange(slots).roll(1)
    turned = [base, of_slots[:, :, order], of_blueprints, pairs[:, :, order]]
    masks["slot"][..., OP_WAIT, :] = True  # index 0 stands for "none": it is no slot
    turned_masks = {
        **masks,
        "slot": masks["slot"][..., order],
        "blueprint": masks["blueprint"][..., order, :],
    }
    plain, values = logits_of(net, joined([base, of_slots, of_blueprints, pairs], lead), masks)
    other, other_values = logits_of(net, joined(turned, lead), turned_masks)
    expected = [plain[0], plain[1][..., order], plain[2][:, :, order], plain[3][:, :, order]]
    for head, here, there in zip(HEADS, other, expected, strict=True):
        is_open = there > -1e30
        assert torch.equal(here > -1e30, is_open)
        assert (here.exp() - there.exp()).abs().max() <= 1e-6, head
    torch.testing.assert_close(values, other_values, rtol=0, atol=2e-6)
    assert (plain[1].exp() - other[1].exp()).abs().max() > 0.01, "the order does matter to indices"


@torch.no_grad()
def test_a_permutation_of_blueprints_permutes_the_answer():
    layout = ObservationLayout(2, 7)
    net = build(layout)
    lead = (HOSTS, STEPS)
    base, of_slots, of_blueprints, pairs = parts_of(lead, layout)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(3))
    plain, values = logits_of(net, joined([base, of_slots, of_blueprints, pairs], lead), {})
    turned = [base, of_slots, of_blueprints[:, :, order], pairs[:, :, :, order]]
    other, other_values = logits_of(net, joined(turned, lead), {})
    expected = [plain[0], plain[1], plain[2][..., order], plain[3][:, :, :, order]]
    for here, there in zip(other, expected, strict=True):
        assert (here.exp() - there.exp()).abs().max() <= 1e-6
    torch.testing.assert_close(values, other_values, rtol=0, atol=2e-6)


# -- any number ------------------------------------------------------------------------------------


def test_no_weight_knows_how_many_slots_blueprints_or_blends_there_are():
    shapes = []
    for slots, blueprints, blends in ((1, 2, ("gated",)), (32, 15, ("linear", "sigmoid", "gated"))):
        net = build(ObservationLayout(slots, blueprints), blends)
        shapes.append({name: value.shape for name, value in net.state_dict().items()})
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("slots", [1, 2, 5, 8, 32])
@pytest.mark.parametrize(
    ("blueprints", "blends"), [(2, ("linear",)), (9, ("linear", "gated")), (15, ("sigmoid",))]
)
def test_one_set_of_weights_plays_any_slots_blueprints_and_blends(slots, blueprints, blends):
    taught = build(ObservationLayout(5, 4))
    layout = ObservationLayout(slots, blueprints)
    net = taught.for_space(layout, blends)
    assert net.num_slots == slots
    assert net.spec.sizes == (NUM_OPS, slots, blueprints, len(blends))
    lead = (2, 3)
    masks = joint_masks(*lead, slots=slots, blueprints=blueprints, blends=len(blends))
    choices, log_probs, *_ = live(net, observations(lead, layout), masks)
    judged = net.evaluate_actions(observations(lead, layout), choices, masks)
    assert max(ratios(judged.log_probs, log_probs).values()) <= 1e-6
    own, shared = dict(net.named_parameters()), dict(taught.named_parameters())
    assert all(own[name] is shared[name] for name in shared)


def test_blends_are_known_by_their_names():
    layout = ObservationLayout(2, 4)
    net = build(layout)
    states = observations((1, 1), layout)
    every, _ = logits_of(net, states, {})
    some, _ = logits_of(net.for_space(layout, ("linear", "gated")), states, {})
    ratio = every[3][..., 0] - every[3][..., 2]
    torch.testing.assert_close(some[3][..., 0] - some[3][..., 1], ratio, atol=1e-5, rtol=0)
    with pytest.raises(SettingError, match=r"blends are \['slow'\]"):
        net.for_space(layout, ("slow",))


def test_features_of_another_kind_are_refused():
    plain = FactoredRecurrentActorCritic(80, 3)
    with pytest.raises(SettingError, match="base features of this policy are others"):
        plain.for_space(ObservationLayout(3, 4), ("linear",))


# -- padding ---------------------------------------------------------------------------------------


@torch.no_grad()
def test_padding_changes_nothing_in_what_is_decided_and_judged():
    narrow, wide = ObservationLayout(2, 4), ObservationLayout(6, 9)
    net = build(narrow)
    lead = (HOSTS, STEPS)
    base, of_slots, of_blueprints, pairs = parts_of(lead, narrow)
    masks = joint_masks(*lead, slots=2, blueprints=4)
    padded = [
        base,
        torch.nn.functional.pad(of_slots, (0, 0, 0, 4)),
        torch.nn.functional.pad(of_blueprints, (0, 0, 0, 5)),
        torch.nn.functional.pad(pairs, (0, 0, 0, 5, 0, 4)),
    ]
    flat = {name: mask.flatten(0, 1).numpy() for name, mask in masks.items()}
    padded_masks = {
        name: torch.as_tensor(mask).unflatten(0, lead)
        for name, mask in pad_masks(flat, wide).items()
    }
    states = joined([base, of_slots, of_blueprints, pairs], lead)
    starts = torch.rand(*lead, generator=torch.Generator().manual_seed(1)) < 0.3
    draw = torch.Generator().manual_seed(2)
    choices, log_probs, values, _ = live(net, states, masks, starts, generator=draw)
    other = net.for_space(wide, net.blends)
    told = other.evaluate_actions(joined(padded, lead), choices, padded_masks, starts=starts)
    plain = net.evaluate_actions(states, choices, masks, starts=starts)
    for head in HEADS:
        assert (told.log_probs[head] - plain.log_probs[head]).abs().max() <= 1e-6, head
        assert (told.entropy[head] - plain.entropy[head]).abs().max() <= 1e-6, head
        assert (told.log_probs[head] - log_probs[head]).abs().max() <= 1e-6, head
    torch.testing.assert_close(told.values, values, rtol=0, atol=2e-6)
    greedy, _, _, _ = other.get_action(joined(padded, lead), None, padded_masks, True)
    expected, _, _, _ = net.get_action(states, None, masks, True)
    assert all(torch.equal(greedy[head], expected[head]) for head in HEADS)


def test_padding_changes_no_statistics():
    narrow, wide = ObservationLayout(2, 4), ObservationLayout(6, 9)
    parts = parts_of(30, narrow, seed=4)
    padded = [
        parts[0],
        torch.nn.functional.pad(parts[1], (0, 0, 0, 4)),
        torch.nn.functional.pad(parts[2], (0, 0, 0, 5)),
        torch.nn.functional.pad(parts[3], (0, 0, 0, 5, 0, 4)),
    ]
    stats = []
    for layout, states in ((narrow, joined(parts, 30)), (wide, joined(padded, 30))):
        net = build(layout)
        for name in ("mean", "var", "counts", "count"):
            getattr(net.observation_stats, name).zero_()
        net.observation_stats.update(states)
        stats.append(net.observation_stats)
    for name in ("mean", "var", "counts"):
        torch.testing.assert_close(getattr(stats[0], name), getattr(stats[1], name))


def test_statistics_are_of_what_was_there_whatever_the_parts():
    layout = ObservationLayout(3, 4)
    states = observations(90, layout, seed=5)
    whole, parts = build(layout).observation_stats, build(layout).observation_stats
    for stats in (whole, parts):
        for name in ("mean", "var", "counts", "count"):
            getattr(stats, name).zero_()
    whole.update(states)
    for part in states.split([10, 0, 50, 30]):
        parts.update(part)
    assert whole.count == parts.count == 90
    for name in ("mean", "var", "counts"):
        torch.testing.assert_close(getattr(whole, name), getattr(parts, name))
    slots = layout.split(states).slots.double()
    place = SLOT_ROW.numbers.index("contribution")
    is_there = slots[..., len(SLOT_ROW.numbers) + SLOT_ROW.optional.index("contribution")] > 0
    column = len(BASE_ROW.numbers) + place
    assert whole.counts[column] == is_there.sum()
    torch.testing.assert_close(whole.mean[column], slots[..., place][is_there].mean())
    torch.testing.assert_close(whole.var[column], slots[..., place][is_there].var(unbiased=False))


def test_what_is_absent_is_zero_after_normalising_and_flags_stay():
    layout = ObservationLayout(2, 4)
    net = build(layout)
    states = observations(40, layout, seed=6)
    before, after = layout.split(states), net.observation_stats.normalised(states)
    for row, raw, normalised in zip(ROWS, before, after, strict=True):
        count = len(row.numbers)
        is_absent = row.presence(raw) == 0
        assert is_absent.any()
        assert not normalised[..., :count][is_absent].any()
        assert torch.equal(normalised[..., count:], raw[..., count:])
        assert not torch.equal(normalised[..., :count], raw[..., :count])


# -- what a choice depends on ----------------------------------------------------------------------


@torch.no_grad()
def test_each_head_reads_what_it_chooses_among():
    layout = ObservationLayout(3, 4)
    net = build(layout)
    parts = parts_of((1, 1), layout)
    plain, _ = logits_of(net, joined(parts, (1, 1)), {})

    def changed(part, index, column):
        other = [each.clone() for each in parts]
        other[part][(0, 0, *index, column)] += 1
        return logits_of(net, joined(other, (1, 1)), {})[0]

    blueprint = changed(2, (2,), BLUEPRINT_ROW.numbers.index("depth"))
    assert torch.equal(blueprint[0], plain[0])
    assert torch.equal(blueprint[1], plain[1])
    assert not torch.isclose(blueprint[2], plain[2]).any()
    price = changed(3, (1, 2), PAIR_ROW.numbers.index("size"))
    assert not torch.isclose(price[2][:, :, 1], plain[2][:, :, 1]).any()
    assert torch.equal(price[2][:, :, 0], plain[2][:, :, 0])
    slot = changed(1, (0,), SLOT_ROW.numbers.index("place"))
    assert not torch.isclose(slot[0], plain[0]).any()
    assert not torch.isclose(slot[1], plain[1]).any()


@torch.no_grad()
def test_a_slot_remembers_its_own_past():
    """The same present and the same pasts in other slots: the answer follows the pasts."""
    layout = ObservationLayout(2, 4)
    net = build(layout, sharpness=100)
    base, slots, blueprints, pairs = parts_of((1, 4), layout)
    slots[:, -1, 1] = slots[:, -1, 0]
    pairs[:, :, 1] = pairs[:, :, 0]
    told, _ = logits_of(net, joined([base, slots, blueprints, pairs], (1, 4)), {})
    last = told[1][-1, OP_GERMINATE - 1].exp()
    assert (last[0] - last[1]).abs() > 1e-3


def test_a_file_of_the_usual_width_is_below_three_megabytes():
    layout = ObservationLayout(2, 4)
    net = FactoredRecurrentActorCritic(layout.width, 2, layout=layout)
    size = sum(value.numel() * value.element_size() for value in net.state_dict().values())
    assert size < 1_000_000
