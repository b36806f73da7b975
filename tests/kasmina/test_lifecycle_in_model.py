"""Whole episodes in a real network:

ramps, gates, culls, fossils, generations. Compared to the bit where it matters.
"""

import copy

import pytest
import torch

from esper.leyline.factored_actions import BLEND_IDS
from esper.leyline.lifecycle import StageLengths, ramp_alpha
from esper.leyline.stages import SeedStage
from kasmina.gardens import (
    cnn_host,
    grow_cnn,
    images,
    keep,
    measure,
    output,
    put_on_probation,
    train,
    without_seed,
)

INPUTS = images()
every_blend = pytest.mark.parametrize("blend", BLEND_IDS)
RAMP = StageLengths(ramp=3)
"""Long enough for the blends to differ."""


def stage_of(model, slot_id="r0c0"):
    return model.slot(slot_id).state.stage


def on_probation(blend="linear", blueprint="conv_light", **options):
    model = grow_cnn(**options)
    put_on_probation(model, "r0c0", blueprint, blend, INPUTS)
    return model


def optimised(model):
    return {id(p) for group in model.link.optimizer.param_groups for p in group["params"]}


# -- blending --------------------------------------------------------------------------------------


@every_blend
def test_a_ramp_in_a_model_goes_from_exactly_zero_to_exactly_one(blend):
    model = grow_cnn(lengths=StageLengths(ramp=4))
    model.germinate_seed("r0c0", "conv_light", blend)
    alphas = [model.slot("r0c0").alpha.item()]
    for _ in range(4):
        model.tick()
        alphas.append(model.slot("r0c0").alpha.item())
    assert (alphas[0], alphas[-1]) == (0.0, 1.0)
    assert alphas == pytest.approx([ramp_alpha(blend, step / 4) for step in range(5)], abs=1e-7)


@every_blend
def test_germinating_changes_no_output_even_with_a_scale_at_birth(blend):
    model = grow_cnn(scale=1.0, lengths=RAMP)
    before = output(model, INPUTS)
    model.germinate_seed("r0c0", "conv_light", blend)
    assert torch.equal(output(model, INPUTS), before)


@every_blend
def test_a_seed_without_scale_blends_in_as_the_identity(blend):
    model = grow_cnn(lengths=RAMP)
    before = output(model, INPUTS)
    model.germinate_seed("r0c0", "conv_light", blend)
    model.tick()
    assert torch.equal(output(model, INPUTS), before)


def test_a_scale_at_birth_shows_as_soon_as_blending_starts():
    model = grow_cnn(scale=1.0)
    before = output(model, INPUTS)
    model.germinate_seed("r0c0", "conv_light")
    model.tick()
    assert not torch.equal(output(model, INPUTS), before)


def test_an_incubated_seed_is_born_without_scale():
    model = grow_cnn(scale=1.0, lengths=StageLengths(training=2))
    model.germinate_seed("r0c0", "conv_light")
    assert model.slot("r0c0").seed.scale.abs().max() == 0.0


def test_seed_and_host_train_together_while_blending():
    model = grow_cnn(scale=1.0, lengths=StageLengths(ramp=2))
    model.germinate_seed("r0c0", "conv_light")
    model.tick()
    before = {name: value.clone() for name, value in model.named_parameters()}
    train(model, INPUTS)
    assert all(not torch.equal(value, before[name]) for name, value in model.named_parameters())


def test_the_gate_is_in_the_optimiser():
    model = grow_cnn()
    model.germinate_seed("r0c0", "conv_light", "gated")
    gate = list(model.slot("r0c0").seed.gate.parameters())
    assert len(gate) == 2
    assert {id(parameter) for parameter in gate} <= optimised(model)


def test_the_gate_learns():
    model = grow_cnn()
    model.germinate_seed("r0c0", "conv_light", "gated")
    model.tick()
    train(model, INPUTS, steps=4)
    assert all(parameter.abs().max() > 0 for parameter in model.slot("r0c0").seed.gate.parameters())


@every_blend
def test_slot_off_is_the_network_with_that_slot_empty(blend):
    model = on_probation(blend, scale=1.0, lengths=RAMP)
    with model.slot_off("r0c0"):
        off = output(model, INPUTS)
    assert torch.equal(off, output(without_seed(model, "r0c0"), INPUTS))
    assert not torch.equal(off, output(model, INPUTS))


