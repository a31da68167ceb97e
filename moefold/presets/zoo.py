"""Presets: published models, each a function that returns a whole configuration. Sizes are the published ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from moefold.config.run import (
    TRAINED,
    AttentionConfig,
    BalanceConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    MemoryConfig,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    RopeConfig,
    RouterConfig,
    TrainConfig,
)

PRESETS: dict[str, Callable[[], Config]] = {}
SMALL_MODELS = ("tiny", "starter")  # made for a CPU, without a smaller variant


class PublishedRun(NamedTuple):
    """The pre-training of a model as its report has it: sequences of a step, at their largest, and tokens in all."""

    global_batch: int
    seq_len: int
    tokens: float

    @property
    def steps(self) -> int:
        step_tokens = self.global_batch * self.seq_len
        return round(self.tokens / step_tokens)


PUBLISHED_RUNS = {  # other reports do not have them
    "olmoe-1b-7b": PublishedRun(1024, 4096, 5.133e12),
    "deepseek-v2-lite": PublishedRun(4608, 4096, 5.7e12),
    "deepseek-v2": PublishedRun(9216, 4096, 8.1e12),
    "deepseek-v3": PublishedRun(15_360, 4096, 14.8e12),
    "kimi-k2": PublishedRun(16_384, 4096, 15.5e12),
}


def is_published_model(name: str) -> bool:
    """Whether a preset has the size of a published model, and not one for a CPU."""
    return name in PRESETS and name not in SMALL_MODELS and not name.endswith("-tiny")


def register_preset(make: Callable[[], Config], name: str = "") -> Callable[[], Config]:
    """Register a preset under its function's name, written with dashes, and its tiny variant."""
    name = name or make.__name__.replace("_", "-")
    tiny_name = f"{name}-tiny"

    def make_named() -> Config:
        return replace(make(), name=name)

    def make_tiny() -> Config:
        return replace(tiny_variant(make()), name=tiny_name)

    PRESETS[name] = make_named
    if name not in SMALL_MODELS:
        PRESETS[tiny_name] = make_tiny
    return make


def pretraining_config(model: ModelConfig, seq_len: int = 4096) -> Config:
    """Training settings for a large model, as a starting point. Batch and steps are for plans and benchmarks: training
    takes them from the user (`recipe.unsaid_settings`)."""
    return Config(
        model=model,
        data=DataConfig(seq_len=seq_len),
        train=TrainConfig(steps=1000, global_batch=8, micro_batch=1, validate_every=250, validate_sequences=16),
        optim=OptimConfig(lr=3e-4, warmup=100),
        checkpoint=CheckpointConfig(every=250),
    )


def tiny_variant(config: Config) -> Config:
    """A variant with all mechanisms of a model, small enough for a CPU to train in seconds; for tests and trials."""
    m = config.model
    a = m.attention
    moe = m.moe
    groups = min(moe.router.groups, 4)
    groups_chosen = min(moe.router.groups_chosen, 2)
    devices = min(moe.balance.devices, 4)
    attention = replace(
        a,
        heads=4,
        kv_heads=4 if a.kv_heads == a.heads else 2,
        head_dim=24 if a.kind == "mla" else 16,
        rope_dim=8 if a.rope_dim else 0,
        q_rank=24 if a.q_rank else 0,
        kv_rank=32,
        value_dim=16 if a.value_dim else 0,
        window=min(a.window, 16),
        rope=replace(a.rope, original_length=64),
    )
    experts = replace(
        moe,
        experts=16 if moe.latent else 8,
        top_k=4 if moe.latent else 2,
        ffn=32,
        shared_ffn=32 if moe.shared_ffn else 0,
        latent=32 if moe.latent else 0,
        dense_layers=min(moe.dense_layers, 1),
        router=replace(moe.router, groups=groups, groups_chosen=groups_chosen),
        balance=replace(moe.balance, devices=devices),
    )
    layers = 2 * moe.every + experts.dense_layers
    sizes = replace(m, layers=layers, hidden=64, vocab=256, dense_ffn=96)
    model = replace(sizes, attention=attention, moe=experts)
    train = TrainConfig(steps=100, global_batch=8, micro_batch=2, validate_every=50, validate_sequences=16)
    data = DataConfig(seq_len=128)
    optim = OptimConfig(warmup=10)
    return replace(config, model=model, data=data, train=train, optim=optim)


