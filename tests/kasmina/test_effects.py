"""Places where a seed could have no effect, and outputs whose first axis is not the batch."""

import pytest
import torch
from torch import nn

import esper
from esper.kasmina.effects import find_idle
from esper.kasmina.probing import find_places, resize
from esper.leyline.errors import HostError
from user_models import CNN, grow_cnn, random_images

FEATURES = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


class Base(nn.Module):
    """A linear layer and a head; what lies between is for the others to say."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, features):
        features = self.first(features)
        return self.head(torch.relu(features) + self.branch(features))

    def branch(self, features):
        return self.middle(features)


class Forgotten(Base):
    """Computes something that nobody uses."""

    def branch(self, features):
        self.kept = super().branch(features)
        return 0.0


class Zeroed(Base):
    """A branch, and a head, that begin at zero."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(()))
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def branch(self, features):
        return self.gain * super().branch(features)


class Quantised(Base):
    """Whole numbers, through which no gradient comes."""

    def branch(self, features):
        return torch.round(10.0 * super().branch(features))


class Softmaxed(Base):
    """Shares, whose sum is one whatever comes before."""

    def forward(self, features):
        return super().forward(features).softmax(-1)


class WhileTraining(Base):
    """Uses a branch in training mode only."""

    def branch(self, features):
        return super().branch(features) if self.training else 0.0 * super().branch(features)


class OfWholeNumbers(Base):
    """Gives out classes, which say little about what moves them."""

    def forward(self, features):
        return super().forward(features).argmax(-1)


class OfManyRows(Base):
    """Uses a branch for a large batch only."""

    def branch(self, features):
        return super().branch(features) if len(features) > 3 else 0.0


class OfOneRow(Base):
    """Takes all five rows, or none."""

    def forward(self, features):
        return super().forward(features.view(5, 4))


