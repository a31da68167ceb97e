"""The models people train, each as a function that returns a whole configuration. Sizes are the published ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moefold.config.run import (
    AttentionConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    RopeConfig,
    TrainConfig,
)

PRESETS: dict[str, Callable[[], Config]] = {}


def preset(make: Callable[[], Config]) -> Callable[[], Config]:
    """Register a preset under its function's name, written with dashes."""
    name = make.__name__.replace("_", "-")
    PRESETS[name] = lambda: replace(make(), name=name)
    return make


def pretraining(model: ModelConfig, seq_len: int = 4096) -> Config:
    """A sound start for a large model: the recipe its users then change."""
    return Config(
        model=model,
        data=DataConfig(seq_len=seq_len),
        train=TrainConfig(steps=1000, global_batch=8, micro_batch=1, validate_every=250, validate_sequences=16),
        optim=OptimConfig(lr=3e-4, warmup=100),
        checkpoint=CheckpointConfig(every=250),
    )


@preset
def tiny() -> Config:
    """Learns Python on two CPU cores in a few minutes; a real MoE in every mechanism, small in every size."""
    return Config(
        model=ModelConfig(
            layers=4,
            hidden=128,
            vocab=256,
            attention=AttentionConfig(heads=4, kv_heads=2, head_dim=32, qk_norm="head"),
            moe=MoeConfig(experts=8, top_k=2, ffn=192, bias_rate=0.01),
        ),
        train=TrainConfig(steps=340, global_batch=8, micro_batch=2, validate_every=85),
        optim=OptimConfig(lr=4e-3, warmup=30),
        checkpoint=CheckpointConfig(every=85),
    )


@preset
def mixtral_8x7b() -> Config:
    return pretraining(
        ModelConfig(
            layers=32,
            hidden=4096,
            vocab=32_000,
            norm_eps=1e-5,
            attention=AttentionConfig(heads=32, kv_heads=8, head_dim=128, rope=RopeConfig(theta=1e6)),
            moe=MoeConfig(experts=8, top_k=2, ffn=14_336, aux_loss=0.02),
        )
    )


@preset
def mixtral_8x22b() -> Config:
    return pretraining(
        ModelConfig(
            layers=56,
            hidden=6144,
            vocab=32_768,
            norm_eps=1e-5,
            attention=AttentionConfig(heads=48, kv_heads=8, head_dim=128, rope=RopeConfig(theta=1e6)),
            moe=MoeConfig(experts=8, top_k=2, ffn=16_384, aux_loss=0.001),
        )
    )


@preset
def olmoe_1b_7b() -> Config:
    return pretraining(
        ModelConfig(
            layers=16,
            hidden=2048,
            vocab=50_304,
            norm_eps=1e-5,
            attention=AttentionConfig(heads=16, kv_heads=16, head_dim=128, qk_norm="full"),
            moe=MoeConfig(experts=64, top_k=8, ffn=1024, normalize_top_k=False, aux_loss=0.01),
        )
    )


@preset
def qwen3_30b_a3b() -> Config:
    return pretraining(
        ModelConfig(
            layers=48,
            hidden=2048,
            vocab=151_936,
            attention=AttentionConfig(heads=32, kv_heads=4, head_dim=128, qk_norm="head", rope=RopeConfig(theta=1e6)),
            moe=MoeConfig(experts=128, top_k=8, ffn=768, aux_loss=0.001),
        )
    )


@preset
def qwen3_235b_a22b() -> Config:
    return pretraining(
        ModelConfig(
            layers=94,
            hidden=4096,
            vocab=151_936,
            attention=AttentionConfig(heads=64, kv_heads=4, head_dim=128, qk_norm="head", rope=RopeConfig(theta=1e6)),
            moe=MoeConfig(experts=128, top_k=8, ffn=1536, aux_loss=0.001),
        )
    )
