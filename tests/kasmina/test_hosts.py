"""Built-in hosts:

sizes, slots, and passes that can be split at any slot while seeds are growing.
"""

import itertools

import pytest
import torch
from torch import nn

from esper.kasmina.checks import check_host
from esper.kasmina.hosts import (
    ChainHost,
    build_cnn_host,
    build_mlp_host,
    build_resnet_host,
    build_transformer_host,
)
from esper.kasmina.model import MorphogeneticModel
from esper.leyline.errors import HostError, SettingError, UnknownNameError
from esper.leyline.lifecycle import StageLengths
from esper.leyline.settings import GrowthSettings
from esper.leyline.slots import SlotConfig


def cnn():
    return build_cnn_host(blocks=4, base_channels=4, image_size=16), torch.randn(3, 3, 16, 16)


def transformer():
    host = build_transformer_host(vocabulary=11, width=16, layers=5, heads=2, context=8, slots=3)
    return host, torch.randint(11, (3, 7))


def mlp():
    return build_mlp_host(inputs=5, widths=(8, 4, 8)), torch.randn(3, 5)


def resnet():
    return build_resnet_host(width=4, stages=2), torch.randn(3, 3, 16, 16)


HOSTS = {"cnn": cnn, "transformer": transformer, "mlp": mlp, "resnet": resnet}
every_host = pytest.mark.parametrize("build", HOSTS.values(), ids=HOSTS)
PLANTED = {"image": "conv_light", "sequence": "attention", "vector": "mlp"}


def with_seeds(host):
    """Every slot holds a seed with an effect, at a different alpha between 0 and 1."""
    settings = GrowthSettings(lengths=StageLengths(ramp=9), scale_at_birth=1.0)
    model = MorphogeneticModel(host, settings=settings).eval()
    model.attach(torch.optim.SGD(host.parameters(), lr=0.1))
    for slot, blend in zip(model.slots.values(), itertools.cycle(("linear", "gated", "sigmoid"))):
        model.germinate_seed(slot.slot_id, PLANTED[slot.kind], blend)
        model.tick()
    assert all(0.0 < report.alpha < 1.0 for report in model.get_slot_reports().values())
    return model


@torch.no_grad()
def assert_segments_agree(host, inputs):
    model = with_seeds(host)
    whole = model(inputs)
    ids = model.slot_config.slot_ids
    for slot_id in ids:
        features = model.forward_to_segment(slot_id, inputs)
        assert torch.equal(model.forward_from_segment(slot_id, features), whole)
    for first, second in itertools.combinations_with_replacement(ids, 2):
        features = model.forward_to_segment(first, inputs)
        hopped = model.forward_to_segment(second, features, from_segment=first)
        assert torch.equal(hopped, model.forward_to_segment(second, inputs))
        assert torch.equal(model.forward_from_segment(second, hopped), whole)


def test_cnn_segment_consistency():
    assert_segments_agree(*cnn())


def test_transformer_segment_consistency():
    assert_segments_agree(*transformer())


def test_mlp_segment_consistency():
    assert_segments_agree(*mlp())


def test_resnet_segment_consistency():
    assert_segments_agree(*resnet())


@every_host
def test_the_seeds_of_the_segment_tests_have_an_effect_in_every_slot(build):
    host, inputs = build()
    model = with_seeds(host)
    whole = model(inputs)
    for slot_id in model.slot_config.slot_ids:
        with model.slot_off(slot_id):
            assert not torch.equal(model(inputs), whole)


@every_host
def test_a_segments_features_are_those_before_its_slot(build):
    host, inputs = build()
    model = with_seeds(host)
    first = model.slot_config.slot_ids[0]
    before = model.forward_to_segment(first, inputs)
    with model.slot_off(first):
        assert torch.equal(model.forward_to_segment(first, inputs), before)


@every_host
def test_a_pass_does_not_go_backwards(build):
    host, inputs = build()
    with pytest.raises(SettingError, match="comes after r0c0"):
        host.forward_to_segment(
            "r0c0", host.forward_to_segment("r0c1", inputs), from_segment="r0c1"
        )


@every_host
def test_an_unknown_segment_gets_the_known_ones(build):
    host, inputs = build()
    with pytest.raises(UnknownNameError, match=": r0c0, r0c1"):
        host.forward_to_segment("r0c7", inputs)


@every_host
def test_every_built_in_host_passes_the_public_check(build):
    check_host(build()[0])


@every_host
def test_the_check_leaves_the_host_as_it_was(build):
    host, _ = build()
    before = {name: value.clone() for name, value in host.state_dict().items()}
    check_host(host)
    assert all(torch.equal(value, before[name]) for name, value in host.state_dict().items())
    assert not any(module._forward_hooks for module in host.modules())
    assert host.training


def test_the_default_cnn_has_three_slots_and_6418_parameters():
    host = build_cnn_host()
    assert sum(parameter.numel() for parameter in host.parameters()) == 6418
    assert host.slot_config().slot_ids == ("r0c0", "r0c1", "r0c2")


