"""Passes that quantise inputs, gradients and weights for the FP8 recipes of this trainer, in bytes read and written.

Passes over weights, once a step, are counted with the step's parameters in `plan/layer/layer_costs.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from moefold.config.precision_recipes import RecipeSpec
from moefold.plan.layer.fp8_tensors import quantise_pass_bytes
from moefold.plan.layer.layer_costs import Gemm, Gemms
from moefold.plan.layer.rank_shapes import RankShapes


def operand_pass_bytes(recipe: RecipeSpec, s: RankShapes) -> float:
    """Bytes moved for a value of an input or a gradient, with its copies: along rows, and along columns for a weight
    gradient in FP8."""
    copies = 1 if recipe.columns == "none" else 2
    return quantise_pass_bytes(recipe, copies, s)


def quantised_gemms(gemms: Gemms) -> list[Gemm]:
    return [gemm for gemm in gemms if gemm.recipe.quantises]


def apart_from_fused_experts(gemms: Iterable[Gemm], s: RankShapes) -> list[Gemm]:
    if not s.fuses_experts:
        return list(gemms)
    return [gemm for gemm in gemms if gemm.kind != "grouped"]


def forward_quantise_bytes(step: str, gemms: Gemms, s: RankShapes) -> float:
    """Bytes of quantising the inputs of a step's products. Products with the same input share a copy."""
    by_input: dict[tuple[float, float, RecipeSpec], float] = {}
    quantised = quantised_gemms(gemms)
    for gemm in apart_from_fused_experts(quantised, s):
        elements = gemm.rows * gemm.groups * gemm.k
        element = operand_pass_bytes(gemm.recipe, s)
        by_input[gemm.rows, gemm.k, gemm.recipe] = elements * element
    moved = sum(by_input.values())
    if step == "experts" and s.fuses_fp8_experts:
        moved += fused_forward_bytes(quantised[0].recipe, s)
    return moved


def backward_quantise_bytes(step: str, gemms: Gemms, s: RankShapes) -> float:
    """Bytes of quantising the gradients of a step's products, and what weight gradients of fused experts read."""
    moved = 0.0
    quantised = quantised_gemms(gemms)
    for gemm in apart_from_fused_experts(quantised, s):
        elements = gemm.rows * gemm.groups * gemm.n
        element = operand_pass_bytes(gemm.recipe, s)
        moved += elements * element
    if step == "experts" and s.fuses_fp8_experts:
        moved += fused_backward_bytes(quantised[0].recipe, s)
    return moved


def fused_forward_bytes(recipe: RecipeSpec, s: RankShapes) -> float:
    """Tokens, once each; and the activation where no block of it is a scale's, so that the product does not write
    it in FP8."""
    element = quantise_pass_bytes(recipe, 1, s)
    tokens = s.N * s.W * element
    if not recipe.scales_in_epilogue:
        return tokens
    activation = s.R * s.F * element
    return tokens + activation


def fused_backward_bytes(recipe: RecipeSpec, s: RankShapes) -> float:
    """Gradients of results and of the pre-activation; then the operands of weight gradients: activation and rows along
    columns, or rows and gradient of results copied into tiles."""
    gradient_width = s.W + s.expert_parts * s.F
    gradients = gradient_width * operand_pass_bytes(recipe, s)
    if s.fp8_expert_wgrad:
        element = quantise_pass_bytes(recipe, 1, s)
        operands = (s.F + s.W) * element
    else:
        operands = 2 * s.W * 2 * s.recipe.wide
    row = gradients + operands
    return s.R * row
