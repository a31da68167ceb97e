"""Step specifications: the pieces of a model as named steps, with order, lane, needs, weights, ops and FLOPs.
Torch-free.

The model binds code to these steps, `explain` prints them, the progress bar and the planner price them. A layer's
order, lanes and needs are stated here and nowhere else.

    dense block    attend > mlp
    MoE block      attend > route > PLAN > DISPATCH > experts > COMBINE > add        capitals: the comm lane
                            route > shared >                              add

A step needs the step before it, unless its `needs` name others: `shared` needs `route` alone, and nothing but `add`
needs `shared`, so shared experts compute while tokens are sent. Where tokens are dispatched as latents, `narrow` stands
before `plan` and `widen` behind `combine`. Multi-token prediction adds, before `predict`, for each further token
`look_ahead`, a block, and `set_aside`; `predict` then has a loss for each of them too.

FLOPs are those of one token's forward pass and follow the published tables: causal attention counts half, the head
counts, embedding and router do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from moefold.anatomy.activations import (
    ACTIVATIONS,
    activation_op,
    expert_kind,
    shared_activation,
)
from moefold.config.run import ModelConfig
from moefold.layout import placement
from moefold.layout.placement import DimCuts

Lane = Literal["compute", "comm"]


@dataclass(frozen=True)
class WeightSpec:
    """A parameter by its name inside its piece. A token uses the `active` share of it; `cut` names the axes that cut
    its dims. A weight that ep cuts belongs to the expert grid."""

    name: str
    shape: tuple[int, ...]
    active: float = 1.0
    cut: DimCuts = ()

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        is_bias = self.name.endswith("bias")
        return len(self.shape) > 1 and not is_bias

    def cut_over(self, degrees: Mapping[str, int]) -> DimCuts:
        """The cuts for these degrees of the axes. A dim with fewer places than ranks is whole on each: key/value heads
        that tensor-parallel ranks share."""
        return tuple((dim, axis) for dim, axis in self.cut if degrees[axis] <= self.shape[dim])

    def part(self, degrees: Mapping[str, int]) -> tuple[float, ...]:
        """The shape on one rank, for these degrees of the axes; uneven parts are averaged."""
        axis_of = dict(self.cut_over(degrees))
        shape: list[float] = []
        for dim, size in enumerate(self.shape):
            share: float = size
            if dim in axis_of:
                share = size / degrees[axis_of[dim]]
            shape.append(share)
        return tuple(shape)


Weights = tuple[WeightSpec, ...]


def sharded_over_tp(dim: int) -> DimCuts:
    return placement.sharded_over_tp(dim).cut


def sharded_over_experts(inner: int) -> DimCuts:
    return placement.sharded_over_experts(inner).cut


def vector_weight(name: str, size: int) -> WeightSpec:
    """A norm or a bias that every rank holds whole."""
    return WeightSpec(name, (size,))


def tp_weight(name: str, *shape: int, dim: int = 0) -> WeightSpec:
    """A weight whose dim `dim` is cut over tp."""
    return WeightSpec(name, shape, cut=sharded_over_tp(dim))


@dataclass(frozen=True)
class StepSpec:
    """One named step. `static`: its shapes do not depend on routing, so a graph may capture it. `needs`: steps of the
    layer that must have run, empty for the step before it. A step reads the carry that the first of them returns, and
    of the others what they have added to theirs."""

    name: str
    lane: Lane
    static: bool
    shapes: str
    ops: tuple[str, ...] = ()
    weights: Weights = ()
    matmul: float = 0.0  # multiply-adds of a token with weights
    context: float = 0.0  # multiply-adds of a token with each token it attends to
    window: int = 0  # how many tokens it attends to at most; 0: all before it
    needs: tuple[str, ...] = ()
    exchanges: int = 0  # how often tokens are sent between the ranks of experts
    chunk: int | None = None  # the number of its row chunk (anatomy/row_chunks.py); None: it runs on all tokens
    share: float = 1.0  # of a microbatch's tokens that it runs on

    @property
    def label(self) -> str:
        """The name by which others need it: steps of several row chunks have the same name."""
        return self.name if self.chunk is None else f"{self.name}.{self.chunk}"

    def flops(self, seq_len: int) -> float:
        """Forward FLOPs of one token in a sequence of this length."""
        attended = self.seen(seq_len)
        return 2 * self.matmul + 2 * self.context * attended

    def seen(self, seq_len: int) -> float:
        """How many tokens a token attends to on average: half of the sequence, or nearly the window."""
        window = min(self.window or seq_len, seq_len)
        share = window / (2 * seq_len)
        return window * (1 - share)

    @property
    def parameters(self) -> int:
        return sum(w.size for w in self.weights)

    @property
    def active(self) -> float:
        return sum(w.size * w.active for w in self.weights)


PrefixedStep = tuple[str, StepSpec]  # with the prefix of its parameters' names


def multiply_adds_per_token(weights: Weights) -> float:
    """Multiply-adds of one token with those weights that are matrices."""
    total = 0
    for weight in weights:
        if weight.is_matrix:
            total += weight.size * weight.active
    return total


def product_step(
    name: str,
    shapes: str,
    ops: tuple[str, ...],
    weights: Weights,
    static: bool = True,
    needs: tuple[str, ...] = (),
) -> StepSpec:
    """A step on the compute lane whose work is the products with its weights."""
    matmul = multiply_adds_per_token(weights)
    return StepSpec(name, "compute", static, shapes, ops, weights, matmul, needs=needs)


# ---- attention ----


def attend_step(model: ModelConfig, layer: int) -> StepSpec:
    a = model.attention
    latent = a.kind == "mla"
    weigh = latent_attention_weights if latent else grouped_query_weights
    weights = weigh(model)
    if a.sinks:
        sinks = tp_weight("attention.sinks", a.heads)
        weights += (sinks,)
    value_dim = (latent and a.value_dim) or a.head_dim
    inner_norms = inner_norm_ops(model)
    return StepSpec(
        "attend",
        "compute",
        static=True,
        shapes=attend_shapes(model, layer),
        ops=("add_rmsnorm", "linear", *inner_norms, "rope", "attention"),
        weights=weights,
        matmul=multiply_adds_per_token(weights),
        context=a.heads * (a.head_dim + value_dim),
        window=sliding_window_of(model, layer),
    )


def attend_shapes(model: ModelConfig, layer: int) -> str:
    a = model.attention
    d = model.hidden
    latent = a.kind == "mla"
    kv_heads = a.heads if latent else a.kv_heads
    value_dim = (latent and a.value_dim) or a.head_dim
    query = f"q T,{a.heads},{a.head_dim}"
    key = f"k T,{kv_heads},{a.head_dim}"
    value = f"v T,{kv_heads},{value_dim}"
    window = sliding_window_of(model, layer)
    note = f"  (the last {window} tokens)" if window else ""
    return f"T,{d} -> {query}; {key}; {value} -> T,{d}{note}"


def inner_norm_ops(model: ModelConfig) -> tuple[str, ...]:
    """Ops that norm latents, or queries and keys: fused with rope, or each by itself before."""
    a = model.attention
    if a.kind == "mla":
        return ("rmsnorm",)
    if a.qk_norm == "none":
        return ()
    if a.qk_norm == "head":
        return ("norm_rope", "rmsnorm")
    return ("norm_rope",)


def sliding_window_of(model: ModelConfig, layer: int) -> int:
    """The window of a layer's attention; 0: none. Every `full_every`-th layer has none."""
    a = model.attention
    number = layer + 1
    is_full = a.full_every > 1 and number % a.full_every == 0
    return 0 if is_full else a.window


