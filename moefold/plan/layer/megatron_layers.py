"""What Megatron-Core's layers keep for backward, as its published memory tables count it.

Norms and RoPE are fused and keep their inputs; the permutation writes the experts' rows; logits are all there at once.
"""

from __future__ import annotations

from moefold.plan.layer.tensor_table import C, D, LayerStack, R, T, TensorEntry, W, qkv_width, uses_gqa, uses_mla

MEGATRON_SAVED = (
    TensorEntry("stream", "attend", T, D, read="norm", entry=True),
    TensorEntry("normed", "attend", T, D, "each", ("norm",), when=uses_mla),
    TensorEntry("normed", "attend", T, D, "linear", ("norm",), when=uses_gqa),
    TensorEntry("query latent", "attend", T, lambda s: s.q_rank, when=uses_mla),
    TensorEntry("key latent and what turns", "attend", T, lambda s: s.kv_rank + s.rope, when=uses_mla),
    TensorEntry("key latent by itself", "attend", T, lambda s: s.kv_rank, when=uses_mla),
    TensorEntry("query latent normed", "attend", T, lambda s: s.q_rank, "linear", ("up",), when=uses_mla),
    TensorEntry("key latent normed", "attend", T, lambda s: s.kv_rank, "linear", ("up",), when=uses_mla),
    TensorEntry("q k v", "attend", C, qkv_width, "wide", ("up",), "core", uses_mla),
    TensorEntry("q k v", "attend", C, qkv_width, "wide", (), "core", uses_gqa),
    TensorEntry(
        "attended", "attend", C, lambda s: s.H * s.V, "wide", ("core",), "out"
    ),  # its projection reads it in bf16
    TensorEntry("log-sum-exp", "attend", C, lambda s: s.H, "fp32", ("core",)),
    TensorEntry("stream", "mlp", T, D, read="norm"),
    TensorEntry("normed", "mlp", T, D, "linear", ("norm",)),
    TensorEntry("gate and up", "mlp", C, lambda s: 2 * s.M, "wide", ("mlp",)),
    TensorEntry("activated", "mlp", C, lambda s: s.M, "linear", ("mlp",)),
    TensorEntry("stream", "route", T, D, read="norm"),
    TensorEntry("normed", "route", T, D, "wide", ("norm",)),
    TensorEntry("scores", "route", T, lambda s: s.E, "fp32", ("moe",)),
    TensorEntry("choice", "route", T, lambda s: s.E, "byte", ("moe",)),
    TensorEntry("normed, for shared experts", "shared", T, D, "copy", ("norm", "moe")),
    TensorEntry("gate and up", "shared", C, lambda s: 2 * s.A, "wide", ("shared", "moe")),
    TensorEntry("activated", "shared", C, lambda s: s.A, "linear", ("shared", "moe")),
    TensorEntry("rows", "experts", R, W, "linear", ("experts", "moe"), "experts"),
    TensorEntry("gate and up", "experts", R, lambda s: 2 * s.F, "wide", ("experts", "moe"), "activation"),
    TensorEntry("activated", "experts", R, lambda s: s.F, "linear", ("activation", "experts", "moe")),
    TensorEntry("results", "experts", R, W, "wide", ("experts", "moe"), when=lambda s: not s.gate_inside),
    TensorEntry("stream and token joined", "look_ahead", T, lambda s: 2 * s.D, "linear"),
    TensorEntry("logits", "predict", C, lambda s: s.P * (1 + s.model.mtp)),
    TensorEntry("softmax of logits", "predict", C, lambda s: s.P * (1 + s.model.mtp), "fp32"),
)

STREAM_GRADIENT = TensorEntry("gradient of the stream", "", T, D)
MEGATRON_WORKING_SETS = {
    ("experts", "B"): (
        (
            STREAM_GRADIENT,
            TensorEntry("gradient of results", "", R, W),
            TensorEntry("gradient of gate and up", "", R, lambda s: 2 * s.F),
            TensorEntry("gradient of rows", "", R, W),
        ),
    ),
    ("attend", "B"): ((STREAM_GRADIENT, TensorEntry("gradients of q k v", "", C, qkv_width)),),
    ("mlp", "B"): ((STREAM_GRADIENT, TensorEntry("gradient of gate and up", "", C, lambda s: 2 * s.M)),),
    ("predict", "B"): ((STREAM_GRADIENT, TensorEntry("gradient of logits", "", C, lambda s: s.P)),),
}

MEGATRON_STACK = LayerStack(MEGATRON_SAVED, MEGATRON_WORKING_SETS)
