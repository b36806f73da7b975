"""The growing network as a whole:

refusals, limits, counts, copies, and that the host stays the user's own.
"""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from esper.kasmina.blueprints import REGISTRY, blueprint
from esper.kasmina.hosts import build_cnn_host
from esper.kasmina.model import MorphogeneticModel
from esper.leyline.errors import (
    BlueprintError,
    BlueprintMismatchError,
    BudgetExceededError,
    EsperError,
    HostError,
    IllegalActionError,
    MeasurementError,
    NoLiveSeedError,
    NotMeasuredError,
    OptimizerError,
    SeedLimitError,
    SeedTooYoungError,
    SettingError,
    SlotOccupiedError,
    UnknownNameError,
)
from esper.leyline.lifecycle import StageLengths
from esper.leyline.settings import GrowthSettings
from esper.leyline.slots import SlotConfig
from esper.leyline.stages import SeedStage
from kasmina.gardens import (
    cnn_host,
    grow_cnn,
    grow_mlp,
    images,
    is_same,
    keep,
    loss_of,
    measure,
    mlp_host,
    output,
    put_on_probation,
    snapshot,
    train,
    vectors,
)

INPUTS = vectors()


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(REGISTRY, "_known", dict(REGISTRY._known))
    return REGISTRY


# -- refusals --------------------------------------------------------------------------------------


def used():
    """A model with a seed in its first slot, one epoch old, that has trained."""
    model = grow_cnn(budget=20_000, max_seeds=2, lengths=StageLengths())
    model.germinate_seed("r0c0", "conv_light", "gated")
    model.tick()
    train(model, images())
    return model


def on_probation():
    model = used()
    model.tick()
    return model


def full():
    model = used()
    model.germinate_seed("r0c1", "norm")
    return model


def tight():
    model = used()
    model.budget = model.total_params + 100
    return model


REFUSALS = {
    "an occupied slot": (used, lambda m: m.germinate_seed("r0c0", "norm"), SlotOccupiedError),
    "an unknown slot": (used, lambda m: m.germinate_seed("r0c9", "norm"), UnknownNameError),
    "a slot called early": (used, lambda m: m.cull_seed("early"), UnknownNameError),
    "an unknown blueprint": (
        used,
        lambda m: m.germinate_seed("r0c1", "conv_ligth"),
        UnknownNameError,
    ),
    "an unknown blend": (
        used,
        lambda m: m.germinate_seed("r0c1", "norm", "linaer"),
        UnknownNameError,
    ),
    "no blueprint": (used, lambda m: m.germinate_seed("r0c1", None), IllegalActionError),
    "one seed too many": (full, lambda m: m.germinate_seed("r0c1", "norm"), IllegalActionError),
    "more than the budget": (
        tight,
        lambda m: m.germinate_seed("r0c1", "conv_heavy"),
        BudgetExceededError,
    ),
    "fossilizing unmeasured": (on_probation, lambda m: m.fossilize_seed("r0c0"), NotMeasuredError),
    "fossilizing while blending": (used, lambda m: m.fossilize_seed("r0c0"), NotMeasuredError),
    "fossilizing nothing": (used, lambda m: m.fossilize_seed("r0c1"), NoLiveSeedError),
    "culling nothing": (used, lambda m: m.cull_seed("r0c1"), NoLiveSeedError),
    "culling a newborn": (full, lambda m: m.cull_seed("r0c1"), SeedTooYoungError),
    "a scalar as evidence": (
        on_probation,
        lambda m: m.record_counterfactual("r0c0", torch.tensor(1.0), torch.tensor(2.0)),
        MeasurementError,
    ),
    "NaN as evidence": (
        on_probation,
        lambda m: m.record_counterfactual("r0c0", torch.full((3,), float("nan")), torch.ones(3)),
        MeasurementError,
    ),
    "LBFGS": (used, lambda m: m.attach(torch.optim.LBFGS(m.host.parameters())), OptimizerError),
}


