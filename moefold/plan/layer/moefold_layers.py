"""What moefold's own layers keep for backward, and what they need for the moment.

A test runs the real model with hooks on all that autograd keeps, and compares. Which implementation of an operation is
bound decides: the fused expert kernel keeps tokens and pre-activations only; on a CPU, RMSNorm is made of operations
that each keep their own, and attention of odd shapes keeps its probabilities.
"""

from __future__ import annotations

from collections.abc import Callable

from moefold.kernels.attention.workspace import HOPPER_HEAD_WIDTHS, score_gradient_bytes
from moefold.plan.layer.rank_shapes import RankShapes
from moefold.plan.layer.tensor_table import (
    C,
    D,
    LayerStack,
    R,
    ShapeFunction,
    T,
    TensorEntry,
    W,
    WorkingSet,
    always,
    qkv_width,
    single_column,
    uses_gqa,
    uses_mla,
)

CHUNK_LOGITS = 1 << 26  # as kernels/vocabulary/cross_entropy.py has these; a test compares
LOGITS_IN_PLACE = 10 << 26
EXPERT_PADDING_ROWS = 64  # rows that the fused kernel may add for each expert

ShapeCondition = Callable[[RankShapes], bool]


def rmsnorm_tensors(
    what: str, step: str, rows: ShapeFunction, width: ShapeFunction, when: ShapeCondition = always, entry: bool = False
) -> tuple[TensorEntry, ...]:
    """An RMSNorm keeps its input and one number a row."""
    return (
        TensorEntry(what, step, rows, width, read="norm", when=when, entry=entry),
        TensorEntry(f"scale of {what}", step, rows, single_column, "fp32", when=when),
        TensorEntry(
            f"{what} scaled", step, rows, width, "fp32", ("norm",), when=lambda s: s.composed_rmsnorm and when(s)
        ),
    )


def norms_and_ropes_in_one_op(s: RankShapes) -> bool:
    """Whether queries and keys are normed and rotated by one op, fused or composed."""
    a = s.model.attention
    rotates_all_dims = a.rope_dim in (0, a.head_dim)
    holds_all_normed = a.qk_norm == "head" or s.portion.tp == 1
    return not s.mla and a.qk_norm != "none" and rotates_all_dims and holds_all_normed


def fuses_norm_and_rope(s: RankShapes) -> bool:
    """Whether one kernel norms queries and keys and rotates them: it keeps its input alone."""
    return norms_and_ropes_in_one_op(s) and s.chosen_implementation("norm_rope") != "reference"


def norms_each_head(s: RankShapes) -> bool:
    return s.qk_norm == "head" and not fuses_norm_and_rope(s)


def full_norm_tensors(what: str, rows: ShapeFunction, width: ShapeFunction) -> tuple[TensorEntry, ...]:
    """A norm over all heads, which tp may cut, is made of plain operations in fp32."""
    return tuple(
        TensorEntry(
            name, "attend", rows, wide, "fp32", when=lambda s: s.qk_norm == "full" and not fuses_norm_and_rope(s)
        )
        for name, wide in ((f"{what} in fp32", width), (f"{what} scaled", width), (f"scale of {what}", single_column))
    )


def sink_key_count(s: RankShapes) -> int:
    """A sink is one more key, and eight more dims of queries and keys, but where a kernel takes it as it is."""
    return 1 if s.model.attention.sinks and s.choices.device == "cpu" else 0


def kept_key_positions(s: RankShapes) -> float:
    """Positions of keys and values that are kept: a gather over cp keeps those of all its ranks."""
    gathered = s.portion.cp if s.portion.context == "all_gather" else 1
    return s.C * gathered + s.B * sink_key_count(s)


def kept_kv_heads(s: RankShapes) -> float:
    """Heads of keys and values; repeated for every query head where attention is made of plain operations."""
    return s.H if s.plain_attention else s.G


