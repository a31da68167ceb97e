"""What Megatron-Core's layers keep for backward, as its published memory tables count it.

Norms and RoPE are fused and keep their inputs; the permutation writes the experts' rows; logits are all there at once.
"""

from __future__ import annotations

from moefold.plan.tensor import C, D, R, Stack, T, Tensor, W, gqa, mla, q_k_v

KEPT = (
    Tensor("stream", "attend", T, D, read="norm", entry=True),
    Tensor("normed", "attend", T, D, "each", ("norm",), when=mla),
    Tensor("normed", "attend", T, D, "linear", ("norm",), when=gqa),
    Tensor("query latent", "attend", T, lambda s: s.q_rank, when=mla),
    Tensor("key latent and what turns", "attend", T, lambda s: s.kv_rank + s.rope, when=mla),
    Tensor("key latent by itself", "attend", T, lambda s: s.kv_rank, when=mla),
    Tensor("query latent normed", "attend", T, lambda s: s.q_rank, "linear", ("up",), when=mla),
    Tensor("key latent normed", "attend", T, lambda s: s.kv_rank, "linear", ("up",), when=mla),
    Tensor("q k v", "attend", C, q_k_v, "wide", ("up",), "core", mla),
    Tensor("q k v", "attend", C, q_k_v, "wide", (), "core", gqa),
    Tensor("attended", "attend", C, lambda s: s.H * s.V, "wide", ("core",), "out"),  # its projection reads it in bf16
    Tensor("log-sum-exp", "attend", C, lambda s: s.H, "fp32", ("core",)),
    Tensor("stream", "mlp", T, D, read="norm"),
    Tensor("normed", "mlp", T, D, "linear", ("norm",)),
    Tensor("gate and up", "mlp", C, lambda s: 2 * s.M, "wide", ("mlp",)),
    Tensor("activated", "mlp", C, lambda s: s.M, "linear", ("mlp",)),
    Tensor("stream", "route", T, D, read="norm"),
    Tensor("normed", "route", T, D, "wide", ("norm",)),
    Tensor("scores", "route", T, lambda s: s.E, "fp32", ("moe",)),
    Tensor("choice", "route", T, lambda s: s.E, "byte", ("moe",)),
    Tensor("normed, for shared experts", "shared", T, D, "copy", ("norm", "moe")),
    Tensor("gate and up", "shared", C, lambda s: 2 * s.A, "wide", ("shared", "moe")),
    Tensor("activated", "shared", C, lambda s: s.A, "linear", ("shared", "moe")),
    Tensor("rows", "experts", R, W, "linear", ("experts", "moe"), "experts"),
    Tensor("gate and up", "experts", R, lambda s: 2 * s.F, "wide", ("experts", "moe"), "activation"),
    Tensor("activated", "experts", R, lambda s: s.F, "linear", ("activation", "experts", "moe")),
    Tensor("results", "experts", R, W, "wide", ("experts", "moe"), when=lambda s: not s.gate_inside),
    Tensor("stream and token joined", "look_ahead", T, lambda s: 2 * s.D, "linear"),
    Tensor("logits", "predict", C, lambda s: s.P * (1 + s.model.mtp)),
    Tensor("softmax of logits", "predict", C, lambda s: s.P * (1 + s.model.mtp), "fp32"),
)

STREAM = Tensor("gradient of the stream", "", T, D)
MOMENTS = {
    ("experts", "B"): (
        (
            STREAM,
            Tensor("gradient of results", "", R, W),
            Tensor("gradient of gate and up", "", R, lambda s: 2 * s.F),
            Tensor("gradient of rows", "", R, W),
        ),
    ),
    ("attend", "B"): ((STREAM, Tensor("gradients of q k v", "", C, q_k_v)),),
    ("mlp", "B"): ((STREAM, Tensor("gradient of gate and up", "", C, lambda s: 2 * s.M)),),
    ("predict", "B"): ((STREAM, Tensor("gradient of logits", "", C, lambda s: s.P)),),
}

MEGATRON = Stack(KEPT, MOMENTS)