@pytest.mark.parametrize(("build", "call", "error"), REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_leaves_the_model_as_before(build, call, error):
    model = build()
    before, link = snapshot(model), model.link
    with pytest.raises(error) as caught:
        call(model)
    assert isinstance(caught.value, EsperError)
    assert is_same(before, snapshot(model))
    assert model.link is link


def test_a_refusal_is_gone_once_it_was_caught():
    """Its traceback would hold the model until the next collection."""
    model, was_on = used(), gc.isenabled()
    gc.disable()
    try:
        try:
            model.germinate_seed("r0c0", "norm")
        except SlotOccupiedError as problem:
            held = weakref.ref(problem)
        assert held() is None
    finally:
        (gc.enable if was_on else gc.disable)()


def test_the_seed_limit_counts_live_seeds_and_fossils():
    model = grow_cnn(max_seeds=2)
    put_on_probation(model, "r0c0", "norm", "linear", images())
    keep(model, "r0c0")
    model.germinate_seed("r0c0", "norm")
    with pytest.raises(SeedLimitError, match=r"2 seeds .*max_seeds is 2"):
        model.germinate_seed("r0c1", "norm")


def test_a_seed_that_was_culled_no_longer_counts():
    model = grow_cnn(max_seeds=1)
    model.germinate_seed("r0c0", "norm")
    model.tick()
    model.cull_seed("r0c0")
    model.germinate_seed("r0c1", "norm")
    assert model.active_seeds == 1


def test_a_blueprint_that_does_not_fit_the_slot_is_refused_with_those_that_do():
    host = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 8))
    model = MorphogeneticModel(
        host, SlotConfig.for_modules(["0", "1"]), example=torch.zeros(2, 5, 4)
    )
    model.germinate_seed("r0c1", "attention")
    with pytest.raises(
        BlueprintMismatchError, match=r"'attention' .*r0c0.*\(5, 6\).*lora, mlp, mlp_small"
    ):
        model.germinate_seed("r0c0", "attention")
    assert model.active_seeds == 1


def test_a_blueprint_that_breaks_at_birth_is_refused(registry):
    @blueprint("vector", "mine")
    def mine(channels):
        layer = nn.Linear(channels, channels)
        nn.init.constant_(layer.weight, float("nan"))
        return layer

    model = grow_mlp()
    before = snapshot(model)
    with pytest.raises(BlueprintError, match="'mine'"):
        model.germinate_seed("r0c0", "mine")
    assert is_same(before, snapshot(model))


def test_one_unfit_blueprint_of_the_users_does_not_break_the_others(registry):
    blueprint("image", "too_large")(lambda channels: nn.Conv2d(channels, channels, 9))
    model = grow_cnn()
    model.germinate_seed("r0c0", "norm")
    with pytest.raises(EsperError, match="too_large"):
        model.germinate_seed("r0c1", "too_large")


@pytest.mark.parametrize("image_size", [2, 4])
def test_a_host_of_one_channel_can_be_wrapped(image_size):
    model = MorphogeneticModel(build_cnn_host(blocks=1, base_channels=1, image_size=image_size))
    model.germinate_seed("r0c0", "attention")
    assert model.active_seeds == 1


# -- the budget ------------------------------------------------------------------------------------

BLUEPRINTS, SLOTS = ("mlp", "lora"), ("r0c0", "r0c1")
moves = st.lists(
    st.tuples(
        st.sampled_from(SLOTS), st.sampled_from(BLUEPRINTS), st.sampled_from(["linear", "gated"])
    )
    | st.sampled_from(["tick", "cull r0c0", "cull r0c1", "keep r0c0", "keep r0c1"]),
    max_size=25,
)


def attempt(model, move):
    """Do it if it is legal; returns whether it was refused for the budget."""
    try:
        if move == "tick":
            model.tick()
        elif isinstance(move, tuple):
            model.germinate_seed(*move)
        elif move.startswith("cull"):
            model.cull_seed(move[5:])
        else:
            if model.slot(move[5:]).state.stage is SeedStage.PROBATIONARY:
                measure(model, move[5:])
            model.fossilize_seed(move[5:])
    except BudgetExceededError:
        return True
    except IllegalActionError:
        pass
    return False


@settings(max_examples=40)
@given(moves, st.integers(0, 1500))
def test_no_sequence_of_moves_exceeds_the_budget(walk, room):
    host_params = sum(parameter.numel() for parameter in mlp_host().parameters())
    budget = host_params + 60 + room
    model = grow_mlp(budget=budget)
    for move in walk:
        refused = attempt(model, move)
        assert model.total_params <= budget
        assert not refused or model.total_params + model.costs[move] > budget


def test_a_blueprint_larger_than_its_price_cannot_exceed_the_budget(registry):
    widths = [1]
    blueprint("vector", "mine")(
        lambda c: nn.Sequential(nn.Linear(c, widths[0]), nn.Linear(widths[0], c))
    )
    model = grow_mlp(blueprints=["mine"], budget=400)
    widths[0] = 500
    before = snapshot(model)
    with pytest.raises(EsperError):
        model.germinate_seed("r0c0", "mine")
    assert is_same(before, snapshot(model))


def test_a_budget_smaller_than_any_seed_is_refused_with_the_least_that_works():
    host = mlp_host()
    params = sum(parameter.numel() for parameter in host.parameters())
    with pytest.raises(SettingError, match=rf"\(lora in r0c0\).* {params + 40}"):
        MorphogeneticModel(host, budget=params + 10)


