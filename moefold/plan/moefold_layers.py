"""What moefold's own layers keep for backward, and what they need for the moment.

A test runs the real model with hooks on all that autograd keeps, and compares. Which implementation of an operation is
bound decides: the fused expert kernel keeps tokens and pre-activations only; on a CPU, RMSNorm is made of operations
that each keep their own, and attention of odd shapes keeps its probabilities.
"""

from __future__ import annotations

from collections.abc import Callable

from moefold.kernels.attention_room import WIDTHS, ds_bytes
from moefold.plan.sizes import Sizes
from moefold.plan.tensor import C, D, Moment, Number, R, Stack, T, Tensor, W, always, gqa, mla, one, q_k_v

CHUNK_LOGITS = 1 << 26  # as kernels/cross_entropy.py has these; a test compares
LOGITS_IN_PLACE = 10 << 26
PADDING = 64  # rows that the fused kernel may add for each expert

When = Callable[[Sizes], bool]


def norm(
    what: str, step: str, rows: Number, width: Number, when: When = always, entry: bool = False
) -> tuple[Tensor, ...]:
    """An RMSNorm keeps its input and one number a row."""
    return (
        Tensor(what, step, rows, width, read="norm", when=when, entry=entry),
        Tensor(f"scale of {what}", step, rows, one, "fp32", when=when),
        Tensor(f"{what} scaled", step, rows, width, "fp32", ("norm",), when=lambda s: s.composed and when(s)),
    )


def turns_in_norm(s: Sizes) -> bool:
    """Whether one kernel norms queries and keys and turns them: it keeps its input alone."""
    a = s.model.attention
    whole = a.rope_dim in (0, a.head_dim) and (a.qk_norm == "head" or s.portion.tp == 1)
    return not s.mla and a.qk_norm != "none" and whole and s.kernel("norm_rope") != "reference"


def per_head(s: Sizes) -> bool:
    return s.qk_norm == "head" and not turns_in_norm(s)


def norm_over_all(what: str, rows: Number, width: Number) -> tuple[Tensor, ...]:
    """A norm over all heads, which tp may cut, is made of plain operations in fp32."""
    return tuple(
        Tensor(name, "attend", rows, wide, "fp32", when=lambda s: s.qk_norm == "full" and not turns_in_norm(s))
        for name, wide in ((f"{what} in fp32", width), (f"{what} scaled", width), (f"scale of {what}", one))
    )


def sink(s: Sizes) -> int:
    """A sink is one more key, and eight more dims of queries and keys, but where a kernel takes it as it is."""
    return 1 if s.model.attention.sinks and s.choices.device == "cpu" else 0


def keys(s: Sizes) -> float:
    """Positions of keys and values that are kept: a gather over cp keeps those of all its ranks."""
    gathered = s.portion.cp if s.portion.context == "all_gather" else 1
    return s.C * gathered + s.B * sink(s)


def groups(s: Sizes) -> float:
    """Heads of keys and values; repeated for every query head where attention is made of plain operations."""
    return s.H if s.plain_attention else s.G


def cuts_context(s: Sizes) -> bool:
    return s.portion.cp > 1


def reorders(s: Sizes) -> bool:
    """Whether attention's result comes in parts, or by heads, and is put together in other memory."""
    return cuts_context(s) and s.portion.context != "ring"


def half_chunks(s: Sizes) -> float:
    """Positions of one of a rank's two chunks, where context is cut."""
    return s.S / (2 * s.portion.cp)


def masks(s: Sizes) -> bool:
    """Chunks that see gathered keys up to their own end need a mask, but where a kernel knows such sight."""
    return cuts_context(s) and s.portion.context == "all_gather" and s.composed


def angles(s: Sizes) -> float:
    """Cosines and sines of the positions held here, which queries and keys each take for themselves."""
    a = s.model.attention
    return (a.rope_dim or a.head_dim) * (1 if turns_in_norm(s) else 2)