@register_preset
def tiny() -> Config:
    """A small but complete MoE model; trains on Python source on two CPU cores in a few minutes."""
    return Config(
        model=ModelConfig(
            layers=4,
            hidden=128,
            vocab=256,
            attention=AttentionConfig(heads=4, kv_heads=2, head_dim=32, qk_norm="head"),
            moe=MoeConfig(experts=8, top_k=2, ffn=192, balance=BalanceConfig(bias_rate=0.01)),
        ),
        train=TrainConfig(steps=340, global_batch=8, micro_batch=2, validate_every=85),
        optim=OptimConfig(lr=4e-3, warmup=30),
        checkpoint=CheckpointConfig(every=85),
    )


@register_preset
def starter() -> Config:
    """The model of `make train`: `tiny` with a vocabulary of byte pairs, trained on the spot, so that it writes words
    within minutes."""
    config = tiny()
    data = DataConfig(tokenizer=TRAINED)
    memory = MemoryConfig(tape=True)
    model = replace(config.model, vocab=2048)
    train = TrainConfig(steps=560, global_batch=8, micro_batch=8, validate_every=140)
    checkpoint = CheckpointConfig(every=140)
    return replace(config, model=model, data=data, train=train, memory=memory, checkpoint=checkpoint)


@register_preset
def mixtral_8x7b() -> Config:
    return pretraining_config(
        ModelConfig(
            layers=32,
            hidden=4096,
            vocab=32_000,
            norm_eps=1e-5,
            attention=AttentionConfig(heads=32, kv_heads=8, head_dim=128, rope=RopeConfig(theta=1e6)),
            moe=MoeConfig(experts=8, top_k=2, ffn=14_336, balance=BalanceConfig(aux_loss=0.02)),
        )
    )


@register_preset
def mixtral_8x22b() -> Config:
    return pretraining_config(
        ModelConfig(
            layers=56,
            hidden=6144,
            vocab=32_768,
            norm_eps=1e-5,
            attention=AttentionConfig(heads=48, kv_heads=8, head_dim=128, rope=RopeConfig(theta=1e6)),
            moe=MoeConfig(experts=8, top_k=2, ffn=16_384, balance=BalanceConfig(aux_loss=0.001)),
        )
    )


@register_preset
def mixtral_8x22b_g8t8() -> Config:
    """Mixtral-8x22B upcycled to 64 experts of an eighth of the width, 8 for each token (Parallel Folding, section
    4.1)."""
    config = mixtral_8x22b()
    published = config.model.moe
    moe = replace(published, experts=64, top_k=8, ffn=2048)
    model = replace(config.model, moe=moe)
    return replace(config, model=model)


@register_preset
def llama3_8x70b() -> Config:
    """Llama3-70B upcycled to 8 experts (Parallel Folding, section 4.1), 2 for each token as in Mixtral."""
    return pretraining_config(
        ModelConfig(
            layers=80,
            hidden=8192,
            vocab=128_256,
            norm_eps=1e-5,
            attention=AttentionConfig(heads=64, kv_heads=8, head_dim=128, rope=RopeConfig(theta=500_000.0)),
            moe=MoeConfig(experts=8, top_k=2, ffn=28_672, balance=BalanceConfig(aux_loss=0.01)),
        )
    )


@register_preset
def internal_352b() -> Config:
    """The 352 B model of MegaScale-MoE, Table 2. Its total and its published MFU need one shared expert as wide as a
    routed one, which the table does not list. Router and RoPE are not published."""
    return pretraining_config(
        ModelConfig(
            layers=60,
            hidden=4096,
            vocab=65_536,
            attention=AttentionConfig(heads=32, kv_heads=8, head_dim=128),
            moe=MoeConfig(experts=32, top_k=3, ffn=14_336, shared_ffn=14_336, balance=BalanceConfig(aux_loss=0.01)),
        ),
        seq_len=8192,
    )


@register_preset
def hunyuan_large() -> Config:
    """The sizes of Hunyuan-Large. Not as published: every layer has keys and values of its own (there, two layers share
    them), and a token's only expert may be full without another taking its place."""
    return pretraining_config(
        ModelConfig(
            layers=64,
            hidden=6400,
            vocab=128_512,
            norm_eps=1e-5,
            attention=AttentionConfig(heads=80, kv_heads=8, head_dim=80, qk_norm="head"),
            moe=MoeConfig(
                experts=16,
                top_k=1,
                ffn=18_304,
                shared_ffn=18_304,
                router=RouterConfig(normalize="none"),
                balance=BalanceConfig(aux_loss=0.001),
            ),
        )
    )


