"""What a growing network counts and reports, its actions from outside, and its copies."""

import copy

import pytest
import torch

from esper.kasmina.blueprints import REGISTRY
from esper.leyline.errors import EsperError, IllegalActionError
from esper.leyline.factored_actions import look_up
from esper.leyline.legality import refuse
from esper.leyline.lifecycle import StageLengths
from esper.leyline.stages import SeedStage
from kasmina.gardens import grow_cnn, images, loss_of, measure, output, put_on_probation, train

INPUTS = images()


def price(blueprint, shape, gated=False):
    return REGISTRY.get("image", blueprint).cost(shape, gated).params


def test_seeds_and_parameters_are_counted_by_their_state():
    model = grow_cnn()
    host = model.total_params
    put_on_probation(model, "r0c0", "conv_light", "gated", INPUTS)
    model.fossilize_seed("r0c0")
    model.tick()
    model.germinate_seed("r0c1", "norm")
    fossil, seed = price("conv_light", (4, 4, 4), gated=True), price("norm", (8, 2, 2))
    assert (model.active_seeds, model.fossilized_seeds) == (1, 1)
    assert (model.host_params, model.fossilized_params, model.active_params) == (host, fossil, seed)
    assert model.total_params == host + fossil + seed


def test_a_report_counts_fossils_with_the_host():
    model = grow_cnn()
    put_on_probation(model, "r0c0", "conv_light", "linear", INPUTS)
    model.fossilize_seed("r0c0")
    model.germinate_seed("r0c1", "norm")
    metrics = model.get_slot_reports()["r0c1"].metrics
    assert metrics.seed_param_count == price("norm", (8, 2, 2))
    assert metrics.host_param_count == model.host_params + price("conv_light", (4, 4, 4))


def test_a_newborn_seed_is_reported_as_not_measured():
    model = grow_cnn()
    model.germinate_seed("r0c0", "norm")
    metrics = model.get_slot_reports()["r0c0"].metrics
    assert metrics.counterfactual_contribution is None
    assert metrics.seed_gradient_norm_ratio is None


def fossil_and_seed():
    """A host with a fossil in its first slot and a live seed in its second."""
    model = grow_cnn(lr=0.0)
    put_on_probation(model, "r0c0", "conv_light", "linear", INPUTS)
    model.fossilize_seed("r0c0")
    model.germinate_seed("r0c1", "norm")
    model.tick()
    return model


def set_gradients(model, host, seed):
    live = {id(parameter) for parameter in model.slot("r0c1").seed.parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, seed if id(parameter) in live else host)


def ratio_of(model):
    return model.get_slot_reports()["r0c1"].metrics.seed_gradient_norm_ratio


def test_the_gradient_ratio_counts_fossils_with_the_host():
    """Every gradient of host and fossil is 1 and every one of the seed 3, so the ratio is 3
    whatever their sizes.
    """
    model = fossil_and_seed()
    set_gradients(model, 1.0, 3.0)
    model.link.optimizer.step()
    assert ratio_of(model) is None, "nothing is read inside an epoch"
    model.read_gradients()
    assert ratio_of(model) == pytest.approx(3.0)


def test_the_gradient_ratio_is_of_all_steps_since_the_last_reading():
    model = fossil_and_seed()
    for host, seed in ((1.0, 3.0), (3.0, 1.0)):
        set_gradients(model, host, seed)
        model.link.optimizer.step()
    model.read_gradients()
    assert ratio_of(model) == pytest.approx(1.0)
    set_gradients(model, 1.0, 2.0)
    model.link.optimizer.step()
    model.read_gradients()
    assert ratio_of(model) == pytest.approx(2.0)


def test_the_gradient_ratio_is_of_the_norms_before_clipping():
    model = fossil_and_seed()
    set_gradients(model, 1.0, 3.0)
    model.clip_gradients(1e-3)
    model.link.optimizer.step()
    model.read_gradients()
    assert ratio_of(model) == pytest.approx(3.0)


def test_a_step_that_overflowed_is_no_reading_of_gradients():
    model = fossil_and_seed()
    for host, seed in ((1.0, float("inf")), (1.0, 3.0)):
        set_gradients(model, host, seed)
        model.link.optimizer.step()
    model.read_gradients()
    assert ratio_of(model) == pytest.approx(3.0)


def test_frozen_parameters_of_the_host_do_not_count_in_the_ratio():
    model = fossil_and_seed()
    set_gradients(model, 1.0, 3.0)
    for parameter in model.host.blocks.parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
    model.link.optimizer.step()
    model.read_gradients()
    assert ratio_of(model) == pytest.approx(3.0)


def test_gradients_of_another_structure_are_not_read():
    """Norms of a host without its newest fossil say nothing about a host with it."""
    model = fossil_and_seed()
    model.tick()
    put_on_probation(model, "r0c0", "conv_light", "linear", INPUTS)
    model.read_gradients()
    before = ratio_of(model)
    set_gradients(model, 1.0, 50.0)
    model.link.optimizer.step()
    model.fossilize_seed("r0c0")
    model.read_gradients()
    assert ratio_of(model) == before > 0


