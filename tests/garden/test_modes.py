"""A garden under autograd's modes, on modules whose output differs in training, in any numbers."""

import numpy as np
import pytest
import torch
from torch import nn, optim

import esper
from esper.leyline.errors import HostError, MeasurementError, SettingError
from user_models import (
    CNN,
    PLANT_FIRST,
    grow_cnn,
    losses_of,
    random_images,
    script,
    train_epoch,
)

IMAGES, HELD_OUT = random_images(32, seed=1), random_images(20, seed=2)


# -- inference mode --------------------------------------------------------------------------------


def tend(folder, is_inference):
    """Everything that one does with a garden between two epochs; the state that comes of it."""
    torch.manual_seed(0)
    host = CNN()
    with torch.inference_mode(is_inference):
        garden = grow_cnn({1: PLANT_FIRST}, host=host, max_seeds=4, attach=False)
        garden.ema(0.9)
        garden.attach(optim.AdamW(garden.parameters(), lr=1e-2))
    for epoch in range(4):
        train_epoch(garden.model, garden.model.link.optimizer, epoch, IMAGES)
        with torch.inference_mode(is_inference):
            garden.step(lambda: losses_of(garden.model, HELD_OUT))
    with torch.inference_mode(is_inference):
        garden.save(folder)
        garden.restore(folder)
        garden.plant("r0c1", "conv_small")
    train_epoch(garden.model, garden.model.link.optimizer, 4, IMAGES)
    fresh = CNN()
    with torch.inference_mode(is_inference):
        plain = garden.harvest()
        loaded = esper.load(folder, fresh, policy=script({}))
    for model in (plain, loaded.model):
        losses_of(model, IMAGES).mean().backward()
    return garden.model.state_dict()


def test_a_garden_that_is_tended_in_inference_mode_trains_on_to_the_bit(tmp_path):
    plain, inference = (tend(tmp_path / str(mode), mode) for mode in (False, True))
    assert plain.keys() == inference.keys()
    assert all(torch.equal(plain[name], inference[name]) for name in plain)


def test_layers_that_are_copied_in_inference_mode_learn():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.inference_mode():
        deeper = esper.deepen(model, 3)
    deeper(torch.ones(2, 4)).sum().backward()
    assert len(deeper) == 3


def test_a_host_that_was_built_in_inference_mode_is_refused():
    with torch.inference_mode():
        host = CNN()
    with pytest.raises(HostError, match=r"built inside torch.inference_mode\(\).*outside"):
        grow_cnn(host=host)


# -- outputs ---------------------------------------------------------------------------------------


class Moody(CNN):
    """Its first layer returns something else than a tensor in one of the modes."""

    def __init__(self, wrap, mood):
        super().__init__()
        self.wrap, self.mood = wrap, mood
        self.inner = self.layer1
        self.layer1 = nn.Identity()
        self.layer1.forward = self.look

    def look(self, images):
        features = self.inner(images)
        return self.wrap(features) if self.training == self.mood else features

    def forward(self, images):
        features = self.layer1(images)
        if self.training == self.mood:
            features = self.inner(images)
        return self.head(self.layer2(features).mean((2, 3)))


@pytest.mark.parametrize(
    "wrap", [lambda x: (x, x), lambda x: {"x": x}, lambda x: None], ids=["tuple", "dict", "None"]
)
def test_a_module_that_returns_no_tensor_in_training_is_refused_before_a_seed_is_there(wrap):
    garden = grow_cnn(host=Moody(wrap, True), slots="layer1", policy="never")
    with pytest.raises(
        HostError, match=r"r0c0 sits on a Identity .*, in training mode, a .*Let it"
    ):
        garden.model.train()(IMAGES)


def test_a_module_that_returns_no_tensor_in_evaluation_is_refused_once_something_grew():
    host = Moody(lambda features: features, False)
    garden = grow_cnn(host=host, slots="layer1", policy="never")
    host.wrap = lambda features: (features, features)
    garden.model.eval()(IMAGES)
    garden.plant("r0c0", "conv_small")
    with pytest.raises(HostError, match="in evaluation mode, a tuple"):
        garden.model.eval()(IMAGES)


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [np.int64, torch.tensor, float], ids=["numpy", "torch", "float"])
def test_numbers_of_any_kind_are_settings_and_come_back_as_those_of_python(number, tmp_path):
    settings = esper.GrowthSettings(
        lengths=esper.StageLengths(ramp=number(2), embargo=number(1)),
        epochs=number(9),
        seed=number(3),
        prunes=number(1),
        least_gain=number(0),
        scale_at_birth=number(0),
        blends=["linear", "gated"],
    )
    plain = esper.GrowthSettings(
        lengths=esper.StageLengths(ramp=2, embargo=1), epochs=9, seed=3, blends=("linear", "gated")
    )
    assert settings == plain
    assert repr(settings) == repr(plain)
    where = {"slots": "layer1", "example": random_images(2), "max_seeds": number(3)}
    esper.grow(CNN(), **where, settings=settings).save(tmp_path)
    assert repr(esper.load(tmp_path, CNN()).model.settings) == repr(plain)


def test_one_blend_may_be_named_as_text():
    assert esper.GrowthSettings(blends="linear").blends == ("linear",)


@pytest.mark.parametrize("budget", [np.float32(2), torch.tensor(2.0), np.int64(400)], ids=str)
def test_a_budget_may_be_a_number_of_any_kind(budget):
    plain = grow_cnn(budget=budget.item())
    assert grow_cnn(budget=budget).model.budget == plain.model.budget


@pytest.mark.parametrize("name", ["epochs", "seed", "prunes", "least_gain", "scale_at_birth"])
@pytest.mark.parametrize(
    "value", [np.array([1, 0]), torch.ones(2), 10**400], ids=["np", "t", "big"]
)
def test_what_is_not_one_number_is_refused_by_the_setting(name, value):
    if isinstance(value, int) and name == "seed":
        value = 1j
    with pytest.raises(SettingError, match=f"^GrowthSettings.{name} must be"):
        esper.GrowthSettings(**{name: value})


def test_several_numbers_are_no_rate_no_decay_and_no_direction():
    garden, several = grow_cnn(attach=False), np.array([1, 0])
    with pytest.raises(SettingError, match="seed_lr must be"):
        garden.attach(optim.SGD(garden.parameters(), lr=0.1), seed_lr=several)
    with pytest.raises(SettingError, match="decay must"):
        garden.ema(several)
    with pytest.raises(SettingError, match="higher_is_better is"):
        grow_cnn(higher_is_better=several)


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(4, dtype=torch.complex64),
        torch.zeros(4).to_sparse(),
        torch.zeros(4, device="meta"),
    ],
    ids=["complex", "sparse", "meta"],
)
def test_held_out_values_that_are_no_plain_numbers_are_refused(value):
    garden = grow_cnn()
    with pytest.raises(MeasurementError, match=r"returned a tensor of shape \(4,\)"):
        garden.step(lambda: value)