@pytest.mark.parametrize("blocks", range(1, 7))
def test_a_cnn_has_any_number_of_blocks_with_a_slot_after_each(blocks):
    host = build_cnn_host(blocks=blocks, base_channels=2, image_size=8, classes=4)
    model = MorphogeneticModel(host)
    assert model.slot_config.num_slots == blocks
    assert [slot.channels for slot in model.slots.values()] == [
        2 * 2**index for index in range(blocks)
    ]
    assert model(host.example()).shape == (2, 4)


@pytest.mark.parametrize(("layers", "slots"), [(4, 2), (5, 3), (3, 3), (7, 1)])
def test_a_transformer_deals_all_its_layers_into_its_slots(layers, slots):
    host = build_transformer_host(
        vocabulary=7, width=8, layers=layers, heads=2, slots=slots, context=4
    )
    assert sum(type(module).__name__ == "DecoderLayer" for module in host.modules()) == layers
    assert host.slot_config().num_slots == slots
    assert host(torch.zeros(2, 4, dtype=torch.long)).shape == (2, 4, 7)


@torch.no_grad()
def test_a_transformer_does_not_look_at_the_future_with_seeds_in_every_slot():
    host, tokens = transformer()
    model = with_seeds(host)
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    assert torch.equal(model(changed)[:, :4], model(tokens)[:, :4])
    assert not torch.equal(model(changed)[:, 4:], model(tokens)[:, 4:])


def test_a_transformer_refuses_more_tokens_than_its_context():
    host, _ = transformer()
    with pytest.raises(SettingError, match=r"9 tokens .* 8"):
        host(torch.zeros(1, 9, dtype=torch.long))


def test_an_mlp_has_a_slot_after_each_hidden_layer():
    model = MorphogeneticModel(build_mlp_host(inputs=5, widths=(8, 4), classes=2))
    assert [slot.feature_shape for slot in model.slots.values()] == [(8,), (4,)]


def test_a_resnet_halves_the_image_and_doubles_the_width_at_each_later_stage():
    model = MorphogeneticModel(build_resnet_host(width=4, blocks=2, stages=3))
    shapes = [slot.feature_shape for slot in model.slots.values()]
    assert shapes == [(4, 32, 32)] * 2 + [(8, 16, 16)] * 2 + [(16, 8, 8)] * 2


def test_copies_fit_behind_the_blocks_of_a_resnet_that_keep_their_shape():
    model = MorphogeneticModel(
        build_resnet_host(width=4, blocks=3, stages=2), blueprints=("copy", "copy_zero")
    )
    for name in ("copy", "copy_zero"):
        assert [slot for slot, *of in model.costs if of == [name, "linear"]] == [
            f"r0c{n}" for n in (0, 1, 2, 4, 5)
        ]


BAD = {
    "no blocks": lambda: build_cnn_host(blocks=0),
    "no channels": lambda: build_cnn_host(base_channels=0),
    "half a class": lambda: build_cnn_host(classes=2.5),
    "no pixels": lambda: build_cnn_host(image_size=-1),
    "no blocks in a stage": lambda: build_resnet_host(blocks=0),
    "no stages": lambda: build_resnet_host(stages=0),
    "no inputs": lambda: build_mlp_host(inputs=0),
    "no widths": lambda: build_mlp_host(inputs=3, widths=()),
    "a width of zero": lambda: build_mlp_host(inputs=3, widths=(4, 0)),
    "heads that do not divide": lambda: build_transformer_host(vocabulary=5, width=10, heads=4),
    "more slots than layers": lambda: build_transformer_host(vocabulary=5, layers=2, slots=3),
    "no vocabulary": lambda: build_transformer_host(vocabulary=0),
}


@pytest.mark.parametrize("build", BAD.values(), ids=BAD)
def test_a_setting_that_makes_no_host_is_refused(build):
    with pytest.raises(SettingError):
        build()


# -- the check sees broken hosts -------------------------------------------------------------------


class ScalesItsOutput(ChainHost):
    def forward_from_segment(self, slot_id, features):
        return super().forward_from_segment(slot_id, features) * 1.001


class RoundsItsFeatures(ChainHost):
    def forward_to_segment(self, slot_id, inputs, from_segment=None):
        features = super().forward_to_segment(slot_id, inputs, from_segment)
        return features.round(decimals=2)


class SkipsItsSlot(ChainHost):
    """Agrees with its forward pass until something grows."""

    def forward_from_segment(self, slot_id, features):
        for block in self.blocks[self._index(slot_id) + 1 :]:
            features = block(features)
        return self.head(features)


def chain(cls):
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
    return cls(blocks, nn.Linear(4, 3), torch.randn(5, 4))


def test_the_plain_chain_passes_the_check():
    check_host(chain(ChainHost))


@pytest.mark.parametrize("cls", [ScalesItsOutput, RoundsItsFeatures, SkipsItsSlot])
def test_the_check_rejects_a_host_whose_segments_disagree(cls):
    with pytest.raises(HostError, match="r0c0"):
        check_host(chain(cls))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0

    def forward(self, inputs):
        self.calls += 1
        return self.layer(inputs) + self.calls


def test_the_check_rejects_a_host_that_answers_differently_each_time():
    with pytest.raises(HostError, match="deterministic"):
        check_host(Counting(), SlotConfig.for_modules(["layer"]), torch.randn(2, 4))
