"""Small models of many families, without download: what people would want to grow."""

import torch
from torch import nn

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 1}


class Encoder(nn.Module):
    """torch's own encoder, which has a list of its own kind."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.enter = nn.Embedding(64, 32)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 64)

    def forward(self, input_ids):
        return self.head(self.encoder(self.enter(input_ids)))


class BasicBlock(nn.Module):
    """The block of a ResNet: batch norm, and a ReLU after the sum."""

    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, features):
        return torch.relu(features + self.body(features))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        self.stage = nn.Sequential(BasicBlock(8), BasicBlock(8))
        self.head = nn.Linear(8, 5)

    def forward(self, pixel_values):
        return self.head(self.stage(self.enter(pixel_values)).mean((2, 3)))


def transformer(model, config, sizes, **options):
    """A constructor: transformers takes seconds to import, so nobody does before it is needed."""

    def build():
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**sizes, **options))

    return build


VISION = {
    key: SIZES[key]
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}
FAMILIES = {
    "gpt2": transformer(
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": 64,
            "n_positions": 64,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 2,
            "bos_token_id": 1,
        },
        eos_token_id=2,
    ),
    "llama": transformer("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "qwen3": transformer("Qwen3ForCausalLM", "Qwen3Config", GROUPED, head_dim=16),
    "gemma3": transformer(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        GROUPED,
        head_dim=16,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "olmo2": transformer("Olmo2ForCausalLM", "Olmo2Config", GROUPED),
    "neox": transformer("GPTNeoXForCausalLM", "GPTNeoXConfig", SIZES),
    "bert": transformer("BertForMaskedLM", "BertConfig", SIZES),
    "vit": transformer(
        "ViTForImageClassification", "ViTConfig", VISION, image_size=16, patch_size=4, num_labels=5
    ),
    "encoder": Encoder,
    "resnet": ResNet,
}
LAYERS = {
    "gpt2": "transformer.h",
    "neox": "gpt_neox.layers",
    "bert": "bert.encoder.layer",
    "vit": "vit.layers",
    "encoder": "encoder.layers",
    "resnet": "stage",
}


def layers_of(name):
    return LAYERS.get(name, "model.layers")


def example_of(name):
    draws = torch.Generator().manual_seed(3)
    if name in ("vit", "resnet"):
        return {"pixel_values": torch.rand(2, 3, 16, 16, generator=draws)}
    return {"input_ids": torch.randint(3, 64, (2, 8), generator=draws)}
