"""What a forward does beside its products and attention: bytes of pointwise passes, and kernels launched, by step.

A pass over x elements reads 2 bytes and writes 2 of each. Quantising for a product reads 2 and writes the element
twice: along rows for this product, along columns for the weight gradient's. Letters are those of `plan/layer/rank_shapes.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from moefold.plan.layer.layer_costs import Gemm
from moefold.plan.layer.rank_shapes import RankShapes

LOW_PRECISION_GEMMS = ("dense", "grouped")  # products that a low precision takes over; router and head stay as they are


def attention_elements(s: RankShapes) -> float:
    """Elements of queries, keys and values that are read or written: turned, normed, put together from latents."""
    keys = s.G * (s.Q + s.V)
    if s.mla:
        return 2 * s.C * (s.H * s.Q + keys) + 2 * s.T * (s.q_rank + s.kv_rank)
    norms = 2 if s.model.attention.qk_norm != "none" else 1
    return s.C * (2 * norms * (s.H + s.G) * s.Q + 2 * s.G * s.V)


def activation_elements(s: RankShapes) -> float:
    """Elements that experts' activation reads and writes, and that biases are added to. In one kernel with the products
    none are."""
    biases = 4 * s.F + 2 * s.W if s.model.moe.biases else 0
    return 0.0 if runs_fused_experts(s) else s.R * (3 * s.F + biases)


def runs_fused_experts(s: RankShapes) -> bool:
    return s.choices.stack == "moefold" and s.fused and not s.choices.recipe.quantizes


def arranged_elements(s: RankShapes) -> float:
    """Elements of tokens put in the order of experts. Of tokens that never left, each is read from the cache again."""
    return s.R * s.W * (1 if runs_fused_experts(s) and s.portion.ep * s.portion.etp == 1 else 2)


def cross_entropy_elements(s: RankShapes) -> float:
    """Elements of logits that are read and written beside products, there and back: a kernel of ours does it once."""
    once = s.choices.stack == "moefold" and s.chosen_implementation("cross_entropy") == "triton"
    return (2 / 3 if once else 6) * s.C * s.P * (1 + s.model.mtp)


POINTWISE_ELEMENTS: dict[str, Callable[[RankShapes], float]] = {
    "embed": lambda s: 2 * s.T * s.D,
    "attend": lambda s: 5 * s.T * s.D + attention_elements(s),  # a norm, and what is added to the stream
    "mlp": lambda s: 5 * s.T * s.D + 3 * s.C * s.M,
    "route": lambda s: 3 * s.T * s.D + 12 * s.T * s.E,
    "dispatch": arranged_elements,
    "shared": lambda s: 2 * s.T * s.D + 3 * s.C * s.A,
    "experts": activation_elements,
    "combine": lambda s: s.R * s.W + 3 * s.T * s.D,
    "look_ahead": lambda s: 8 * s.T * s.D,
    "set_aside": lambda s: 2 * s.T * s.D,
    "predict": lambda s: 2 * s.T * s.D + cross_entropy_elements(s),
}

KERNEL_LAUNCHES = {
    "embed": 3,
    "attend": 16,
    "mlp": 8,
    "route": 30,
    "narrow": 1,
    "dispatch": 14,
    "shared": 6,
    "experts": 6,
    "combine": 10,
    "widen": 1,
    "look_ahead": 6,
    "set_aside": 2,
    "predict": 14,
}

FUSED_KERNEL_LAUNCHES = {"attend": 9, "route": 12, "dispatch": 5, "combine": 2}  # with our kernels


def pointwise_bytes(step: str, s: RankShapes) -> float:
    """Bytes of a forward's pointwise passes."""
    return 2.0 * POINTWISE_ELEMENTS[step](s) if step in POINTWISE_ELEMENTS else 0.0


def quantization_bytes(gemms: tuple[Gemm, ...], s: RankShapes, outputs: bool = False) -> float:
    """Bytes of quantising what the products read, or in backward the gradients of what they gave. Products of one
    input share its quantised form."""
    if not s.choices.recipe.quantizes:
        return 0.0
    low = [g for g in gemms if g.kind in LOW_PRECISION_GEMMS]
    once = {(g.rows, g.n, g.name) if outputs else (g.rows, g.k): g for g in low}
    elements = sum(g.rows * g.groups * (g.n if outputs else g.k) for g in once.values())
    return (2 + 2 * s.choices.recipe.linear) * elements


def count_launches(step: str, gemms: tuple[Gemm, ...], s: RankShapes) -> tuple[float, float]:
    """Kernels of a forward: those one after the other, and those of a loop over experts, side by side on the device.
    Megatron's layers make each expert's product by itself and quantise each operand."""
    low = sum(g.kind in LOW_PRECISION_GEMMS for g in gemms) if s.choices.recipe.quantizes else 0
    few = FUSED_KERNEL_LAUNCHES if runs_fused_experts(s) else {}
    count = few.get(step, KERNEL_LAUNCHES[step]) + 2 * low + (6 if step == "attend" and s.mla else 0)
    grouped = sum(g.groups for g in gemms if g.kind == "grouped") if s.choices.stack == "megatron" else 0
    return count, grouped * (5 if s.choices.recipe.quantizes else 1)
