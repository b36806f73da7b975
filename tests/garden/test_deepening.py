"""esper.deepen:

a deeper model of the user's own class, saved and loaded without esper; refusals change nothing.
"""

import copy
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import esper
from esper.leyline.errors import EsperError, HostError, OptimizerError, SettingError
from kasmina.copies.test_membership import GPT, TOKENS, Odd, Summed, chain, grown

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
SIZES |= {"max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {**SIZES, "num_key_value_heads": 1}
GPT2 = {
    "vocab_size": 64,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
PATTERN = {
    "head_dim": 16,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}
VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 4,
}
FAMILIES = {
    "GPT2LMHeadModel": ("GPT2Config", GPT2),
    "LlamaForCausalLM": ("LlamaConfig", GROUPED),
    "Qwen3ForCausalLM": ("Qwen3Config", {**GROUPED, "head_dim": 16}),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", GROUPED | PATTERN),
    "Olmo2ForCausalLM": ("Olmo2Config", GROUPED),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", SIZES),
    "BertForMaskedLM": ("BertConfig", SIZES),
    "ViTForImageClassification": ("ViTConfig", VIT),
}
every_family = pytest.mark.parametrize("family", FAMILIES)


def build(family):
    config, options = FAMILIES[family]
    torch.manual_seed(4)
    return getattr(transformers, family)(getattr(transformers, config)(**options)).eval()


def batch_for(family):
    numbers = torch.Generator().manual_seed(5)
    if family.startswith("ViT"):
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=numbers)}
    return {
        "input_ids": torch.randint(3, 64, (2, 12), generator=numbers),
        "attention_mask": torch.ones(2, 12).long(),
    }


def layers_of(model):
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


# -- transformers ----------------------------------------------------------------------------------

ELSEWHERE = """
    import sys
    sys.modules["esper"] = None
    import torch, transformers
    [getattr(transformers, family) for family in {families!r}]
    input()
    for family in {families!r}:
        model = getattr(transformers, family).from_pretrained({folder!r} + "/" + family).eval()
        batch = torch.load({folder!r} + "/" + family + ".pt")
        with torch.no_grad():
            told = {{"logits": model(**batch).logits}}
            if "Causal" in family or "LMHead" in family:
                for cached in (True, False):
                    options = dict(max_new_tokens=4, min_new_tokens=4, do_sample=False, use_cache=cached)
                    told[cached] = model.generate(**batch, **options)
        torch.save(told, {folder!r} + "/" + family + ".told")
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Every family twice as deep, and what it says in a process where esper cannot be imported."""
    folder, models = tmp_path_factory.mktemp("deep"), {}
    code = textwrap.dedent(ELSEWHERE.format(families=list(FAMILIES), folder=str(folder)))
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE
    ) as process:  # imports meanwhile
        for family in FAMILIES:
            models[family] = esper.deepen(build(family), 4, example=batch_for(family))
            models[family].save_pretrained(folder / family)
            torch.save(batch_for(family), folder / f"{family}.pt")
        process.communicate(b"go\n", timeout=120)
    assert process.returncode == 0
    return {
        family: (model, torch.load(folder / f"{family}.told")) for family, model in models.items()
    }


@every_family
def test_a_saved_model_gives_the_same_logits_without_esper(loaded, family):
    model, told = loaded[family]
    with torch.no_grad():
        assert torch.equal(told["logits"], model(**batch_for(family)).logits)
    if True in told:
        assert torch.equal(told[True], told[False])
        assert told[True].shape == (2, 16)


@every_family
def test_layers_are_interleaved_and_numbered(loaded, family):
    model, _ = loaded[family]
    first, second = layers_of(build(family))
    for layer, original in zip(layers_of(model), (first, first, second, second), strict=True):
        assert all(
            torch.equal(a, b)
            for a, b in zip(layer.parameters(), original.parameters(), strict=True)
        )
    numbers = [
        p.layer_idx
        for layer in layers_of(model)
        for p in layer.modules()
        if hasattr(p, "layer_idx")
    ]
    assert not numbers or sorted(set(numbers)) == [0, 1, 2, 3]
    assert model.config.num_hidden_layers == 4
    if family.startswith("Gemma"):
        assert model.config.layer_types == ["sliding_attention"] * 2 + ["full_attention"] * 2


@every_family
def test_copies_can_start_as_the_identity(family):
    model, batch = build(family), batch_for(family)
    with torch.no_grad():
        before = model(**batch).logits
        if family.startswith("Bert"):  # it normalises after each residual
            with pytest.raises(HostError):
                esper.deepen(model, 4, identity=True, example=batch)
            assert len(layers_of(model)) == model.config.num_hidden_layers == 2
            return
        deeper = esper.deepen(model, 4, identity=True, example=batch)
        assert deeper is model
        assert len(layers_of(model)) == 4
        assert torch.equal(model(**batch).logits, before)


