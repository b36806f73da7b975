"""What a decision earns:

the sign of every term, no profit from going round in circles, telescoping, bounds, scale.
"""

import math
from dataclasses import fields, replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from esper.leyline.errors import MeasurementError, SettingError, UnknownNameError
from esper.leyline.factored_actions import OP_CULL, OP_FOSSILIZE, OP_GERMINATE, OP_WAIT
from esper.simic.rewards import (
    BOUND,
    FAMILIES,
    TERMS,
    StepFacts,
    accuracy_beyond_twin,
    breakdown,
    check_weights,
    churn,
    contribution,
    harm,
    lasting_accuracy,
    lasting_loss,
    loss_beyond_twin,
    rent,
    reward_parts,
    share_out,
    weights_of,
)

STILL = StepFacts(
    accuracy=0.5,
    accuracy_before=0.5,
    twin_accuracy=0.5,
    twin_accuracy_before=0.5,
    loss=1.0,
    loss_before=1.0,
    twin_loss=1.0,
    twin_loss_before=1.0,
    loss_unit=0.5,
    op=OP_WAIT,
    params_share=0.0,
    flops_share=0.0,
    kept_share=0.0,
    is_last=False,
)
"""An epoch in which nothing happened."""
BEYOND = {accuracy_beyond_twin: "accuracy", loss_beyond_twin: "loss"}
LASTING = (lasting_accuracy, lasting_loss)
every_family = pytest.mark.parametrize("family", FAMILIES)
PRICED = [family for family in FAMILIES if family != "compute"]
"""families in which size and going round in circles have a price; with clock compute both are paid
for in steps
"""
every_priced_family = pytest.mark.parametrize("family", PRICED)

accuracies = st.integers(0, 256).map(lambda count: count / 256)
"""On a grid on which sums are exact, so that signs are too."""
losses = st.integers(0, 4096).map(lambda count: count / 512)
shares = st.floats(0, 20)
leads = st.integers(-320, 320).map(lambda count: count / 64)
"""In units of loss, within the bound."""
worths = st.fixed_dictionaries({"r0c0": leads, "r0c1": leads, "r0c2": leads})
ops = st.sampled_from([OP_WAIT, OP_GERMINATE, OP_CULL, OP_FOSSILIZE])


@st.composite
def epochs(draw):
    """Any epoch of any host."""
    is_lost = draw(st.booleans())
    return StepFacts(
        *(draw(accuracies) for _ in range(4)),
        *(draw(losses) for _ in range(4)),
        loss_unit=draw(st.sampled_from([0.125, 0.5, 1.0, 2.0])),
        op=draw(ops),
        params_share=draw(shares),
        flops_share=draw(shares),
        kept_share=draw(st.floats(0, 1)),
        is_last=is_lost or draw(st.booleans()),
        is_rolled_back=is_lost or draw(st.booleans()),
        is_lost=is_lost,
        contributions=draw(worths),
        contributions_before=draw(worths),
        lead=draw(leads),
        lead_before=draw(leads),
        gamma=draw(st.sampled_from([0.9, 0.99, 1.0])),
    )


# -- signs -----------------------------------------------------------------------------------------


@given(epochs())
def test_getting_ahead_of_the_twin_is_never_punished_and_falling_behind_never_rewarded(facts):
    gain, twin_gain = (
        facts.accuracy - facts.accuracy_before,
        facts.twin_accuracy - facts.twin_accuracy_before,
    )
    assert (
        math.copysign(1, accuracy_beyond_twin(facts)) == math.copysign(1, gain - twin_gain)
        or gain == twin_gain
    )
    fall, twin_fall = facts.loss_before - facts.loss, facts.twin_loss_before - facts.twin_loss
    assert loss_beyond_twin(facts) * (fall - twin_fall) >= 0.0


@given(epochs())
def test_keeping_pace_with_the_twin_earns_exactly_nothing(facts):
    abreast = replace(
        facts,
        accuracy=facts.twin_accuracy,
        accuracy_before=facts.twin_accuracy_before,
        loss=facts.twin_loss,
        loss_before=facts.twin_loss_before,
    )
    assert [term(abreast) for term in (*BEYOND, *LASTING)] == [0.0] * 4


