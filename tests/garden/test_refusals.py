"""Bad input to a garden:

each mistake has its own error, and model, optimiser, clock and history are as before.
"""

import math
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import esper
from esper.leyline.errors import (
    HostError,
    MeasurementError,
    OptimizerError,
    SettingError,
    UnknownNameError,
)
from user_models import (
    CNN,
    PLANT_FIRST,
    grow_cnn,
    losses_of,
    made_up,
    random_images,
    script,
    walk_to,
)

IMAGES = random_images(16)
PLANT_SECOND = (1, 1, 1, 0)


# -- slots -----------------------------------------------------------------------------------------


def places(**options):
    return list(grow_cnn(**options).model.slot_config.modules.values())


def test_a_name_chooses_one_module():
    assert places(slots="layer2") == ["layer2"]


def test_a_glob_chooses_modules_part_by_part():
    assert places(slots="layer?") == ["layer1", "layer2"]
    assert places(slots="layer*.0") == ["layer1.0", "layer2.0"]


def test_a_regex_chooses_what_it_matches_in_full():
    assert places(slots=r"layer(1|2)\.[01]") == ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]


def test_slots_are_numbered_in_the_order_of_execution_not_of_naming():
    assert places(slots=["layer2", "layer1", "layer1.0"]) == ["layer1.0", "layer1", "layer2"]


def test_a_module_meant_twice_gets_one_slot():
    assert places(slots=["layer1", "layer*"]) == ["layer1", "layer2"]


def test_a_pattern_that_matches_nothing_shows_the_nearest_name():
    with pytest.raises(UnknownNameError, match=r"pattern 'layr1'.*'layer1'"):
        grow_cnn(slots=["layer2", "layr1"])


def test_no_slots_at_all_are_refused():
    with pytest.raises(SettingError, match="module"):
        grow_cnn(slots=[])


@pytest.mark.parametrize(
    "none", [[], (), set(), filter(None, [])], ids=["list", "tuple", "set", "generator"]
)
def test_no_blueprints_at_all_are_refused(none):
    with pytest.raises(SettingError, match=r"blueprints .*empty"):
        grow_cnn(blueprints=none)


def test_one_blueprint_may_be_a_plain_name():
    assert grow_cnn(blueprints="norm").model.space.blueprint_ids == (None, "norm")


class Pair(nn.Module):
    def forward(self, inputs):
        return inputs, inputs


class Paired(nn.Module):
    """One module returns a tuple, one integers, one nothing that ever runs."""

    def __init__(self):
        super().__init__()
        self.first, self.pair, self.spare = nn.Linear(6, 3), Pair(), nn.Linear(3, 3)

    def forward(self, inputs):
        return self.pair(self.first(inputs))[0]


def test_an_output_that_is_not_one_tensor_is_refused_by_its_type():
    with pytest.raises(HostError, match=r"'pair'.*tuple"):
        esper.grow(Paired(), slots="pair", example=torch.zeros(2, 6))


def test_a_module_that_does_not_run_on_the_example_is_refused():
    with pytest.raises(HostError, match=r"'spare'.*example batch"):
        esper.grow(Paired(), slots="spare", example=torch.zeros(2, 6))


def test_a_glob_passes_over_places_where_no_slot_fits():
    garden = esper.grow(Paired(), slots="*", example=torch.zeros(2, 6))
    assert garden.model.slot_config.modules == {"r0c0": "first"}


def test_a_refused_wrap_leaves_no_hook_on_the_model():
    host = Paired()
    with pytest.raises(HostError):
        esper.grow(host, slots=["first", "pair"], example=torch.zeros(2, 6))
    assert not any(module._forward_hooks for module in host.modules())


def test_a_blueprint_that_no_slot_can_carry_is_refused_by_name():
    with pytest.raises(UnknownNameError, match=r"image blueprint 'conv_ligt'.*'conv_light'"):
        grow_cnn(blueprints=["conv_ligt"])


# -- optimisers and schedulers ---------------------------------------------------------------------


def refuse_attach(garden, match, optimizer, scheduler=None):
    before = [(len(group["params"]), group["lr"]) for group in optimizer.param_groups]
    with pytest.raises(OptimizerError, match=match):
        garden.attach(optimizer, scheduler)
    assert [(len(group["params"]), group["lr"]) for group in optimizer.param_groups] == before
    assert garden.model.link is None
    assert not optimizer._optimizer_step_pre_hooks


def test_an_optimizer_that_does_not_own_the_parameters_is_refused_with_their_names():
    garden = grow_cnn(attach=False)
    refuse_attach(
        garden, r"2 .*\(head.weight, head.bias\)", torch.optim.SGD(list(garden.parameters())[:-2])
    )


def test_an_optimizer_of_another_copy_is_refused():
    garden = grow_cnn(attach=False)
    refuse_attach(garden, "own 10", torch.optim.Adam(CNN().parameters()))