def test_a_grown_llama_is_saved_as_a_llama(tmp_path):
    batch, plan = (
        batch_for("LlamaForCausalLM"),
        [("r0c0", "copy"), ("r0c0", "copy"), ("r0c1", "copy")],
    )
    garden = grown(build("LlamaForCausalLM"), "model.layers.*", plan, batch)
    garden.harvest().save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert again.config.num_hidden_layers == 5
        assert torch.equal(again(**batch).logits, garden.model(**batch, use_cache=False).logits)


# -- the user's own --------------------------------------------------------------------------------


@pytest.mark.parametrize("host", [GPT, chain])
def test_an_own_model_is_deepened_evenly(host):
    model = host()
    originals = list(model.blocks)
    assert esper.deepen(model, 5, layers="blocks", example=TOKENS) is model
    sources = [originals[number] for number in (0, 0, 1, 1, 1)]  # later layers first
    assert [block.training for block in model.blocks] == [True] * 5
    for block, source in zip(model.blocks, sources, strict=True):
        assert all(
            torch.equal(a, b) for a, b in zip(block.parameters(), source.parameters(), strict=True)
        )
    assert len({id(parameter) for parameter in model.blocks.parameters()}) == 5 * len(
        list(originals[0].parameters())
    )
    assert model(TOKENS).shape == (3, 7, 11)


def test_the_optimizer_takes_copies_into_their_originals_groups():
    model = GPT()
    model.blocks[1].mix.bias.requires_grad_(False)
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for n, p in model.named_parameters() if p.dim() < 2 and p.requires_grad]
    groups = [
        {"params": weights, "weight_decay": 0.3},
        {"params": others, "weight_decay": 0.0, "lr": 0.5},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    model(TOKENS).square().mean().backward()
    optimizer.step()
    state = copy.deepcopy({id(p): value for p, value in optimizer.state.items()})
    esper.deepen(model, 4, optimizer=optimizer, example=TOKENS)
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {
        id(p) for p in model.parameters() if p.dim() > 1
    }
    learning = {id(p) for p in model.parameters() if p.dim() < 2 and p.requires_grad}
    assert {id(p) for p in optimizer.param_groups[1]["params"]} == learning
    assert [block.mix.bias.requires_grad for block in model.blocks] == [True, True, False, False]
    assert {id(p) for p in optimizer.state} == state.keys()
    for parameter, value in optimizer.state.items():
        assert all(torch.equal(value[key], state[id(parameter)][key]) for key in value)
    before = model.blocks[1].mix.weight.clone()
    optimizer.zero_grad()
    model(TOKENS).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model.blocks[1].mix.weight, before)


# -- refusals --------------------------------------------------------------------------------------


def two_lists():
    model = GPT()
    model.more = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    return model


def growing():
    model = GPT()
    model.garden = [esper.grow(model, slots="blocks.0", example=TOKENS, blueprints=["mlp"])]
    return model


REFUSALS = {
    "list that does not exist": (
        GPT,
        {"to": 4, "layers": "layers"},
        EsperError,
        "'layers'.*blocks",
    ),
    "as deep already": (GPT, {"to": 2}, SettingError, r"\b2\b"),
    "not a number": (GPT, {"to": "4"}, SettingError, "'4'"),
    "two lists": (two_lists, {"to": 4}, HostError, "'blocks'.*'more'"),
    "no list": (lambda: nn.Linear(2, 2), {"to": 4}, HostError, "Linear.*none"),
    "unknown family": (Odd, {"to": 4, "example": TOKENS}, HostError, r"dict .*\b2\b.*\b4"),
    "growing": (growing, {"to": 4}, HostError, r"harvest\(\)"),
    "data parallel": (lambda: nn.DataParallel(GPT()), {"to": 4}, HostError, "DataParallel"),
    "compiled": (lambda: torch.compile(GPT()), {"to": 4}, HostError, "OptimizedModule"),
    "not in order": (Summed, {"to": 4, "example": TOKENS}, HostError, r"blocks\.0"),
    "identity without example": (GPT, {"to": 4, "identity": True}, SettingError, "example="),
    "not an optimizer": (GPT, {"to": 4, "optimizer": "AdamW"}, OptimizerError, "str"),
    "shapes that change": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)),
        {"to": 4, "example": torch.zeros(2, 6)},
        HostError,
        r"\(6,\).*\(8,\)",
    ),
}


@pytest.mark.parametrize(
    ("host", "options", "error", "told"), REFUSALS.values(), ids=REFUSALS.keys()
)
def test_a_refusal_leaves_the_model_as_it_was(host, options, error, told):
    model = host()
    modules, config = list(model.named_modules()), copy.deepcopy(getattr(model, "config", None))
    values = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error, match=told):
        esper.deepen(model, **options)
    assert list(model.named_modules()) == modules
    assert getattr(model, "config", None) == config
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert [m.layer_idx for m in model.modules() if hasattr(m, "layer_idx")] in ([0, 1], [])