def test_what_an_epoch_earns_in_numbers():
    better = replace(STILL, accuracy=0.75, twin_accuracy=0.625, loss=0.5, twin_loss=0.75)
    assert (accuracy_beyond_twin(better), loss_beyond_twin(better)) == (0.125, 0.5)
    worse = replace(STILL, accuracy=0.5, twin_accuracy=0.625, loss=1.0, twin_loss=0.75)
    assert (accuracy_beyond_twin(worse), loss_beyond_twin(worse)) == (-0.125, -0.5)


@given(epochs())
def test_rent_churn_and_breakdown_are_never_positive_and_what_lasts_never_negative(facts):
    assert max(term(facts) for term in (rent, churn, breakdown)) <= 0.0
    assert min(term(facts) for term in LASTING) >= 0.0


@given(epochs(), st.floats(0.01, 5))
def test_more_parameters_or_more_flops_cost_more_rent(facts, more):
    assert rent(replace(facts, params_share=facts.params_share + more)) < rent(facts)
    assert rent(replace(facts, flops_share=facts.flops_share + more)) < rent(facts)


def test_a_network_as_large_as_two_hosts_pays_one_rent():
    assert rent(replace(STILL, params_share=1.0, flops_share=1.0)) == -1.0


@pytest.mark.parametrize(
    ("op", "price"), [(OP_WAIT, 0.0), (OP_GERMINATE, -1.0), (OP_CULL, -1.0), (OP_FOSSILIZE, 0.0)]
)
def test_planting_and_culling_cost_and_keeping_is_free(op, price):
    assert churn(replace(STILL, op=op)) == price


@pytest.mark.parametrize(
    ("brought_back", "lost", "fine"),
    [(False, False, 0.0), (True, False, -1.0), (True, True, -10.0)],
)
def test_a_rollback_is_fined_and_being_given_up_ten_times_as_much(brought_back, lost, fine):
    assert breakdown(replace(STILL, is_rolled_back=brought_back, is_lost=lost)) == fine


# -- what lasts ------------------------------------------------------------------------------------

AHEAD = replace(STILL, accuracy=0.75, loss=0.5, kept_share=0.5, is_last=True)


def test_what_lasts_is_the_lead_as_far_as_it_rests_on_fossils():
    assert (lasting_accuracy(AHEAD), lasting_loss(AHEAD)) == (0.125, 0.5)
    whole = replace(AHEAD, kept_share=1.0)
    assert (lasting_accuracy(whole), lasting_loss(whole)) == (0.25, 1.0)


@pytest.mark.parametrize(
    "change",
    [{"is_last": False}, {"kept_share": 0.0}, {"accuracy": 0.25, "loss": 1.5}, {"is_lost": True}],
    ids=["before the end", "nothing kept", "behind the twin", "given up"],
)
def test_nothing_lasts(change):
    assert [term(replace(AHEAD, **change)) for term in LASTING] == [0.0, 0.0]


# -- contribution ----------------------------------------------------------------------------------


@given(worths, leads)
def test_slots_are_never_paid_more_than_the_lead_and_a_network_behind_pays_for_all_of_it(
    contributions, lead
):
    pays = share_out(contributions, lead)
    assert pays.total <= lead + 1e-12
    assert sum(pay for pay in pays.by_slot.values() if pay > 0) <= max(0.0, lead) + 1e-12
    assert pays.harm <= 0.0
    for slot_id, worth in contributions.items():
        pay = pays.by_slot[slot_id]
        assert pay == worth if worth < 0 else 0.0 <= pay <= worth


@given(worths, leads, leads)
def test_a_larger_lead_never_pays_less(contributions, lead, other):
    low, high = sorted([lead, other])
    assert share_out(contributions, low).total <= share_out(contributions, high).total + 1e-12