def test_the_least_budget_that_works_does_work():
    host = mlp_host()
    params = sum(parameter.numel() for parameter in host.parameters())
    model = MorphogeneticModel(
        host, budget=params + REGISTRY.get("vector", "lora").cost((8,)).params
    )
    model.germinate_seed("r0c0", "lora")
    assert model.total_params == model.budget


@pytest.mark.parametrize("limit", [0, -1])
def test_room_for_no_seed_at_all_is_refused(limit):
    with pytest.raises(SettingError, match=r"max_seeds .* 1"):
        grow_mlp(max_seeds=limit)


def test_an_unknown_blueprint_in_the_list_is_refused_when_the_host_is_wrapped():
    with pytest.raises(UnknownNameError, match=r"'loar'.*'lora'"):
        grow_mlp(blueprints=["loar"])


# -- optimiser -------------------------------------------------------------------------------------


def test_a_seed_that_no_optimiser_owns_stops_the_tick():
    model = grow_mlp(attach=False)
    model.germinate_seed("r0c0", "lora")
    with pytest.raises(OptimizerError, match=r"3 parameters .*lora .*r0c0.*attach"):
        model.tick()
    assert model.slot("r0c0").state.stage is SeedStage.GERMINATED


def test_parameters_taken_out_of_the_optimiser_behind_our_back_stop_the_tick():
    model = grow_mlp()
    model.germinate_seed("r0c0", "lora")
    model.link.optimizer.param_groups[-2]["params"].pop()
    with pytest.raises(OptimizerError, match="1 parameters"):
        model.tick()


def test_an_optimiser_attached_late_takes_over_the_seeds():
    model = grow_mlp(attach=False)
    model.germinate_seed("r0c0", "lora")
    model.attach(torch.optim.Adam(model.host.parameters()))
    model.tick()
    before = model.slot("r0c0").seed.scale.clone()
    train(model, INPUTS)
    assert not torch.equal(model.slot("r0c0").seed.scale, before)


# -- the host stays itself -------------------------------------------------------------------------


def test_wrapping_changes_no_output():
    host = cnn_host()
    before = output(host, images())
    assert torch.equal(output(MorphogeneticModel(host), images()), before)


def test_the_hosts_keys_are_unchanged_under_their_prefix():
    host = cnn_host()
    keys = set(host.state_dict())
    model = grow_cnn(host)
    put_on_probation(model, "r0c0", "conv_light", "gated", images())
    model.fossilize_seed("r0c0")
    assert set(host.state_dict()) == keys
    assert {key for key in model.state_dict() if key.startswith("host.")} == {
        f"host.{key}" for key in keys
    }


def test_attributes_fall_through_to_the_host():
    host = mlp_host()
    host.config = {"answer": 42}
    assert MorphogeneticModel(host).config is host.config


def test_an_attribute_nobody_has_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'confgi'"):
        _ = grow_mlp().confgi


def test_a_module_is_still_visited_by_a_function_applied_to_all():
    seen = []
    grow_mlp().apply(lambda module: seen.append(type(module).__name__))
    assert "Linear" in seen


def test_a_foreign_model_grows_at_the_modules_it_names():
    host = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    model = MorphogeneticModel(host, SlotConfig.for_modules(["1"]), example=torch.zeros(2, 6))
    model.attach(torch.optim.SGD(host.parameters(), lr=0.1))
    model.germinate_seed("r0c0", "mlp")
    model.tick()
    before = loss_of(model, INPUTS).item()
    train(model, INPUTS, 20)
    assert loss_of(model, INPUTS).item() < before
    assert model.slot("r0c0").seed.scale.abs().sum() > 0


@pytest.mark.parametrize("order", [("r0c0", "r0c1"), ("r0c1", "r0c0")])
def test_reports_come_in_slot_order_whatever_the_order_given(order):
    assert list(grow_mlp(slots=SlotConfig(order)).get_slot_reports()) == ["r0c0", "r0c1"]


def test_a_host_without_known_sites_is_refused_with_what_to_write():
    with pytest.raises(HostError, match=r"SlotConfig\.for_modules"):
        MorphogeneticModel(nn.Linear(2, 2))


def test_a_host_without_an_example_is_refused_with_what_to_write():
    with pytest.raises(HostError, match="example=batch"):
        MorphogeneticModel(nn.Sequential(nn.Linear(2, 2)), SlotConfig.for_modules(["0"]))


@pytest.mark.parametrize("training", [0, 2])
def test_what_is_built_in_starts_as_seeds_do_and_is_never_incubated(training):
    lengths = StageLengths(training=training)
    model = MorphogeneticModel(
        build_cnn_host(), settings=GrowthSettings(lengths=lengths, scale_at_birth=0.3)
    )
    model.build_in("r0c1", "conv_light")
    assert torch.equal(model.slot("r0c1").fossils[0].scale, torch.full((16, 1, 1), 0.3))
    model.germinate_seed("r0c1", "norm")
