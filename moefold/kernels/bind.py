"""The choice of implementations, made once when a run is assembled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from moefold.kernels import (
    adamw,
    add_rmsnorm,
    add_squares,
    arrange_rows,
    attention,
    attention_block,
    clamped_swiglu,
    cross_entropy,
    embedding,
    expert_bias,
    expert_mlp,
    grouped_gemm,
    linear,
    norm_rope,
    permute,
    rmsnorm,
    rope,
    router_logits,
    router_topk,
    swiglu,
)
from moefold.kernels.catalog import CATALOG, Facts, pick, read_force
from moefold.kernels.registry import OPS

__all__ = [  # imported so that their ops are registered
    "adamw",
    "add_rmsnorm",
    "add_squares",
    "arrange_rows",
    "attention",
    "attention_block",
    "clamped_swiglu",
    "cross_entropy",
    "embedding",
    "expert_bias",
    "expert_mlp",
    "grouped_gemm",
    "linear",
    "norm_rope",
    "permute",
    "rmsnorm",
    "rope",
    "router_logits",
    "router_topk",
    "swiglu",
]


@dataclass(frozen=True)
class Kernels:
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


def bind(facts: Facts, force: Iterable[str] = ()) -> Kernels:
    """The implementation of every op for these facts, or the one the user forces."""
    wanted = read_force(force)
    chosen = {name: pick(name, facts, wanted.get(name))[0] for name in CATALOG}
    return Kernels(**{name: OPS[name].implementations[which] for name, which in chosen.items()})
