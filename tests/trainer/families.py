"""Tiny models with random weights, of the families that people train: their configs by name of the type."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, masking_utils

VOCAB_SIZE = 61
DENSE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # for peaked, distinct distributions
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {**DENSE, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
GEMMA = {**DENSE, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}

LLAMA4 = {"llama4_text": {**DENSE, "head_dim": 8, "num_local_experts": 4, "attention_chunk_size": 6}}
HAS_CHUNKS_OF_SEQUENCES = hasattr(masking_utils, "remap_positions_for_packed_sequence")
"""From transformers 5.23 on. Before, Llama 4's chunks were counted along the whole row."""

PACKED: Mapping[str, dict[str, Any]] = {
    "llama": DENSE,
    "mistral": {**DENSE, "sliding_window": 6},
    "qwen2": DENSE,
    "qwen3": {**DENSE, "head_dim": 8},
    "qwen3_moe": {**MOE, "head_dim": 8},
    "mixtral": {**DENSE, "num_local_experts": 4},
    "gemma": {**DENSE, "head_dim": 8},
    "gemma2": {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": GEMMA,
    "phi3": {**DENSE, "sliding_window": 6},
    "granite": {**DENSE, "logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "granitemoe": {**DENSE, "num_local_experts": 4, "logits_scaling": 4.0},
    "glm": {**DENSE, "head_dim": 8},
    "glm4": {**DENSE, "head_dim": 8},
    "glm4_moe": {**MOE, **ROUTED, "head_dim": 8},
    "gpt_oss": {**DENSE, "head_dim": 8, "num_local_experts": 4, "sliding_window": 6},
    "deepseek_v3": {**MOE, **ROUTED, **LATENT, "num_key_value_heads": 4},
    "cohere2": {**DENSE, "logit_scale": 0.2, "sliding_window": 6},
    "olmo3": {**DENSE, "sliding_window": 6},
    "seed_oss": {**DENSE, "head_dim": 8},
    **(LLAMA4 if HAS_CHUNKS_OF_SEQUENCES else {}),
}
"""Families that pass the proof in packed rows."""

PADDED: Mapping[str, dict[str, Any]] = {
    "qwen3_next": {**MOE, **LINEAR, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": {**DENSE, **LINEAR, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {**DENSE, "layer_types": ["conv", "full_attention"]},
    "falcon_h1": {
        **DENSE,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "lm_head_multiplier": 0.7,  # which the decoder keeps
    },
    "granitemoehybrid": {
        **DENSE,
        "num_local_experts": 4,
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "logits_scaling": 4.0,
    },
    "bloom": {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    **({} if HAS_CHUNKS_OF_SEQUENCES else LLAMA4),
}
"""Families that pass it only with a row for each sequence."""
EXACT = {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
"""Of a gpt2, which computes all in float64: others compute rotations and RMS norms in float32."""


def make(model_type: str, fields: Mapping[str, Any], *, seed: int = 0) -> PreTrainedModel:
    """Make a model of random weights, in evaluation mode."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields), attn_implementation="eager")
    with torch.no_grad():
        for name, one in (*model.named_parameters(), *model.named_buffers()):
            if one.ndim == 1 and "inv_freq" not in name:  # norms, biases and sinks, which begin as ones or zeros
                one.add_(torch.randn_like(one) * 0.3)
    return model.eval()