def test_a_whole_model_optimizer_is_refused_by_name():
    garden = grow_cnn(attach=False)
    refuse_attach(garden, "LBFGS", torch.optim.LBFGS(garden.parameters()))


def test_a_scheduler_that_cannot_be_extended_is_refused_by_name():
    garden = grow_cnn(attach=False)
    optimizer = torch.optim.SGD(garden.parameters(), lr=0.1)
    refuse_attach(
        garden, "scheduler ReduceLROnPlateau", optimizer, lr_scheduler.ReduceLROnPlateau(optimizer)
    )


def test_a_scheduler_of_another_optimizer_is_refused():
    garden = grow_cnn(attach=False)
    optimizer = torch.optim.SGD(garden.parameters(), lr=0.1)
    other = lr_scheduler.StepLR(torch.optim.SGD(CNN().parameters(), lr=0.1), 1)
    refuse_attach(garden, "scheduler .*optimiser", optimizer, other)


def test_parameters_the_user_froze_need_no_optimizer():
    garden = grow_cnn(attach=False)
    garden.model.host.head.requires_grad_(False)
    garden.attach(torch.optim.SGD((p for p in garden.parameters() if p.requires_grad), lr=0.1))
    assert garden.model.link is not None


# -- values from evaluate --------------------------------------------------------------------------


def facts(garden):
    optimizer = garden.model.link.optimizer
    return {
        "weights": [value.tolist() for value in garden.model.state_dict().values()],
        "states": [slot.state for slot in garden.model.slots.values()],
        "groups": [[id(p) for p in group["params"]] for group in optimizer.param_groups],
        "optimizer": [
            [v.tolist() if isinstance(v, torch.Tensor) else v for v in optimizer.state[p].values()]
            for p in garden.parameters()
        ],
        "epoch": garden.epoch,
        "memory": garden.memory,
        "history": list(garden.history),
        "mode": [module.training for module in garden.model.modules()],
    }


def two_live_seeds():
    garden = grow_cnn({0: PLANT_FIRST, 1: PLANT_SECOND}, keeps=False)
    walk_to(garden, "PROBATIONARY", "r0c1")
    garden.model.train()
    losses_of(garden.model, IMAGES).mean().backward()
    garden.model.link.optimizer.step()
    return garden


BAD_VALUES = {
    "scalar": (torch.tensor(1.0), r"shape \(\).*held-out"),
    "float": (1.5, "float.*held-out"),
    "list": ([1.0, 2.0], "list.*held-out"),
    "2-d": (torch.ones(3, 2), r"shape \(3, 2\)"),
    "one example": (torch.ones(1), "two examples"),
    "nan": (torch.tensor([1.0, float("nan"), 2.0]), "NaN .*1 of 3"),
    "inf": (torch.tensor([1.0, float("inf"), float("nan")]), "NaN .*2 of 3"),
}


@pytest.mark.parametrize(("value", "match"), BAD_VALUES.values(), ids=BAD_VALUES.keys())
def test_a_value_that_is_no_evidence_is_refused_and_nothing_changes(value, match):
    garden = two_live_seeds()
    before = facts(garden)
    with pytest.raises(MeasurementError, match=match):
        garden.step(lambda: value)
    assert facts(garden) == before


@pytest.mark.parametrize("bad_call", [1, 2], ids=["first slot off", "second slot off"])
def test_a_bad_value_with_a_slot_off_changes_nothing_either(bad_call):
    garden = two_live_seeds()
    before = facts(garden)
    calls = iter([torch.ones(3), torch.arange(3.0)][:bad_call])
    with pytest.raises(MeasurementError, match=r"NaN .*1 of 3"):
        garden.step(lambda: next(calls, torch.tensor([1.0, float("nan"), 2.0])))
    assert facts(garden) == before


@pytest.mark.parametrize("bad_call", [1, 2], ids=["first slot off", "second slot off"])
def test_values_of_other_examples_do_not_pair_up(bad_call):
    garden = two_live_seeds()
    before = facts(garden)
    calls = iter([torch.ones(3), torch.arange(3.0)][:bad_call])
    with pytest.raises(MeasurementError, match="3 and 4"):
        garden.step(lambda: next(calls, torch.ones(4)))
    assert facts(garden) == before


def test_an_error_inside_evaluate_comes_through_and_changes_nothing():
    garden = two_live_seeds()
    before = facts(garden)
    with pytest.raises(ZeroDivisionError):
        garden.step(lambda: 1 / 0)
    assert facts(garden) == before


def test_a_garden_goes_on_after_a_refused_value():
    garden, twin = two_live_seeds(), two_live_seeds()
    with pytest.raises(MeasurementError):
        garden.step(lambda: torch.tensor(0.0))
    assert garden.step(made_up(garden)) == twin.step(made_up(twin))


# -- policies of one's own -------------------------------------------------------------------------


def test_an_action_outside_the_space_is_refused_by_head():
    garden = grow_cnn(policy=script({0: (1, 7, 1, 0)}))
    with pytest.raises(SettingError, match="slot index 7"):
        garden.step(made_up(garden))