def test_a_replaced_forward_is_refused_even_without_an_example():
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
    net[0].forward = lambda features: features
    with pytest.raises(HostError, match="forward"):
        esper.deepen(net, 4)
    assert len(net) == 2


class Watched(nn.Module):
    """Hands out what the layer at one number gives."""

    def __init__(self, number):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.number = number

    def forward(self, features):
        seen = []
        for layer in self.layers:
            features = layer(features)
            seen.append(features)
        return features, seen[self.number], seen


def test_a_layer_that_is_handed_out_by_its_number_keeps_that_number():
    features = torch.randn(2, 4)
    model = Watched(1)
    _, before, _ = model(features)
    with pytest.warns(UserWarning, match=r"copied as 0 1 1 2 2 2: .* depends on"):
        esper.deepen(model, 6, example=features)
    _, after, seen = model(features)
    assert torch.equal(after, before)
    assert len(seen) == 6


# -- members that would not run --------------------------------------------------------------------


class ByNumber(nn.Module):
    """Goes through its layers by a number, a list or a slice of its own."""

    def __init__(self, way):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.way = way
        self.rates = [0.5, 0.6, 0.7]
        self.how_many = 3

    def forward(self, features):
        if self.way == "range":
            for number in range(self.how_many):
                features = features + self.layers[number](features)
        elif self.way == "zip":
            for layer, rate in zip(self.layers, self.rates, strict=False):
                features = features + rate * layer(features)
        else:
            for layer in self.layers[: self.how_many]:
                features = features + layer(features)
        return features


@pytest.mark.parametrize("way", ["range", "zip", "slice"])
def test_a_layer_that_would_never_run_is_an_error(way):
    model = ByNumber(way)
    keys = list(model.state_dict())
    with pytest.raises(HostError, match=r"a layer at layers\.\d would never run"):
        esper.deepen(model, 6, example=torch.randn(2, 4))
    assert list(model.state_dict()) == keys
    with pytest.raises(SettingError, match=r"run in order .* pass example="):
        esper.deepen(model, 6)
    assert list(model.state_dict()) == keys


# -- layers that give out more than their features -------------------------------------------------


class Talkative(nn.Module):
    """A layer that takes more than features, by position, and gives out a tuple."""

    def __init__(self, form):
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.form = form

    def forward(self, features, bias, cache=None):
        grown = features + self.mix(features) * bias
        if self.form == "dict":
            return {"weights": None, "features": grown, "bias": bias}
        return (grown, bias, None)


class Chatty(nn.Module):
    """Hands every part of a layer's output on, and draws random numbers before."""

    def __init__(self, form):
        super().__init__()
        self.layers = nn.ModuleList(Talkative(form) for _ in range(3))
        self.form = form

    def forward(self, features):
        features = features + torch.rand(4)
        graph = torch.eye(4).to_sparse()
        bias = torch.ones(())
        for layer in self.layers:
            output = layer(torch.sparse.mm(graph, features.T).T.contiguous(), bias)
            features, bias = self.parts_of(output)
        return features, bias

    def parts_of(self, output):
        return (output["features"], output["bias"]) if self.form == "dict" else output[:2]


class Handing(Chatty):
    """The same without a graph between the layers."""

    def forward(self, features):
        features = features + torch.rand(4)
        bias = torch.ones(())
        for layer in self.layers:
            features, bias = self.parts_of(layer(features, bias))
        return features, bias, torch.eye(4).to_sparse()


@pytest.mark.parametrize("form", ["tuple", "dict"])
@pytest.mark.parametrize("identity", [False, True])
def test_layers_that_give_out_more_than_features_are_copied(form, identity):
    model = Handing(form).eval()
    features = torch.randn(2, 4)

    def run():
        torch.manual_seed(3)
        with torch.no_grad():
            return model(features)[0]

    before = run()
    esper.deepen(model, 6, example=features, identity=identity)
    assert len(model.layers) == 6
    assert torch.equal(run(), before) == identity


def test_a_layer_that_does_not_get_the_output_before_it_as_it_is_has_no_copy():
    with pytest.raises(HostError, match="would not get its output as it is"):
        esper.deepen(Chatty("tuple"), 6, example=torch.randn(2, 4))


def test_a_layer_whose_copies_would_overflow_has_none():
    class Steep(nn.Linear):
        def forward(self, features):
            return features * 1e30

    class Steeps(nn.Sequential):
        pass

    model = Steeps(Steep(4, 4))
    with pytest.raises(HostError, match="NaN or Inf"):
        esper.deepen(model, 2, example=torch.ones(2, 4))
    assert len(model) == 1