@pytest.mark.parametrize(
    ("contributions", "lead", "paid", "harm_paid"),
    [
        ({"a": 1.0, "b": 1.0}, 4.0, [1.0, 1.0], 0.0),  # all is paid; the rest of the lead is luck
        ({"a": 3.0, "b": 3.0}, 3.0, [1.5, 1.5], 0.0),  # each claims the whole lead
        ({"a": 2.0, "b": 0.0}, -1.0, [0.0, 0.0], -1.0),  # the host merely depends on it
        ({"a": 2.0, "b": -1.0}, 1.0, [1.0, -1.0], 0.0),
        ({"a": 0.0, "b": -1.0}, -3.0, [0.0, -1.0], -2.0),
        ({"a": 0.0, "b": -3.0}, -1.0, [0.0, -3.0], 0.0),
        ({"a": 0.0, "b": 0.0}, 2.0, [0.0, 0.0], 0.0),  # ahead of the twin, but not by what grew
    ],
)
def test_what_slots_are_paid_in_numbers(contributions, lead, paid, harm_paid):
    pays = share_out(contributions, lead)
    assert (list(pays.by_slot.values()), pays.harm) == (paid, harm_paid)


def change_of(contributions, before, lead, lead_before, **more):
    """What slot a and the harm are paid in an epoch."""
    facts = replace(
        STILL,
        contributions={"a": contributions},
        contributions_before={"a": before},
        lead=lead,
        lead_before=lead_before,
        gamma=0.5,
        **more,
    )
    return contribution(facts)["a"], harm(facts)


def test_paid_is_the_discounted_change_and_at_the_end_all_that_is_left():
    assert change_of(2.0, 1.0, 3.0, 3.0) == (0.0, 0.0)
    assert change_of(2.0, 0.0, 3.0, 0.0) == (1.0, 0.0)
    assert change_of(2.0, 1.0, 3.0, 3.0, is_last=True) == (1.0, 0.0)
    assert change_of(0.0, 1.0, 0.0, 3.0) == (-1.0, 0.0)  # culled: the network that is left
    assert change_of(0.0, 0.0, -2.0, 0.0, is_last=True) == (0.0, -2.0)


def test_the_lead_of_a_host_that_is_given_up_is_not_paid():
    assert change_of(2.0, 1.0, 3.0, 3.0, is_last=True, is_lost=True) == (-1.0, 0.0)
    assert change_of(-2.0, 0.0, 3.0, 3.0, is_last=True, is_lost=True) == (-2.0, 0.0)


@given(st.lists(st.tuples(worths, leads), min_size=1, max_size=6), st.sampled_from([0.9, 1.0]))
def test_discounted_pay_adds_up_to_what_is_left_at_the_end(network, gamma):
    """Readings on the way bring it forward; they change nothing in the sum."""
    nothing = dict.fromkeys(network[0][0], 0.0)
    before = (nothing, 0.0)
    total = 0.0
    for number, (contributions, lead) in enumerate(network):
        facts = replace(
            STILL,
            contributions=contributions,
            contributions_before=before[0],
            lead=lead,
            lead_before=before[1],
            gamma=gamma,
            is_last=number == len(network) - 1,
        )
        total += gamma**number * (sum(contribution(facts).values()) + harm(facts))
        before = (contributions, lead)
    last = gamma ** (len(network) - 1) * share_out(*network[-1]).total
    assert total == pytest.approx(last, abs=1e-9)


# -- circles ---------------------------------------------------------------------------------------


@st.composite
def episodes(draw):
    """An episode of a host that waits:

    its readings beside its twin's, from an equal start, with or without fossils.
    """
    length = draw(st.integers(3, 8))
    rows = [draw(st.tuples(accuracies, accuracies, losses, losses)) for _ in range(length)]
    start = draw(accuracies), draw(losses)
    readings = [(start[0], start[0], start[1], start[1]), *rows]
    size, unit = draw(st.sampled_from([0.0, 0.5, 2.0])), draw(st.sampled_from([0.125, 1.0]))
    return [
        StepFacts(
            accuracy=now[0],
            accuracy_before=before[0],
            twin_accuracy=now[1],
            twin_accuracy_before=before[1],
            loss=now[2],
            loss_before=before[2],
            twin_loss=now[3],
            twin_loss_before=before[3],
            loss_unit=unit,
            op=OP_WAIT,
            params_share=size,
            flops_share=size,
            kept_share=float(size > 0),
            is_last=place == length,
        )
        for place, (before, now) in enumerate(pairwise(readings), 1)
    ]