def cuts_context(s: RankShapes) -> bool:
    return s.portion.cp > 1


def reorders_attended(s: RankShapes) -> bool:
    """Whether attention's result comes in parts, or by heads, and is put together in other memory."""
    return cuts_context(s) and s.portion.context != "ring"


def half_chunk_positions(s: RankShapes) -> float:
    """Positions of one of a rank's two chunks, where context is cut."""
    return s.S / (2 * s.portion.cp)


def needs_chunk_masks(s: RankShapes) -> bool:
    """Chunks that see gathered keys up to their own end need a mask, but where a kernel knows such sight."""
    return cuts_context(s) and s.portion.context == "all_gather" and s.composed_rmsnorm


def rope_table_width(s: RankShapes) -> float:
    """Cosines and sines of the positions held here. Queries and keys share them where one op norms and rotates."""
    a = s.model.attention
    return (a.rope_dim or a.head_dim) * (1 if norms_and_ropes_in_one_op(s) else 2)


ATTEND_TENSORS = (
    *rmsnorm_tensors("stream", "attend", T, D, entry=True),
    TensorEntry("normed", "attend", C, D, "linear", ("norm",), when=uses_gqa),
    TensorEntry("normed", "attend", T, D, "linear", ("norm",), when=uses_mla),
    *rmsnorm_tensors("query latent", "attend", T, lambda s: s.q_rank, lambda s: s.mla and s.q_rank > 0),
    *rmsnorm_tensors("key latent", "attend", T, lambda s: s.kv_rank, uses_mla),
    TensorEntry(
        "latents",
        "attend",
        C,
        lambda s: (s.q_rank or s.D) + s.kv_rank + s.rope,
        "linear",
        ("norm",),
        "up",
        when=uses_mla,
    ),
    *rmsnorm_tensors("query", "attend", lambda s: s.C * s.H, lambda s: s.Q, norms_each_head),
    *rmsnorm_tensors("key", "attend", lambda s: s.C * s.G, lambda s: s.Q, norms_each_head),
    TensorEntry("query", "attend", C, lambda s: s.H * s.Q, read="norm", when=fuses_norm_and_rope),
    TensorEntry("key", "attend", C, lambda s: s.G * s.Q, read="norm", when=fuses_norm_and_rope),
    *full_norm_tensors("query", C, lambda s: s.H * s.Q),
    *full_norm_tensors("key", C, lambda s: s.G * s.Q),
    TensorEntry(
        "queries", "attend", C, lambda s: s.H * (s.Q + 8 * sink_key_count(s)), "wide", ("up",), "core", uses_mla
    ),
    TensorEntry(
        "keys",
        "attend",
        kept_key_positions,
        lambda s: kept_kv_heads(s) * (s.Q + 8 * sink_key_count(s)),
        "wide",
        ("up",),
        "core",
        uses_mla,
    ),
    TensorEntry(
        "values", "attend", kept_key_positions, lambda s: kept_kv_heads(s) * s.V, "wide", ("up",), "core", uses_mla
    ),
    TensorEntry("queries", "attend", C, lambda s: s.H * (s.Q + 8 * sink_key_count(s)), "wide", (), "core", uses_gqa),
    TensorEntry(
        "keys",
        "attend",
        kept_key_positions,
        lambda s: kept_kv_heads(s) * (s.Q + 8 * sink_key_count(s)),
        "wide",
        (),
        "core",
        uses_gqa,
    ),
    TensorEntry("values", "attend", kept_key_positions, lambda s: kept_kv_heads(s) * s.V, "wide", (), "core", uses_gqa),
    TensorEntry("attended", "attend", C, lambda s: s.H * s.V, "linear", ("core",), "out"),
    TensorEntry(
        "attended, before it is put in order",
        "attend",
        C,
        lambda s: s.H * s.V,
        "wide",
        ("core",),
        when=reorders_attended,
    ),
    TensorEntry(
        "angles of its positions", "attend", lambda s: s.S / s.portion.cp, rope_table_width, "fp32", when=cuts_context
    ),
    TensorEntry(
        "masks of its two chunks",
        "attend",
        half_chunk_positions,
        lambda s: s.S + half_chunk_positions(s),
        "fp32",
        when=needs_chunk_masks,
    ),
    TensorEntry("log-sum-exp", "attend", C, lambda s: s.H, "fp32", ("core",), when=lambda s: not s.plain_attention),
    TensorEntry(
        "probabilities",
        "attend",
        C,
        lambda s: s.H * (s.S + sink_key_count(s)),
        "fp32",
        ("core",),
        when=lambda s: s.plain_attention,
    ),
)
MLP_TENSORS = (
    *rmsnorm_tensors("stream", "mlp", T, D),
    TensorEntry("normed", "mlp", C, D, "linear", ("norm",)),
    TensorEntry("gate and up", "mlp", C, lambda s: 2 * s.M, "wide", ("mlp",)),
    TensorEntry("activated", "mlp", C, lambda s: s.M, "linear", ("mlp",)),
)