def test_slot_off_ends_with_the_slot_on_again():
    model = on_probation(scale=1.0)
    before = output(model, INPUTS)
    with pytest.raises(ZeroDivisionError), model.slot_off("r0c0"):
        raise ZeroDivisionError
    assert torch.equal(output(model, INPUTS), before)


def test_full_strength_is_the_network_at_the_end_of_its_ramp():
    model = grow_cnn(scale=1.0, lengths=StageLengths(ramp=4))
    model.germinate_seed("r0c0", "conv_light")
    model.tick()
    with model.at_full_strength("r0c0"):
        full = output(model, INPUTS)
    for _ in range(3):
        model.tick()
    assert torch.equal(output(model, INPUTS), full)


# -- culling ---------------------------------------------------------------------------------------

LENGTHS = {
    SeedStage.TRAINING: StageLengths(training=9, ramp=3),
    SeedStage.BLENDING: StageLengths(ramp=9),
    SeedStage.PROBATIONARY: RAMP,
}


@every_blend
@pytest.mark.parametrize("stage", LENGTHS)
def test_after_a_cull_the_function_is_the_current_hosts_to_the_bit(stage, blend):
    model = grow_cnn(scale=1.0, lengths=LENGTHS[stage])
    model.germinate_seed("r0c0", "conv_light", blend)
    for _ in range(4):
        model.tick()
        train(model, INPUTS)
    assert stage_of(model) is stage
    model.cull_seed("r0c0")
    fresh = cnn_host()
    fresh.load_state_dict(model.host.state_dict())
    assert torch.equal(output(model, INPUTS), output(fresh, INPUTS))


def test_a_cull_leaves_other_seeds_and_fossils_as_they_are():
    model = on_probation(scale=1.0)
    keep(model, "r0c0")
    model.germinate_seed("r0c0", "norm")
    model.germinate_seed("r0c1", "conv_small")
    model.tick()
    train(model, INPUTS)
    expected = output(without_seed(model, "r0c0"), INPUTS)
    model.cull_seed("r0c0")
    assert torch.equal(output(model, INPUTS), expected)
    assert (model.fossilized_seeds, model.active_seeds) == (1, 1)


def test_culled_parameters_leave_the_optimiser_with_their_state():
    model = on_probation()
    gone = list(model.slot("r0c0").seed.parameters())
    model.cull_seed("r0c0")
    assert not {id(parameter) for parameter in gone} & optimised(model)
    assert not {id(parameter) for parameter in gone} & {
        id(key) for key in model.link.optimizer.state
    }


def test_a_culled_slot_is_embargoed_and_opens_again():
    model = on_probation()
    model.cull_seed("r0c0")
    stages = [stage_of(model).name]
    for _ in range(5):
        model.tick()
        stages.append(stage_of(model).name)
    assert stages == ["CULLED"] + ["EMBARGOED"] * 3 + ["RESETTING", "DORMANT"]
    model.germinate_seed("r0c0", "norm")


# -- fossilizing -----------------------------------------------------------------------------------


@every_blend
def test_fossilizing_changes_nothing_in_the_output(blend):
    model = on_probation(blend, scale=1.0, lengths=RAMP)
    before = output(model, INPUTS)
    model.fossilize_seed("r0c0")
    assert torch.equal(output(model, INPUTS), before)
    model.tick()
    assert torch.equal(output(model, INPUTS), before)


@every_blend
def test_fossilizing_changes_no_gradient(blend):
    model = on_probation(blend, lengths=RAMP)
    twin = copy.deepcopy(model)
    model.fossilize_seed("r0c0")
    for each in (model, twin):
        each.zero_grad()
        each.eval()(INPUTS).square().sum().backward()
    gradients = [
        [p.grad for p in (*each.host.parameters(), *each.slots.parameters())]
        for each in (model, twin)
    ]
    torch.testing.assert_close(*gradients)