def circle(episode, start, end, size):
    """The same readings with a seed that is planted at `start` and culled at `end`, or is still
    there at the end.
    """
    changed = list(episode)
    for place in range(start, min(end, len(episode))):
        fossils = episode[place].params_share
        changed[place] = replace(
            changed[place],
            op=OP_GERMINATE if place == start else OP_WAIT,
            params_share=fossils + size,
            flops_share=fossils + size,
            kept_share=fossils / (fossils + size),
        )
    if end < len(episode):
        changed[end] = replace(changed[end], op=OP_CULL)
    return changed


def total(episode, family):
    return sum(sum(reward_parts(facts, FAMILIES[family]).values()) for facts in episode)


@every_priced_family
@given(episodes(), st.integers(0, 6), st.integers(1, 6), st.floats(0.01, 5))
def test_a_germinate_cull_cycle_earns_less_than_waiting_on_the_same_readings(
    family, episode, start, length, size
):
    assume(start < len(episode))
    assert total(circle(episode, start, start + length, size), family) < total(episode, family)


# -- telescoping, bounds, scale --------------------------------------------------------------------


@given(episodes())
def test_what_is_won_beyond_the_twin_adds_up_to_the_final_lead(episode):
    last = episode[-1]
    assert sum(map(accuracy_beyond_twin, episode)) == pytest.approx(
        last.accuracy - last.twin_accuracy, abs=1e-12
    )
    lead = (last.twin_loss - last.loss) / last.loss_unit
    assert sum(map(loss_beyond_twin, episode)) == pytest.approx(
        max(-BOUND, min(BOUND, lead)), abs=1e-12
    )


anything = st.floats(-1e300, 1e300)


@given(
    st.tuples(*[anything] * 4), st.sampled_from([1e-3, 1.0, 1e9]), st.floats(0, 1), st.booleans()
)
def test_no_loss_however_large_pays_or_costs_more_than_the_bound(four, unit, kept, is_last):
    loss, before, twin, twin_before = four
    facts = replace(
        STILL, loss=loss, loss_before=before, twin_loss=twin, twin_loss_before=twin_before
    )
    facts = replace(facts, loss_unit=unit, kept_share=kept, is_last=is_last)
    assert abs(loss_beyond_twin(facts)) <= 2 * BOUND
    assert abs(loss_beyond_twin(replace(facts, loss_before=0.0, twin_loss_before=0.0))) <= BOUND
    assert 0.0 <= lasting_loss(facts) <= BOUND


def test_a_loss_that_is_not_a_number_is_no_lead():
    broken = replace(AHEAD, loss=math.nan)
    assert (loss_beyond_twin(broken), lasting_loss(broken)) == (-BOUND, 0.0)


@given(epochs())
def test_finite_facts_have_finite_rewards_within_bounds(facts):
    parts = reward_parts(facts, dict.fromkeys(TERMS, 1.0))
    assert all(math.isfinite(value) for value in parts.values())
    assert all(abs(parts[f"contribution:r0c{slot}"]) <= 2 * BOUND for slot in range(3))
    assert abs(parts["harm"]) <= 2 * BOUND
    assert abs(parts["accuracy_beyond_twin"]) <= 2.0
    assert parts["lasting_accuracy"] <= 1.0


@every_family
@given(epochs(), st.sampled_from([0.0, 0.5, 2.0, 1024.0]))
def test_rewards_are_linear_in_their_weights(family, facts, scale):
    weights = FAMILIES[family]
    scaled = reward_parts(facts, {name: scale * weight for name, weight in weights.items()})
    assert scaled == {name: scale * part for name, part in reward_parts(facts, weights).items()}