def latent_attention_weights(model: ModelConfig) -> Weights:
    a = model.attention
    d = model.hidden
    value_dim = a.value_dim or a.head_dim
    weights = [vector_weight("attention.norm.weight", d)]
    # Down to the latents, which every tp rank makes of its own tokens.
    widths = {"query_down": a.q_rank, "latent": a.kv_rank, "turning": a.rope_dim}
    for name, width in widths.items():
        if width:
            down = WeightSpec(f"attention.{name}.weight", (width, d))
            weights.append(down)
    for name, width in widths.items():
        if width and a.qkv_bias:
            bias = vector_weight(f"attention.{name}.bias", width)
            weights.append(bias)
    if a.q_rank:
        query_norm = vector_weight("attention.query_norm.weight", a.q_rank)
        weights.append(query_norm)
    latent_norm = vector_weight("attention.latent_norm.weight", a.kv_rank)
    # Up to the heads, which tp cuts.
    query_width = a.q_rank or d
    nope_dim = a.head_dim - a.rope_dim
    query = tp_weight("attention.query.weight", a.heads, a.head_dim, query_width)
    key = tp_weight("attention.key.weight", a.heads, nope_dim, a.kv_rank)
    value = tp_weight("attention.value.weight", a.heads, value_dim, a.kv_rank)
    weights += (latent_norm, query, key, value)
    weights += output_projection_weights(model, value_dim)
    return tuple(weights)


