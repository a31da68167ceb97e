"""Recompute and offload on a GPU, with moefold's own kernels: the bits of a run that keeps everything."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from moefold.config.run import Config
from moefold.layout.axes import single_rank_world
from moefold.presets.recipe import resolve_recipe
from moefold.train.parity import RankTrace, trace_run
from tests.memory.test_recompute import differing, recomputing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZES = [
    *("--model.layers", "5", "--model.hidden", "256", "--model.moe.ffn", "256", "--model.moe.experts", "8"),
    *("--model.attention.heads", "4", "--model.attention.kv_heads", "2", "--model.attention.head_dim", "64"),
    *("--model.dense_ffn", "256", "--model.moe.shared_ffn", "128", "--model.moe.dense_layers", "1"),
    *("--model.moe.balance.aux_loss", "0.1", "--model.moe.balance.bias_rate", "0.01", "--optim.warmup", "0"),
    *("--data.seq_len", "256", "--train.global_batch", "4", "--train.micro_batch", "2", "--data.tokenizer", "byte"),
    *("--train.device", "cuda", "--train.precision", "bf16", "--observe.tensorboard", "false"),
]
LATENT_ATTENTION = [
    *("--model.attention.kind", "mla", "--model.attention.kv_heads", "4", "--model.attention.head_dim", "128"),
    *("--model.attention.rope_dim", "64", "--model.attention.q_rank", "128", "--model.attention.kv_rank", "128"),
    *("--model.attention.qk_norm", "none"),
]
MECHANISMS: dict[str, list[str]] = {
    "plain": ["--model.attention.qk_norm", "head"],
    "latent attention": LATENT_ATTENTION,
    "tokens ahead": ["--model.mtp", "1", "--model.mtp_loss", "0.3"],
    "capacity": ["--model.moe.capacity.factor", "1.0"],
    "documents": ["--data.attend", "document"],
    "deferred weight gradients": ["--pipeline.defer", "true"],
    "zero bubble": ["--pipeline.schedule", "zb_h1"],
    "fp8 blocks": ["--precision.recipe", "fp8_block"],
    "fp8 rows": ["--precision.recipe", "fp8_row"],
    "fp8 hybrid": ["--precision.recipe", "fp8_hybrid"],
}
CHOICES = [
    "norm,core,shared,mlp",
    "experts",
    "moe",
    "layer",
    "sar",
    " > layer",
    " > experts@1,core",
    "layer > layer",
    "norm > moe@1,core",
]
STEPS = 2


def configured(mechanism: str) -> Config:
    return resolve_recipe("tiny", [*SIZES, *MECHANISMS[mechanism]], 1)


@cache
def kept_trace(mechanism: str) -> RankTrace:
    return trace_run(configured(mechanism), single_rank_world("cuda"), STEPS)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_run_with_a_policy_is_equal_to_the_bit(mechanism: str, choice: str):
    config = recomputing(configured(mechanism), choice)
    config = replace(config, memory=replace(config.memory, offload_gib=1.0))
    assert differing(trace_run(config, single_rank_world("cuda"), STEPS), kept_trace(mechanism)) == []


def test_projections_up_from_latents_are_rebuilt_to_the_bit():
    config = recomputing(configured("latent attention"), "norm,up")
    assert differing(trace_run(config, single_rank_world("cuda"), STEPS), kept_trace("latent attention")) == []
