"""The choice of implementations, made once when a run is assembled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from moefold.kernels.attention import attention, ring_block
from moefold.kernels.catalog import CATALOG, Facts, forced_implementations, pick_implementation
from moefold.kernels.experts import clamped_swiglu, expert_bias, expert_mlp, grouped_gemm, swiglu
from moefold.kernels.linear import linear
from moefold.kernels.norm import add_rmsnorm, norm_rope, rmsnorm, rope
from moefold.kernels.optimizer import adamw, add_squares
from moefold.kernels.registry import OPS
from moefold.kernels.routing import arrange_rows, gather_rows, router_logits, router_topk
from moefold.kernels.vocabulary import cross_entropy, embedding

__all__ = [  # imported so that their ops are registered
    "adamw",
    "add_rmsnorm",
    "add_squares",
    "arrange_rows",
    "attention",
    "clamped_swiglu",
    "cross_entropy",
    "embedding",
    "expert_bias",
    "expert_mlp",
    "gather_rows",
    "grouped_gemm",
    "linear",
    "norm_rope",
    "ring_block",
    "rmsnorm",
    "rope",
    "router_logits",
    "router_topk",
    "swiglu",
]


@dataclass(frozen=True)
class BoundKernels:
    """One callable per op; the model and the optimizer call these and do not know which implementation they got."""

    embedding: Callable[..., Any]
    rmsnorm: Callable[..., Any]
    add_rmsnorm: Callable[..., Any]
    linear: Callable[..., Any]
    rope: Callable[..., Any]
    norm_rope: Callable[..., Any]
    attention: Callable[..., Any]
    attention_block: Callable[..., Any]
    attention_block_backward: Callable[..., Any]
    swiglu: Callable[..., Any]
    clamped_swiglu: Callable[..., Any]
    expert_bias: Callable[..., Any]
    router_logits: Callable[..., Any]
    router_topk: Callable[..., Any]
    arrange_rows: Callable[..., Any]
    gather_rows: Callable[..., Any]
    sum_rows: Callable[..., Any]
    grouped_gemm: Callable[..., Any]
    grouped_gemm_weight: Callable[..., Any]
    expert_mlp: Callable[..., Any]
    cross_entropy: Callable[..., Any]
    adamw: Callable[..., Any]
    add_squares: Callable[..., Any]


def bind_kernels(facts: Facts, force: Iterable[str] = ()) -> BoundKernels:
    """The implementation of every op for these facts, or the one the user forces."""
    wanted = forced_implementations(force)
    chosen = {name: pick_implementation(name, facts, wanted.get(name))[0] for name in CATALOG}
    return BoundKernels(**{name: OPS[name].implementations[which] for name, which in chosen.items()})