def grouped_query_weights(model: ModelConfig) -> Weights:
    a = model.attention
    d = model.hidden
    head = a.head_dim
    heads = {"query": a.heads, "key": a.kv_heads, "value": a.kv_heads}
    weights = [vector_weight("attention.norm.weight", d)]
    for name, count in heads.items():
        matrix = tp_weight(f"attention.{name}.weight", count, head, d)
        weights.append(matrix)
    projection, *projection_bias = output_projection_weights(model, head)
    weights.append(projection)
    if a.qkv_bias:
        for name, count in heads.items():
            bias = tp_weight(f"attention.{name}.bias", count, head)
            weights.append(bias)
    weights += projection_bias
    weights += query_key_norm_weights(model)
    return tuple(weights)


def output_projection_weights(model: ModelConfig, value_dim: int) -> Weights:
    a = model.attention
    d = model.hidden
    width = a.heads * value_dim
    projection = tp_weight("attention.out.weight", d, width, dim=1)
    if not a.out_bias:
        return (projection,)
    return projection, vector_weight("attention.out.bias", d)


def query_key_norm_weights(model: ModelConfig) -> Weights:
    """The norms of queries and keys: over one head, or over all heads of a token."""
    a = model.attention
    if a.qk_norm == "none":
        return ()
    if a.qk_norm == "head":
        query = vector_weight("attention.query_norm.weight", a.head_dim)
        key = vector_weight("attention.key_norm.weight", a.head_dim)
    else:
        query_width = a.head_dim * a.heads
        key_width = a.head_dim * a.kv_heads
        query = tp_weight("attention.query_norm.weight", query_width)
        key = tp_weight("attention.key_norm.weight", key_width)
    return query, key


# ---- MLP and experts ----


def mlp_weights(model: ModelConfig, name: str, ffn: int, activation: str) -> Weights:
    d = model.hidden
    kind = ACTIVATIONS[activation]
    outputs = kind.up_outputs(ffn)
    inner_dim = len(outputs) - 1
    up = tp_weight(f"{name}.{kind.up_name}.weight", *outputs, d, dim=inner_dim)
    down = tp_weight(f"{name}.down.weight", d, ffn, dim=1)
    return up, down


def mlp_shapes(rows: str, width: int, ffn: int, activation: str) -> str:
    """Shapes of an MLP, with the name of an activation other than SwiGLU."""
    outputs = ACTIVATIONS[activation].up_outputs(ffn)
    inner = ",".join(map(str, outputs))
    note = "" if activation == "swiglu" else f"  ({activation})"
    return f"{rows},{width} -> {rows},{inner} -> {rows},{width}{note}"


def dense_mlp_step(model: ModelConfig) -> StepSpec:
    d = model.hidden
    ffn = model.dense_ffn
    activation = model.dense_activation
    norm = vector_weight("dense.norm.weight", d)
    matrices = mlp_weights(model, "dense", ffn, activation)
    ops = ("add_rmsnorm", "linear", activation_op(activation))
    shapes = mlp_shapes("T", d, ffn, activation)
    return product_step("mlp", shapes, ops, (norm, *matrices))


def route_step(model: ModelConfig) -> StepSpec:
    d = model.hidden
    moe = model.moe
    norm = vector_weight("moe.norm.weight", d)
    router = WeightSpec("moe.router.weight", (moe.experts, d))
    weights = (norm, router)
    if moe.biases:
        bias = vector_weight("moe.router.bias", moe.experts)
        weights += (bias,)
    ops = ("add_rmsnorm", "router_logits", "router_topk")
    shapes = f"T,{d} -> T,{moe.experts} -> T,{moe.top_k}"
    return StepSpec("route", "compute", True, shapes, ops, weights)


def dispatched_width(model: ModelConfig) -> int:
    """The width of a token in the all-to-all and inside the experts."""
    return model.moe.latent or model.hidden


def narrow_step(model: ModelConfig) -> StepSpec:
    d = model.hidden
    latent = model.moe.latent
    weight = WeightSpec("moe.narrow.weight", (latent, d))
    shapes = f"T,{d} -> T,{latent}"
    return product_step("narrow", shapes, ("linear",), (weight,))


def widen_step(model: ModelConfig) -> StepSpec:
    d = model.hidden
    latent = model.moe.latent
    weight = WeightSpec("moe.widen.weight", (d, latent))
    shapes = f"T,{latent} -> T,{d}"
    return product_step("widen", shapes, ("linear",), (weight,))


def plan_step(model: ModelConfig) -> StepSpec:
    """The order of rows, and with experts on several ranks the exchange of their counts and router weights."""
    top_k = model.moe.top_k
    shapes = f"T,{top_k} -> R  (R = T x {top_k})"
    return StepSpec("plan", "comm", False, shapes, ("arrange_rows",))