@given(epochs(), st.sampled_from([2.0**-10, 0.5, 8.0]))
def test_the_loss_family_does_not_know_the_unit_of_the_loss(facts, scale):
    names = [field.name for field in fields(StepFacts) if "loss" in field.name]
    assert len(names) == 5
    other = replace(facts, **{name: scale * getattr(facts, name) for name in names})
    assert reward_parts(other, FAMILIES["loss"]) == reward_parts(facts, FAMILIES["loss"])


@pytest.mark.parametrize(("family", "foreign"), [("lead", "loss"), ("loss", "accuracy")])
@given(facts=epochs(), value=accuracies)
def test_a_family_does_not_look_at_the_others_readings(family, foreign, facts, value):
    names = [
        field.name
        for field in fields(StepFacts)
        if foreign in field.name and field.name != "loss_unit"
    ]
    other = replace(facts, **dict.fromkeys(names, value))
    assert len(names) == 4
    assert reward_parts(other, FAMILIES[family]) == reward_parts(facts, FAMILIES[family])


# -- families and weights --------------------------------------------------------------------------


@every_family
@given(epochs())
def test_each_part_is_its_term_times_its_weight(family, facts):
    parts = reward_parts(facts, FAMILIES[family])
    assert list(dict.fromkeys(name.partition(":")[0] for name in parts)) == list(FAMILIES[family])
    for name, weight in FAMILIES[family].items():
        earned = TERMS[name](facts)
        if name == "contribution":
            assert {
                f"contribution:{slot}": weight * part for slot, part in earned.items()
            }.items() <= parts.items()
        else:
            assert parts[name] == weight * earned


def test_weights_that_are_given_are_the_weights():
    busy = replace(AHEAD, op=OP_CULL, params_share=1.0, flops_share=1.0)
    assert reward_parts(busy, {"rent": 2.0, "churn": 3.0}) == {"rent": -2.0, "churn": -3.0}
    assert reward_parts(busy, {}) == {}


def test_every_term_is_in_a_family_and_every_family_has_prices():
    assert set(TERMS) == {name for weights in FAMILIES.values() for name in weights}
    for family, weights in FAMILIES.items():
        assert {"rent", "churn"} < set(weights) or family not in PRICED
        assert weights["breakdown"]
        assert all(weight > 0 for weight in weights.values())


@every_priced_family
def test_a_family_with_some_weights_changed(family):
    before = dict(FAMILIES[family])
    changed = weights_of(family, {"rent": 0.5})
    assert changed == {**FAMILIES[family], "rent": 0.5}
    assert list(changed) == list(FAMILIES[family])
    assert FAMILIES[family] == before
    assert weights_of(family) == FAMILIES[family]


def test_an_unknown_family_is_told_the_nearest():
    with pytest.raises(UnknownNameError, match=r"family 'contributions'.*'contribution'"):
        weights_of("contributions")


@pytest.mark.parametrize(
    ("term", "hint"),
    [("lasting_los", "'lasting_loss'"), ("accuracy_beyond_twin", "breakdown, churn")],
)
def test_a_term_that_the_family_does_not_have_is_refused(term, hint):
    with pytest.raises(UnknownNameError, match=rf"family 'loss' '{term}'.* {hint}"):
        weights_of("loss", {term: 1.0})


def test_an_unknown_term_is_refused_with_the_nearest():
    with pytest.raises(UnknownNameError, match=r"reward term 'chrun'.*'churn'"):
        check_weights({"chrun": 1.0})


@pytest.mark.parametrize("weight", [-0.01, math.nan, math.inf])
def test_a_weight_that_would_turn_a_price_into_a_prize_is_refused(weight):
    with pytest.raises(SettingError, match=r"reward term 'rent' is .* 0"):
        weights_of("contribution", {"rent": weight})


def test_a_term_that_is_no_number_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(TERMS, "mine", lambda facts: float("nan"))
    with pytest.raises(MeasurementError, match="'mine' is nan"):
        reward_parts(STILL, {"mine": 1.0})
