"""Published defaults of each family: what an absent key of config.json means, and which keys may be null. Torch-free.

The defaults are those of the config classes of `transformers`; a test compares the two. Keys that published files have
and a class has not are in FILE_DEFAULTS, with the defaults of the code that was published with the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class PublishedKeys:
    """The keys of a family. A default of None: the value follows from other keys, or there is none."""

    defaults: Mapping[str, Any]
    nullable: frozenset[str] = frozenset()  # null is refused in all others
    second_names: Mapping[str, str] = field(default_factory=dict[str, str])  # attribute_map of transformers


COMMON_DEFAULTS: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
COMMON_NULLABLE = {"rope_parameters", "rope_scaling", "rope_theta"}

MIXTRAL_DEFAULTS: dict[str, Any] = {
    **COMMON_DEFAULTS,
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
}
OLMOE_DEFAULTS: dict[str, Any] = {
    **COMMON_DEFAULTS,
    "vocab_size": 50_304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": None,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "clip_qkv": None,
    "num_experts_per_tok": 8,
    "num_experts": 64,
    "router_aux_loss_coef": 0.01,
    "norm_topk_prob": False,
}
QWEN2_MOE_DEFAULTS: dict[str, Any] = {
    **COMMON_DEFAULTS,
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.001,
    "qkv_bias": True,
}
QWEN3_MOE_DEFAULTS: dict[str, Any] = {
    **COMMON_DEFAULTS,
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.001,
}
DEEPSEEK_V3_DEFAULTS: dict[str, Any] = {
    **COMMON_DEFAULTS,
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_interleave": True,
    "attention_bias": False,
    "num_nextn_predict_layers": 1,
}
DEEPSEEK_V2_DEFAULTS: dict[str, Any] = {
    **COMMON_DEFAULTS,
    "vocab_size": 102_400,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "moe_intermediate_size": 1407,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "head_dim": None,
    "n_group": None,
    "topk_group": None,
    "topk_method": "greedy",
    "num_experts_per_tok": None,
    "first_k_dense_replace": 0,
    "norm_topk_prob": False,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
}
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
GPT_OSS_DEFAULTS: dict[str, Any] = {
    **COMMON_DEFAULTS,
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": GPT_OSS_ROPE,
    "rope_theta": 150_000.0,
    "sliding_window": 128,
    "layer_types": None,
    "attention_bias": True,
    "num_experts_per_tok": 4,
    "num_local_experts": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "router_aux_loss_coef": 0.001,
}
GLM4_MOE_DEFAULTS: dict[str, Any] = {
    **COMMON_DEFAULTS,
    "vocab_size": 151_552,
    "hidden_size": 4096,
    "intermediate_size": 10_944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "attention_bias": False,
    "use_qk_norm": False,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}
LLAMA_DEFAULTS: dict[str, Any] = {
    **COMMON_DEFAULTS,
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
}
MISTRAL_DEFAULTS: dict[str, Any] = {
    **COMMON_DEFAULTS,
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
}
QWEN2_DEFAULTS: dict[str, Any] = {
    **COMMON_DEFAULTS,
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
QWEN3_DEFAULTS: dict[str, Any] = {**QWEN2_DEFAULTS, "head_dim": 128, "attention_bias": False}

NO_HEAD_DIM = {"head_dim": None}  # absent: the hidden size divided by the heads
DEEPSEEK_FILE_DEFAULTS = {"moe_layer_freq": 1, "aux_loss_alpha": 0.001, "seq_aux": True}
DEEPSEEK_V3_FILE_DEFAULTS = {
    **DEEPSEEK_FILE_DEFAULTS,
    **NO_HEAD_DIM,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
FILE_DEFAULTS: dict[str, dict[str, Any]] = {
    "olmoe": NO_HEAD_DIM,
    "qwen2_moe": NO_HEAD_DIM,
    "qwen3_moe": NO_HEAD_DIM,
    "deepseek_v3": DEEPSEEK_V3_FILE_DEFAULTS,
    "kimi_k2": DEEPSEEK_V3_FILE_DEFAULTS,
    "deepseek_v2": {**DEEPSEEK_FILE_DEFAULTS, "scoring_func": "softmax"},
    "gpt_oss": {"experts_per_token": None},  # a second copy of num_experts_per_tok
    "glm4_moe": NO_HEAD_DIM,
    "qwen2": NO_HEAD_DIM,
}
CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "mixtral": MIXTRAL_DEFAULTS,
    "olmoe": OLMOE_DEFAULTS,
    "qwen2_moe": QWEN2_MOE_DEFAULTS,
    "qwen3_moe": QWEN3_MOE_DEFAULTS,
    "deepseek_v3": DEEPSEEK_V3_DEFAULTS,
    "kimi_k2": DEEPSEEK_V3_DEFAULTS,
    "deepseek_v2": DEEPSEEK_V2_DEFAULTS,
    "gpt_oss": GPT_OSS_DEFAULTS,
    "glm4_moe": GLM4_MOE_DEFAULTS,
    "llama": LLAMA_DEFAULTS,
    "mistral": MISTRAL_DEFAULTS,
    "qwen2": QWEN2_DEFAULTS,
    "qwen3": QWEN3_DEFAULTS,
}
# Null is no window, no latent, false, or the value that follows from other keys.
LATENT_NULLABLE = {"attention_dropout", "num_key_value_heads", "q_lora_rank", "norm_topk_prob", "rope_interleave"}
NULLABLE: dict[str, set[str]] = {
    "mixtral": {"head_dim", "sliding_window"},
    "olmoe": {"num_key_value_heads", "clip_qkv"},
    "qwen2_moe": {"sliding_window", "layer_types", "mlp_only_layers"},
    "qwen3_moe": {"sliding_window", "mlp_only_layers"},
    "deepseek_v3": LATENT_NULLABLE,
    "kimi_k2": LATENT_NULLABLE,
    "deepseek_v2": {*LATENT_NULLABLE, "head_dim", "n_group", "topk_group"},
    "gpt_oss": {"layer_types"},
    "glm4_moe": {"partial_rotary_factor"},
    "llama": {"attention_dropout", "num_key_value_heads", "head_dim"},
    "mistral": {"head_dim", "sliding_window"},
    "qwen2": {"num_key_value_heads", "sliding_window", "layer_types"},
    "qwen3": {"num_key_value_heads", "sliding_window", "layer_types"},
}
MTP_NAME = {"num_mtp_layers": "num_nextn_predict_layers"}
LATENT_NAMES = {"num_local_experts": "n_routed_experts", **MTP_NAME}
SECOND_NAMES: dict[str, dict[str, str]] = {
    "mixtral": {"num_experts": "num_local_experts"},
    "olmoe": {"num_local_experts": "num_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "deepseek_v3": LATENT_NAMES,
    "kimi_k2": LATENT_NAMES,
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "gpt_oss": {"num_experts": "num_local_experts"},
    "glm4_moe": LATENT_NAMES,
}

# Keys inside rope_parameters, by rope_type. A default of None that is read as a value: the key must be there.
LINEAR_ROPE: dict[str, Any] = {"rope_theta": None, "factor": None}
LLAMA3_ROPE: dict[str, Any] = {
    **LINEAR_ROPE,
    "original_max_position_embeddings": None,
    "low_freq_factor": None,
    "high_freq_factor": None,
}
YARN_ROPE: dict[str, Any] = {
    **LINEAR_ROPE,
    "original_max_position_embeddings": None,
    "beta_fast": None,
    "beta_slow": None,
    "truncate": True,
    "mscale": None,
    "mscale_all_dim": None,
    "attention_factor": None,
}
YARN_NULLABLE = {"factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor"}
ROPE_KEYS = {
    "default": PublishedKeys({"rope_theta": None}),
    "linear": PublishedKeys(LINEAR_ROPE),
    "llama3": PublishedKeys(LLAMA3_ROPE),
    "yarn": PublishedKeys(YARN_ROPE, frozenset(YARN_NULLABLE)),
}


def family_keys(kind: str) -> PublishedKeys:
    file_defaults = FILE_DEFAULTS.get(kind, {})
    defaults = CLASS_DEFAULTS[kind] | file_defaults
    nullable = COMMON_NULLABLE | NULLABLE[kind]
    second_names = SECOND_NAMES.get(kind, {})
    return PublishedKeys(defaults, frozenset(nullable), second_names)
