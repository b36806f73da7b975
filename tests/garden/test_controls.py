"""Controls of a grown network: its structure from fresh weights, and the untouched start."""

import pytest
import torch
from torch import nn

import esper
from esper.leyline.errors import HostError, SettingError
from garden.test_auto_slots import IMAGES, encoder, plain_cnn

TOKENS = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))


def grown(model, example, blueprints=None, **options):
    """A garden in which one seed has been kept."""
    settings = esper.GrowthSettings(prunes=False, scale_at_birth=0.5)
    garden = esper.grow(
        model,
        example=example,
        blueprints=blueprints,
        policy="schedule:epochs=0",
        settings=settings,
        **options,
    )
    optimizer = torch.optim.SGD(garden.parameters(), lr=0.05)
    garden.attach(optimizer)

    def losses():
        return garden.model(example).flatten(1).pow(2).mean(1)

    for _ in range(3):
        optimizer.zero_grad()
        losses().mean().backward()
        optimizer.step()
        garden.step(losses)
    assert garden.model.fossilized_seeds == 1
    return garden


def parameters_of(model):
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize(
    ("model", "example", "blueprints"),
    [
        (plain_cnn(), torch.randn(4, 3, 8, 8), ["conv_light"]),
        (encoder(2), TOKENS, ["mlp"]),
        (encoder(2), TOKENS, ["copy"]),
    ],
    ids=["images", "tokens", "copies"],
)
def test_a_control_has_the_grown_structure_and_no_trained_weight(model, example, blueprints):
    garden = grown(model, example, blueprints)
    plain = parameters_of(garden.harvest())
    control = parameters_of(garden.control())
    assert {name: value.shape for name, value in control.items()} == {
        name: value.shape for name, value in plain.items()
    }
    matrices = [name for name in plain if name.endswith("weight") and plain[name].dim() > 1]
    assert matrices
    assert not any(torch.equal(plain[name], control[name]) for name in matrices)
    again = parameters_of(garden.control())
    assert all(torch.equal(again[name], value) for name, value in control.items())
    other = parameters_of(garden.control(seed=1))
    assert not any(torch.equal(other[name], control[name]) for name in matrices)


def test_a_control_leaves_the_garden_and_the_random_state_as_they_are():
    garden = grown(plain_cnn(), torch.randn(4, 3, 8, 8))
    before = {name: value.clone() for name, value in garden.model.state_dict().items()}
    state = torch.random.get_rng_state()
    garden.control()
    garden.control(like="start")
    assert torch.equal(torch.random.get_rng_state(), state)
    after = garden.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_the_start_is_the_model_as_grow_found_it():
    model = plain_cnn()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    garden = grown(model, torch.randn(4, 3, 8, 8))
    start = garden.control(like="start")
    assert start.state_dict().keys() == before.keys()
    assert all(torch.equal(start.state_dict()[name], value) for name, value in before.items())
    assert type(start) is type(model)
    start(IMAGES)


def test_a_start_that_was_not_kept_is_an_error_with_the_way_out(tmp_path):
    garden = esper.grow(plain_cnn(), example=IMAGES, slots="2", keep_start=False)
    with pytest.raises(HostError, match="Build the model again"):
        garden.control(like="start")
    loaded = esper.load(garden.save(tmp_path / "saved"), plain_cnn())
    with pytest.raises(HostError, match="it was loaded"):
        loaded.control(like="start")
    with pytest.raises(SettingError, match='"grown" or "start"'):
        garden.control(like="new")


class Tables(nn.Module):
    """Weights that no method of torch draws again."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.table = nn.Parameter(torch.randn(8))

    def forward(self, features):
        for layer in self.layers:
            features = torch.tanh(layer(features))
        return features * self.table


def test_weights_that_cannot_be_drawn_again_are_asked_for():
    garden = grown(Tables(), torch.randn(4, 8), ["mlp"], slots="layers.0")
    with pytest.raises(HostError, match=r"'table' cannot be drawn again.*build=make_model"):
        garden.control()
    control = garden.control(build=Tables)
    assert not torch.equal(control.table, garden.model.host.table)
    with pytest.raises(HostError, match="differs from that of the host"):
        garden.control(build=lambda: nn.Linear(8, 8))


def test_of_a_model_that_is_built_again_every_copy_gets_weights_of_its_own():
    garden = grown(Tables(), torch.randn(4, 8), ["copy"], slots="layers.0")
    control = garden.control(build=Tables)
    weights = [value for value in parameters_of(control).values() if value.shape == (8, 8)]
    assert len(weights) == 3
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_model_that_initialises_itself_is_drawn_its_own_way():
    class Narrow(Tables):
        def _init_weights(self, module):
            if isinstance(module, nn.Linear):
                nn.init.constant_(module.weight, 0.25)
            if isinstance(module, Narrow):
                nn.init.ones_(module.table)

    garden = grown(Narrow(), torch.randn(4, 8), ["mlp"], slots="layers.0")
    control = garden.control()
    assert torch.equal(control.table, torch.ones(8))
    assert torch.equal(control.layers[1].weight, torch.full((8, 8), 0.25))
