"""Attention seeds beside masks and caches: left out by default, and never silently wrong."""

import copy
import importlib.util
import io
import pickle
import pickletools

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import EncoderDecoderCache

import esper
from esper.kasmina.blueprints import REGISTRY
from esper.kasmina.unseen import hides_tokens, holds_tokens, is_cache, is_mask

IDS = torch.randint(50, (4, 6), generator=torch.Generator().manual_seed(0))
LEFT, RIGHT = torch.ones_like(IDS), torch.ones_like(IDS)
LEFT[1, :2] = 0
RIGHT[1, 4:] = 0
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2]] * 4)
AT_ONCE = esper.GrowthSettings(scale_at_birth=1.0, lengths=esper.StageLengths(ramp=0))
SITES = ("model.layers.0", "model.layers.1.mlp", "model.norm")
NO_CACHE, NO_MASK = "earlier calls.*use_cache=False", "hides an earlier token.*Pad on the right"

pytestmark = [
    pytest.mark.filterwarnings("ignore:the harvest takes fossils"),
    pytest.mark.filterwarnings("ignore:save_pretrained would drop"),
]


def decoder():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def garden_with_attention(model, slots, example):
    """A garden in which attention has grown on each of the slots."""
    garden = esper.grow(
        model,
        slots=slots,
        example=example,
        blueprints=["attention"],
        policy="never",
        settings=AT_ONCE,
    )
    garden.attach(torch.optim.SGD(garden.parameters(), lr=0.1))
    for slot_id in garden.model.slot_config.slot_ids:
        garden.plant(slot_id, "attention")
    return garden


