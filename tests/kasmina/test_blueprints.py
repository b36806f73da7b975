"""What every blueprint promises, with the registry as the list of cases; and that the checker sees
broken ones.
"""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from esper.kasmina.blueprints import REGISTRY, SHAM, blueprint
from esper.kasmina.checks import TYPICAL_SHAPES, check_blueprint
from esper.leyline.errors import (
    BlueprintError,
    BlueprintMismatchError,
    NameTakenError,
    UnknownNameError,
)
from kasmina.gardens import grow_cnn, images, output, train

ALL = [
    key for key, known in REGISTRY._known.items() if not known.inherits
]  # copies are tested in their networks
CAPACITY = [(kind, name) for kind, name in ALL if name != SHAM]
SHAPES = {
    "image": [(8, 6, 6), (6, 5, 7), (3, 2, 2)],
    "sequence": [(5, 16), (1, 8)],
    "vector": [(16,), (3,)],
}
SIZED = [(kind, name, shape) for kind, name in CAPACITY for shape in SHAPES[kind]]

every = pytest.mark.parametrize(("kind", "name"), CAPACITY)
with_and_without_gate = pytest.mark.parametrize("gated", [False, True])


@pytest.fixture
def registry(monkeypatch):
    """The registry, with whatever a test registers taken out again."""
    monkeypatch.setattr(REGISTRY, "_known", dict(REGISTRY._known))
    return REGISTRY


def build(kind, name, *, scale=0.0, gated=False):
    shape = TYPICAL_SHAPES[kind]
    return REGISTRY.get(kind, name).build_seed(shape, scale=scale, gated=gated), torch.randn(
        4, *shape
    )


def test_the_registry_holds_what_the_specification_lists():
    assert {kind: set(REGISTRY.names(kind)) for kind in ("image", "sequence", "vector")} == {
        "image": {
            "conv_light",
            "conv_heavy",
            "depthwise",
            "attention",
            "norm",
            "bottleneck",
            "inverted_bottleneck",
            "conv_small",
            "copy",
            "copy_zero",
        },
        "sequence": {"lora", "mlp", "mlp_small", "attention", "norm", "copy", "copy_zero"},
        "vector": {"mlp", "mlp_small", "mlp_tiny", "lora", "copy", "copy_zero"},
    }


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_every_blueprint_passes_the_public_check(kind, name):
    check_blueprint(kind, name)


@pytest.mark.parametrize(("kind", "name", "shape"), SIZED)
@with_and_without_gate
def test_a_newborn_seed_is_the_identity_to_the_bit(kind, name, shape, gated):
    features = torch.randn(4, *shape)
    seed = REGISTRY.get(kind, name).build_seed(shape, gated=gated)
    for mode in (True, False):
        assert torch.equal(seed.train(mode)(features), features)


@pytest.mark.parametrize(("kind", "name", "shape"), SIZED)
def test_a_seed_at_full_strength_keeps_the_shape(kind, name, shape):
    seed = REGISTRY.get(kind, name).build_seed(shape, scale=1.0)
    assert seed(torch.randn(4, *shape)).shape == (4, *shape)


