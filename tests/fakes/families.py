"""A small sequence classifier of every architecture that transformers has, with random weights.

Sizes have many names. Each is set in whichever configuration has it; OPTIONS holds what an
architecture needs besides.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from tests.fakes.models import NLI, byte_tokenizer

#: Ids of special tokens in every family's tokenizer.
BEGIN, PAD, END = 0, 1, 2
VOCABULARY = 400
WIDTH, HEADS, LAYERS = 32, 4, 2
#: Sizes by name.
SIZES: dict[str, Any] = (
    dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "word_embed_proj_dim",
        "embedding_size"), WIDTH
    )
    | dict.fromkeys(
        (
            "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers",
            "decoder_layers",
            "num_decoder_layers",
        ),
        LAYERS,
    )
    | dict.fromkeys(
        (
            "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
            "decoder_attention_heads", "num_key_value_heads",
        ),
        HEADS,
    )
    | dict.fromkeys(("head_dim", "d_kv"), WIDTH // HEADS)
    | dict.fromkeys(
        (
            "intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff",
            "d_inner", "n_inner",
            "hidden_dim", "dff",
        ),
        2 * WIDTH,
    )
    | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
    | {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
    | dict.fromkeys(("initializer_range", "init_std"), 0.2)
)  # fmt: skip
#: Names of the number of positions.
POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "seq_length",
    "max_seq_len",
)
LATENT_ATTENTION = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "head_dim": 8,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
ROTARY = {"rope_type": "default", "rope_theta": 10_000.0}
#: What an architecture needs besides; None for a size that it must not get.
OPTIONS: dict[str, dict[str, Any]] = {
    "axk1": LATENT_ATTENTION,
    "axk2": LATENT_ATTENTION,
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {"full_attention": ROTARY, "sliding_attention": ROTARY},
    },
    "deepseek_v2": LATENT_ATTENTION,
    "deepseek_v3": LATENT_ATTENTION,
    "esm": {"mask_token_id": 3, "position_embedding_type": "absolute"},
    "funnel": {"block_sizes": [1, 1], "num_hidden_layers": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8, "input_size": 32},
    "lilt": {"hidden_size": 48},
    "luke": {"entity_vocab_size": 10},
    "mistral4": LATENT_ATTENTION | {
        "rope_parameters": ROTARY | {
            "partial_rotary_factor": 1.0, "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 40,
        },
    },
    "mpt": {"max_seq_len": 64},
    "perceiver": {
        "num_latents": 4, "d_latents": 32, "num_blocks": 1, "num_self_attends_per_block": 1,
        "num_self_attention_heads": 4, "num_cross_attention_heads": 4,
    },
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "reformer": {
        "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 8], "attention_head_size": 8,
        "feed_forward_size": 64,
        "is_decoder": False, "num_buckets": 2, "lsh_attn_chunk_length": 4,
        "local_attn_chunk_length": 4,
        "attn_layers": ["local", "lsh"], "num_hidden_layers": None,
    },
    "t5": {"decoder_start_token_id": PAD},
    "xlnet": {"max_position_embeddings": None},
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip
#: Architectures that are left out, and why.
LEFT_OUT = {
    "layoutlmv2": "needs detectron2, which no index has",
    "gemma3": "reads images, too; gemma3_text is its part for texts",
    "modernvbert": "reads images, too; modernbert is its part for texts",
    "qwen3_5": "reads images, too; qwen3_5_text is its part for texts",
    "t5gemma2": "reads images, too; t5gemma is its part for texts",
    "ultravbert": "reads images, too; ultrabert is its part for texts",
    "t5gemma": "has billions of parameters unless both of its halves get sizes",
    "zamba": "needs kernels",
    "zamba2": "needs kernels",
}
FAMILIES = [
    family
    for family in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    if family not in LEFT_OUT
]


def family_config(family: str, positions: int = 64, **options: Any) -> Any:
    """Return a small configuration. positions: number of positions, if the architecture has such a
    number.
    """
    kind = transformers.CONFIG_MAPPING[family]
    usual = kind()
    arguments: dict[str, Any] = {}
    for name, value in (SIZES | dict.fromkeys(POSITIONS, positions)).items():
        is_other_name = name in getattr(kind, "attribute_map", {})
        if (
            hasattr(usual, name)
            and not is_other_name
            and not isinstance(getattr(kind, name, None), property)
        ):
            arguments[name] = value
    arguments |= {
        "vocab_size": VOCABULARY,
        "bos_token_id": BEGIN,
        "pad_token_id": PAD,
        "eos_token_id": END,
    }
    arguments |= {
        "id2label": NLI,
        "label2id": {label: place for place, label in NLI.items()},
    }
    arguments |= OPTIONS.get(family, {}) | options
    for name in [
        name
        for name, value in arguments.items()
        if value is None and name not in options
    ]:
        del arguments[name]
    return kind(**arguments)


def make_family(family: str, folder: Path, positions: int = 64, **options: Any) -> Path:
    """Save a classifier with a tokenizer that begins and ends texts with special tokens.

    Return the folder.
    """
    torch.manual_seed(7)
    config = family_config(family, positions, **options)
    model = AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        # biases of zeros would hide that one is missing
        if parameter.dim() == 1 and "norm" not in name.lower():
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