ATTEND = (
    *norm("stream", "attend", T, D, entry=True),
    Tensor("normed", "attend", C, D, "linear", ("norm",), when=gqa),
    Tensor("normed", "attend", T, D, "linear", ("norm",), when=mla),
    *norm("query latent", "attend", T, lambda s: s.q_rank, lambda s: s.mla and s.q_rank > 0),
    *norm("key latent", "attend", T, lambda s: s.kv_rank, mla),
    Tensor(
        "latents", "attend", C, lambda s: (s.q_rank or s.D) + s.kv_rank + s.rope, "linear", ("norm",), "up", when=mla
    ),
    *norm("query", "attend", lambda s: s.C * s.H, lambda s: s.Q, per_head),
    *norm("key", "attend", lambda s: s.C * s.G, lambda s: s.Q, per_head),
    Tensor("query", "attend", C, lambda s: s.H * s.Q, read="norm", when=turns_in_norm),
    Tensor("key", "attend", C, lambda s: s.G * s.Q, read="norm", when=turns_in_norm),
    *norm_over_all("query", C, lambda s: s.H * s.Q),
    *norm_over_all("key", C, lambda s: s.G * s.Q),
    Tensor("queries", "attend", C, lambda s: s.H * (s.Q + 8 * sink(s)), "wide", ("up",), "core", mla),
    Tensor("keys", "attend", keys, lambda s: groups(s) * (s.Q + 8 * sink(s)), "wide", ("up",), "core", mla),
    Tensor("values", "attend", keys, lambda s: groups(s) * s.V, "wide", ("up",), "core", mla),
    Tensor("queries", "attend", C, lambda s: s.H * (s.Q + 8 * sink(s)), "wide", (), "core", gqa),
    Tensor("keys", "attend", keys, lambda s: groups(s) * (s.Q + 8 * sink(s)), "wide", (), "core", gqa),
    Tensor("values", "attend", keys, lambda s: groups(s) * s.V, "wide", (), "core", gqa),
    Tensor("attended", "attend", C, lambda s: s.H * s.V, "linear", ("core",), "out"),
    Tensor("attended, before it is put in order", "attend", C, lambda s: s.H * s.V, "wide", ("core",), when=reorders),
    Tensor("angles of its positions", "attend", lambda s: s.S / s.portion.cp, angles, "fp32", when=cuts_context),
    Tensor("masks of its two chunks", "attend", half_chunks, lambda s: s.S + half_chunks(s), "fp32", when=masks),
    Tensor("log-sum-exp", "attend", C, lambda s: s.H, "fp32", ("core",), when=lambda s: not s.plain_attention),
    Tensor(
        "probabilities",
        "attend",
        C,
        lambda s: s.H * (s.S + sink(s)),
        "fp32",
        ("core",),
        when=lambda s: s.plain_attention,
    ),
)
MLP = (
    *norm("stream", "mlp", T, D),
    Tensor("normed", "mlp", C, D, "linear", ("norm",)),
    Tensor("gate and up", "mlp", C, lambda s: 2 * s.M, "wide", ("mlp",)),
    Tensor("activated", "mlp", C, lambda s: s.M, "linear", ("mlp",)),
)


def one_pass(s: Sizes) -> bool:
    """Whether one kernel chooses: it keeps logits, choice and weights."""
    return s.kernel("router_topk") == "triton"


def normalize(s: Sizes) -> str:
    return "chosen" if s.model.moe.score == "softmax_chosen" else s.model.moe.normalize


def weighs_chosen(s: Sizes) -> bool:
    return normalize(s) == "chosen" and not one_pass(s)


def has_aux(s: Sizes) -> bool:
    return bool(s.model.moe.aux_loss or s.model.moe.device_loss)


def counted(s: Sizes) -> float:
    """Rows of the shares that the balance losses multiply with: each sequence has its own."""
    return s.B if s.model.moe.aux_over == "sequence" else 1.0


def has_shares(s: Sizes) -> bool:
    """Whether scores as shares of one have a use: in balance losses, or as weights."""
    softmax = normalize(s) == "none" and s.model.moe.score == "softmax"
    return not one_pass(s) and (has_aux(s) or normalize(s) == "all" or softmax)


def has_logs(s: Sizes) -> bool:
    return s.model.moe.score == "sigmoid" and (has_shares(s) or weighs_chosen(s)) and not one_pass(s)


def has_logits(s: Sizes) -> bool:
    return one_pass(s) or s.model.moe.z_loss > 0 or has_logs(s) or weighs_chosen(s)


def has_sigmoids(s: Sizes) -> bool:
    return s.model.moe.score == "sigmoid" and normalize(s) == "none" and not one_pass(s)


def E(s: Sizes) -> float:
    return s.E


def K(s: Sizes) -> float:
    return s.K


def scores(what: str, when: When, width: Number = E, rows: Number = T, held: str = "fp32") -> Tensor:
    return Tensor(what, "route", rows, width, held, ("moe",), when=when)


ROUTE = (
    *norm("stream", "route", T, D),
    Tensor("normed", "route", T, D, "wide", ("norm",), "experts"),
    scores("logits", has_logits),
    scores("shares", has_shares),
    scores("sigmoids", has_sigmoids),
    scores("logs of sigmoids", lambda s: has_logs(s) and weighs_chosen(s)),
    scores("what their gradient needs", lambda s: has_logs(s) and s.composed),
    scores("choice", always, K, held="int64"),
    scores("which choices are none", lambda s: not one_pass(s), K, held="byte"),
    scores("weights", lambda s: weighs_chosen(s) or one_pass(s), K),
    scores("price of each expert", has_aux, E, counted),
    scores("log-sum-exp", lambda s: s.model.moe.z_loss > 0 and not one_pass(s), one),
)