def fused_router(s: RankShapes) -> bool:
    """Whether one kernel chooses: it keeps logits, choice and weights."""
    return s.chosen_implementation("router_topk") == "triton"


def weight_normalization(s: RankShapes) -> str:
    return "chosen" if s.model.moe.router.score == "softmax_chosen" else s.model.moe.router.normalize


def normalizes_chosen(s: RankShapes) -> bool:
    return weight_normalization(s) == "chosen" and not fused_router(s)


def has_balance_loss(s: RankShapes) -> bool:
    return bool(s.model.moe.balance.aux_loss or s.model.moe.balance.device_loss)


def balance_loss_rows(s: RankShapes) -> float:
    """Rows of the shares that the balance losses multiply with: each sequence has its own."""
    return s.B if s.model.moe.balance.aux_over == "sequence" else 1.0


def keeps_score_shares(s: RankShapes) -> bool:
    """Whether scores as shares of one have a use: in balance losses, or as weights."""
    softmax = weight_normalization(s) == "none" and s.model.moe.router.score == "softmax"
    return not fused_router(s) and (has_balance_loss(s) or weight_normalization(s) == "all" or softmax)


def keeps_log_sigmoids(s: RankShapes) -> bool:
    return (
        s.model.moe.router.score == "sigmoid"
        and (keeps_score_shares(s) or normalizes_chosen(s))
        and not fused_router(s)
    )


def keeps_logits(s: RankShapes) -> bool:
    return fused_router(s) or s.model.moe.balance.z_loss > 0 or keeps_log_sigmoids(s) or normalizes_chosen(s)


def keeps_sigmoids(s: RankShapes) -> bool:
    return s.model.moe.router.score == "sigmoid" and weight_normalization(s) == "none" and not fused_router(s)


def E(s: RankShapes) -> float:
    return s.E


def K(s: RankShapes) -> float:
    return s.K


def router_tensor(
    what: str, when: ShapeCondition, width: ShapeFunction = E, rows: ShapeFunction = T, held: str = "fp32"
) -> TensorEntry:
    return TensorEntry(what, "route", rows, width, held, ("moe",), when=when)


ROUTE_TENSORS = (
    *rmsnorm_tensors("stream", "route", T, D),
    TensorEntry("normed", "route", T, D, "wide", ("norm",), "experts"),
    router_tensor("logits", keeps_logits),
    router_tensor("shares", keeps_score_shares),
    router_tensor("sigmoids", keeps_sigmoids),
    router_tensor("logs of sigmoids", lambda s: keeps_log_sigmoids(s) and normalizes_chosen(s)),
    router_tensor("what their gradient needs", lambda s: keeps_log_sigmoids(s) and s.composed_rmsnorm),
    router_tensor("choice", always, K, held="int64"),
    router_tensor("which choices are none", lambda s: not fused_router(s), K, held="byte"),
    router_tensor("weights", lambda s: normalizes_chosen(s) or fused_router(s), K),
    router_tensor("price of each expert", has_balance_loss, E, balance_loss_rows),
    router_tensor("log-sum-exp", lambda s: s.model.moe.balance.z_loss > 0 and not fused_router(s), single_column),
)