def dispatch_step(model: ModelConfig) -> StepSpec:
    width = dispatched_width(model)
    shapes = f"T,{width} -> R,{width}"
    return StepSpec("dispatch", "comm", False, shapes, exchanges=1)


def shared_experts_step(model: ModelConfig) -> StepSpec:
    d = model.hidden
    ffn = model.moe.shared_ffn
    activation = shared_activation(model)
    weights = mlp_weights(model, "moe.shared", ffn, activation)
    if model.moe.shared_gate:
        gate = WeightSpec("moe.shared.gate.weight", (1, d))
        weights += (gate,)
    shapes = mlp_shapes("T", d, ffn, activation)
    ops = ("linear", activation_op(activation))
    return product_step("shared", shapes, ops, weights, needs=("route",))


def add_shared_step(model: ModelConfig, has_chunks: bool) -> StepSpec:
    """The sum of routed and shared experts."""
    d = model.hidden
    routed = "join" if has_chunks else "combine"
    if model.moe.latent:
        routed = "widen"
    shapes = f"T,{d} and T,{d} -> T,{d}"
    return StepSpec("add", "compute", True, shapes, needs=(routed, "shared"))


def unfused_experts_reason(model: ModelConfig) -> str:
    """The keys that keep the experts off the fused kernel, which has plain SwiGLU with the router weight inside and no
    biases; empty: none."""
    moe = model.moe
    keys: list[str] = []
    if moe.activation != "swiglu":
        keys.append(f"moe.activation = {moe.activation}")
    if moe.biases:
        keys.append("moe.biases = true")
    if moe.gate != "activation":
        keys.append(f"moe.gate = {moe.gate}")
    return ", ".join(keys)


def fits_fused_expert_mlp(model: ModelConfig) -> bool:
    """Whether the fused kernel can run the experts."""
    return not unfused_experts_reason(model)


def experts_step(model: ModelConfig) -> StepSpec:
    """The routed experts. The op `expert_mlp` is a fused kernel, or the composition of the others."""
    moe = model.moe
    d = dispatched_width(model)
    products = ("gather_rows", "grouped_linear", "grouped_gemm", "grouped_gemm_weight")
    ops = ("expert_mlp", *products, activation_op(moe.activation))
    if moe.biases:
        ops += ("expert_bias",)
    shapes = mlp_shapes("R", d, moe.ffn, moe.activation)
    weights = expert_weights(model)
    needs = ("dispatch",)
    return product_step("experts", shapes, ops, weights, static=False, needs=needs)


def expert_weights(model: ModelConfig) -> Weights:
    moe = model.moe
    d = dispatched_width(model)
    count = moe.experts
    ffn = moe.ffn
    active = moe.top_k / count
    kind = expert_kind(model)
    outputs = kind.up_outputs(ffn)
    up_cut = sharded_over_experts(len(outputs))
    down_cut = sharded_over_experts(2)
    up_name = f"moe.experts.{kind.up_name}"
    up_shape = (count, *outputs, d)
    up = WeightSpec(up_name, up_shape, active, up_cut)
    down = WeightSpec("moe.experts.down", (count, d, ffn), active, down_cut)
    if not moe.biases:
        return up, down
    bias_shape = (count, *outputs)
    up_bias = WeightSpec(f"{up_name}_bias", bias_shape, active, up_cut)
    over_ep = ((0, "ep"),)
    down_bias = WeightSpec("moe.experts.down_bias", (count, d), active, over_ep)
    return up, down, up_bias, down_bias


def combine_step(model: ModelConfig) -> StepSpec:
    width = dispatched_width(model)
    shapes = f"R,{width} -> T,{width}"
    ops = ("sum_rows",)
    return StepSpec("combine", "comm", False, shapes, ops, exchanges=1)


def join_step(model: ModelConfig) -> StepSpec:
    """The results of row chunks, one behind the other."""
    width = dispatched_width(model)
    return StepSpec("join", "compute", True, f"chunks of T,{width} -> T,{width}")


# ---- blocks ----


def is_moe_layer(model: ModelConfig, layer: int) -> bool:
    """The first few layers may be dense, and of the others all but every n-th."""
    moe = model.moe
    if layer < moe.dense_layers:
        return False
    return (layer + 1) % moe.every == 0


def block_step_specs(model: ModelConfig, layer: int, row_chunks: int = 1) -> list[StepSpec]:
    """The steps of one block, in the order in which they run."""
    attend = attend_step(model, layer)
    if not is_moe_layer(model, layer):
        return [attend, dense_mlp_step(model)]
    return [attend, *moe_step_specs(model, row_chunks)]