@partial(register_preset, name="phi-3.5-moe")
def phi_3_5_moe() -> Config:
    """The sizes of Phi-3.5-MoE. Not as published: RMSNorm for LayerNorm, and a softmax router for SparseMixer."""
    return pretraining_config(
        ModelConfig(
            layers=32,
            hidden=4096,
            vocab=32_064,
            norm_eps=1e-5,
            attention=AttentionConfig(heads=32, kv_heads=8, head_dim=128, qkv_bias=True, out_bias=True),
            moe=MoeConfig(
                experts=16,
                top_k=2,
                ffn=6400,
                router=RouterConfig(normalize="none"),
                balance=BalanceConfig(aux_loss=0.001),
            ),
        )
    )


@register_preset
def olmoe_1b_7b() -> Config:
    return pretraining_config(
        ModelConfig(
            layers=16,
            hidden=2048,
            vocab=50_304,
            norm_eps=1e-5,
            attention=AttentionConfig(heads=16, kv_heads=16, head_dim=128, qk_norm="full"),
            moe=MoeConfig(
                experts=64,
                top_k=8,
                ffn=1024,
                router=RouterConfig(normalize="none"),
                balance=BalanceConfig(aux_loss=0.01),
            ),
        )
    )


@register_preset
def qwen3_30b_a3b() -> Config:
    return pretraining_config(
        ModelConfig(
            layers=48,
            hidden=2048,
            vocab=151_936,
            attention=AttentionConfig(heads=32, kv_heads=4, head_dim=128, qk_norm="head", rope=RopeConfig(theta=1e6)),
            moe=MoeConfig(experts=128, top_k=8, ffn=768, balance=BalanceConfig(aux_loss=0.001)),
        )
    )


@register_preset
def qwen3_235b_a22b() -> Config:
    return pretraining_config(
        ModelConfig(
            layers=94,
            hidden=4096,
            vocab=151_936,
            attention=AttentionConfig(heads=64, kv_heads=4, head_dim=128, qk_norm="head", rope=RopeConfig(theta=1e6)),
            moe=MoeConfig(experts=128, top_k=8, ffn=1536, balance=BalanceConfig(aux_loss=0.001)),
        )
    )


@register_preset
def qwen2_57b_a14b() -> Config:
    return pretraining_config(
        ModelConfig(
            layers=28,
            hidden=3584,
            vocab=151_936,
            attention=AttentionConfig(heads=28, kv_heads=4, head_dim=128, qkv_bias=True, rope=RopeConfig(theta=1e6)),
            moe=MoeConfig(
                experts=64,
                top_k=8,
                ffn=2560,
                shared_ffn=20_480,
                shared_gate=True,
                router=RouterConfig(normalize="none"),
                balance=BalanceConfig(aux_loss=0.001),
            ),
        )
    )


@register_preset
def deepseek_moe_16b() -> Config:
    """DeepSeekMoE 16B, the model before DeepSeek-V2: whole keys and values for every head."""
    return pretraining_config(
        ModelConfig(
            layers=28,
            hidden=2048,
            vocab=102_400,
            dense_ffn=10_944,
            attention=AttentionConfig(heads=16, kv_heads=16, head_dim=128),
            moe=MoeConfig(
                experts=64,
                top_k=6,
                ffn=1408,
                shared_ffn=2816,
                dense_layers=1,
                router=RouterConfig(normalize="none"),
                balance=BalanceConfig(aux_loss=0.001),
            ),
        )
    )


def deepseek_attention(heads: int, q_rank: int, rope: RopeConfig) -> AttentionConfig:
    """Latent attention of DeepSeek's models from V2 on: 128 dims without RoPE, 64 rotary dims, values of 128."""
    return AttentionConfig(
        kind="mla",
        heads=heads,
        kv_heads=heads,
        head_dim=192,
        rope_dim=64,
        value_dim=128,
        q_rank=q_rank,
        kv_rank=512,
        rope=rope,
    )


def deepseek_yarn(mscale: float, factor: float = 40.0, theta: float = 10_000.0, beta_fast: float = 32.0) -> RopeConfig:
    return RopeConfig(
        theta=theta,
        scaling="yarn",
        factor=factor,
        original_length=4096,
        beta_fast=beta_fast,
        mscale=mscale,
        mscale_all=mscale,
    )


@register_preset
def deepseek_v2_lite() -> Config:
    return pretraining_config(
        ModelConfig(
            layers=27,
            hidden=2048,
            vocab=102_400,
            dense_ffn=10_944,
            attention=deepseek_attention(heads=16, q_rank=0, rope=deepseek_yarn(0.707)),
            moe=MoeConfig(
                experts=64,
                top_k=6,
                ffn=1408,
                shared_ffn=2816,
                dense_layers=1,
                router=RouterConfig(normalize="none"),
                balance=BalanceConfig(aux_loss=0.001),
            ),
        )
    )


