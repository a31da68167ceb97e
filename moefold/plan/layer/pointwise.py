"""Pointwise kernels of a forward beside GEMMs and attention: bytes moved and kernel launches, by step.

A pass over elements reads 2 bytes and writes 2 bytes per element. Quantisation for a GEMM reads 2 bytes and writes two
quantised elements: one along rows for this GEMM, one along columns for the weight gradient. Letters are those of
`plan/layer/rank_shapes.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from moefold.plan.layer.layer_costs import Gemm, Gemms
from moefold.plan.layer.rank_shapes import RankShapes

LOW_PRECISION_GEMMS = ("dense", "grouped")  # GEMMs in low precision; router and head are not quantised
NORM_PASSES = 5  # a norm of the stream, and the addition of a layer's output to it


def attention_elements(s: RankShapes) -> float:
    """Elements of queries, keys and values that norms, RoPE and up-projections read or write."""
    if s.mla:
        queries = s.H * s.Q
        keys = s.G * (s.Q + s.V)
        ranks = s.q_rank + s.kv_rank
        heads = 2 * s.C * (queries + keys)
        latents = 2 * s.T * ranks
        return heads + latents
    norms = 2 if s.model.attention.qk_norm != "none" else 1
    query_and_key_heads = s.H + s.projected_kv_heads
    queries_and_keys = 2 * norms * query_and_key_heads * s.Q
    values = 2 * s.projected_kv_heads * s.V
    return s.C * (queries_and_keys + values)


def activation_elements(s: RankShapes) -> float:
    """Elements that the activation and the biases of experts read and write; none where the activation is fused with
    the GEMMs."""
    if runs_fused_experts(s):
        return 0.0
    elements = (s.expert_parts + 1) * s.F
    if s.model.moe.biases:
        biased = s.expert_parts * s.F
        elements += 2 * biased + 2 * s.W
    return s.R * elements


def runs_fused_experts(s: RankShapes) -> bool:
    if s.choices.stack != "moefold" or s.recipe.quantizes:
        return False
    return s.fuses_experts


def arranged_elements(s: RankShapes) -> float:
    """Elements of tokens gathered in expert order. Local tokens are read from cache."""
    stays_local = s.portion.ep * s.portion.etp == 1
    passes = 1 if stays_local and runs_fused_experts(s) else 2
    return s.R * s.W * passes


def cross_entropy_elements(s: RankShapes) -> float:
    """Elements of logits that are read and written beside GEMMs, in forward and backward; fewer with the fused
    kernel."""
    passes = 6
    is_moefold = s.choices.stack == "moefold"
    if is_moefold and s.chosen_implementation("cross_entropy") == "triton":
        passes = 2 / 3
    heads = 1 + s.model.mtp
    return passes * s.C * s.P * heads


def embed_elements(s: RankShapes) -> float:
    return 2 * s.T * s.D


def attend_elements(s: RankShapes) -> float:
    return NORM_PASSES * s.T * s.D + attention_elements(s)


def mlp_elements(s: RankShapes) -> float:
    norm = NORM_PASSES * s.T * s.D
    tensors = s.dense_parts + 1
    activation = tensors * s.C * s.M
    return norm + activation


def route_elements(s: RankShapes) -> float:
    norm = 3 * s.T * s.D
    return norm + 12 * s.T * s.E


def shared_elements(s: RankShapes) -> float:
    stream = 2 * s.T * s.D
    tensors = s.shared_parts + 1
    activation = tensors * s.C * s.A
    return stream + activation


def combine_elements(s: RankShapes) -> float:
    rows = s.R * s.W
    return rows + 3 * s.T * s.D


def look_ahead_elements(s: RankShapes) -> float:
    return 8 * s.T * s.D


def set_aside_elements(s: RankShapes) -> float:
    return 2 * s.T * s.D


def predict_elements(s: RankShapes) -> float:
    return 2 * s.T * s.D + cross_entropy_elements(s)


POINTWISE_ELEMENTS: dict[str, Callable[[RankShapes], float]] = {
    "embed": embed_elements,
    "attend": attend_elements,
    "mlp": mlp_elements,
    "route": route_elements,
    "dispatch": arranged_elements,
    "shared": shared_elements,
    "experts": activation_elements,
    "combine": combine_elements,
    "look_ahead": look_ahead_elements,
    "set_aside": set_aside_elements,
    "predict": predict_elements,
}

KERNEL_LAUNCHES = {
    "embed": 3,
    "attend": 16,
    "mlp": 8,
    "route": 30,
    "narrow": 1,
    "plan": 0,  # counted with dispatch, which follows directly
    "dispatch": 14,
    "shared": 6,
    "experts": 6,
    "combine": 10,
    "widen": 1,
    "add": 0,  # counted with shared
    "look_ahead": 6,
    "set_aside": 2,
    "predict": 14,
}

FUSED_KERNEL_LAUNCHES = {"attend": 9, "route": 12, "dispatch": 5, "combine": 2}  # with moefold's kernels
MLA_EXTRA_LAUNCHES = 6
QUANTIZED_LOOP_LAUNCHES = 5  # of one expert's GEMM: each operand is quantised


def pointwise_bytes(step: str, s: RankShapes) -> float:
    """Bytes moved by the pointwise kernels of a forward."""
    if step not in POINTWISE_ELEMENTS:
        return 0.0
    count_elements = POINTWISE_ELEMENTS[step]
    return 2.0 * count_elements(s)


def low_precision_gemms(gemms: Gemms) -> list[Gemm]:
    return [gemm for gemm in gemms if gemm.kind in LOW_PRECISION_GEMMS]


def input_quantization_bytes(gemms: Gemms, s: RankShapes) -> float:
    """Bytes of quantising the inputs of a forward's GEMMs. GEMMs with the same input share one quantised copy."""
    if not s.recipe.quantizes:
        return 0.0
    elements: dict[tuple[float, float], float] = {}
    for gemm in low_precision_gemms(gemms):
        shared_input = gemm.rows, gemm.k
        elements[shared_input] = gemm.rows * gemm.groups * gemm.k
    distinct = sum(elements.values())
    return quantized_element_bytes(s) * distinct


