"""One slot: what comes out of it in each state, and what it reports."""

import pytest
import torch

from esper.kasmina.blueprints import REGISTRY
from esper.kasmina.copies.eligibility import Inheritance
from esper.kasmina.slot import SeedSlot, SlotContents
from esper.leyline.gates import Measurement
from esper.leyline.lifecycle import SeedState, germinate
from esper.leyline.stages import SeedStage

SHAPE = (4, 5, 5)


def planted(stage, alpha=0.0, *, blend="linear", scale=1.0):
    """A slot whose seed has an effect, in the given stage."""
    slot = SeedSlot("r0c0", "image", SHAPE, torch.empty(0), Inheritance())
    seed = REGISTRY.get("image", "conv_light").build_seed(
        SHAPE, scale=scale, gated=blend == "gated"
    )
    state = germinate("conv_light", blend)
    slot.plant(seed, SeedState(stage, 1, 2, alpha, state.blueprint_id, state.blend_id))
    return slot


@pytest.fixture
def features():
    return torch.randn(3, *SHAPE)


def test_an_empty_slot_returns_its_very_input(features):
    assert SeedSlot("r0c0", "image", SHAPE, torch.empty(0), Inheritance())(features) is features


@pytest.mark.parametrize("stage", [SeedStage.GERMINATED, SeedStage.TRAINING])
def test_a_seed_that_is_not_blended_in_yet_has_no_effect(features, stage):
    assert planted(stage)(features) is features


@pytest.mark.parametrize("blend", ["linear", "sigmoid", "gated"])
def test_alpha_zero_is_the_input_to_the_bit(features, blend):
    assert torch.equal(planted(SeedStage.BLENDING, 0.0, blend=blend)(features), features)


@pytest.mark.parametrize("blend", ["linear", "sigmoid", "gated"])
@pytest.mark.parametrize("stage", [SeedStage.BLENDING, SeedStage.PROBATIONARY])
def test_alpha_one_is_the_seed_to_the_bit(features, blend, stage):
    slot = planted(stage, 1.0, blend=blend)
    assert torch.equal(slot(features), slot.seed(features))
    assert not torch.equal(slot(features), features)


@pytest.mark.parametrize("alpha", [0.1, 0.25, 0.5, 0.9])
def test_alpha_between_is_on_the_straight_line(features, alpha):
    slot = planted(SeedStage.BLENDING, alpha)
    torch.testing.assert_close(slot(features), (1 - alpha) * features + alpha * slot.seed(features))


def test_a_gate_decides_example_by_example(features):
    slot = planted(SeedStage.BLENDING, 1.0, blend="gated")
    torch.nn.init.normal_(slot.seed.gate.linear.weight)
    grown = features + slot.seed.scale * slot.seed.body(features)
    share = (slot(features) - features) / (grown - features)
    by_example = share.flatten(1).nanmedian(1).values
    torch.testing.assert_close(by_example, slot.seed.gate(features).flatten())
    assert by_example.std() > 0.01


def test_alpha_is_a_tensor_that_follows_the_state():
    slot = planted(SeedStage.BLENDING, 0.25)
    tensor = slot.alpha
    slot.assign(SeedState(SeedStage.BLENDING, 2, 3, 0.5, "conv_light", "linear"))
    assert slot.alpha is tensor
    assert tensor.item() == 0.5


def test_fossils_act_in_the_order_they_were_made(features):
    slot = planted(SeedStage.PROBATIONARY, 1.0)
    first = slot.petrify()
    second = planted(SeedStage.PROBATIONARY, 1.0).seed
    slot.plant(second, SeedState(SeedStage.PROBATIONARY, 1, 2, 1.0, "conv_light", "linear"))
    assert torch.equal(slot(features), second(first(features)))
    assert not torch.equal(slot(features), first(second(features)))


def test_petrifying_keeps_the_output_and_frees_the_place(features):
    slot = planted(SeedStage.PROBATIONARY, 1.0, blend="gated")
    before = slot(features)
    slot.petrify()
    assert torch.equal(slot(features), before)
    assert slot.seed is None


def test_uprooting_leaves_the_fossils(features):
    slot = planted(SeedStage.PROBATIONARY, 1.0)
    fossil = slot.petrify()
    slot.plant(
        planted(SeedStage.BLENDING).seed,
        SeedState(SeedStage.BLENDING, 1, 1, 0.5, "conv_light", "linear"),
    )
    slot.uproot()
    assert torch.equal(slot(features), fossil(features))


def grown():
    """A slot with a fossil, a live seed and readings: nothing in it is as in an empty one."""
    slot = planted(SeedStage.PROBATIONARY, 1.0)
    slot.petrify()
    slot.built_in = 1
    slot.plant(planted(SeedStage.BLENDING).seed, planted(SeedStage.BLENDING, 0.5).state)
    slot.set_plain(gradient_ratio=0.5, gradient_norm=2.0, greedy_score=3.0)
    return slot


def test_a_slot_that_takes_anothers_contents_is_as_that_one():
    slot, contents = planted(SeedStage.TRAINING), grown().contents()
    empty = SlotContents()
    assert all(value != vars(empty)[name] for name, value in vars(contents).items())
    slot.take(contents)
    assert slot.contents() == contents
    assert (slot.alpha.item(), slot.is_in_output) == (0.5, True)


def test_contents_do_not_follow_the_slot_that_they_were_taken_from():
    slot = grown()
    contents = slot.contents()
    before = dict(vars(contents))
    slot.take(SlotContents())
    assert vars(contents) == before
    assert slot.contents() == SlotContents()
    assert (slot.alpha.item(), slot.is_in_output) == (1.0, False)


def test_a_report_of_an_empty_slot_measures_nothing():
    report = SeedSlot("r0c0", "image", SHAPE, torch.empty(0), Inheritance()).report(100)
    assert (report.stage, report.blueprint_id, report.fossil_count) == (SeedStage.DORMANT, None, 0)
    assert report.metrics.counterfactual_contribution is None
    assert report.metrics.seed_gradient_norm_ratio is None
    assert (report.metrics.seed_param_count, report.metrics.host_param_count) == (0, 100)


def test_a_report_says_what_the_state_knows():
    slot = planted(SeedStage.PROBATIONARY, 1.0, blend="gated")
    slot.assign(slot.state.measured(Measurement(0.5, 0.1, 20)))
    report = slot.report(100)
    assert (report.slot_id, report.kind, report.feature_shape) == ("r0c0", "image", SHAPE)
    assert (report.blueprint_id, report.blend_algorithm_id) == ("conv_light", "gated")
    assert (report.epochs_in_stage, report.seed_age_epochs, report.alpha) == (1, 2, 1.0)
    assert (
        report.metrics.counterfactual_contribution,
        report.metrics.counterfactual_standard_error,
    ) == (0.5, 0.1)
    assert report.metrics.seed_param_count == sum(
        parameter.numel() for parameter in slot.seed.parameters()
    )