@register_preset
def deepseek_v2() -> Config:
    return pretraining_config(
        ModelConfig(
            layers=60,
            hidden=5120,
            vocab=102_400,
            dense_ffn=12_288,
            attention=deepseek_attention(heads=128, q_rank=1536, rope=deepseek_yarn(0.707)),
            moe=MoeConfig(
                experts=160,
                top_k=6,
                ffn=1536,
                shared_ffn=3072,
                dense_layers=1,
                router=RouterConfig(normalize="none", scale=16.0, groups=8, groups_chosen=3, group_score="best"),
                balance=BalanceConfig(aux_loss=0.003, device_loss=0.05, devices=8),
            ),
        )
    )


@register_preset
def deepseek_v3() -> Config:
    return pretraining_config(
        ModelConfig(
            layers=61,
            hidden=7168,
            vocab=129_280,
            dense_ffn=18_432,
            init_std=0.006,
            mtp=1,
            attention=deepseek_attention(heads=128, q_rank=1536, rope=deepseek_yarn(1.0)),
            moe=MoeConfig(
                experts=256,
                top_k=8,
                ffn=2048,
                shared_ffn=2048,
                dense_layers=3,
                router=RouterConfig(score="sigmoid", scale=2.5, groups=8, groups_chosen=4),
                balance=BalanceConfig(bias_rate=0.001, aux_loss=0.0001),
            ),
        )
    )


@register_preset
def kimi_k2() -> Config:
    rope = deepseek_yarn(1.0, factor=32.0, theta=50_000.0, beta_fast=1.0)
    return pretraining_config(
        ModelConfig(
            layers=61,
            hidden=7168,
            vocab=163_840,
            dense_ffn=18_432,
            attention=deepseek_attention(heads=64, q_rank=1536, rope=rope),
            moe=MoeConfig(
                experts=384,
                top_k=8,
                ffn=2048,
                shared_ffn=2048,
                dense_layers=1,
                router=RouterConfig(score="sigmoid", scale=2.827),
                balance=BalanceConfig(bias_rate=0.001, aux_loss=0.001),
            ),
        )
    )


def gpt_oss_config(layers: int, experts: int) -> Config:
    rope = RopeConfig(theta=150_000.0, scaling="yarn", factor=32.0, original_length=4096, round_dims=False)
    return pretraining_config(
        ModelConfig(
            layers=layers,
            hidden=2880,
            vocab=201_088,
            norm_eps=1e-5,
            attention=AttentionConfig(
                heads=64,
                kv_heads=8,
                head_dim=64,
                qkv_bias=True,
                out_bias=True,
                window=128,
                full_every=2,
                sinks=True,
                rope=rope,
            ),
            moe=MoeConfig(
                experts=experts,
                top_k=4,
                ffn=2880,
                biases=True,
                activation="clamped_swiglu",
                router=RouterConfig(score="softmax_chosen"),
                balance=BalanceConfig(aux_loss=0.001),
            ),
        )
    )


@register_preset
def gpt_oss_20b() -> Config:
    return gpt_oss_config(layers=24, experts=32)


@register_preset
def gpt_oss_120b() -> Config:
    return gpt_oss_config(layers=36, experts=128)


@partial(register_preset, name="glm-4.5-air")
def glm_4_5_air() -> Config:
    return pretraining_config(
        ModelConfig(
            layers=46,
            hidden=4096,
            vocab=151_552,
            dense_ffn=10_944,
            norm_eps=1e-5,
            mtp=1,
            attention=AttentionConfig(
                heads=96, kv_heads=8, head_dim=128, rope_dim=64, qkv_bias=True, rope=RopeConfig(theta=1e6)
            ),
            moe=MoeConfig(
                experts=128,
                top_k=8,
                ffn=1408,
                shared_ffn=1408,
                dense_layers=1,
                router=RouterConfig(score="sigmoid"),
                balance=BalanceConfig(bias_rate=0.001, aux_loss=0.0001),
            ),
        )
    )


@register_preset
def latent_30b_a3b() -> Config:
    """Qwen3-30B-A3B with experts in a latent of a quarter of the width: four times the experts, and four times the
    experts per token, with the same parameters, FLOPs and bytes sent."""
    config = qwen3_30b_a3b()
    moe = replace(config.model.moe, latent=512, experts=512, top_k=32)
    return replace(config, model=replace(config.model, moe=moe))