@pytest.mark.parametrize(
    ("model", "idle"),
    [
        (Forgotten(), {"middle"}),
        (Zeroed(), set()),
        (Quantised(), set()),
        (Softmaxed(), set()),
        (WhileTraining(), set()),
        (OfWholeNumbers(), set()),
        (OfManyRows(), set()),
        (OfOneRow(), set()),
        (Base().requires_grad_(False), set()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_place_is_idle_if_nothing_that_it_gives_out_can_matter(model, idle):
    model.train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    assert find_idle(model, FEATURES, ["first", "middle"]) == idle
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(module.training and not module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_slot_without_effect_is_refused_by_its_name_and_passed_over_by_a_pattern():
    with pytest.raises(HostError, match="'middle': middle: what the model gives out does not"):
        esper.grow(Forgotten(), slots="middle", example=FEATURES)
    garden = esper.grow(Forgotten(), slots=["*"], example=FEATURES)
    assert set(garden.model.slot_config.modules.values()) == {"first", "head"}


def test_growing_tries_a_model_on_two_rows():
    sizes = []
    host = CNN()
    host.register_forward_pre_hook(lambda _module, args: sizes.append(len(args[0])))
    esper.grow(host, slots="layer1", example=random_images(16), blueprints=["norm"], policy="never")
    # the whole batch shows the shapes, and what is counted of it; the rest is tried on few rows
    assert sizes == [16, 2, 2, 16, 16]


# -- which axis is the batch -----------------------------------------------------------------------


class Stacked(nn.Module):
    """Four views of a text, stacked before the batch, or behind it, or tokens before it."""

    def __init__(self, layout):
        super().__init__()
        self.embed = nn.Embedding(50, 6)
        self.enter, self.layer, self.head = nn.Identity(), nn.Linear(6, 6), nn.Linear(6, 3)
        self.leave = nn.Identity()
        self.layout = layout

    def forward(self, ids):
        features = self.embed(ids)
        if self.layout == "views":
            features = torch.stack([features * view for view in range(1, 5)])
            return self.head(self.layer(features).mean(0))
        if self.layout == "tokens":
            return self.head(self.layer(features.transpose(0, 1)).transpose(0, 1))
        if self.layout == "last":
            return self.head(self.leave(self.layer(features).permute(1, 2, 0)).permute(2, 0, 1))
        return self.head(self.layer(features))


TEXTS = torch.randint(50, (4, 5), generator=torch.Generator().manual_seed(0))


def place_of(layout, name="layer", texts=TEXTS, **options):
    (place,) = (p for p in find_places(Stacked(layout), texts, **options) if p.name == name)
    return place


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize(
    ("layout", "kind", "shape"),
    [
        ("views", "vector", (4, 5, 6)),
        ("tokens", "vector", (5, 6)),
        ("plain", "sequence", (5, 6)),
    ],
)
def test_an_axis_that_follows_the_number_of_examples_is_the_batch(layout, kind, shape, rows):
    place = place_of(layout, texts=TEXTS[:rows])
    assert (place.kind, place.shape, place.problem) == (kind, shape, None)


def test_features_with_the_batch_last_carry_no_slot():
    place = place_of("last", "leave")
    assert place.kind is None
    assert "axis 2 of its 3, counted from 0, is the batch" in place.problem


class Windows(nn.Module):
    """A block whose layers work on the last axis, or on the second, of an image."""

    def __init__(self, channels_last):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(12), nn.Linear(12, 12)
        self.channels_last = channels_last

    def forward(self, images):
        images = self.linear(self.norm(images.permute(0, 2, 3, 1)))
        return images if self.channels_last else images.permute(0, 3, 1, 2)


@pytest.mark.parametrize(("channels_last", "kind"), [(True, "vector"), (False, "image")])
def test_an_image_whose_channels_are_last_has_seeds_of_the_last_axis(channels_last, kind):
    model = nn.Sequential(Windows(channels_last), nn.Flatten())
    example = torch.randn(2, 12, 5, 5)
    place = {place.name: place for place in find_places(model, example)}["0"]
    assert place.kind == kind
    stated = find_places(model, example, {"0": "image"})
    assert {place.name: place for place in stated}["0"].kind == "image"


def test_a_kind_that_is_stated_for_features_without_the_batch_first_must_be_vector():
    assert "is the batch" in place_of("views", kinds={"layer": "image"}).problem
    assert place_of("views", kinds={"layer": "vector"}).kind == "vector"


@pytest.mark.parametrize("layout", ["views", "tokens"])
def test_seeds_on_features_with_another_batch_axis_take_any_batch_and_mix_no_examples(layout):
    settings = esper.GrowthSettings(scale_at_birth=1.0, lengths=esper.StageLengths(ramp=0))
    garden = esper.grow(
        Stacked(layout), slots="layer", example=TEXTS, policy="never", settings=settings
    )
    garden.attach(torch.optim.SGD(garden.parameters(), lr=0.1))
    garden.plant("r0c0", "mlp")
    model = garden.model.eval()
    with torch.no_grad():
        whole = model(TEXTS)
        for row in range(4):
            torch.testing.assert_close(model(TEXTS[row : row + 1])[0], whole[row])
        assert model(TEXTS[:3, :2]).shape == (3, 2, 3)


def test_an_example_is_cut_or_repeated_in_all_its_parts():
    table, scale = torch.ones(7, 3), torch.tensor(2.0)
    example = {"ids": TEXTS, "more": [TEXTS[:, :1], table], "scale": scale, "flag": True}
    for count in (2, 6):
        other = resize(example, count)
        assert torch.equal(other["ids"], TEXTS[torch.arange(count) % 4])
        assert other["more"][0].shape == (count, 1)
        assert other["more"][1] is table
        assert other["scale"] is scale
        assert other["flag"] is True
    assert torch.equal(resize(TEXTS, 1), TEXTS[:1])
    assert [len(part) for part in resize((TEXTS, FEATURES[:4]), 2)] == [2, 2]


def test_a_host_of_a_run_that_names_an_idle_module_is_refused():
    from esper.runtime.building import name_slots

    with pytest.raises(HostError, match="'middle': middle: what the model gives out does not"):
        name_slots(Forgotten(), ("middle",), FEATURES)


def test_a_module_that_is_put_in_place_after_growing_is_an_error_that_names_it():
    garden = grow_cnn()
    garden.model.host.layer1 = nn.Sequential(*garden.model.host.layer1)
    with pytest.raises(HostError, match=r"another Sequential stands at 'layer1'"):
        garden.plant("r0c0", "norm")