@every
@with_and_without_gate
def test_one_optimiser_step_changes_the_output(kind, name, gated):
    seed, features = build(kind, name, gated=gated)
    optimizer = torch.optim.SGD(seed.parameters(), lr=0.1)
    (seed(features) - torch.randn_like(features)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(seed(features), features)


@every
@with_and_without_gate
def test_every_parameter_gets_a_gradient_within_three_steps(kind, name, gated):
    seed, features = build(kind, name, gated=gated)
    optimizer = torch.optim.SGD(seed.parameters(), lr=0.1)
    target, woken = torch.randn_like(features), set()
    for _ in range(3):
        optimizer.zero_grad()
        (seed(features) - target).square().sum().backward()
        woken |= {
            name
            for name, p in seed.named_parameters()
            if p.grad is not None and p.grad.abs().sum() > 0
        }
        optimizer.step()
    assert woken == {name for name, _ in seed.named_parameters()}


@pytest.mark.parametrize(("kind", "name", "shape"), SIZED)
@with_and_without_gate
def test_the_price_is_the_number_of_parameters_that_get_built(kind, name, shape, gated):
    seed = REGISTRY.get(kind, name).build_seed(shape, gated=gated)
    built = sum(parameter.numel() for parameter in seed.parameters())
    assert REGISTRY.get(kind, name).cost(shape, gated).params == built


@pytest.mark.parametrize(("kind", "name", "shape"), SIZED)
@with_and_without_gate
def test_the_flops_are_those_of_a_real_forward_pass(kind, name, shape, gated):
    seed = REGISTRY.get(kind, name).build_seed(shape, scale=1.0, gated=gated)
    # torch's counter does not know the fused attention kernel of the CPU
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        seed(torch.randn(1, *shape))
    assert REGISTRY.get(kind, name).cost(shape, gated).flops == counter.get_total_flops()


@every
def test_asking_for_a_price_leaves_the_random_state_alone(kind, name):
    before = torch.get_rng_state()
    REGISTRY.get(kind, name).cost((*TYPICAL_SHAPES[kind][:-1], TYPICAL_SHAPES[kind][-1] + 4))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_heavier_blueprint_costs_more():
    prices = [
        REGISTRY.get("image", name).cost((16, 4, 4)).params
        for name in ("conv_small", "conv_light", "conv_heavy")
    ]
    assert prices == sorted(set(prices))


@pytest.mark.parametrize("name", [name for kind, name in CAPACITY if kind == "sequence"])
@with_and_without_gate
def test_a_sequence_seed_does_not_look_at_the_future(name, gated):
    seed, features = build("sequence", name, scale=1.0, gated=gated)
    if gated:
        nn.init.normal_(seed.gate.linear.weight)
    for token in range(features.shape[1]):
        changed = features.clone()
        changed[:, token] += torch.randn_like(changed[:, token])
        assert torch.equal(seed(changed)[:, :token], seed(features)[:, :token])
        assert not torch.equal(seed(changed)[:, token], seed(features)[:, token])


def test_attention_looks_at_the_past():
    seed, features = build("sequence", "attention", scale=1.0)
    changed = features.clone()
    changed[:, 0] += torch.randn_like(changed[:, 0])
    assert not torch.equal(seed(changed)[:, -1], seed(features)[:, -1])


@every
def test_a_seed_treats_every_example_alone(kind, name):
    seed, features = build(kind, name, scale=1.0)
    torch.testing.assert_close(seed(features)[:1], seed(features[:1]))


def test_attention_refuses_a_width_its_heads_do_not_divide():
    with pytest.raises(BlueprintMismatchError, match=r"'attention' .*\(5, 6\).* 4"):
        REGISTRY.get("sequence", "attention").build_seed((5, 6))


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(UnknownNameError, match=r"image .*'conv_hevy'.*'conv_heavy'"):
        REGISTRY.get("image", "conv_hevy")


def test_a_name_of_another_kind_is_unknown():
    with pytest.raises(UnknownNameError, match="vector blueprint 'conv_light'"):
        REGISTRY.get("vector", "conv_light")


def test_the_sham_has_no_parameters_and_no_effect():
    seed, features = build("image", SHAM)
    assert not list(seed.parameters())
    assert torch.equal(seed(features), features)
    assert torch.equal(seed.blend(features, torch.tensor(0.3)), features)


# -- the user's own --------------------------------------------------------------------------------


def test_a_users_own_blueprint_grows_in_a_model(registry):
    @blueprint("image", "mine", spatial=1.0)
    def mine(channels):
        return nn.Conv2d(channels, channels, 3, padding=1)

    check_blueprint("image", "mine")
    model = grow_cnn()
    model.germinate_seed("r0c0", "mine")
    before = output(model, images())
    model.tick()
    train(model, images())
    assert model.active_params == REGISTRY.get("image", "mine").cost((4, 4, 4)).params
    assert not torch.equal(output(model, images()), before)


@pytest.mark.parametrize("name", ["my conv", "x;import os", ""])
def test_a_blueprints_name_is_an_identifier(registry, name):
    with pytest.raises(BlueprintError, match="identifier"):
        blueprint("image", name)


def test_a_blueprints_kind_is_a_known_one(registry):
    with pytest.raises(UnknownNameError, match=r"'imge'.*'image'"):
        blueprint("imge", "mine")


def test_a_function_that_builds_no_module_is_refused(registry):
    blueprint("image", "mine")(lambda channels: "a string")
    with pytest.raises(BlueprintError, match=r"'mine' .*nn.Module"):
        REGISTRY.get("image", "mine").build_seed((8, 6, 6))


# -- the checker sees broken promises --------------------------------------------------------------


class Constant(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, features):
        return torch.full_like(features, self.value)


class Unused(nn.Conv2d):
    def __init__(self, channels):
        super().__init__(channels, channels, 1)
        self.forgotten = nn.Parameter(torch.ones(3))


def dead(channels):
    layer = nn.Conv2d(channels, channels, 1)
    nn.init.zeros_(layer.weight)
    nn.init.constant_(layer.bias, -1.0)
    return nn.Sequential(layer, nn.ReLU())


class Peeking(nn.Module):
    """Every token gets the mean of all tokens, through a projection that is zero at birth."""

    def __init__(self, channels):
        super().__init__()
        self.out = nn.Linear(channels, channels)
        nn.init.zeros_(self.out.weight)

    def forward(self, features):
        return self.out(features.mean(1, keepdim=True).expand_as(features))


SIZES = itertools.count(1)
BROKEN = {
    "batch norm": ("image", lambda c: nn.BatchNorm2d(c), "BatchNorm"),
    "batch norm of vectors": ("vector", lambda c: nn.BatchNorm1d(c), "BatchNorm"),
    "dropout": (
        "vector",
        lambda c: nn.Sequential(nn.Linear(c, c), nn.Dropout(0.5)),
        "random.*dropout",
    ),
    "later tokens": (
        "sequence",
        lambda c: nn.TransformerEncoderLayer(c, 2, 8, 0.0, batch_first=True),
        "token 0",
    ),
    "later tokens, once it learns": ("sequence", Peeking, "token 0 .* token 1.* causal=False"),
    "smaller images": ("image", lambda c: nn.Conv2d(c, c, 3), "shape"),
    "larger images": ("image", lambda c: nn.Upsample(scale_factor=2), "shape"),
    "another width": ("vector", lambda c: nn.Linear(c, c + 1), "shape"),
    "an extra axis": ("vector", lambda c: nn.Unflatten(1, (1, c)), "shape"),
    "zeros": (
        "image",
        lambda c: nn.Sequential(nn.Conv2d(c, c, 1), Constant(0.0)),
        "optimiser step",
    ),
    "zero weights before a ReLU": ("image", dead, "optimiser step"),
    "not finite": ("image", lambda c: Constant(float("nan")), "identity"),
    "an unused parameter": ("image", Unused, "gradient after"),
    "another size each time": (
        "vector",
        lambda c: nn.Sequential(nn.Linear(c, n := next(SIZES)), nn.Linear(n, c)),
        "priced",
    ),
}


@pytest.mark.parametrize(("kind", "body", "reason"), BROKEN.values(), ids=BROKEN)
def test_the_check_rejects_a_broken_blueprint(registry, kind, body, reason):
    blueprint(kind, "broken")(body)
    with pytest.raises(BlueprintError, match=reason):
        check_blueprint(kind, "broken")


def test_a_seed_for_a_model_that_looks_both_ways_may_look_at_later_tokens(registry):
    blueprint("sequence", "peeking")(Peeking)
    check_blueprint("sequence", "peeking", causal=False)


def test_dropout_is_not_taken_for_mixing_examples(registry):
    blueprint("image", "dropped")(lambda c: nn.Sequential(nn.Conv2d(c, c, 1), nn.Dropout(0.1)))
    with pytest.raises(BlueprintError) as refused:
        check_blueprint("image", "dropped")
    assert "BatchNorm" not in str(refused.value)


def test_a_name_that_is_taken_is_refused_unless_one_says_so(registry):
    known = REGISTRY.get("image", "norm")
    with pytest.raises(NameTakenError, match=r"image blueprint 'norm' .*replace=True"):
        blueprint("image", "norm")(Unused)
    assert REGISTRY.get("image", "norm") is known
    blueprint("image", "norm", replace=True)(nn.Identity)
    assert REGISTRY.get("image", "norm").build is nn.Identity
    blueprint("vector", "norm")(nn.Identity)  # of another kind it is another one


@pytest.mark.parametrize("name", ["sham", "copy", "copy_zero"])
def test_what_growing_itself_rests_on_is_not_replaced(registry, name):
    with pytest.raises(BlueprintError, match=f"'{name}'"):
        blueprint("image", name, replace=True)


def test_the_check_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    check_blueprint("vector", "mlp")
    assert torch.equal(torch.get_rng_state(), before)
