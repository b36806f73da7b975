"""A wrapped model in which nothing is planted is the bare model, to the bit, for twenty steps of
training.
"""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import esper
from esper.kasmina.probing import call_with
from esper.leyline.errors import HostError
from user_models import (
    CLASSES,
    CNN,
    MLP,
    Encoder,
    ResidualNet,
    Twice,
    random_images,
    random_vectors,
    sequential_net,
)

STEPS = 20


@dataclass(frozen=True)
class Case:
    build: Any
    example: Any
    slots: tuple[str, ...]


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=17, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def vit():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=6,
        patch_size=3,
        num_channels=1,
        num_labels=CLASSES,
        hidden_dropout_prob=0.1,
    )
    return transformers.ViTForImageClassification(config)


TOKENS = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(3))
IDS = torch.randint(17, (4, 6), generator=torch.Generator().manual_seed(3))
CASES = {
    "mlp": Case(MLP, random_vectors(), ("enter", "middle")),
    "cnn with batch norm": Case(CNN, random_images(), ("layer*",)),
    "residual net": Case(ResidualNet, random_images(), ("stem", "blocks.*")),
    "transformer encoder, batch first": Case(lambda: Encoder(True), TOKENS, ("encoder.layers.*",)),
    "transformer encoder, tokens first": Case(
        lambda: Encoder(False), TOKENS, ("encoder.layers.*",)
    ),
    "sequential root": Case(sequential_net, random_vectors(), ("0", "2")),
    "gpt-2": Case(
        gpt2, {"input_ids": IDS, "labels": IDS}, ("transformer.h.*", "transformer.h.*.mlp")
    ),
    "vit": Case(vit, {"pixel_values": random_images()}, ("vit.layers.*", "vit.embeddings")),
}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-2),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def output_of(model, example):
    output = call_with(model, example)
    return output if isinstance(output, torch.Tensor) else output.logits


def wrap(case, model):
    return esper.grow(model, slots=list(case.slots), example=case.example, policy="never")


def train(model, host, optimizer, example):
    """Outputs, gradients, weights and buffers of every step, and the optimiser's state after the
    last.
    """
    torch.manual_seed(5)  # dropout draws from the global state
    seen = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        output = output_of(model, example)
        output.square().mean().backward()
        gradients = [p.grad.clone() for p in host.parameters() if p.grad is not None]
        optimizer.step()
        seen.append(
            [output.detach(), *gradients, *(value.clone() for value in host.state_dict().values())]
        )
    history = [value for p in host.parameters() for value in optimizer.state[p].values()]
    return [*seen, [value for value in history if isinstance(value, torch.Tensor)]]


def is_equal(first, second):
    return all(
        len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(first, second, strict=True)
    )


@every_optimizer
@every_case
def test_an_ungrown_model_trains_like_the_bare_one_to_the_bit(case, optimizer):
    bare = case.build().train()
    garden = wrap(case, copy.deepcopy(bare))
    follower = optimizer(garden.parameters())
    garden.attach(follower)
    expected = train(bare, bare, optimizer(bare.parameters()), case.example)
    assert is_equal(train(garden.model, garden.model.host, follower, case.example), expected)


@every_case
def test_wrapping_leaves_mode_weights_and_random_state_alone(case):
    model = case.build().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    wrap(case, model)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@every_case
def test_wrapping_adds_no_child_and_replaces_no_layer(case):
    model = case.build()
    before = dict(model.named_modules())
    wrap(case, model)
    after = dict(model.named_modules())
    assert before.keys() == after.keys()
    assert all(module is before[name] for name, module in after.items())


@every_case
def test_an_ungrown_model_evaluates_like_the_bare_one_to_the_bit(case):
    bare = case.build().eval()
    garden = wrap(case, copy.deepcopy(bare))
    with torch.no_grad():
        assert torch.equal(output_of(garden.model, case.example), output_of(bare, case.example))


@every_case
def test_the_hosts_state_dict_keys_are_its_own(case):
    model = case.build()
    before = list(model.state_dict())
    garden = wrap(case, model)
    grown = garden.model.state_dict()
    assert [name.removeprefix("host.") for name in grown if name.startswith("host.")] == before


def test_a_module_called_twice_per_forward_is_refused_by_its_own_name():
    with pytest.raises(HostError, match=r"'shared'.*2 times"):
        esper.grow(Twice(), slots=["shared"], example=random_vectors())


def test_a_module_called_twice_does_not_stop_its_neighbours():
    garden = esper.grow(Twice(), slots=["leave"], example=random_vectors())
    assert garden.model.slot_config.modules == {"r0c0": "leave"}


# -- a model whose head reads what hooks record of its own modules ---------------------------------


def segformer():
    transformers = pytest.importorskip("transformers")
    sizes = {"depths": [1, 1], "sr_ratios": [1, 1], "hidden_sizes": [4, 8], "mlp_ratios": [1, 1]}
    shapes = {"patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 1]}
    config = transformers.SegformerConfig(
        num_encoder_blocks=2, num_channels=1, decoder_hidden_size=4, num_labels=2, **sizes, **shapes
    )
    return transformers.SegformerForSemanticSegmentation(config).eval()


@pytest.mark.filterwarnings("ignore:save_pretrained would drop")
def test_what_a_model_records_of_itself_is_the_same_after_loading(tmp_path):
    """Its head reads the outputs of stages as hooks record them, which come with the first run."""
    images = random_images(2)
    garden = esper.grow(
        segformer(), slots="segformer.stages.*", example=images, blueprints=["conv_light"]
    )
    garden.attach(torch.optim.SGD(garden.parameters(), lr=0.1))
    for slot_id in garden.model.slot_config.slot_ids:
        garden.model.build_in(slot_id, "conv_light")
    bare = garden.model(images).logits
    for parameter in garden.model.slots.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    loaded = esper.load(garden.save(tmp_path), segformer())
    with torch.no_grad():
        grown = garden.model.eval()(images).logits
        assert torch.equal(loaded.model.eval()(images).logits, grown)
        assert torch.equal(garden.harvest().eval()(images).logits, grown)
    assert not torch.allclose(grown, bare)


# -- a transformer encoder with padding, whose layers pass nested tensors in evaluation ------------


def padded_encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    padding = torch.zeros(4, 5, dtype=torch.bool)
    padding[:, 3:] = True
    return nn.TransformerEncoder(layer, 2), {"src": TOKENS, "src_key_padding_mask": padding}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_layer_that_passes_nested_tensors_is_refused_with_a_way_out():
    model, example = padded_encoder()
    with pytest.raises(esper.EsperError, match="enable_nested_tensor=False"):
        esper.grow(model, slots="layers.0", example=example)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_that_reaches_a_seed_is_an_error_with_a_way_out():
    model, example = padded_encoder()
    garden = esper.grow(model, slots="layers.*", example=TOKENS)
    garden.attach(torch.optim.SGD(garden.parameters(), lr=0.1))
    garden.model.germinate_seed("r0c0", "mlp")
    garden.model.tick()
    with torch.no_grad(), pytest.raises(esper.EsperError, match="enable_nested_tensor=False"):
        garden.model.eval()(**example)
