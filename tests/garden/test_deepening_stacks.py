"""esper.deepen where layers differ, and where adapters stand around a model.

What is saved is built again by its configuration.
"""

import pytest
import torch
from torch import nn

import esper
from esper.leyline.errors import HostError
from garden.test_deepening import GROUPED, VIT, batch_for, build
from kasmina.copies.test_membership import grown

transformers = pytest.importorskip("transformers")

# -- mixed stacks ----------------------------------------------------------------------------------

GROUPS = {**GROUPED, "num_hidden_layers": 4, "head_dim": 16}


def deepseek():
    sizes = {
        **GROUPED,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "first_k_dense_replace": 1,
    }
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    sizes |= {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    sizes |= {"v_head_dim": 8, "n_group": 1, "topk_group": 1}
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes))


def llama4():
    sizes = {**GROUPS, "intermediate_size_mlp": 64, "num_local_experts": 2, "pad_token_id": None}
    sizes |= {"interleave_moe_layer_step": 2, "no_rope_layers": [1, 1, 1, 0]}
    sizes |= {"attention_chunk_size": 8, "use_qk_norm": False}
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**sizes))


def t5():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    return transformers.T5EncoderModel(transformers.T5Config(vocab_size=64, **sizes))


def mamba2():
    sizes = {"hidden_size": 16, "num_heads": 4, "head_dim": 8, "state_size": 4, "n_groups": 1}
    sizes |= {"vocab_size": 64, "num_hidden_layers": 2, "chunk_size": 4}
    return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**sizes))


def beit():
    config = transformers.BeitConfig(**VIT, drop_path_rate=0.2, vocab_size=8)
    return transformers.BeitForImageClassification(config)


def convnext():
    sizes = {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2, "image_size": 16}
    return transformers.ConvNextForImageClassification(transformers.ConvNextConfig(**sizes))


def jamba():
    sizes = {**GROUPED, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1}
    sizes |= {"expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 2}
    sizes |= {"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}
    return transformers.JambaForCausalLM(transformers.JambaConfig(**sizes))


PIXELS = {"pixel_values": torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(5))}
WORDS = {"input_ids": torch.arange(3, 27).view(2, 12)}
MIXED = {
    "counted from the front": (deepseek, "model.layers", 6, WORDS, {"first_k_dense_replace": 2}),
    "numbered": (llama4, "model.layers", 8, WORDS, {"moe_layers": [2, 3, 6, 7]}),
    "the first is another": (t5, "encoder.block", 4, WORDS, {"num_layers": 4}),
    "an infinite limit": (mamba2, "backbone.layers", 4, WORDS, {"num_hidden_layers": 4}),
    "dropped more and more": (beit, None, 4, PIXELS, {"num_hidden_layers": 4}),
    "one of several lists": (
        convnext,
        "convnext.encoder.stages.1.layers",
        4,
        PIXELS,
        {"depths": [2, 4]},
    ),
    "periods": (jamba, "model.layers", 8, WORDS, {"attn_layer_period": 2}),
}


@pytest.mark.filterwarnings("ignore:the layers of")
@pytest.mark.parametrize("kind", MIXED)
def test_a_mixed_stack_is_deepened_as_its_configuration_can_say(kind, tmp_path):
    build_model, layers, to, batch, fields = MIXED[kind]
    torch.manual_seed(4)
    model = esper.deepen(build_model().eval(), to, layers=layers, example=batch)
    for name, value in fields.items():
        assert getattr(model.config, name) == value
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    parts = [(name, type(part)) for name, part in model.named_modules()]
    assert [(name, type(part)) for name, part in again.named_modules()] == parts
    with torch.no_grad():
        assert torch.equal(again(**batch)[0], model(**batch)[0])


def test_the_field_that_stands_in_the_way_is_named():
    model = jamba()
    with pytest.raises(HostError, match=r"expert_layer_period|attn_layer_period"):
        esper.deepen(model, 5, layers="model.layers", example=WORDS)
    assert (len(model.model.layers), model.config.num_hidden_layers) == (4, 4)


# -- adapters --------------------------------------------------------------------------------------


class Adapters(nn.Module):
    """What PEFT puts around a model: it shows the model's configuration, and saves itself alone."""

    def __init__(self, base_model):
        super().__init__()
        self.base_model = base_model
        self.config = base_model.config
        self.peft_config = {"default": "lora"}

    def forward(self, **batch):
        return self.base_model(**batch)

    def get_base_model(self):
        return self.base_model

    def save_pretrained(self, folder):
        raise NotImplementedError


class Adapted(nn.Module):
    def __init__(self, base_layer):
        super().__init__()
        self.base_layer, self.lora = base_layer, nn.Linear(32, 32, bias=False)

    def forward(self, features):
        return self.base_layer(features) + self.lora(features)


def adapted():
    base = build("LlamaForCausalLM")
    for layer in base.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
    return Adapters(base)


def unloaded(model):
    for layer in model.base_model.model.layers:
        linear = layer.self_attn.q_proj.base_layer
        with torch.no_grad():
            linear.weight += layer.self_attn.q_proj.lora.weight
        layer.self_attn.q_proj = linear
    return model.base_model


def test_copies_beside_adapters_are_layers_of_the_model_inside_and_that_is_told(tmp_path):
    batch = batch_for("LlamaForCausalLM")
    deepened = adapted().eval()
    with pytest.warns(UserWarning, match=r"adapters .* would lose the copied layers"):
        esper.deepen(deepened, 4, example=batch)
    garden = grown(adapted(), "base_model.model.layers.*", [("r0c0", "copy", "linear")], batch)
    with pytest.warns(UserWarning, match=r"adapters .* would lose the copied layers"):
        harvested = garden.harvest().eval()
    for model, count in ((deepened, 4), (harvested, 3)):
        with torch.no_grad():
            expected = model(**batch).logits
        merged = unloaded(model)
        merged.save_pretrained(tmp_path / str(count))
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / str(count)).eval()
        assert len(again.model.layers) == count
        with torch.no_grad():
            torch.testing.assert_close(again(**batch).logits, expected)