def test_the_slot_opens_when_the_fossil_has_trained_for_an_epoch():
    model = on_probation()
    model.fossilize_seed("r0c0")
    stages = [stage_of(model)]
    for _ in range(2):
        model.tick()
        stages.append(stage_of(model))
    assert stages == [SeedStage.FOSSILIZED, SeedStage.FOSSILIZED, SeedStage.DORMANT]
    model.germinate_seed("r0c0", "norm")


@pytest.mark.parametrize("gain", [1.0, -1.0])
def test_a_measured_seed_stays_in_the_output_until_it_is_decided_about(gain):
    model = on_probation()
    measure(model, "r0c0", gain)
    before = output(model, INPUTS)
    for _ in range(9):
        model.tick()
        assert stage_of(model) is SeedStage.PROBATIONARY
    assert torch.equal(output(model, INPUTS), before)
    assert model.slot("r0c0").fossil_names == []


def test_a_gate_becomes_part_of_its_fossil():
    model = on_probation("gated")
    gate = model.slot("r0c0").seed.gate
    model.fossilize_seed("r0c0")
    assert model.slot("r0c0").fossils[0].gate is gate
    assert {id(parameter) for parameter in gate.parameters()} <= optimised(model)


def test_a_fossil_goes_on_learning_with_the_host():
    model = on_probation()
    model.fossilize_seed("r0c0")
    model.tick()
    before = model.slot("r0c0").fossils[0].scale.clone()
    train(model, INPUTS)
    assert not torch.equal(model.slot("r0c0").fossils[0].scale, before)


# -- generations -----------------------------------------------------------------------------------


def test_several_generations_grow_in_one_slot():
    model = grow_cnn(scale=1.0, lengths=RAMP)
    for blueprint, blend in (("conv_light", "linear"), ("norm", "gated"), ("depthwise", "sigmoid")):
        put_on_probation(model, "r0c0", blueprint, blend, INPUTS)
        before = output(model, INPUTS)
        keep(model, "r0c0")
        assert torch.equal(output(model, INPUTS), before)
    assert model.get_slot_reports()["r0c0"].fossil_count == model.fossilized_seeds == 3
    assert [type(fossil.body).__name__ for fossil in model.slot("r0c0").fossils] == [
        "Sequential",
        "GroupNorm",
        "Sequential",
    ]


def test_a_generation_after_a_cull_starts_anew():
    model = grow_cnn(lengths=StageLengths(embargo=0, resetting=0))
    put_on_probation(model, "r0c0", "conv_light", "linear", INPUTS)
    model.cull_seed("r0c0")
    model.tick()
    model.germinate_seed("r0c0", "conv_light")
    report = model.get_slot_reports()["r0c0"]
    assert (report.seed_age_epochs, report.alpha, report.is_measured) == (0, 0.0, False)


def test_two_seeds_of_one_blueprint_are_born_different():
    model = grow_cnn(lengths=StageLengths(embargo=0, resetting=0))
    weights = []
    for _ in range(2):
        model.germinate_seed("r0c0", "conv_light")
        weights.append(model.slot("r0c0").seed.body[0].weight.clone())
        model.tick()
        model.cull_seed("r0c0")
        model.tick()
    assert not torch.equal(*weights)


def test_seeds_are_born_alike_whatever_the_global_seed():
    weights = []
    for seed in (1, 2):
        model = grow_cnn()
        torch.manual_seed(seed)
        model.germinate_seed("r0c0", "conv_light")
        weights.append(model.slot("r0c0").seed.body[0].weight.clone())
    assert torch.equal(*weights)


def test_a_tick_returns_exactly_what_changed_stage():
    model = grow_cnn()
    model.germinate_seed("r0c1", "norm")
    changes = model.tick()
    assert [(c.slot_id, c.before.stage.name, c.after.stage.name) for c in changes] == [
        ("r0c1", "GERMINATED", "BLENDING")
    ]
    assert model.get_slot_reports()["r0c1"].alpha == 1.0


def test_a_sham_has_a_whole_episode_and_changes_nothing():
    model = grow_cnn(blueprints=["sham"])
    before = output(model, INPUTS)
    model.germinate_seed("r0c0", "sham")
    model.tick()
    model.tick()
    measure(model, "r0c0")
    model.fossilize_seed("r0c0")
    assert torch.equal(output(model, INPUTS), before)
    assert (model.fossilized_seeds, model.fossilized_params) == (1, 0)
