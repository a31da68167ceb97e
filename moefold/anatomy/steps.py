"""What a model is made of: its pieces as named steps, with order, lane, weights, operations and FLOPs. Torch-free.

The model binds code to these steps, `explain` prints them, the progress bar and the planner price them. A layer's
order and lanes are stated here and nowhere else.

    MoE block:    attend  route  dispatch  shared  experts  combine       dense block:    attend  mlp
    lane:         compute compute  comm    compute compute    comm

`shared` stands behind `dispatch`, so that shared experts compute while tokens travel.

FLOPs are those of one token's forward pass and follow the published tables: causal attention counts half, the head
counts, embedding and router do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from moefold.config.run import ModelConfig

Lane = Literal["compute", "comm"]


@dataclass(frozen=True)
class Weight:
    """A parameter by its name inside its piece; a token uses the `active` share of it."""

    name: str
    shape: tuple[int, ...]
    active: float = 1.0

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class StepSpec:
    """One named step. `static`: its shapes do not depend on routing, so a graph may capture it."""

    name: str
    lane: Lane
    static: bool
    shapes: str
    ops: tuple[str, ...] = ()
    weights: tuple[Weight, ...] = ()
    matmul: float = 0.0  # multiply-adds a token makes with weights
    context: float = 0.0  # multiply-adds a token makes with each other token of a full sequence

    def flops(self, seq_len: int) -> float:
        """Forward FLOPs of one token in a sequence of this length."""
        return 2 * self.matmul + 2 * self.context * seq_len / 2

    @property
    def parameters(self) -> int:
        return sum(w.size for w in self.weights)

    @property
    def active(self) -> float:
        return sum(w.size * w.active for w in self.weights)


def matmul_size(weights: tuple[Weight, ...]) -> float:
    """Multiply-adds of one token with those weights that are matrices."""
    return sum(w.size * w.active for w in weights if len(w.shape) > 1 and not w.name.endswith(".bias"))


def attend(model: ModelConfig) -> StepSpec:
    a, d = model.attention, model.hidden
    heads = {"query": (a.heads, a.head_dim), "key": (a.kv_heads, a.head_dim), "value": (a.kv_heads, a.head_dim)}
    weights = [Weight("attention.norm.weight", (d,))]
    weights += [Weight(f"attention.{name}.weight", (*shape, d)) for name, shape in heads.items()]
    weights += [Weight("attention.out.weight", (d, a.heads * a.head_dim))]
    if a.qkv_bias:
        weights += [Weight(f"attention.{name}.bias", shape) for name, shape in heads.items()]
    if a.out_bias:
        weights += [Weight("attention.out.bias", (d,))]
    if a.qk_norm != "none":
        per_head = a.qk_norm == "head"
        widths = [a.head_dim * (1 if per_head else n) for n in (a.heads, a.kv_heads)]
        weights += [Weight(f"attention.{n}_norm.weight", (w,)) for n, w in zip(("query", "key"), widths, strict=True)]
    found = tuple(weights)
    return StepSpec(
        "attend",
        "compute",
        True,
        f"T,{d} -> q T,{a.heads},{a.head_dim}; kv T,{a.kv_heads},{a.head_dim} -> T,{d}",
        ("rmsnorm", "rope", "attention"),
        found,
        matmul_size(found),
        context=2 * a.heads * a.head_dim,
    )


def mlp_weights(model: ModelConfig, name: str, ffn: int) -> tuple[Weight, ...]:
    return (
        Weight(f"{name}.gate_up.weight", (2, ffn, model.hidden)),
        Weight(f"{name}.down.weight", (model.hidden, ffn)),
    )


def mlp(model: ModelConfig) -> StepSpec:
    weights = (Weight("dense.norm.weight", (model.hidden,)), *mlp_weights(model, "dense", model.dense_ffn))
    shapes = f"T,{model.hidden} -> T,2,{model.dense_ffn} -> T,{model.hidden}"
    return StepSpec("mlp", "compute", True, shapes, ("rmsnorm", "swiglu"), weights, matmul_size(weights))


def route(model: ModelConfig) -> StepSpec:
    d, e, k = model.hidden, model.moe.experts, model.moe.top_k
    weights = (Weight("moe.norm.weight", (d,)), Weight("moe.router.weight", (e, d)))
    kernels = ("rmsnorm", "router_logits", "router_topk", "arrange_rows")
    return StepSpec("route", "compute", True, f"T,{d} -> T,{e} -> T,{k}", kernels, weights)


def dispatch(model: ModelConfig) -> StepSpec:
    return StepSpec("dispatch", "comm", False, f"T,{model.hidden} -> R,{model.hidden}  (R = T x {model.moe.top_k})")


def shared(model: ModelConfig) -> StepSpec:
    weights = mlp_weights(model, "moe.shared", model.moe.shared_ffn)
    shapes = f"T,{model.hidden} -> T,2,{model.moe.shared_ffn} -> T,{model.hidden}"
    return StepSpec("shared", "compute", True, shapes, ("swiglu",), weights, matmul_size(weights))


def experts(model: ModelConfig) -> StepSpec:
    m, d = model.moe, model.hidden
    share = m.top_k / m.experts
    weights = (
        Weight("moe.experts.gate_up", (m.experts, 2, m.ffn, d), share),
        Weight("moe.experts.down", (m.experts, d, m.ffn), share),
    )
    shapes = f"R,{d} -> R,2,{m.ffn} -> R,{d}"
    kernels = ("expert_mlp", "gather_rows", "grouped_gemm", "swiglu")  # the first at once, or the others in turn
    return StepSpec("experts", "compute", False, shapes, kernels, weights, matmul_size(weights))


def combine(model: ModelConfig) -> StepSpec:
    return StepSpec("combine", "comm", False, f"R,{model.hidden} -> T,{model.hidden}", ("sum_rows",))


def is_moe(model: ModelConfig, layer: int) -> bool:
    return layer >= model.moe.dense_layers


def block_steps(model: ModelConfig, layer: int) -> list[StepSpec]:
    """The steps of one block, in the order in which they run."""
    if not is_moe(model, layer):
        return [attend(model), mlp(model)]
    middle = [shared(model)] if model.moe.shared_ffn else []
    return [attend(model), route(model), dispatch(model), *middle, experts(model), combine(model)]


def embed(model: ModelConfig) -> StepSpec:
    weights = (Weight("embedding.weight", (model.vocab, model.hidden)),)
    return StepSpec("embed", "compute", True, f"T -> T,{model.hidden}", (), weights)


def predict(model: ModelConfig) -> StepSpec:
    matrix = Weight("head.weight", (model.vocab, model.hidden))
    weights = (Weight("head.norm.weight", (model.hidden,)), *(() if model.tied_head else (matrix,)))
    shapes = f"T,{model.hidden} -> T,{model.vocab} in chunks -> loss"
    return StepSpec("predict", "compute", True, shapes, ("rmsnorm", "cross_entropy"), weights, float(matrix.size))


def pieces(model: ModelConfig) -> Iterator[tuple[str, StepSpec]]:
    """Every step of the whole model with the prefix of its parameters' names."""
    yield "", embed(model)
    for layer in range(model.layers):
        for step in block_steps(model, layer):
            yield f"blocks.{layer}.", step
    yield "", predict(model)