def reference_arrange_rows(s: RankShapes) -> bool:
    return s.chosen_implementation("arrange_rows") == "reference" or s.portion.ep > 1


def fused_experts(s: RankShapes) -> bool:
    """Whether one kernel does: in backward it writes the gradient of gate and up over them."""
    return s.fused


def unfused_experts(s: RankShapes) -> bool:
    return not s.fused


def experts_are_remote(s: RankShapes) -> bool:
    return s.portion.ep * s.portion.etp > 1


def weighs_expert_outputs(s: RankShapes) -> bool:
    return not s.gate_inside


def has_expert_biases(s: RankShapes) -> bool:
    return s.model.moe.biases


EXPERT_REGIONS = ("experts", "moe")
EXPERT_TENSORS = (
    TensorEntry("order of rows", "dispatch", R, single_column, "int64", ("moe",), when=reference_arrange_rows),
    TensorEntry(
        "who went where", "dispatch", lambda s: s.T * s.K, lambda s: 2.0, "int64", ("moe",), when=experts_are_remote
    ),
    TensorEntry(
        "tokens that came",
        "experts",
        lambda s: s.N,
        W,
        "wide",
        EXPERT_REGIONS,
        "experts",
        lambda s: s.fused and experts_are_remote(s),
    ),
    TensorEntry(
        "latents",
        "experts",
        T,
        W,
        "wide",
        EXPERT_REGIONS,
        "experts",
        lambda s: s.fused and not experts_are_remote(s) and s.latent,
    ),
    TensorEntry("index and slots", "experts", R, lambda s: 2.0, "int32", EXPERT_REGIONS),
    TensorEntry("weights", "experts", R, single_column, "fp32", EXPERT_REGIONS),
    TensorEntry("rows", "experts", R, W, "linear", EXPERT_REGIONS, "experts", unfused_experts),
    TensorEntry("gate and up", "experts", R, lambda s: 2 * s.F, "wide", EXPERT_REGIONS, "activation"),
    TensorEntry(
        "activated", "experts", R, lambda s: s.F, "linear", ("activation", *EXPERT_REGIONS), when=unfused_experts
    ),
    TensorEntry("results", "experts", R, W, "wide", EXPERT_REGIONS, when=weighs_expert_outputs),
    TensorEntry(
        "weights, rounded",
        "experts",
        R,
        single_column,
        "wide",
        EXPERT_REGIONS,
        when=lambda s: weighs_expert_outputs(s) and not s.composed_rmsnorm,
    ),
    TensorEntry(
        "expert of each row, twice", "experts", R, lambda s: 2.0, "int64", EXPERT_REGIONS, when=has_expert_biases
    ),
    TensorEntry(
        "biases of rows", "experts", R, W, "wide", EXPERT_REGIONS, when=lambda s: has_expert_biases(s) and s.gate_inside
    ),
    TensorEntry("results in latents", "widen", T, W, "linear", ("moe",)),
    TensorEntry("results, while woven", "combine", R, W, "wide", when=lambda s: s.portion.weaves and s.gate_inside),
)
SHARED_EXPERT_TENSORS = (
    TensorEntry("normed, gathered", "shared", C, D, "linear", ("shared", "moe"), when=lambda s: s.portion.tp > 1),
    TensorEntry("gate and up", "shared", C, lambda s: 2 * s.A, "wide", ("shared", "moe")),
    TensorEntry("activated", "shared", C, lambda s: s.A, "linear", ("shared", "moe")),
    TensorEntry("results", "shared", T, D, "wide", ("shared", "moe"), when=lambda s: s.model.moe.shared_gate),
    TensorEntry("gates", "shared", T, single_column, "wide", ("shared", "moe"), when=lambda s: s.model.moe.shared_gate),
)


