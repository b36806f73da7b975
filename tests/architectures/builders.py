"""Tiny random models of architectures that other people wrote, built without a download."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

WORDS = 64
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 3,
    "n_layers": 3,
    "n_head": 4,
    "n_heads": 4,
    "n_inner": 64,
    "d_model": 32,
    "dim": 32,
    "hidden_dim": 64,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "ffn_dim": 64,
    "word_embed_proj_dim": 32,
    "decoder_start_token_id": 0,
    "embedding_size": 32,
    "sliding_window": 4,
    "query_pre_attn_scalar": 8,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 4,
    "mamba_dt_rank": 4,
    "shared_expert_intermediate_size": 32,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "lru_width": 32,
}
PIXELS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 5,
    "num_channels": 3,
}
SOUND = {
    **SIZES,
    "conv_dim": (16, 16),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
}
STILL = dict.fromkeys(
    (
        "dropout",
        "hidden_dropout",
        "attention_dropout",
        "activation_dropout",
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        "dropout_rate",
        "feat_proj_dropout",
        "final_dropout",
        "router_aux_loss_coef",
    ),
    0.0,
)

Batch = dict[str, torch.Tensor]


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def texts(rows: int, seed: int) -> Batch:
    return {"input_ids": torch.randint(3, WORDS, (rows, 8), generator=draw(seed))}


def translations(rows: int, seed: int) -> Batch:
    decoded = torch.randint(3, WORDS, (rows, 6), generator=draw(seed + 50))
    return {**texts(rows, seed), "decoder_input_ids": decoded}


def images(size: int) -> Callable[[int, int], Batch]:
    def draw_images(rows: int, seed: int) -> Batch:
        return {"pixel_values": torch.rand(rows, 3, size, size, generator=draw(seed))}

    return draw_images


def waves(rows: int, seed: int) -> Batch:
    return {"input_values": torch.randn(rows, 400, generator=draw(seed))}


@dataclass(frozen=True)
class Architecture:
    """A model class, its configuration, and batches for it."""

    model: str
    config: str
    examples: Callable[[int, int], Batch] = texts
    sizes: dict[str, Any] = field(default_factory=lambda: SIZES)
    options: dict[str, Any] = field(default_factory=dict)
    generates: bool = False
    blocks: str = ""
    """the repeated blocks, where the largest list is not meant"""

    def build(self) -> torch.nn.Module:
        """A model whose weights are the same every time."""
        make = getattr(transformers, self.config)
        known = {**self.sizes, **STILL}
        plain = make()
        sizes = {name: value for name, value in known.items() if hasattr(plain, name)}
        torch.manual_seed(0)
        return getattr(transformers, self.model)(make(**{**sizes, **self.options}))


def decoder(name: str, config: str = "", **options: Any) -> Architecture:
    return Architecture(
        f"{name}ForCausalLM", config or f"{name}Config", options=options, generates=True
    )


STAGES = {"image_size": 32, "depths": [2, 2], "num_labels": 5}
PYRAMID = {
    **STAGES,
    "num_encoder_blocks": 2,
    "sr_ratios": [2, 1],
    "hidden_sizes": [16, 32],
    "patch_sizes": [3, 3],
    "strides": [2, 2],
    "num_attention_heads": [2, 4],
    "mlp_ratios": [2, 2],
}

ARCHITECTURES = {
    "gpt2": Architecture("GPT2LMHeadModel", "GPT2Config", generates=True),
    "gpt_neox": decoder("GPTNeoX"),
    "gptj": decoder("GPTJ", rotary_dim=4),
    "opt": decoder("OPT"),
    "bloom": decoder("Bloom"),
    "llama": decoder("Llama"),
    "llama4": decoder("Llama4", "Llama4TextConfig", num_hidden_layers=4),
    "mistral": decoder("Mistral"),
    "mixtral": decoder("Mixtral"),
    "qwen2": decoder("Qwen2"),
    "qwen3": decoder("Qwen3"),
    "gemma2": decoder("Gemma2", num_hidden_layers=4),
    "gemma3n": decoder(
        "Gemma3n",
        "Gemma3nTextConfig",
        num_hidden_layers=4,
        num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"] * 2,
        vocab_size_per_layer_input=WORDS,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        intermediate_size=[64] * 4,
        activation_sparsity_pattern=[0.0] * 4,
    ),
    "phi": decoder("Phi"),
    "deepseek_v3": decoder("DeepseekV3", num_key_value_heads=4),
    "granitemoehybrid": decoder(
        "GraniteMoeHybrid",
        num_hidden_layers=4,
        layer_types=["mamba", "attention"] * 2,
        shared_intermediate_size=32,
    ),
    "jamba": decoder("Jamba", num_hidden_layers=4, use_mamba_kernels=False),
    "recurrent_gemma": decoder("RecurrentGemma", attention_window_size=8),
    "bert": Architecture("BertForMaskedLM", "BertConfig"),
    "distilbert": Architecture("DistilBertForMaskedLM", "DistilBertConfig"),
    "t5": Architecture("T5ForConditionalGeneration", "T5Config", translations),
    "bart": Architecture(
        "BartForConditionalGeneration", "BartConfig", translations, blocks="model.decoder.layers"
    ),
    "vit": Architecture("ViTForImageClassification", "ViTConfig", images(16), PIXELS),
    "convnext": Architecture(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        images(32),
        options={**STAGES, "hidden_sizes": [8, 16], "num_stages": 2},
        sizes={},
    ),
    "resnet": Architecture(
        "ResNetForImageClassification",
        "ResNetConfig",
        images(32),
        options={
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [3, 2],
            "layer_type": "basic",
            "num_labels": 5,
        },
        sizes={},
    ),
    "segformer": Architecture(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        images(32),
        options={**PYRAMID, "decoder_hidden_size": 16},
        sizes={},
    ),
    "pvt_v2": Architecture(
        "PvtV2ForImageClassification", "PvtV2Config", images(32), options=PYRAMID, sizes={}
    ),
    "mobilevit": Architecture(
        "MobileViTForImageClassification",
        "MobileViTConfig",
        images(64),
        options={
            "image_size": 64,
            "hidden_sizes": [16, 24, 32],
            "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 64],
            "num_attention_heads": 2,
            "num_labels": 5,
        },
        sizes={},
    ),
    "wav2vec2": Architecture("Wav2Vec2ForCTC", "Wav2Vec2Config", waves, SOUND),
    "hubert": Architecture("HubertForCTC", "HubertConfig", waves, SOUND),
}
