"""Tiny models of every family as `transformers` makes them, with all weights random, in several odd settings.

`transformers` is imported once, when the first is made.
"""

from __future__ import annotations

import logging
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.02,
    "pad_token_id": None,  # whose embedding would have no gradient
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
WIDEST = 64  # inputs that a weight has without being scaled down
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 500.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500.0,
}
DEEPSEEK_YARN = {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0, "beta_fast": 16.0}
QWEN3 = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
QWEN2 = {**QWEN3, "shared_expert_intermediate_size": 24}
V3 = {**LATENT, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "n_shared_experts": 2}
V2 = {**V3, "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0}
GLM = {
    "head_dim": 16,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
}
OSS = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
OLMOE = {"num_experts": 8, "num_experts_per_tok": 3}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Moe", {**QWEN3, "norm_topk_prob": True}),
    "qwen3 tied, biased, not normalised": (
        "Qwen3Moe",
        {**QWEN3, "tie_word_embeddings": True, "attention_bias": True, "norm_topk_prob": False, "rms_norm_eps": 1e-3},
    ),
    "qwen3 dense layers, window": (
        "Qwen3Moe",
        {**QWEN3, "mlp_only_layers": [0], "use_sliding_window": True, "sliding_window": 6, "norm_topk_prob": True},
    ),
    "qwen3 every other layer, yarn": (
        "Qwen3Moe",
        {**QWEN3, "decoder_sparse_step": 2, "rope_parameters": YARN, "norm_topk_prob": True},
    ),
    "mixtral": ("Mixtral", MIXTRAL),
    "mixtral window, head width, tied": (
        "Mixtral",
        {**MIXTRAL, "sliding_window": 7, "head_dim": 16, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    ),
    "olmoe": ("Olmoe", OLMOE),
    "olmoe biased, normalised, one key head": (
        "Olmoe",
        {
            **OLMOE,
            "attention_bias": True,
            "norm_topk_prob": True,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
        },
    ),
    "deepseek v3": ("DeepseekV3", V3),
    "deepseek v3 yarn, no query latent, biased": (
        "DeepseekV3",
        {**V3, "q_lora_rank": None, "rope_parameters": DEEPSEEK_YARN, "attention_bias": True},
    ),
    "deepseek v3 not normalised, all groups, tied": (
        "DeepseekV3",
        {**V3, "norm_topk_prob": False, "n_group": 1, "topk_group": 1, "tie_word_embeddings": True},
    ),
    "qwen2": ("Qwen2Moe", QWEN2),
    "qwen2 window, normalised, dense layers": (
        "Qwen2Moe",
        {
            **QWEN2,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 3,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
            "num_experts_per_tok": 1,
        },
    ),
    "qwen2 without biases": ("Qwen2Moe", {**QWEN2, "qkv_bias": False, "tie_word_embeddings": True}),
    "gpt-oss": ("GptOss", OSS),
    "gpt-oss tied, small clamp, plain positions": (
        "GptOss",
        {
            **OSS,
            "tie_word_embeddings": True,
            "swiglu_limit": 0.5,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "deepseek v2": ("DeepseekV2", V2),
    "deepseek v2 lite, yarn": (
        "DeepseekV2",
        {**V2, "q_lora_rank": None, "topk_method": "greedy", "n_group": None, "rope_parameters": DEEPSEEK_YARN},
    ),
    "glm": ("Glm4Moe", GLM),
    "glm qk-norm, biased, groups, two dense layers": (
        "Glm4Moe",
        {
            **GLM,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "n_shared_experts": 2,
        },
    ),
}
WIDE = {"intermediate_size": 32}  # a quarter of it is still rows of 16 bytes, as grouped GEMMs ask for
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**WIDE, "rope_parameters": LLAMA3, "head_dim": 16}),
    "mistral": ("Mistral", {**WIDE, "sliding_window": 6, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", WIDE),
    "qwen3": ("Qwen3", {**WIDE, "head_dim": 16}),
}


@cache
def hf() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return transformers


def make(kind: str, seed: int = 0, **options: Any) -> Any:
    """A model of the tiny sizes, but for `options`."""
    return make_model(kind, {**SIZES, **options}, seed)


def make_model(kind: str, options: dict[str, Any], seed: int = 0) -> Any:
    """A model whose every weight matters: norms and biases are random too, routers far from even."""
    config = getattr(hf(), f"{kind}Config")(**deepcopy(options))  # which changes rope_parameters in place
    model = getattr(hf(), f"{kind}ForCausalLM")._from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name:
                mean = 1.0 if "norm" in name else 0.0
                std = 0.5 if name.endswith("gate.weight") else 0.3 if "embed" in name else 0.15
                std *= min(1.0, (WIDEST / max(tensor.shape[-1], 1)) ** 0.5)
                tensor.copy_(mean + std * torch.randn(tensor.shape, generator=generator))
    return model.eval()


def save(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def tokens(seed: int = 0, sequences: int = 2, length: int = 24) -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], (sequences, length), generator=torch.Generator().manual_seed(seed))
