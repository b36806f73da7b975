"""Where a slot would fit: kinds, shapes, reasons, order, and what a pattern means."""

import re

import pytest
import torch
from torch import nn

import esper
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.probing import choose_places, find_names, find_places, undisturbed
from esper.leyline.errors import HostError, UnknownNameError
from esper.leyline.slots import SlotConfig
from user_models import CNN, MLP, Encoder, Twice, random_images, random_vectors

TOKENS = torch.randn(4, 5, 8)


class Odd(nn.Module):
    """Sub-modules whose outputs no slot can take, registered in another order than they run."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(3, 2)
        self.unused = nn.Linear(3, 3)
        self.flat = nn.Flatten(0)
        self.ids = ArgMax()
        self.rnn = nn.GRU(6, 3, batch_first=True)
        self.first = nn.Linear(6, 6)

    def forward(self, vectors, scale=1.0, *, shift=None):
        features, _ = self.rnn(self.first(vectors)[:, None])
        self.ids(features)
        self.flat(features)
        output = self.last(features[:, 0]) * scale
        return output if shift is None else output + shift


class ArgMax(nn.Module):
    def forward(self, features):
        return features.argmax(-1)


def by_name(model, example, **options):
    return {place.name: place for place in find_places(model, example, **options)}


# -- what inspect shows ----------------------------------------------------------------------------


def test_inspect_shows_kind_and_shape_of_every_fitting_place():
    found = {
        place.name: (place.kind, place.shape) for place in esper.inspect(CNN(), random_images(2))
    }
    assert found["layer1"] == ("image", (4, 6, 6))
    assert found["head"] == ("vector", (3,))


def test_features_of_rank_three_are_sequences():
    place = by_name(Encoder(True), TOKENS)["encoder.layers.0"]
    assert (place.kind, place.shape) == ("sequence", (5, 8))


def test_places_come_in_the_order_of_execution():
    names = [place.name for place in find_places(Odd(), random_vectors())]
    assert names == ["first", "rnn", "ids", "flat", "last"]


def test_a_container_comes_after_its_parts():
    names = [place.name for place in find_places(CNN(), random_images(2))]
    assert names.index("layer1.2") < names.index("layer1") < names.index("layer2.0")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("rnn", "tuple"),
        ("ids", "torch.int64"),
        ("flat", "2, 3 or 4"),
    ],
)
def test_a_place_that_does_not_fit_says_why(name, reason):
    place = by_name(Odd(), random_vectors())[name]
    assert reason in place.problem
    assert place.kind is None


def test_a_module_called_twice_says_so():
    assert "2 times" in by_name(Twice(), random_vectors())["shared"].problem


def test_a_place_reads_as_one_line():
    fitting, unfit = (by_name(Odd(), random_vectors())[name] for name in ("first", "rnn"))
    assert str(fitting) == "first (Linear): vector (6,)"
    assert re.match(r"rnn \(GRU\): .*tuple", str(unfit))


def test_probing_leaves_no_hook_and_no_trace():
    model = CNN(dropout=0.5).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    find_places(model, random_images(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training and not module._forward_hooks for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_modes_come_back_even_after_an_error():
    model = CNN().train()
    with pytest.raises(ZeroDivisionError), undisturbed(model):
        raise ZeroDivisionError
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("name", "error", "reason"),
    [
        ("firt", UnknownNameError, "'first'"),
        ("unused", HostError, "'unused'"),
        ("rnn", HostError, "tuple"),
    ],
)
def test_a_slot_where_none_fits_is_refused_with_the_reason(name, error, reason):
    with pytest.raises(error, match=reason):
        MorphogeneticModel(Odd(), SlotConfig.for_modules([name]), example=random_vectors())


# -- example batches -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "example",
    [
        random_vectors(),
        (random_vectors(), 2.0),
        [random_vectors()],
        {"vectors": random_vectors(), "shift": torch.ones(2)},
    ],
    ids=["tensor", "arguments", "list of one", "keywords"],
)
def test_an_example_is_spread_as_the_model_takes_it(example):
    assert by_name(Odd(), example)["last"].shape == (2,)


@pytest.mark.parametrize(
    "example",
    [torch.zeros(2, 5), {"pictures": torch.zeros(2, 6)}, (), torch.zeros(2, 6, dtype=torch.long)],
)
def test_an_example_that_does_not_run_is_refused_and_leaves_no_hook(example):
    model = MLP()
    with pytest.raises(HostError, match=r"MLP: .*dict"):
        find_places(model, example)
    assert not any(module._forward_hooks for module in model.modules())


# -- kinds -----------------------------------------------------------------------------------------


def test_a_kind_can_be_said_for_a_pattern():
    kinds = {
        place.name: place.kind
        for place in find_places(Encoder(True), TOKENS, {"encoder.layers.*": "vector"})
    }
    assert (kinds["encoder.layers.0"], kinds["encoder"]) == ("vector", "sequence")


def test_an_unknown_kind_shows_the_nearest():
    with pytest.raises(UnknownNameError, match=r"'vektor'.*'vector'"):
        find_places(MLP(), random_vectors(), {"enter": "vektor"})


def test_where_tokens_may_come_before_the_batch_only_token_wise_seeds_are_offered():
    assert by_name(Encoder(False), TOKENS)["encoder.layers.0"].kind == "vector"


def test_a_user_who_knows_better_gets_a_sequence_where_tokens_come_first():
    found = by_name(Encoder(False), TOKENS, kinds={"encoder.layers.1": "sequence"})
    assert found["encoder.layers.1"].kind == "sequence"


def test_a_kind_said_for_one_place_does_not_lift_the_caution_at_others():
    found = by_name(Encoder(False), TOKENS, kinds={"head": "vector"})
    assert found["encoder.layers.0"].kind == "vector"


def test_a_kind_of_another_rank_is_refused_when_the_model_is_wrapped():
    settings = esper.GrowthSettings(kinds={"enter": "image"})
    with pytest.raises(esper.EsperError, match="enter"):
        esper.grow(MLP(), slots="enter", example=random_vectors(), settings=settings)


# -- patterns --------------------------------------------------------------------------------------

NAMES = ("h", "h.0", "h.0.mlp", "h.1.mlp", "h.10.mlp", "h.0.attn.proj", "head")


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("h.0", {"h.0"}),
        ("h.*", {"h.0"}),
        ("h.*.mlp", {"h.0.mlp", "h.1.mlp", "h.10.mlp"}),
        ("h.?.mlp", {"h.0.mlp", "h.1.mlp"}),
        ("h.[01].mlp", {"h.0.mlp", "h.1.mlp"}),
        ("h*", {"h", "head"}),
        (r"h\.\d+\.mlp", {"h.0.mlp", "h.1.mlp", "h.10.mlp"}),
        (r"h\..*", {"h.0", "h.0.mlp", "h.1.mlp", "h.10.mlp", "h.0.attn.proj"}),
        ("H.0", set()),
        ("mlp", set()),
        ("(", set()),
    ],
)
def test_a_pattern_is_a_name_or_a_glob_by_parts_or_a_regex(pattern, meant):
    assert find_names(pattern, NAMES) == meant


def test_a_name_wins_over_its_reading_as_a_regex():
    assert find_names("h.0", ("h.0", "hx0")) == {"h.0"}


def test_patterns_choose_places_in_the_order_of_execution():
    model = CNN()
    places = find_places(model, random_images(2))
    assert [place.name for place in choose_places(model, places, ["head", "layer*"])] == [
        "layer1",
        "layer2",
        "head",
    ]


class AlwaysLearning(nn.BatchNorm1d):
    """Batch norm that no call of `eval` freezes."""

    def train(self, mode=True):
        return super().train(True)


@pytest.mark.parametrize("blueprints", [["mlp"], ["copy", "copy_zero"]], ids=str)
def test_looking_and_counting_leave_running_statistics_alone(blueprints):
    model = nn.Sequential(nn.Linear(4, 8), AlwaysLearning(8), nn.Linear(8, 8), nn.BatchNorm1d(8))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = torch.randn(6, 4)
    esper.inspect(model, batch)
    garden = esper.grow(model, slots=["1", "2"], example=batch, blueprints=blueprints)
    assert garden.books.flops is not None
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.parametrize("pattern", ["leyer1", "nothing.*", "("])
def test_a_pattern_of_kinds_that_no_module_has_is_refused(pattern):
    host = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    with pytest.raises(UnknownNameError, match=r"^unknown module or pattern .*esper\.inspect"):
        find_places(host, torch.zeros(2, 4), {"0": "vector", pattern: "vector"})
    assert find_places(host, torch.zeros(2, 4), {"*": "vector"})