def gradient_quantization_bytes(gemms: Gemms, s: RankShapes) -> float:
    """Bytes of quantising the gradients of the GEMMs' outputs, in backward."""
    if not s.recipe.quantizes:
        return 0.0
    elements: dict[tuple[float, float, str], float] = {}
    for gemm in low_precision_gemms(gemms):
        output = gemm.rows, gemm.n, gemm.name
        elements[output] = gemm.rows * gemm.groups * gemm.n
    distinct = sum(elements.values())
    return quantized_element_bytes(s) * distinct


def quantized_element_bytes(s: RankShapes) -> float:
    """Bytes of quantising one element: read in bf16, written twice."""
    return 2 + 2 * s.recipe.linear


def count_launches(step: str, gemms: Gemms, s: RankShapes) -> tuple[float, float]:
    """Kernels of a forward: those in sequence, and those of a loop over experts, which run in parallel on the device.
    Megatron's layers run one GEMM per expert and quantise each operand."""
    quantizes = s.recipe.quantizes
    quantised = sum(gemm.recipe.quantises for gemm in gemms)
    count = KERNEL_LAUNCHES[step]
    if runs_fused_experts(s):
        count = FUSED_KERNEL_LAUNCHES.get(step, count)
    if quantizes:
        quantised = len(low_precision_gemms(gemms))
    count += 2 * quantised
    if step == "attend" and s.mla:
        count += MLA_EXTRA_LAUNCHES
    if s.choices.stack != "megatron":
        return count, 0
    looped = 0
    for gemm in gemms:
        if gemm.kind == "grouped":
            looped += gemm.groups
    if quantizes:
        looped *= QUANTIZED_LOOP_LAUNCHES
    return count, looped
