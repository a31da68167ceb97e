"""The options that published models have in config.json give the models of the zoo."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moefold.checkpoint.hf.config_json import (
    FAMILIES,
    config_json_for,
    essential_values,
    read_model_config,
)
from moefold.checkpoint.hf.config_options import ConfigOptions
from moefold.checkpoint.hf.published_defaults import family_keys
from moefold.checkpoint.hf.quantization_config import check_quantisation
from moefold.config.errors import UserError
from moefold.config.run import ModelConfig
from moefold.presets.zoo import PRESETS

USUAL = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEEPSEEK = {
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "attention_bias": False,
    "ep_size": 1,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
}
YARN = {"type": "yarn", "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
PUBLISHED: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        **USUAL,
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "vocab_size": 32000,
    },
    "qwen3-30b-a3b": {
        **USUAL,
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "deepseek-v3": {
        **USUAL,
        **DEEPSEEK,
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 3,
        "max_position_embeddings": 163840,
        "n_group": 8,
        "n_routed_experts": 256,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "rope_scaling": {**YARN, "beta_fast": 32, "factor": 40},
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
        "vocab_size": 129280,
    },
    "kimi-k2": {
        **USUAL,
        **DEEPSEEK,
        "model_type": "kimi_k2",
        "aux_loss_alpha": 0.001,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 131072,
        "n_group": 1,
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0,
        "pretraining_tp": 1,
        "rope_scaling": {**YARN, "beta_fast": 1.0, "factor": 32.0},
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "seq_aux": True,
        "topk_group": 1,
        "vocab_size": 163840,
    },
    "gpt-oss-120b": {
        **USUAL,
        "model_type": "gpt_oss",
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "vocab_size": 201088,
    },
    "glm-4.5-air": {
        **USUAL,
        "model_type": "glm4_moe",
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "use_qk_norm": False,
        "vocab_size": 151552,
    },
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_published_options_are_all_known_and_give_the_preset(preset: str):
    family = FAMILIES[PUBLISHED[preset]["model_type"]]
    options = ConfigOptions(PUBLISHED[preset], "config.json", family_keys(family.kind))
    check_quantisation(options)
    assert essential_values(read_model_config(family, options)) == essential_values(PRESETS[preset]().model)


def with_activations(experts: Any, dense: Any) -> ModelConfig:
    model = PRESETS["deepseek-v3-tiny"]().model
    return replace(model, dense_activation=dense, moe=replace(model.moe, activation=experts))


def test_an_activation_is_written_where_the_family_has_a_name_for_it_and_else_refused():
    family = FAMILIES["deepseek_v3"]
    for ours, theirs in {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_pytorch_tanh", "reglu": "relu"}.items():
        assert config_json_for(family, with_activations(ours, ours))["hidden_act"] == theirs
    for experts, dense, named in (
        ("relu2", "relu2", "model.moe.activation = relu2"),
        ("gelu", "geglu", "model.moe.activation = gelu"),
        ("geglu", "swiglu", "model.dense_activation = swiglu"),
    ):
        with pytest.raises(UserError, match=f"no place for {named}"):
            config_json_for(family, with_activations(experts, dense))
