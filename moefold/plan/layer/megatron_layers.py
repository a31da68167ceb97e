"""Tensors that Megatron-Core's layers save for backward, as in its published memory tables.

Norms and RoPE are fused and save their inputs; the permutation writes the experts' rows; all logits are held at once.
"""

from __future__ import annotations

from moefold.plan.layer.rank_shapes import RankShapes
from moefold.plan.layer.tensor_table import (
    LayerStack,
    TensorEntry,
    TensorTable,
    WorkingSet,
    attended_width,
    context_tokens,
    dense_inner_width,
    dense_preactivation_width,
    dispatched_token_width,
    expert_count,
    expert_inner_width,
    expert_preactivation_width,
    expert_rows,
    joined_token_width,
    key_latent_width,
    qkv_width,
    query_heads,
    query_latent_width,
    rank_tokens,
    shared_inner_width,
    shared_preactivation_width,
    stream_width,
    uses_gqa,
    uses_mla,
    vocab_shard_width,
    weighs_expert_outputs,
)


def rotary_key_latent_width(s: RankShapes) -> float:
    return s.kv_rank + s.rope


def all_logits_width(s: RankShapes) -> float:
    return s.P * (1 + s.model.mtp)


def attend_tensors() -> list[TensorEntry]:
    table = TensorTable("attend")
    mla = table.only(uses_mla)
    gqa = table.only(uses_gqa)
    table.add("stream", rank_tokens, stream_width, read_by=("norm",), layer_input=True)
    # Two projections of latent attention quantise its input separately.
    mla_norm = mla.remade_by("norm")
    mla_norm.add("normed", rank_tokens, stream_width, "each")
    gqa_norm = gqa.remade_by("norm")
    gqa_norm.add("normed", rank_tokens, stream_width, "linear")
    # Latent attention: latents before and after their norms, then their up-projections.
    mla.add("query latent", rank_tokens, query_latent_width)
    mla.add("key latent and rotary key", rank_tokens, rotary_key_latent_width)
    mla.add("key latent", rank_tokens, key_latent_width)
    mla_up = mla.remade_by("up")
    mla_up.add("query latent normed", rank_tokens, query_latent_width, "linear")
    mla_up.add("key latent normed", rank_tokens, key_latent_width, "linear")
    mla_up.add("q k v", context_tokens, qkv_width, read_by=("core",))
    gqa.add("q k v", context_tokens, qkv_width, read_by=("core",))
    core = table.remade_by("core")
    core.add("attended", context_tokens, attended_width, read_by=("out",))  # its projection reads it in bf16
    core.add("log-sum-exp", context_tokens, query_heads, "fp32")
    return table.entries


def mlp_tensors() -> list[TensorEntry]:
    table = TensorTable("mlp")
    table.add("stream", rank_tokens, stream_width, read_by=("norm",))
    norm = table.remade_by("norm")
    norm.add("normed", rank_tokens, stream_width, "linear")
    mlp = table.remade_by("mlp")
    mlp.add("pre-activation", context_tokens, dense_preactivation_width)
    mlp.add("activated", context_tokens, dense_inner_width, "linear")
    return table.entries


def route_tensors() -> list[TensorEntry]:
    table = TensorTable("route")
    table.add("stream", rank_tokens, stream_width, read_by=("norm",))
    table.remade_by("norm").add("normed", rank_tokens, stream_width)
    router = table.remade_by("moe")
    router.add("scores", rank_tokens, expert_count, "fp32")
    router.add("choice", rank_tokens, expert_count, "byte")
    return table.entries


def shared_expert_tensors() -> list[TensorEntry]:
    table = TensorTable("shared")
    norm = table.remade_by("norm", "moe")
    norm.add("normed, for shared experts", rank_tokens, stream_width, "copy")
    shared = table.remade_by("shared", "moe")
    shared.add("pre-activation", context_tokens, shared_preactivation_width)
    shared.add("activated", context_tokens, shared_inner_width, "linear")
    return table.entries


def expert_tensors() -> list[TensorEntry]:
    table = TensorTable("experts")
    experts = table.remade_by("experts", "moe")
    activation = table.remade_by("activation", "experts", "moe")
    rows = experts.read_by("experts")
    rows.add("rows", expert_rows, dispatched_token_width, "linear")
    inner = experts.read_by("activation")
    inner.add("pre-activation", expert_rows, expert_preactivation_width)
    activation.add("activated", expert_rows, expert_inner_width, "linear")
    experts.only(weighs_expert_outputs).add("results", expert_rows, dispatched_token_width)
    return table.entries


def head_tensors() -> list[TensorEntry]:
    ahead = TensorTable("look_ahead")
    ahead.add("stream and token joined", rank_tokens, joined_token_width, "linear")
    head = TensorTable("predict")
    head.add("logits", context_tokens, all_logits_width)
    head.add("softmax of logits", context_tokens, all_logits_width, "fp32")
    return ahead.entries + head.entries


MEGATRON_SAVED = [
    *attend_tensors(),
    *mlp_tensors(),
    *route_tensors(),
    *shared_expert_tensors(),
    *expert_tensors(),
    *head_tensors(),
]


def backward_table() -> TensorTable:
    table = TensorTable()
    table.add("gradient of the stream", rank_tokens, stream_width)
    return table


def expert_backward() -> WorkingSet:
    table = backward_table()
    table.add("gradient of results", expert_rows, dispatched_token_width)
    table.add("gradient of the pre-activation", expert_rows, expert_preactivation_width)
    table.add("gradient of rows", expert_rows, dispatched_token_width)
    return table.entries


def attend_backward() -> WorkingSet:
    table = backward_table()
    table.add("gradients of q k v", context_tokens, qkv_width)
    return table.entries


def mlp_backward() -> WorkingSet:
    table = backward_table()
    table.add("gradient of the pre-activation", context_tokens, dense_preactivation_width)
    return table.entries


def predict_backward() -> WorkingSet:
    table = backward_table()
    table.add("gradient of logits", context_tokens, vocab_shard_width)
    return table.entries


MEGATRON_WORKING_SETS = {
    ("experts", "B"): [expert_backward()],
    ("attend", "B"): [attend_backward()],
    ("mlp", "B"): [mlp_backward()],
    ("predict", "B"): [predict_backward()],
}

MEGATRON_STACK = LayerStack(MEGATRON_SAVED, MEGATRON_WORKING_SETS, waiting=[])