def moe_step_specs(model: ModelConfig, row_chunks: int = 1) -> list[StepSpec]:
    """The steps of one MoE layer, in the order in which they run. With several row chunks, training runs those between
    `plan` and `join` once for each (anatomy/row_chunks.py)."""
    has_chunks = row_chunks > 1
    has_latents = model.moe.latent
    has_shared = model.moe.shared_ffn
    steps = [route_step(model)]
    if has_latents:
        steps.append(narrow_step(model))
    steps.append(plan_step(model))
    steps.append(dispatch_step(model))
    if has_shared:
        steps.append(shared_experts_step(model))
    steps.append(experts_step(model))
    steps.append(combine_step(model))
    if has_chunks:
        steps.append(join_step(model))
    if has_latents:
        steps.append(widen_step(model))
    if has_shared:
        shared = add_shared_step(model, has_chunks)
        steps.append(shared)
    return steps


# ---- ends of the model, and multi-token prediction ----


def embed_step(model: ModelConfig) -> StepSpec:
    table = tp_weight("embedding.weight", model.vocab, model.hidden)
    shapes = f"T -> T,{model.hidden}"
    ops = ("embedding",)
    return StepSpec("embed", "compute", True, shapes, ops, (table,))


def predict_step(model: ModelConfig) -> StepSpec:
    d = model.hidden
    vocab = model.vocab
    matrix = tp_weight("head.weight", vocab, d)
    weights = (vector_weight("head.norm.weight", d),)
    if not model.tied_head:
        weights += (matrix,)
    shapes = f"T,{d} -> T,{vocab} in chunks -> loss"
    matmul = (1.0 + model.mtp) * matrix.size  # tied or not, once for each loss
    ops = ("add_rmsnorm", "cross_entropy")
    return StepSpec("predict", "compute", True, shapes, ops, weights, matmul)


def look_ahead_step(model: ModelConfig) -> StepSpec:
    d = model.hidden
    stream_norm = vector_weight("stream_norm.weight", d)
    token_norm = vector_weight("token_norm.weight", d)
    join = WeightSpec("join.weight", (d, 2 * d))
    shapes = f"T,{d} and T,{d} -> T,{d}"
    ops = ("rmsnorm", "linear")
    weights = (stream_norm, token_norm, join)
    return product_step("look_ahead", shapes, ops, weights)


def set_aside_step(model: ModelConfig) -> StepSpec:
    d = model.hidden
    norm = vector_weight("norm.weight", d)
    shapes = f"T,{d} -> T,{d}"
    ops = ("add_rmsnorm",)
    return StepSpec("set_aside", "compute", True, shapes, ops, (norm,))


def mtp_step_specs(model: ModelConfig, depth: int) -> list[StepSpec]:
    """The steps of one multi-token prediction layer. Embedding and head are the model's own."""
    block = block_step_specs(model, model.layers + depth)
    return [look_ahead_step(model), *block, set_aside_step(model)]


def prefixed_mtp_steps(model: ModelConfig) -> Iterator[PrefixedStep]:
    """The steps of all multi-token prediction layers, with the prefix of their parameters' names."""
    for depth in range(model.mtp):
        first, *block, last = mtp_step_specs(model, depth)
        yield f"ahead.{depth}.", first
        for step in block:
            yield f"ahead.{depth}.block.", step
        yield f"ahead.{depth}.", last


def prefixed_model_steps(model: ModelConfig) -> Iterator[PrefixedStep]:
    """Every step from tokens to the loss, with the prefix of its parameters' names; without multi-token prediction."""
    yield "", embed_step(model)
    for layer, steps in enumerate(steps_of_layers(model)):
        prefix = f"blocks.{layer}."
        for step in steps:
            yield prefix, step
    yield "", predict_step(model)


def steps_of_layers(model: ModelConfig) -> Iterator[list[StepSpec]]:
    """Those of each layer in turn. Layers that are alike share theirs: a model has many layers of few kinds."""
    known: dict[tuple[bool, int], list[StepSpec]] = {}
    for layer in range(model.layers):
        kind = is_moe_layer(model, layer), sliding_window_of(model, layer)
        if kind not in known:
            known[kind] = block_step_specs(model, layer)
        yield known[kind]


def prefixed_steps(model: ModelConfig) -> list[PrefixedStep]:
    """Every step of the model, with the prefix of its parameters' names; those of multi-token prediction last."""
    return [*prefixed_model_steps(model), *prefixed_mtp_steps(model)]