def test_evidence_of_birth_and_ownership_is_on_record():
    model = grow_cnn()
    model.germinate_seed("r0c0", "norm")
    model.tick()
    verdicts = {gate.name: gate.passed for gate in model.get_slot_reports()["r0c0"].gates}
    assert verdicts == {"G0": True, "G1": True, "G2": True}


def test_a_counterfactual_is_positive_when_the_seed_lowers_the_loss():
    model = grow_cnn()
    put_on_probation(model, "r0c0", "norm", "linear", INPUTS)
    measurement = model.record_counterfactual(
        "r0c0", torch.tensor([1.0, 1.0]), torch.tensor([2.0, 4.0])
    )
    assert (measurement.mean, measurement.standard_error, measurement.examples) == (
        2.0,
        pytest.approx(1.0),
        2,
    )
    assert model.get_slot_reports()["r0c0"].metrics.counterfactual_contribution == 2.0


@pytest.mark.parametrize("stage", [SeedStage.DORMANT, SeedStage.GERMINATED, SeedStage.BLENDING])
def test_evidence_about_a_slot_without_a_seed_on_probation_is_refused(stage):
    model = grow_cnn()
    if stage is not SeedStage.DORMANT:
        model.germinate_seed("r0c0", "norm")
    if stage is SeedStage.BLENDING:
        model.tick()
    assert model.slot("r0c0").state.stage is stage
    with pytest.raises(EsperError):
        measure(model, "r0c0")
    assert not model.get_slot_reports()["r0c0"].is_measured


# -- actions ---------------------------------------------------------------------------------------


def test_a_decision_is_carried_out_where_it_says():
    model = grow_cnn()
    (change,) = model.act((1, 1, model.space.blueprint_index("norm"), 2))
    assert (change.slot_id, change.before.stage, change.after.stage) == (
        "r0c1",
        SeedStage.DORMANT,
        SeedStage.GERMINATED,
    )
    report = model.get_slot_reports()["r0c1"]
    assert (report.blueprint_id, report.blend_algorithm_id) == ("norm", "gated")


def test_waiting_changes_nothing():
    model = grow_cnn()
    assert model.act((0, 0, 0, 0)) == []
    assert model.active_seeds == 0


def test_cull_and_fossilize_are_decisions_too():
    model = grow_cnn(lengths=StageLengths())
    for slot_id in ("r0c0", "r0c1"):
        put_on_probation(model, slot_id, "norm", "linear", INPUTS)
    model.act((2, 0, 0, 0))
    model.act((3, 1, 0, 0))
    assert [report.stage.name for report in model.get_slot_reports().values()] == [
        "CULLED",
        "FOSSILIZED",
    ]


@pytest.mark.parametrize("op", [1, 2, 3])
@pytest.mark.parametrize("blueprint", [0, 1])
def test_a_decision_is_refused_exactly_when_it_is_not_legal(op, blueprint):
    model = grow_cnn()
    choice = (op, 0, blueprint, 0)
    if refuse(op, *look_up(model.space, *choice)[1:], model.view()) is None:
        model.act(choice)
    else:
        with pytest.raises(IllegalActionError):
            model.act(choice)


# -- copies ----------------------------------------------------------------------------------------


@pytest.fixture
def pair():
    model = grow_cnn(scale=1.0)
    put_on_probation(model, "r0c0", "conv_light", "gated", INPUTS)
    return model, copy.deepcopy(model)


def test_a_copy_computes_the_same(pair):
    assert torch.equal(*(output(model, INPUTS) for model in pair))


def test_training_the_original_does_not_move_the_copy(pair):
    model, twin = pair
    before = output(twin, INPUTS)
    train(model, INPUTS)
    assert torch.equal(output(twin, INPUTS), before)
    assert not torch.equal(output(model, INPUTS), before)


def test_a_copys_slots_act_on_the_copy(pair):
    model, twin = pair
    before = output(model, INPUTS)
    twin.cull_seed("r0c0")
    assert not torch.equal(output(twin, INPUTS), before)
    assert torch.equal(output(model, INPUTS), before)
    assert model.slot("r0c0").state.stage is SeedStage.PROBATIONARY


def test_a_copy_has_no_optimiser_and_can_get_its_own(pair):
    model, twin = pair
    assert twin.link is None
    assert model.link is not None
    twin.attach(torch.optim.SGD(twin.host.parameters(), lr=0.1))
    before = twin.slot("r0c0").seed.scale.clone()
    train(twin, INPUTS)
    assert not torch.equal(twin.slot("r0c0").seed.scale, before)


def test_a_copys_gradients_are_its_own(pair):
    model, twin = pair
    model.zero_grad()
    twin.zero_grad()
    loss_of(twin, INPUTS).backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_tick_with_an_unowned_seed_is_refused_in_the_copy_too(pair):
    _, twin = pair
    with pytest.raises(EsperError, match="attach"):
        twin.tick()
