"""Growing other people's models by copies of their own layers:

same function, same ends, native harvest.
"""

import copy

import pytest
import torch
from torch import nn

import esper
from esper.leyline.lifecycle import SeedState
from families import FAMILIES, example_of, layers_of

CAUSAL = ("gpt2", "llama", "qwen3", "gemma3", "olmo2", "neox")
LENGTHS = esper.GrowthSettings(lengths=esper.StageLengths(ramp=2))


def build(name):
    torch.manual_seed(0)
    return FAMILIES[name]()


def run(model, name, **options):
    output = model(**example_of(name), **options)
    return output if isinstance(output, torch.Tensor) else output.logits


def logits(model, name):
    with torch.no_grad():
        return run(copy.deepcopy(model).eval(), name)


def planted(name, blueprint="copy", **options):
    model = build(name)
    garden = esper.grow(
        model,
        slots=f"{layers_of(name)}.*",
        example=example_of(name),
        blueprints=[blueprint],
        max_seeds=9,
        policy="never",
        settings=LENGTHS,
        **options,
    )
    garden.attach(torch.optim.AdamW(garden.parameters(), lr=5e-3))
    garden.model.germinate_seed("r0c0", blueprint)
    return garden


def keep(garden, name="copy", slot="r0c0"):
    garden.model.build_in(slot, name)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_copy_grows_from_the_old_function_to_host_then_copy_and_is_culled_to_the_bit(name):
    alone = logits(build(name), name)
    garden = planted(name)
    model = garden.model
    assert torch.equal(logits(model, name), alone)
    model.tick()
    assert not torch.equal(logits(model, name), alone)
    model.slot("r0c0").alpha.fill_(1.0)
    grown = logits(model, name)
    model.cull_seed("r0c0")
    assert torch.equal(logits(model, name), alone)
    model.slot("r0c0").assign(SeedState())
    keep(garden)
    assert torch.equal(logits(garden.harvest(), name), grown)


@pytest.mark.parametrize("name", FAMILIES)
def test_training_the_copy_alone_lowers_the_loss(name):
    garden = planted(name)
    garden.model.tick()
    garden.model.tick()
    model, own = garden.model.train(), list(garden.model.slot("r0c0").seed.parameters())
    optimizer = torch.optim.AdamW(own, lr=5e-3)
    target = torch.randint(
        0, 5, run(model, name).shape[:-1], generator=torch.Generator().manual_seed(1)
    )
    losses = []
    for _ in range(20):
        torch.manual_seed(0)
        loss = nn.functional.cross_entropy(run(model, name).flatten(0, -2), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.01


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("bert", "encoder")])
def test_a_zeroed_copy_is_the_identity_in_every_family_that_has_one(name):
    alone = logits(build(name), name)
    garden = planted(name, "copy_zero")
    garden.model.tick()
    assert torch.equal(logits(garden.model, name), alone)


def test_a_layer_that_normalises_last_says_why_it_has_no_zeroed_copy():
    with pytest.raises(esper.EsperError, match="zeros"):
        planted("bert", "copy_zero")


@pytest.mark.parametrize("name", CAUSAL)
def test_generating_with_a_cache_is_refused_while_a_copy_is_alive_and_right_after_the_harvest(name):
    garden = planted(name)
    garden.model.tick()
    garden.model.tick()
    model, prompt = garden.model.eval(), example_of(name)["input_ids"]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with pytest.raises(RuntimeError, match="use_cache=False"):
        model.generate(prompt, **options)
    plain = model.generate(prompt, use_cache=False, **options)
    assert plain.shape[1] == prompt.shape[1] + 4
    keep(garden, slot="r0c1")
    harvested = garden.harvest().eval()
    cached = harvested.generate(prompt, **options)
    assert torch.equal(cached, harvested.generate(prompt, use_cache=False, **options))
    assert harvested.config.num_hidden_layers == 3


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_gradient_checkpointing_gives_the_same_gradients(name):
    def gradients(with_checkpoints):
        garden = planted(name)
        garden.model.tick()
        if with_checkpoints:
            garden.model.host.gradient_checkpointing_enable()
        torch.manual_seed(0)
        garden.model.train()
        run(garden.model, name).sum().backward()
        return [p.grad.clone() for p in garden.model.slot("r0c0").seed.parameters()]

    for plain, checkpointed in zip(gradients(False), gradients(True), strict=True):
        assert torch.allclose(plain, checkpointed, atol=1e-5)


def test_a_mask_reaches_the_copy():
    garden = planted("llama")
    garden.model.tick()
    tokens = example_of("llama")["input_ids"]
    mask = torch.ones_like(tokens)
    mask[:, :3] = 0
    other = tokens.clone()
    other[:, :3] = (other[:, :3] + 7) % 60
    with torch.no_grad():
        model = garden.model.eval()
        first, second = (
            model(input_ids=each, attention_mask=mask).logits[:, 3:] for each in (tokens, other)
        )
    assert torch.equal(first, second)


def test_a_mix_of_copies_and_other_seeds_is_harvested_in_order():
    names = ["mlp_small", "copy", "norm", "copy"]
    garden = esper.grow(
        build("llama"),
        slots="model.layers.*",
        example=example_of("llama"),
        blueprints=[*dict.fromkeys(names)],
        max_seeds=9,
        settings=LENGTHS,
        policy="never",
    )
    for blueprint in names:
        keep(garden, blueprint)
    with pytest.warns(UserWarning, match="save_pretrained"):
        plain = garden.harvest()
    assert len(plain.model.layers) == 4
    assert plain.config.num_hidden_layers == 4
    assert torch.equal(logits(plain, "llama"), logits(garden.model, "llama"))


def test_an_unknown_family_keeps_its_copies_grafted():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, features):
            return self.parts[1](self.parts[0](features))  # a third one would never run

    torch.manual_seed(0)
    features = torch.randn(3, 4)
    garden = esper.grow(
        Odd(), slots="parts.0", example=features, blueprints=["copy"], policy="never"
    )
    keep(garden)
    plain = garden.harvest()
    assert len(plain.parts) == 2
    with torch.no_grad():
        assert torch.equal(plain(features), garden.model(features))


def test_a_grown_model_that_cannot_be_described_is_not_harvested_silently():
    garden = esper.grow(
        build("llama"),
        slots="model.layers.*",
        example=example_of("llama"),
        blueprints=["copy"],
        policy="never",
        max_seeds=2,
    )
    keep(garden)
    garden.model.host.config.num_hidden_layers = 7
    with pytest.warns(UserWarning, match=r"save_pretrained would drop .*no field of LlamaConfig"):
        garden.harvest()
