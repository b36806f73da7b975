"""Masks say what is possible:

every action they let through is legal as a whole, and unused heads have one choice.
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import is_legal
from esper.kasmina.hosts import build_cnn_host, build_mlp_host
from esper.kasmina.model import MorphogeneticModel
from esper.leyline.errors import SettingError, SlotIdError, UnknownNameError
from esper.leyline.factored_actions import (
    DEFAULT_SPACE,
    NUM_BLENDS,
    NUM_BLUEPRINTS,
    NUM_OPS,
    OP_CULL,
    OP_FOSSILIZE,
    OP_GERMINATE,
    ActionSpace,
    FactoredAction,
)
from esper.leyline.lifecycle import StageLengths
from esper.leyline.settings import GrowthSettings
from esper.leyline.slots import SlotConfig
from esper.leyline.stages import SeedStage
from esper.tamiyo.masks import (
    MaskSeedInfo,
    compute_action_masks,
    compute_batch_masks,
    masks_for,
)

DORMANT = {slot: MaskSeedInfo(SeedStage.DORMANT) for slot in SlotConfig.default().slot_ids}


def masks_of(max_seeds=None, total=0, **states):
    return compute_action_masks({**DORMANT, **states}, total, max_seeds)


def test_a_slot_without_a_state_is_an_empty_one():
    nothing, empty = masks_of(r0c1=None), masks_of()
    assert all(np.array_equal(nothing[head], mask) for head, mask in empty.items())
    assert nothing["slot"][OP_GERMINATE].all()
    assert not nothing["op"][OP_CULL]


def test_the_slots_are_those_that_are_named_unless_a_space_has_more():
    assert compute_action_masks({"r0c1": None}, 0, None)["slot"].shape == (NUM_OPS, 1)
    many = {f"r0c{column}": None for column in range(8)}
    assert compute_action_masks(many, 0, None)["blueprint"].shape == (8, NUM_BLUEPRINTS)
    blending = {"r0c1": MaskSeedInfo(SeedStage.BLENDING, 1)}
    unnamed = compute_action_masks(blending, 1, None, space=DEFAULT_SPACE)
    assert unnamed["slot"][OP_GERMINATE].tolist() == [True, False, True]


@pytest.mark.parametrize("order", [("r0c10", "r0c2", "r0c0"), ("r0c0", "r0c10", "r0c2")])
def test_masks_are_in_the_order_of_slots_whatever_the_order_of_the_dict(order):
    states = dict.fromkeys(order)
    states["r0c10"] = MaskSeedInfo(SeedStage.BLENDING, 1)
    masks = compute_action_masks(states, 1, None)
    assert masks["slot"][OP_CULL].tolist() == [False, False, True]


@pytest.mark.parametrize("stage", SeedStage)
def test_a_number_serves_as_a_stage(stage):
    named, numbered = (masks_of(r0c0=MaskSeedInfo(value, 5)) for value in (stage, stage.value))
    assert all(np.array_equal(named[head], mask) for head, mask in numbered.items())
    assert named["op"][OP_FOSSILIZE] == (stage is SeedStage.PROBATIONARY)


def test_a_slot_or_stage_that_does_not_exist_gets_one_clear_line():
    with pytest.raises(UnknownNameError, match=r"slot 'r0c9'.*r0c0"):
        compute_action_masks({"r0c9": None}, 0, None, space=DEFAULT_SPACE)
    with pytest.raises(SlotIdError, match=r"'early' .*'r0c0'.*instead of early"):
        compute_action_masks({"early": None}, 0, None)
    with pytest.raises(SettingError, match=r"slot r0c1 is in stage 9.*4 PROBATIONARY"):
        masks_of(r0c1=MaskSeedInfo(9))


def ops(masks):
    return np.flatnonzero(masks["op"]).tolist()


# -- arrays ----------------------------------------------------------------------------------------


def test_masks_have_the_shapes_of_the_space():
    masks = masks_of()
    shapes = {head: mask.shape for head, mask in masks.items()}
    assert shapes == {
        "op": (NUM_OPS,),
        "slot": (NUM_OPS, 3),
        "blueprint": (3, NUM_BLUEPRINTS),
        "blend": (NUM_BLENDS,),
    }
    assert all(mask.dtype == bool for mask in masks.values())


def test_a_batch_stacks_hosts():
    first, second = grown_model().view(), grown_model().view()
    masks = compute_batch_masks([first, second])
    assert masks["slot"].shape == (2, NUM_OPS, 2)
    assert np.array_equal(masks["op"][1], masks_for(second)["op"])


def test_waiting_is_always_possible():
    assert masks_of(max_seeds=1, total=1)["op"][0]


def test_no_blueprint_is_never_possible_where_something_can_be_planted():
    assert not masks_of()["blueprint"][:, 0].any()


def test_only_dormant_slots_can_be_planted():
    masks = masks_of(r0c1=MaskSeedInfo(SeedStage.BLENDING, 1))
    assert masks["slot"][OP_GERMINATE].tolist() == [True, False, True]


@pytest.mark.parametrize(
    "stage", [SeedStage.EMBARGOED, SeedStage.RESETTING, SeedStage.CULLED, SeedStage.FOSSILIZED]
)
def test_a_closed_slot_offers_nothing(stage):
    masks = compute_action_masks({slot: MaskSeedInfo(stage) for slot in DORMANT}, 0, None)
    assert ops(masks) == [0]


@pytest.mark.parametrize(("age", "expected"), [(0, False), (1, True), (5, True)])
def test_culling_needs_a_seed_of_age(age, expected):
    masks = masks_of(r0c2=MaskSeedInfo(SeedStage.BLENDING, age))
    assert masks["op"][OP_CULL] == expected
    assert masks["slot"][OP_CULL, 2] == expected


@pytest.mark.parametrize(
    ("stage", "is_measured", "expected"),
    [
        (SeedStage.PROBATIONARY, True, True),
        (SeedStage.PROBATIONARY, False, False),
        (SeedStage.BLENDING, True, False),
    ],
)
def test_fossilizing_needs_probation_and_a_measurement(stage, is_measured, expected):
    assert masks_of(r0c1=MaskSeedInfo(stage, 3, is_measured))["op"][OP_FOSSILIZE] == expected


def test_at_the_limit_of_seeds_nothing_can_be_planted():
    assert OP_GERMINATE not in ops(masks_of(max_seeds=2, total=2))
    assert OP_GERMINATE in ops(masks_of(max_seeds=3, total=2))


def test_a_head_that_no_op_can_use_has_exactly_its_first_entry():
    masks = compute_action_masks(
        {slot: MaskSeedInfo(SeedStage.EMBARGOED) for slot in DORMANT}, 0, None
    )
    for rows in (masks["slot"], masks["blueprint"], masks["blend"][None]):
        assert rows[:, 0].all()
        assert not rows[:, 1:].any()


def test_waiting_uses_no_slot():
    assert masks_of()["slot"][0].tolist() == [True, False, False]


def test_a_slots_report_and_its_state_in_few_words_give_the_same_masks():
    model = grown_model()
    model.germinate_seed("r0c1", "norm")
    model.tick()
    view = model.view()
    in_few_words = {"r0c1": MaskSeedInfo(SeedStage.BLENDING, 1, False)}
    facts = {"space": view.space, "costs": view.costs, "ramp": view.ramp}
    few = compute_action_masks(in_few_words, view.seeds_used, None, **facts)
    full = compute_action_masks(view.reports, view.seeds_used, None, **facts)
    assert all(np.array_equal(few[head], mask) for head, mask in full.items())
    assert few["op"].tolist() == [True, True, True, False]


def test_a_budget_of_parameters_closes_what_it_cannot_pay():
    costs = dict.fromkeys([("r0c0", "norm", "linear"), ("r0c0", "mlp", "linear")], 10)
    costs["r0c0", "mlp", "linear"] = 50
    space = ActionSpace.of(SlotConfig(("r0c0",)), ("norm", "mlp"), ("linear",))
    facts = {"space": space, "costs": costs, "budget": 100}
    open_blueprints = {}
    for used in (0, 60, 95):
        masks = compute_action_masks({}, 0, None, params_used=used, **facts)
        open_blueprints[used] = masks["blueprint"][0].tolist()
    assert open_blueprints == {
        0: [False, True, True],
        60: [False, True, False],
        95: [True, False, False],
    }


# -- prices ----------------------------------------------------------------------------------------


def grown_model(blueprints=("norm", "conv_light"), ramp=3, **limits):
    host = build_cnn_host(blocks=2, base_channels=4, in_channels=1, image_size=8, classes=3)
    settings = GrowthSettings(lengths=StageLengths(ramp=ramp))
    model = MorphogeneticModel(host, blueprints=blueprints, settings=settings, **limits)
    model.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    return model


def test_a_blend_whose_gate_does_not_fit_the_budget_is_masked():
    plain = grown_model(["norm"])
    cheap, gated = plain.costs["r0c0", "norm", "linear"], plain.costs["r0c0", "norm", "gated"]
    assert gated > cheap
    tight = grown_model(["norm"], budget=plain.host_params + gated - 1)
    assert masks_for(tight.view())["blend"].tolist() == [True, True, False]
    roomy = grown_model(["norm"], budget=plain.host_params + plain.costs["r0c1", "norm", "gated"])
    assert masks_for(roomy.view())["blend"].tolist() == [True, True, True]


@pytest.mark.parametrize("ramp", [0, 1, 2, 3])
def test_a_blend_that_repeats_another_is_masked_and_keeps_its_number(ramp):
    expected = [True, ramp > 2, True]
    assert masks_for(grown_model(ramp=ramp).view())["blend"].tolist() == expected
    bare = compute_action_masks(DORMANT, 0, None, ramp=ramp)
    assert bare["blend"].tolist() == expected


def test_a_blueprint_over_budget_is_masked_where_it_is_too_dear():
    plain = grown_model()
    limit = plain.host_params + plain.costs["r0c0", "conv_light", "gated"]
    masks = masks_for(grown_model(budget=limit).view())
    assert masks["blueprint"][0].tolist() == [False, True, True]
    assert masks["blueprint"][1].tolist() == [False, True, False]


def test_a_blueprint_of_another_kind_is_masked():
    host = build_mlp_host(inputs=6, widths=(8, 6), classes=3)
    model = MorphogeneticModel(host, blueprints=["mlp", "lora"])
    assert masks_for(model.view())["blueprint"].tolist() == [[False, True, True]] * 2


# -- the whole -------------------------------------------------------------------------------------


def allowed(masks):
    """Every action that can be drawn head by head."""
    for op in np.flatnonzero(masks["op"]):
        for slot in np.flatnonzero(masks["slot"][op]):
            blueprints = np.flatnonzero(masks["blueprint"][slot]) if op == OP_GERMINATE else [0]
            blends = np.flatnonzero(masks["blend"]) if op == OP_GERMINATE else [0]
            for blueprint, blend in itertools.product(blueprints, blends):
                yield int(op), int(slot), int(blueprint), int(blend)


@settings(max_examples=30)
@given(
    st.data(),
    st.sampled_from([None, 2, 3]),
    st.none() | st.integers(12, 500),
    st.sampled_from([0, 1, 3]),
)
def test_nothing_that_the_masks_let_through_is_ever_refused(data, max_seeds, room, ramp):
    model = grown_model(["norm", "conv_small", "conv_light"], ramp, max_seeds=max_seeds)
    model.budget = None if room is None else model.host_params + room
    for _ in range(12):
        choices = list(allowed(masks_for(model.view())))
        assert all(is_legal(action_of(model, choice), model.view()) for choice in choices)
        model.act(data.draw(st.sampled_from(choices)))
        assert model.budget is None or model.total_params <= model.budget
        assert max_seeds is None or model.active_seeds + model.fossilized_seeds <= max_seeds
        model.tick()
        for slot_id, report in model.get_slot_reports().items():
            if report.stage is SeedStage.PROBATIONARY:
                losses = torch.arange(3.0)
                model.record_counterfactual(
                    slot_id, losses, losses * data.draw(st.sampled_from([0.5, 2.0]))
                )


@settings(max_examples=20)
@given(st.data(), st.sampled_from([0, 1, 3]))
def test_what_is_legal_without_a_budget_is_let_through(data, ramp):
    model = grown_model(["norm", "conv_small"], ramp, max_seeds=3)
    sizes = model.space.sizes
    for _ in range(6):
        masks = masks_for(model.view())
        through = set(allowed(masks))
        for choice in itertools.product(*map(range, sizes)):
            op, slot, *_ = choice
            used = choice if op == OP_GERMINATE else (op, slot if op else 0, 0, 0)
            assert is_legal(action_of(model, choice), model.view()) == (used in through)
        model.act(data.draw(st.sampled_from(sorted(through))))
        model.tick()


def action_of(model, choice):
    op, slot, blueprint, blend = choice
    return FactoredAction.from_indices(
        op_idx=op, slot_idx=slot, blueprint_idx=blueprint, blend_idx=blend, space=model.space
    )
