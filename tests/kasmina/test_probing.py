"""Looking into a foreign model for places, without leaving a trace."""

import pytest
import torch
from torch import nn

from esper.kasmina import MorphogeneticModel
from esper.kasmina.probing import choose_places, find_names, find_places, undisturbed
from esper.leyline import SlotConfig
from esper.leyline.errors import HostError, UnknownNameError


class Foreign(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
        self.shared = nn.ReLU()
        self.unused = nn.Linear(2, 2)
        self.recurrent = nn.LSTM(4, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, images):
        features = self.shared(self.shared(self.stem(images)))
        tokens, _ = self.recurrent(features.flatten(2).mT)
        return self.head(tokens.mean(1))


EXAMPLE = torch.randn(3, 1, 5, 5)


@pytest.fixture
def places():
    return {place.name: place for place in find_places(Foreign(), EXAMPLE)}


def test_places_have_the_kind_and_shape_of_their_output(places):
    assert (places["stem"].kind, places["stem"].shape) == ("image", (4, 3, 3))
    assert (places["head"].kind, places["head"].shape) == ("vector", (2,))


@pytest.mark.parametrize(("name", "problem"), [("shared", "2 times per forward"), ("recurrent", "output is a tuple")])
def test_a_place_where_no_slot_fits_says_why(places, name, problem):
    assert problem in places[name].problem


def test_a_module_that_does_not_run_is_no_place(places):
    assert "unused" not in places


def test_looking_leaves_mode_buffers_hooks_and_random_state_alone():
    model = Foreign()
    model.stem[1].eval()
    modes = [module.training for module in model.modules()]
    buffers, state = [buffer.clone() for buffer in model.buffers()], torch.get_rng_state()
    find_places(model, EXAMPLE)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_modes_come_back_even_after_an_error():
    model = Foreign().train()
    with pytest.raises(ZeroDivisionError), undisturbed(model):
        raise ZeroDivisionError
    assert model.training


def test_an_example_that_does_not_run_is_refused_with_what_it_should_be():
    with pytest.raises(HostError, match="`example` must be what the model is called with"):
        find_places(Foreign(), torch.randn(3, 2))


@pytest.mark.parametrize("example", [EXAMPLE, (EXAMPLE,), {"images": EXAMPLE}], ids=["tensor", "tuple", "dict"])
def test_an_example_comes_as_the_model_takes_it(example):
    assert {place.name for place in find_places(Foreign(), example)} >= {"stem", "head"}


def test_the_kind_can_be_overridden_by_pattern():
    places = {place.name: place for place in find_places(Foreign(), EXAMPLE, {"stem*": "image", "head": "vector"})}
    assert places["head"].kind == "vector"
    with pytest.raises(UnknownNameError, match="Did you mean 'vector'"):
        find_places(Foreign(), EXAMPLE, {"head": "vectr"})


NAMES = ["h.0.mlp", "h.1.mlp", "h.10.mlp", "h.0.attn", "head"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("head", {"head"}),
        ("h.*.mlp", {"h.0.mlp", "h.1.mlp", "h.10.mlp"}),
        (r"h\.[01]\..*", {"h.0.mlp", "h.1.mlp", "h.0.attn"}),
        ("nothing", set()),
        ("(", set()),
    ],
)
def test_a_pattern_finds_the_names_it_means(pattern, found):
    assert find_names(pattern, NAMES) == found


def test_places_are_chosen_in_the_order_of_execution(places):
    model = Foreign()
    chosen = choose_places(model, find_places(model, EXAMPLE), ["head", "stem"])
    assert [place.name for place in chosen] == ["stem", "head"]


@pytest.mark.parametrize(
    ("name", "error", "reason"),
    [
        ("steem", UnknownNameError, "Did you mean 'stem'"),
        ("shared", HostError, "2 times per forward"),
        ("unused", HostError, "does not run"),
        ("recurrent", HostError, "tuple"),
    ],
)
def test_a_slot_where_none_fits_is_refused_with_the_reason(name, error, reason):
    with pytest.raises(error, match=reason):
        MorphogeneticModel(Foreign(), SlotConfig.for_modules([name]), example=EXAMPLE)