def test_a_rate_outside_its_range_is_refused_by_name():
    garden = grow_cnn(attach=False)
    for rate in (0.0, -1, math.nan, "1"):
        with pytest.raises(SettingError, match="seed_lr"):
            garden.attach(torch.optim.SGD(garden.parameters(), lr=0.1), seed_lr=rate)


# -- values of another type ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_seeds", "2"),
        ("max_seeds", 1.5),
        ("settings", {}),
        ("settings", "x"),
        ("higher_is_better", "lower"),
        ("higher_is_better", 2),
    ],
    ids=str,
)
def test_an_argument_of_another_type_is_refused(name, value):
    model, where = CNN(), {"slots": "layer1", "example": random_images(2)}
    with pytest.raises(
        SettingError, match=f"^{name} .*{type(value).__name__ if name == 'settings' else value}"
    ):
        esper.grow(model, **where, **{name: value})
    esper.grow(model, **where)  # which can grow all the same


@pytest.mark.parametrize("decay", ["0.9", None, [0.9]], ids=str)
def test_a_decay_that_is_no_number_is_refused(decay):
    with pytest.raises(SettingError, match=r"decay .* 0 and 1"):
        grow_cnn().ema(decay)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lengths", 3),
        ("blends", None),
        ("blends", 3),
        ("kinds", None),
        ("kinds", ["layer1"]),
        ("kinds", {"layer1": 3}),
        ("kinds", {1: "image"}),
        ("seed", "0"),
        ("seed", 0.5),
        ("prunes", "no"),
        ("epochs", "3"),
        ("epochs", 2.5),
        ("scale_at_birth", "x"),
        ("scale_at_birth", -1),
        ("scale_at_birth", math.nan),
        ("least_gain", None),
        ("least_gain", -0.1),
    ],
    ids=str,
)
def test_a_setting_of_another_type_is_refused_where_it_is_written(name, value):
    with pytest.raises(
        SettingError, match=f"^GrowthSettings.{name} must be .* got {re.escape(repr(value))}"
    ):
        esper.GrowthSettings(**{name: value})


def test_names_in_an_array_are_names():
    where = {"slots": np.array(["layer1"]), "blueprints": np.array(["norm"])}
    assert list(
        esper.grow(CNN(), example=random_images(2), **where).model.slot_config.modules.values()
    ) == ["layer1"]


def test_whole_floats_and_truth_values_are_what_they_were():
    settings = esper.GrowthSettings(seed=3.0, epochs=3.0, prunes=1)
    esper.grow(CNN(), slots="layer1", example=random_images(2), max_seeds=2.0, settings=settings)


def test_numbers_of_numpy_are_numbers_and_can_be_saved(tmp_path):
    garden = esper.grow(CNN(), slots="layer1", example=random_images(2), max_seeds=np.int64(2))
    garden.attach(torch.optim.SGD(garden.parameters(), lr=0.1), seed_lr=np.float32(2))
    garden.ema(np.float32(0.5))
    garden.save(tmp_path / "garden")
    loaded = esper.load(tmp_path / "garden", CNN())
    assert (loaded.model.max_seeds, loaded.average.decay) == (2, 0.5)


def test_settings_of_numpy_are_taken():
    settings = esper.GrowthSettings(
        seed=np.int64(3), scale_at_birth=np.float32(0.5), least_gain=np.float64(0)
    )
    esper.grow(CNN(), slots="layer1", example=random_images(2), settings=settings)


# -- parts of a growing model ----------------------------------------------------------------------


def grow_layer(model, name, slot):
    return esper.grow(
        model.get_submodule(name), slots=slot, example=random_images(2), blueprints=["norm"]
    )


def test_a_part_of_a_growing_model_is_not_grown_and_no_save_is_loaded_into_it(tmp_path):
    grow_layer(CNN(), "layer1", "0").save(tmp_path)
    garden = grow_cnn(slots="layer2")
    with pytest.raises(HostError, match=r"part of a CNN that grows.*one call"):
        grow_layer(garden.model.host, "layer1", "0")
    with pytest.raises(HostError, match=r"part of a CNN that grows.*one call"):
        esper.load(tmp_path, garden.model.host.layer1)


def test_a_part_of_a_harvested_network_can_be_grown():
    garden = grow_cnn(slots="layer2")
    grow_layer(garden.harvest(), "layer1", "0")


def test_a_host_with_a_part_that_grows_in_another_garden_is_not_saved(tmp_path):
    inner = grow_layer(CNN(), "layer1", "0")
    garden = grow_cnn(slots="layer2")
    garden.model.host.layer1 = inner.model.host
    with pytest.raises(HostError, match=r"layer1\.0 of this CNN grows in another garden.*one call"):
        garden.save(tmp_path)
    assert not list(tmp_path.iterdir())
    inner.save(tmp_path)
    esper.load(tmp_path, CNN().layer1)