def prediction_heads(s: RankShapes) -> float:
    """Losses: the model's own, and those of tokens further ahead."""
    return 1.0 + s.model.mtp


EMBED_AND_HEAD_TENSORS = (
    TensorEntry("tokens", "embed", C, single_column, "int64"),
    TensorEntry("tokens", "look_ahead", C, single_column, "int64"),
    *rmsnorm_tensors("normed stream", "look_ahead", T, D),
    *rmsnorm_tensors("token", "look_ahead", T, D),
    TensorEntry("stream and token joined", "look_ahead", T, lambda s: 2 * s.D, "linear"),
    *rmsnorm_tensors("stream", "set_aside", T, D),
    *rmsnorm_tensors("stream", "predict", T, D),
    TensorEntry("gradient of streams", "predict", C, lambda s: s.D * prediction_heads(s)),
    TensorEntry("gradient of the head", "predict", lambda s: s.P, lambda s: s.D * prediction_heads(s), "fp32"),
)

STREAM_GRADIENT = TensorEntry("gradient of the stream", "", T, D)


def writes_score_gradients(s: RankShapes) -> bool:
    """Whether attention's backward writes down the gradients of its scores, as its kernels for Hopper do."""
    a, c = s.model.attention, s.choices
    plain = not (s.mla or a.window or a.sinks or cuts_context(s)) and s.Q in HOPPER_HEAD_WIDTHS
    return (
        plain
        and c.device == "cuda"
        and c.capability == 90
        and c.precision != "fp32"
        and score_gradient_workspace(s) > 0
    )