def reference_rows(s: Sizes) -> bool:
    return s.kernel("arrange_rows") == "reference" or s.portion.ep > 1


def fused(s: Sizes) -> bool:
    """Whether one kernel does: in backward it writes the gradient of gate and up over them."""
    return s.fused


def unfused(s: Sizes) -> bool:
    return not s.fused


def travels(s: Sizes) -> bool:
    return s.portion.ep * s.portion.etp > 1


def outside(s: Sizes) -> bool:
    return not s.gate_inside


def biased(s: Sizes) -> bool:
    return s.model.moe.biases


INNER = ("experts", "moe")
EXPERTS = (
    Tensor("order of rows", "dispatch", R, one, "int64", ("moe",), when=reference_rows),
    Tensor("who went where", "dispatch", lambda s: s.T * s.K, lambda s: 2.0, "int64", ("moe",), when=travels),
    Tensor("tokens that came", "experts", lambda s: s.N, W, "wide", INNER, "experts", lambda s: s.fused and travels(s)),
    Tensor("latents", "experts", T, W, "wide", INNER, "experts", lambda s: s.fused and not travels(s) and s.latent),
    Tensor("index and slots", "experts", R, lambda s: 2.0, "int32", INNER),
    Tensor("weights", "experts", R, one, "fp32", INNER),
    Tensor("rows", "experts", R, W, "linear", INNER, "experts", unfused),
    Tensor("gate and up", "experts", R, lambda s: 2 * s.F, "wide", INNER, "activation"),
    Tensor("activated", "experts", R, lambda s: s.F, "linear", ("activation", *INNER), when=unfused),
    Tensor("results", "experts", R, W, "wide", INNER, when=outside),
    Tensor("weights, rounded", "experts", R, one, "wide", INNER, when=lambda s: outside(s) and not s.composed),
    Tensor("expert of each row, twice", "experts", R, lambda s: 2.0, "int64", INNER, when=biased),
    Tensor("biases of rows", "experts", R, W, "wide", INNER, when=lambda s: biased(s) and s.gate_inside),
    Tensor("results in latents", "widen", T, W, "linear", ("moe",)),
    Tensor("results, while woven", "combine", R, W, "wide", when=lambda s: s.portion.weaves and s.gate_inside),
)
SHARED = (
    Tensor("normed, gathered", "shared", C, D, "linear", ("shared", "moe"), when=lambda s: s.portion.tp > 1),
    Tensor("gate and up", "shared", C, lambda s: 2 * s.A, "wide", ("shared", "moe")),
    Tensor("activated", "shared", C, lambda s: s.A, "linear", ("shared", "moe")),
    Tensor("results", "shared", T, D, "wide", ("shared", "moe"), when=lambda s: s.model.moe.shared_gate),
    Tensor("gates", "shared", T, one, "wide", ("shared", "moe"), when=lambda s: s.model.moe.shared_gate),
)


def heads(s: Sizes) -> float:
    """Losses: the model's own, and those of tokens further ahead."""
    return 1.0 + s.model.mtp


ENDS = (
    Tensor("tokens", "embed", C, one, "int64"),
    Tensor("tokens", "look_ahead", C, one, "int64"),
    *norm("normed stream", "look_ahead", T, D),
    *norm("token", "look_ahead", T, D),
    Tensor("stream and token joined", "look_ahead", T, lambda s: 2 * s.D, "linear"),
    *norm("stream", "set_aside", T, D),
    *norm("stream", "predict", T, D),
    Tensor("gradient of streams", "predict", C, lambda s: s.D * heads(s)),
    Tensor("gradient of the head", "predict", lambda s: s.P, lambda s: s.D * heads(s), "fp32"),
)

STREAM = Tensor("gradient of the stream", "", T, D)


def on_hopper(s: Sizes) -> bool:
    """Whether attention's backward writes down the gradients of its scores, as its kernels for Hopper do."""
    a, c = s.model.attention, s.choices
    plain = not (s.mla or a.window or a.sinks or cuts_context(s)) and s.Q in WIDTHS
    return plain and c.device == "cuda" and c.capability == 90 and c.precision != "fp32" and gradients_of_scores(s) > 0