def exported(garden, folder):
    """The exported network, built by the file that was written."""
    garden.export(folder)
    spec = importlib.util.spec_from_file_location("grown_attention", folder / "grown.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.graft(decoder())


def unpickled(network):
    file = io.BytesIO()
    torch.save(network, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.fixture(scope="module", params=SITES)
def networks(request, tmp_path_factory):
    """A decoder with attention: growing, copied, saved and loaded, harvested, exported."""
    folder = tmp_path_factory.mktemp("attention")
    garden = garden_with_attention(decoder(), request.param, {"input_ids": IDS})
    garden.save(folder / "garden")
    harvested = garden.harvest()
    return {
        "growing": garden.model.eval(),
        "copied": copy.deepcopy(garden.model),
        "loaded": esper.load(folder / "garden", decoder()).model.eval(),
        "harvested": harvested,
        "unpickled": unpickled(harvested),
        "exported": exported(garden, folder / "export"),
        "grown again": esper.grow(
            garden.harvest(), slots="lm_head", example={"input_ids": IDS}, policy="never"
        ).model.eval(),
    }


KEPT = ["growing", "copied", "loaded", "harvested", "unpickled", "exported", "grown again"]
every_network = pytest.mark.parametrize("kept", KEPT)


@every_network
@pytest.mark.filterwarnings("ignore:The attention mask")
def test_a_call_in_which_attention_would_be_wrong_is_one_clear_line(networks, kept):
    network = networks[kept]
    for call, line in (
        (lambda: network(input_ids=IDS, attention_mask=LEFT), NO_MASK),
        (lambda: network(IDS, LEFT), NO_MASK),
        (lambda: network(input_ids=IDS, position_ids=PACKED), "a new text begins"),
        (lambda: network.generate(IDS, max_new_tokens=2, do_sample=False), NO_CACHE),
    ):
        with pytest.raises(RuntimeError, match=line) as caught:
            call()
        assert "\n" not in str(caught.value)


@every_network
@torch.no_grad()
def test_a_call_in_which_attention_is_right_is_not_refused(networks, kept):
    network = networks[kept]
    whole = network(input_ids=IDS, use_cache=True).logits
    padded = network(input_ids=IDS, attention_mask=RIGHT).logits
    torch.testing.assert_close(padded[1, :4], whole[1, :4])
    torch.testing.assert_close(network(IDS, torch.ones_like(IDS)).logits, whole)
    network.generate(
        IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=2, use_cache=False, do_sample=False
    )


def test_a_refused_call_does_not_refuse_the_next_one(networks):
    network = networks["growing"]
    with pytest.raises(RuntimeError, match=NO_MASK):
        network(input_ids=IDS, attention_mask=LEFT)
    network(input_ids=IDS)


def test_a_harvest_without_attention_has_no_hook_that_watches():
    garden = esper.grow(
        decoder(), slots="model.layers.0", example={"input_ids": IDS}, blueprints=["attention"]
    )
    assert garden.model.host._forward_pre_hooks
    assert not any(module._forward_pre_hooks for module in garden.harvest().modules())


def test_the_hooks_of_a_harvest_bring_their_source_and_need_no_esper(networks):
    hooks = []
    for module in networks["harvested"].modules():
        hooks += module._forward_pre_hooks.values()
    assert len(hooks) > 2
    for hook in hooks:
        for _ in range(2):  # saved, loaded, and saved again
            data = pickle.dumps(hook)
            taken = [text for code, text, _ in pickletools.genops(data) if code.name == "GLOBAL"]
            strings = [text for _, text, _ in pickletools.genops(data) if isinstance(text, str)]
            assert not any(text.startswith("esper.") for text in (*taken, *strings))
            hook = pickle.loads(data)
            assert type(hook).__module__ == "esper_unseen"


def test_attention_inside_a_part_that_takes_tokens_listens_to_that_part():
    class Wrapped(nn.Module):
        """Takes a batch as one record; the decoder inside has the arguments."""

        def __init__(self):
            super().__init__()
            self.inner = decoder()

        def forward(self, batch):
            return self.inner(**batch).logits

    garden = garden_with_attention(Wrapped(), "inner.model.layers.0", ({"input_ids": IDS},))
    garden.model({"input_ids": IDS, "attention_mask": RIGHT})
    with pytest.raises(RuntimeError, match=NO_MASK):
        garden.model({"input_ids": IDS, "attention_mask": LEFT})


# -- what is planted where nothing is said ---------------------------------------------------------


class Encoder(nn.Module):
    """Tokens, a layer of torch's own, and a mask of one kind or another."""

    def __init__(self, masks=None):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.masks = masks

    def forward(self, ids):
        features = self.embed(ids)
        if self.masks == "causal":
            mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
            return self.layer(features, src_mask=mask)
        padding = ids == 0 if self.masks == "padding" else None
        return self.layer(features, src_key_padding_mask=padding)


class Masked(Encoder):
    """Takes a mask that nobody need pass."""

    def forward(self, ids, attention_mask=None):
        return super().forward(ids)


def blueprints_of(model, slots, example):
    return esper.grow(model, slots=slots, example=example).model.space.blueprint_ids[1:]


def test_usual_seeds_of_a_decoder_work_position_by_position():
    names = blueprints_of(decoder(), "model.layers.*", {"input_ids": IDS})
    assert names == ("lora", "mlp", "mlp_small", "norm")
    assert not any(REGISTRY.get("sequence", name).traits.spatial for name in names)
    (place,) = (p for p in esper.inspect(decoder(), IDS) if p.name == "model.layers.0")
    assert place.unseen == "past_key_values"


@pytest.mark.parametrize(
    ("model", "has_attention"),
    [
        (Encoder(), True),
        (Encoder("causal"), True),
        (Encoder("padding"), False),
        (Masked(), False),
    ],
    ids=["plain", "causal", "padded", "takes a mask"],
)
def test_attention_is_usual_where_a_sequence_has_no_mask(model, has_attention):
    names = blueprints_of(model, "layer", IDS)
    assert ("attention" in names) == has_attention
    assert {"lora", "mlp", "mlp_small", "norm"} <= set(names)


def test_a_network_with_usual_seeds_generates_the_same_with_its_cache_and_without():
    garden = esper.grow(
        decoder(),
        slots="model.layers.0",
        example={"input_ids": IDS},
        policy="never",
        settings=AT_ONCE,
    )
    garden.attach(torch.optim.SGD(garden.parameters(), lr=0.1))
    garden.plant("r0c0", "mlp")
    how = {"attention_mask": LEFT, "max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    how |= {"output_logits": True, "return_dict_in_generate": True}
    network = garden.harvest()
    cached = network.generate(IDS, use_cache=True, **how)
    plain = network.generate(IDS, use_cache=False, **how)
    torch.testing.assert_close(cached.logits, plain.logits)


# -- what an argument is ---------------------------------------------------------------------------


def test_arguments_are_known_by_their_names():
    assert all(map(is_cache, ("past_key_values", "layer_past", "cache_params", "mems", "kv_cache")))
    assert not any(map(is_cache, ("use_cache", "past_values", "cache_position", "input_ids")))
    assert all(map(is_mask, ("attention_mask", "decoder_attention_mask", "src_key_padding_mask")))
    names = ("encoder_attention_mask", "head_mask", "memory_mask", "bool_masked_pos", "use_mask")
    assert [name for name in names if is_mask(name)] == ["use_mask"]


def filled_cache():
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    return cache


@pytest.mark.parametrize(
    ("cache", "holds"),
    [
        (True, False),
        (None, False),
        (DynamicCache(), False),
        (EncoderDecoderCache(DynamicCache(), DynamicCache()), False),
        (filled_cache(), True),
        (((torch.zeros(1, 2, 3, 4),) * 2,), True),
        ([None, None], False),
        (torch.zeros(0), False),
        ({"layer": torch.zeros(2)}, True),
        (object(), True),
    ],
)
def test_a_cache_holds_tokens_or_says_that_it_does_not(cache, holds):
    assert holds_tokens(cache) == holds


CAUSAL = nn.Transformer.generate_square_subsequent_mask(4)


@pytest.mark.parametrize(
    ("name", "mask", "hides"),
    [
        ("attention_mask", torch.ones(2, 4), False),
        ("attention_mask", LEFT, True),
        ("attention_mask", RIGHT, False),
        ("attention_mask", LEFT.bool(), True),
        ("attention_mask", (1.0 - LEFT.float()) * -1e9, True),
        ("attention_mask", (1.0 - RIGHT.float()) * -1e9, False),
        ("src_key_padding_mask", LEFT == 0, True),
        ("src_key_padding_mask", RIGHT == 0, False),
        ("src_key_padding_mask", (1.0 - RIGHT.float()) * -1e9, False),
        ("src_mask", CAUSAL, False),
        ("src_mask", CAUSAL == 0, False),
        ("src_mask", CAUSAL.T, True),
        ("mask", LEFT, True),
        ("attention_mask", CAUSAL.expand(2, 1, 4, 4), False),
        ("attention_mask", torch.zeros(2, 1, 4, 4), False),
        ("attention_mask", torch.rand(2, 1, 4, 4), None),
        ("attention_mask", {"full_attention": None}, None),
    ],
)
def test_a_mask_hides_an_earlier_token_or_does_not(name, mask, hides):
    assert hides_tokens(name, mask) is hides
