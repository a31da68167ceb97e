"""What a model is made of: its pieces as named steps, with order, lane, weights, operations and FLOPs. Torch-free.

The model binds code to these steps, `explain` prints them, the progress bar and the planner price them. A layer's
order and lanes are stated here and nowhere else.

    MoE block:    attend  route  dispatch  shared  experts  combine       dense block:    attend  mlp
    lane:         compute compute  comm    compute compute    comm

`shared` stands behind `dispatch`, so that shared experts compute while tokens travel. Where tokens travel as latents,
`narrow` stands before `dispatch` and `widen` behind `combine`. Multi-token prediction adds, before `predict`, for each
further token `look_ahead`, a block, and `set_aside`; `predict` then has a loss for each of them too.

FLOPs are those of one token's forward pass and follow the published tables: causal attention counts half, the head
counts, embedding and router do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from moefold.config.run import ModelConfig

Lane = Literal["compute", "comm"]
DimCuts = tuple[tuple[int, str], ...]  # dims of a tensor with the axes that cut them, as a placement has them


@dataclass(frozen=True)
class WeightSpec:
    """A parameter by its name inside its piece; a token uses the `active` share of it, and `cut` says which axes cut
    which dims. One that ep cuts is of the expert grid."""

    name: str
    shape: tuple[int, ...]
    active: float = 1.0
    cut: DimCuts = ()

    @property
    def size(self) -> int:
        return prod(self.shape)

    def part(self, degrees: Mapping[str, int]) -> tuple[float, ...]:
        """Its shape on one rank, where axes have these degrees; parts that do not come out even are on average."""
        by = dict(self.cut)
        return tuple(size / degrees[by[dim]] if dim in by else size for dim, size in enumerate(self.shape))


def sharded_over_tp(dim: int) -> DimCuts:
    return ((dim, "tp"),)


def sharded_over_experts(inner: int) -> DimCuts:
    return ((0, "ep"), (inner, "etp"))


@dataclass(frozen=True)
class StepSpec:
    """One named step. `static`: its shapes do not depend on routing, so a graph may capture it."""

    name: str
    lane: Lane
    static: bool
    shapes: str
    ops: tuple[str, ...] = ()
    weights: tuple[WeightSpec, ...] = ()
    matmul: float = 0.0  # multiply-adds a token makes with weights
    context: float = 0.0  # multiply-adds a token makes with each token it sees
    window: int = 0  # how many tokens it sees at most; 0: all before it

    def flops(self, seq_len: int) -> float:
        """Forward FLOPs of one token in a sequence of this length."""
        return 2 * self.matmul + 2 * self.context * self.seen(seq_len)

    def seen(self, seq_len: int) -> float:
        """How many tokens a token sees on average: half of the sequence, or nearly the window."""
        window = min(self.window or seq_len, seq_len)
        return window * (1 - window / (2 * seq_len))

    @property
    def parameters(self) -> int:
        return sum(w.size for w in self.weights)

    @property
    def active(self) -> float:
        return sum(w.size * w.active for w in self.weights)


def multiply_adds_per_token(weights: tuple[WeightSpec, ...]) -> float:
    """Multiply-adds of one token with those weights that are matrices."""
    return sum(w.size * w.active for w in weights if len(w.shape) > 1 and not w.name.endswith("bias"))


def attend_step(model: ModelConfig, layer: int) -> StepSpec:
    a, d = model.attention, model.hidden
    weights = (latent_attention_weights if a.kind == "mla" else grouped_query_weights)(model)
    if a.sinks:
        weights += (WeightSpec("attention.sinks", (a.heads,), cut=sharded_over_tp(0)),)
    value_dim = (a.kind == "mla" and a.value_dim) or a.head_dim
    kv_heads = a.heads if a.kind == "mla" else a.kv_heads
    window = sliding_window_of(model, layer)
    return StepSpec(
        "attend",
        "compute",
        True,
        f"T,{d} -> q T,{a.heads},{a.head_dim}; k T,{kv_heads},{a.head_dim}; v T,{kv_heads},{value_dim} -> T,{d}"
        + (f"  (the last {window} tokens)" if window else ""),
        ("add_rmsnorm", "linear", *inner_norm_ops(model), "rope", "attention"),
        weights,
        multiply_adds_per_token(weights),
        context=a.heads * (a.head_dim + value_dim),
        window=window,
    )


def inner_norm_ops(model: ModelConfig) -> tuple[str, ...]:
    """Operations that norm latents, or queries and keys: these as they turn, or each by itself before."""
    a = model.attention
    if a.kind == "mla":
        return ("rmsnorm",)
    return {"none": (), "head": ("norm_rope", "rmsnorm"), "full": ("norm_rope",)}[a.qk_norm]


def sliding_window_of(model: ModelConfig, layer: int) -> int:
    """How far a layer sees; 0: to the beginning. Every `full_every`-th layer has no window."""
    a = model.attention
    full = a.full_every > 1 and (layer + 1) % a.full_every == 0
    return 0 if full else a.window


def latent_attention_weights(model: ModelConfig) -> tuple[WeightSpec, ...]:
    a, d = model.attention, model.hidden
    still, value_dim = a.head_dim - a.rope_dim, a.value_dim or a.head_dim
    down = {"query_down": a.q_rank, "latent": a.kv_rank, "turning": a.rope_dim}
    down = {name: width for name, width in down.items() if width}
    up = {"query": (a.q_rank or d, a.head_dim), "key": (a.kv_rank, still), "value": (a.kv_rank, value_dim)}
    return (
        WeightSpec("attention.norm.weight", (d,)),
        *(WeightSpec(f"attention.{name}.weight", (width, d)) for name, width in down.items()),
        *(WeightSpec(f"attention.{name}.bias", (width,)) for name, width in down.items() if a.qkv_bias),
        *((WeightSpec("attention.query_norm.weight", (a.q_rank,)),) if a.q_rank else ()),
        WeightSpec("attention.latent_norm.weight", (a.kv_rank,)),
        *(
            WeightSpec(f"attention.{name}.weight", (a.heads, width, rank), cut=sharded_over_tp(0))
            for name, (rank, width) in up.items()
        ),
        WeightSpec("attention.out.weight", (d, a.heads * value_dim), cut=sharded_over_tp(1)),
        *((WeightSpec("attention.out.bias", (d,)),) if a.out_bias else ()),
    )


def grouped_query_weights(model: ModelConfig) -> tuple[WeightSpec, ...]:
    a, d = model.attention, model.hidden
    heads = {"query": (a.heads, a.head_dim), "key": (a.kv_heads, a.head_dim), "value": (a.kv_heads, a.head_dim)}
    weights = [WeightSpec("attention.norm.weight", (d,))]
    weights += [
        WeightSpec(f"attention.{name}.weight", (*shape, d), cut=sharded_over_tp(0)) for name, shape in heads.items()
    ]
    weights += [WeightSpec("attention.out.weight", (d, a.heads * a.head_dim), cut=sharded_over_tp(1))]
    if a.qkv_bias:
        weights += [
            WeightSpec(f"attention.{name}.bias", shape, cut=sharded_over_tp(0)) for name, shape in heads.items()
        ]
    if a.out_bias:
        weights += [WeightSpec("attention.out.bias", (d,))]
    if a.qk_norm != "none":
        per_head = a.qk_norm == "head"
        widths = {
            "query": a.head_dim * (1 if per_head else a.heads),
            "key": a.head_dim * (1 if per_head else a.kv_heads),
        }
        cut = () if per_head else sharded_over_tp(0)
        weights += [WeightSpec(f"attention.{name}_norm.weight", (width,), cut=cut) for name, width in widths.items()]
    return tuple(weights)


def gated_mlp_weights(model: ModelConfig, name: str, ffn: int) -> tuple[WeightSpec, ...]:
    return (
        WeightSpec(f"{name}.gate_up.weight", (2, ffn, model.hidden), cut=sharded_over_tp(1)),
        WeightSpec(f"{name}.down.weight", (model.hidden, ffn), cut=sharded_over_tp(1)),
    )


def dense_mlp_step(model: ModelConfig) -> StepSpec:
    weights = (WeightSpec("dense.norm.weight", (model.hidden,)), *gated_mlp_weights(model, "dense", model.dense_ffn))
    shapes = f"T,{model.hidden} -> T,2,{model.dense_ffn} -> T,{model.hidden}"
    return StepSpec(
        "mlp", "compute", True, shapes, ("add_rmsnorm", "linear", "swiglu"), weights, multiply_adds_per_token(weights)
    )


def route_step(model: ModelConfig) -> StepSpec:
    d, e, k = model.hidden, model.moe.experts, model.moe.top_k
    weights = (WeightSpec("moe.norm.weight", (d,)), WeightSpec("moe.router.weight", (e, d)))
    weights += (WeightSpec("moe.router.bias", (e,)),) if model.moe.biases else ()
    kernels = ("add_rmsnorm", "router_logits", "router_topk")
    return StepSpec("route", "compute", True, f"T,{d} -> T,{e} -> T,{k}", kernels, weights)


def dispatched_width(model: ModelConfig) -> int:
    """How wide a token is on its way to experts and there."""
    return model.moe.latent or model.hidden


def narrow_step(model: ModelConfig) -> StepSpec:
    weights = (WeightSpec("moe.narrow.weight", (model.moe.latent, model.hidden)),)
    shapes = f"T,{model.hidden} -> T,{model.moe.latent}"
    return StepSpec("narrow", "compute", True, shapes, ("linear",), weights, multiply_adds_per_token(weights))


def widen_step(model: ModelConfig) -> StepSpec:
    weights = (WeightSpec("moe.widen.weight", (model.hidden, model.moe.latent)),)
    shapes = f"T,{model.moe.latent} -> T,{model.hidden}"
    return StepSpec("widen", "compute", True, shapes, ("linear",), weights, multiply_adds_per_token(weights))


def dispatch_step(model: ModelConfig) -> StepSpec:
    width = dispatched_width(model)
    shapes = f"T,{width} -> R,{width}  (R = T x {model.moe.top_k})"
    return StepSpec("dispatch", "comm", False, shapes, ("arrange_rows",))


def shared_experts_step(model: ModelConfig) -> StepSpec:
    weights = gated_mlp_weights(model, "moe.shared", model.moe.shared_ffn)
    weights += (WeightSpec("moe.shared.gate.weight", (1, model.hidden)),) if model.moe.shared_gate else ()
    shapes = f"T,{model.hidden} -> T,2,{model.moe.shared_ffn} -> T,{model.hidden}"
    return StepSpec("shared", "compute", True, shapes, ("linear", "swiglu"), weights, multiply_adds_per_token(weights))


def fits_fused_expert_mlp(model: ModelConfig) -> bool:
    """Whether the experts are what the fused kernel knows: plain SwiGLU with the gate inside."""
    return model.moe.gate == "activation" and model.moe.activation == "swiglu" and not model.moe.biases


def experts_step(model: ModelConfig) -> StepSpec:
    m, d = model.moe, dispatched_width(model)
    share = m.top_k / m.experts
    weights = (
        WeightSpec("moe.experts.gate_up", (m.experts, 2, m.ffn, d), share, sharded_over_experts(2)),
        WeightSpec("moe.experts.down", (m.experts, d, m.ffn), share, sharded_over_experts(2)),
    )
    ops = ("gather_rows", "grouped_gemm", m.activation)
    if fits_fused_expert_mlp(model):
        ops = ("expert_mlp", *ops)  # the first at once, or the others in turn
    if m.biases:
        weights += (
            WeightSpec("moe.experts.gate_up_bias", (m.experts, 2, m.ffn), share, sharded_over_experts(2)),
            WeightSpec("moe.experts.down_bias", (m.experts, d), share, ((0, "ep"),)),
        )
        ops += ("expert_bias",)
    shapes = f"R,{d} -> R,2,{m.ffn} -> R,{d}"
    return StepSpec("experts", "compute", False, shapes, ops, weights, multiply_adds_per_token(weights))


def combine_step(model: ModelConfig) -> StepSpec:
    width = dispatched_width(model)
    return StepSpec("combine", "comm", False, f"R,{width} -> T,{width}", ("sum_rows",))


def is_moe_layer(model: ModelConfig, layer: int) -> bool:
    """The first few layers may be dense, and of the others all but every n-th."""
    return layer >= model.moe.dense_layers and (layer + 1) % model.moe.every == 0


def block_step_specs(model: ModelConfig, layer: int) -> list[StepSpec]:
    """The steps of one block, in the order in which they run."""
    attend = attend_step(model, layer)
    if not is_moe_layer(model, layer):
        return [attend, dense_mlp_step(model)]
    return [attend, *moe_step_specs(model)]


def moe_step_specs(model: ModelConfig) -> list[StepSpec]:
    """The steps of one MoE layer, in the order in which they run."""
    steps = [route_step(model)]
    if model.moe.latent:
        steps.append(narrow_step(model))
    steps.append(dispatch_step(model))
    if model.moe.shared_ffn:
        steps.append(shared_experts_step(model))
    steps += [experts_step(model), combine_step(model)]
    if model.moe.latent:
        steps.append(widen_step(model))
    return steps


def embed_step(model: ModelConfig) -> StepSpec:
    weights = (WeightSpec("embedding.weight", (model.vocab, model.hidden), cut=sharded_over_tp(0)),)
    return StepSpec("embed", "compute", True, f"T -> T,{model.hidden}", ("embedding",), weights)


def predict_step(model: ModelConfig) -> StepSpec:
    matrix = WeightSpec("head.weight", (model.vocab, model.hidden), cut=sharded_over_tp(0))
    weights = (WeightSpec("head.norm.weight", (model.hidden,)), *(() if model.tied_head else (matrix,)))
    shapes = f"T,{model.hidden} -> T,{model.vocab} in chunks -> loss"
    times = 1.0 + model.mtp
    return StepSpec("predict", "compute", True, shapes, ("add_rmsnorm", "cross_entropy"), weights, times * matrix.size)


def look_ahead_step(model: ModelConfig) -> StepSpec:
    d = model.hidden
    norms = tuple(WeightSpec(f"{name}_norm.weight", (d,)) for name in ("stream", "token"))
    weights = (*norms, WeightSpec("join.weight", (d, 2 * d)))
    return StepSpec(
        "look_ahead", "compute", True, f"T,{d} and T,{d} -> T,{d}", ("rmsnorm", "linear"), weights, 2.0 * d * d
    )


def set_aside_step(model: ModelConfig) -> StepSpec:
    weights = (WeightSpec("norm.weight", (model.hidden,)),)
    return StepSpec("set_aside", "compute", True, f"T,{model.hidden} -> T,{model.hidden}", ("add_rmsnorm",), weights)


def mtp_step_specs(model: ModelConfig, depth: int) -> list[StepSpec]:
    """The steps of one layer of multi-token prediction. Embedding and head are the model's own."""
    return [look_ahead_step(model), *block_step_specs(model, model.layers + depth), set_aside_step(model)]


def prefixed_mtp_steps(model: ModelConfig) -> Iterator[tuple[str, StepSpec]]:
    """All of them, with the prefix of their parameters' names."""
    for depth in range(model.mtp):
        begin, *block, end = mtp_step_specs(model, depth)
        yield f"ahead.{depth}.", begin
        yield from ((f"ahead.{depth}.block.", step) for step in block)
        yield f"ahead.{depth}.", end


def prefixed_model_steps(model: ModelConfig) -> Iterator[tuple[str, StepSpec]]:
    """Every step from tokens to the loss, with the prefix of its parameters' names; multi-token prediction not."""
    yield "", embed_step(model)
    for layer in range(model.layers):
        for step in block_step_specs(model, layer):
            yield f"blocks.{layer}.", step
    yield "", predict_step(model)