def gradients_of_scores(s: Sizes) -> float:
    """Bytes of them; so many heads go at once that it is not too much. None if one head's are too many."""
    return ds_bytes(s.S, int(s.B * s.G), int(s.H // s.G))


def stands_apart(s: Sizes) -> bool:
    """Whether the gradient of experts' weights is there beside the sum it is added to."""
    return not (s.fused and s.portion.adds)


def fused_and_apart(s: Sizes) -> bool:
    return s.fused and stands_apart(s)


def padded(s: Sizes) -> float:
    return s.R + (PADDING * s.e if s.fused else 0.0)


def in_place(s: Sizes) -> bool:
    """Whether the head's kernel writes the gradient of logits over them, in bf16."""
    return s.kernel("cross_entropy") == "triton"


def chunked(s: Sizes) -> bool:
    return not in_place(s)


def chunk(s: Sizes) -> float:
    """Logits that the head holds at a time: those of as many tokens as may be, a power of two. A kernel that needs less
    for each of them takes more at a time."""
    most = LOGITS_IN_PLACE if in_place(s) else CHUNK_LOGITS
    return min(tokens_of_chunk(most, s.P), s.C) * s.P


def tokens_of_chunk(logits: int, words: float) -> int:
    return 1 << max(0, int(logits // words).bit_length() - 1)


def swiglu_backward(rows: Number, inner: Number, when: When = always) -> Moment:
    """By hand in fp32: gate and up, the incoming gradient, what the formula names, and both results before they are
    rounded. A kernel has the incoming gradient and both results."""

    def by_hand(s: Sizes) -> bool:
        return when(s) and s.kernel("swiglu") != "triton"

    def in_one_pass(s: Sizes) -> bool:
        return when(s) and not by_hand(s)

    return (
        Tensor("gradient of the activation, in fp32", "", rows, lambda s: 10 * inner(s), "fp32", when=by_hand),
        Tensor("gradients of activation, gate and up", "", rows, lambda s: 3 * inner(s), when=in_one_pass),
    )


MOMENTS: dict[tuple[str, str], tuple[Moment, ...]] = {
    ("experts", "F"): (
        (
            Tensor("rows", "", padded, W, when=fused),
            Tensor("activated", "", R, lambda s: s.F, when=fused),
            Tensor("results", "", R, W),
        ),
    ),
    ("experts", "B"): (
        (
            STREAM,
            Tensor("gradient of results", "", R, W),
            Tensor("gradient of gate and up", "", R, lambda s: 2 * s.F, when=unfused),
            Tensor("rows and their gradient", "", R, lambda s: s.W * (2 if s.fused else 1)),
            Tensor("gradient of what arrived", "", lambda s: s.N, W),
            Tensor("gradients of the experts' weights", "", lambda s: s.e * s.W, lambda s: 3 * s.F, when=stands_apart),
        ),
        (
            STREAM,
            Tensor("gradient of results", "", R, W, when=fused),
            Tensor("activation, made again", "", padded, lambda s: s.F, when=fused),
            Tensor("gradient of down", "", lambda s: s.e * s.W, lambda s: s.F, when=fused_and_apart),
        ),
        (STREAM, *swiglu_backward(R, lambda s: s.F, unfused)),
    ),
    ("attend", "B"): (
        (
            STREAM,
            Tensor("gradients of q k v and the result", "", C, lambda s: q_k_v(s) + s.H * s.V),
            Tensor("those that turn, in fp32", "", C, lambda s: 2 * s.H * s.Q, "fp32"),
        ),
        (
            STREAM,
            Tensor("gradients of q k v and the result", "", C, lambda s: q_k_v(s) + s.H * s.V),
            Tensor("gradients of the scores", "", gradients_of_scores, one, "byte", when=on_hopper),
        ),
    ),
    ("mlp", "B"): ((STREAM, *swiglu_backward(C, lambda s: s.M)),),
    ("shared", "B"): ((STREAM, *swiglu_backward(C, lambda s: s.A)),),
    ("predict", "F"): (
        (Tensor("logits of a chunk, then their gradient", "", chunk, one, when=in_place),),
        (Tensor("logits of a chunk and their exponentials", "", chunk, lambda s: 2.0, "fp32", when=chunked),),
        (
            Tensor("gradient of a chunk's logits", "", chunk, one, when=chunked),
            Tensor("its part of the head's gradient", "", lambda s: s.P, D, when=chunked),
        ),
    ),
    ("predict", "B"): (
        (
            Tensor("gradient of the stream", "", T, lambda s: 2 * s.D),
            Tensor("gradient of the head", "", lambda s: s.P, D),
        ),
    ),
}

MOEFOLD = Stack((*ATTEND, *MLP, *ROUTE, *EXPERTS, *SHARED, *ENDS), MOMENTS)