def score_gradient_workspace(s: RankShapes) -> float:
    """Bytes of them; so many heads go at once that it is not too much. None if one head's are too many."""
    return score_gradient_bytes(s.S, int(s.B * s.G), int(s.H // s.G))


def separate_expert_wgrad(s: RankShapes) -> bool:
    """Whether the gradient of experts' weights is there beside the sum it is added to."""
    return not (s.fused and s.portion.adds)


def fused_separate_wgrad(s: RankShapes) -> bool:
    return s.fused and separate_expert_wgrad(s)


def padded_expert_rows(s: RankShapes) -> float:
    return s.R + (EXPERT_PADDING_ROWS * s.e if s.fused else 0.0)


def overwrites_logits(s: RankShapes) -> bool:
    """Whether the head's kernel writes the gradient of logits over them, in bf16."""
    return s.chosen_implementation("cross_entropy") == "triton"


def keeps_logits_apart(s: RankShapes) -> bool:
    return not overwrites_logits(s)


def logits_per_chunk(s: RankShapes) -> float:
    """Logits that the head holds at a time: those of as many tokens as may be, a power of two. A kernel that needs less
    for each of them takes more at a time."""
    most = LOGITS_IN_PLACE if overwrites_logits(s) else CHUNK_LOGITS
    return min(tokens_of_chunk(most, s.P), s.C) * s.P


def tokens_of_chunk(logits: int, words: float) -> int:
    return 1 << max(0, int(logits // words).bit_length() - 1)


def swiglu_backward(rows: ShapeFunction, inner: ShapeFunction, when: ShapeCondition = always) -> WorkingSet:
    """By hand in fp32: gate and up, the incoming gradient, what the formula names, and both results before they are
    rounded. A kernel has the incoming gradient and both results."""

    def composed_swiglu(s: RankShapes) -> bool:
        return when(s) and s.chosen_implementation("swiglu") != "triton"

    def fused_swiglu(s: RankShapes) -> bool:
        return when(s) and not composed_swiglu(s)

    return (
        TensorEntry(
            "gradient of the activation, in fp32", "", rows, lambda s: 10 * inner(s), "fp32", when=composed_swiglu
        ),
        TensorEntry("gradients of activation, gate and up", "", rows, lambda s: 3 * inner(s), when=fused_swiglu),
    )


MOEFOLD_WORKING_SETS: dict[tuple[str, str], tuple[WorkingSet, ...]] = {
    ("experts", "F"): (
        (
            TensorEntry("rows", "", padded_expert_rows, W, when=fused_experts),
            TensorEntry("activated", "", R, lambda s: s.F, when=fused_experts),
            TensorEntry("results", "", R, W),
        ),
    ),
    ("experts", "B"): (
        (
            STREAM_GRADIENT,
            TensorEntry("gradient of results", "", R, W),
            TensorEntry("gradient of gate and up", "", R, lambda s: 2 * s.F, when=unfused_experts),
            TensorEntry("rows and their gradient", "", R, lambda s: s.W * (2 if s.fused else 1)),
            TensorEntry("gradient of what arrived", "", lambda s: s.N, W),
            TensorEntry(
                "gradients of the experts' weights",
                "",
                lambda s: s.e * s.W,
                lambda s: 3 * s.F,
                when=separate_expert_wgrad,
            ),
        ),
        (
            STREAM_GRADIENT,
            TensorEntry("gradient of results", "", R, W, when=fused_experts),
            TensorEntry("activation, made again", "", padded_expert_rows, lambda s: s.F, when=fused_experts),
            TensorEntry("gradient of down", "", lambda s: s.e * s.W, lambda s: s.F, when=fused_separate_wgrad),
        ),
        (STREAM_GRADIENT, *swiglu_backward(R, lambda s: s.F, unfused_experts)),
    ),
    ("attend", "B"): (
        (
            STREAM_GRADIENT,
            TensorEntry("gradients of q k v and the result", "", C, lambda s: qkv_width(s) + s.H * s.V),
            TensorEntry("those that turn, in fp32", "", C, lambda s: 2 * s.H * s.Q, "fp32"),
        ),
        (
            STREAM_GRADIENT,
            TensorEntry("gradients of q k v and the result", "", C, lambda s: qkv_width(s) + s.H * s.V),
            TensorEntry(
                "gradients of the scores",
                "",
                score_gradient_workspace,
                single_column,
                "byte",
                when=writes_score_gradients,
            ),
        ),
    ),
    ("mlp", "B"): ((STREAM_GRADIENT, *swiglu_backward(C, lambda s: s.M)),),
    ("shared", "B"): ((STREAM_GRADIENT, *swiglu_backward(C, lambda s: s.A)),),
    ("predict", "F"): (
        (
            TensorEntry(
                "logits of a chunk, then their gradient", "", logits_per_chunk, single_column, when=overwrites_logits
            ),
        ),
        (
            TensorEntry(
                "logits of a chunk and their exponentials",
                "",
                logits_per_chunk,
                lambda s: 2.0,
                "fp32",
                when=keeps_logits_apart,
            ),
        ),
        (
            TensorEntry("gradient of a chunk's logits", "", logits_per_chunk, single_column, when=keeps_logits_apart),
            TensorEntry("its part of the head's gradient", "", lambda s: s.P, D, when=keeps_logits_apart),
        ),
    ),
    ("predict", "B"): (
        (
            TensorEntry("gradient of the stream", "", T, lambda s: 2 * s.D),
            TensorEntry("gradient of the head", "", lambda s: s.P, D),
        ),
    ),
}

MOEFOLD_STACK = LayerStack(
    (*ATTEND_TENSORS, *MLP_TENSORS, *ROUTE_TENSORS, *EXPERT_TENSORS, *SHARED_EXPERT_TENSORS, *EMBED_AND_HEAD_TENSORS),
    MOEFOLD_WORKING_SETS,
)
