"""SwiGLU's gradient of rows in tiles, quantised in the same pass with scales of 128 values.

    a = silu(gate) * up * weight     from the kept pre-activation h = (gate, up)
    dh = da * weight * (up * silu'(gate), silu(gate))     d weight = da . silu(gate) * up

The data gradient reads dh along rows. Weight gradients read dh and a along columns, or as they are where they are
computed in bf16. `da_RF` has no padding; everything else is in padded places (kernels/quantise/row_tiles.py).

P padded rows in M tiles, R rows, F inner width, N = 2F.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from moefold.kernels.experts.fp8_swiglu import (
    SWIGLU_CASES,
    Kept,
    quantise_blocks,
    swiglu_gradients,
    tiles_of_counts,
)
from moefold.kernels.quantise.fp8 import Quantised, ScaleRule
from moefold.kernels.quantise.quantise_tiles import quantise_columns
from moefold.kernels.quantise.row_tiles import RowTiles, pad_to_tiles
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_inner_op


class GradientRules(NamedTuple):
    """The rules of dh and of a; whether weight gradients are FP8 products."""

    dh: ScaleRule
    a: ScaleRule
    fp8_wgrad: bool


class QuantisedGradient(NamedTuple):
    """dh along rows, values (P, N). dh along columns, values (M, N, 128), or as it is, (P, N). a likewise. The gradient
    of the router's weights, (R,)."""

    rows: Quantised
    dh: Quantised | Tensor
    a: Quantised | Tensor
    dweight_R: Tensor


@register_inner_op
def quantise_swiglu_gradient(
    da_RF: Tensor, h: Kept, weight_R: Tensor, tiles: RowTiles, rules: GradientRules
) -> QuantisedGradient:
    da_PF = pad_to_tiles(da_RF, tiles)
    dh_PN, a_PF, dweight_R = swiglu_gradients(da_PF, h, weight_R, tiles)
    rows = quantise_blocks(dh_PN, rules.dh)
    if rules.fp8_wgrad:
        dh = quantise_column_blocks(dh_PN, rules.dh)
        a = quantise_column_blocks(a_PF, rules.a)
    else:
        dtype = da_RF.dtype
        dh = dh_PN.to(dtype)
        a = a_PF.to(dtype)
    return QuantisedGradient(rows, dh, a, dweight_R)


def quantise_column_blocks(x_PD: Tensor, rule: ScaleRule) -> Quantised:
    blocks = quantise_columns(x_PD, "block", rule)
    assert blocks is not None, "scales of blocks were asked for"
    return blocks


@quantise_swiglu_gradient.register_fast("gluon")
def quantise_swiglu_gradient_gluon(
    da_RF: Tensor, h: Kept, weight_R: Tensor, tiles: RowTiles, rules: GradientRules
) -> QuantisedGradient:
    """Tiles that are not in use are not written: theirs are undefined."""
    from moefold.kernels.experts.swiglu_tiles_launch import launch_quantise_gradient

    found = launch_quantise_gradient(da_RF, h, weight_R, tiles, *rules)
    return QuantisedGradient(*found)


# ---- cases


def kept_cases(draw: CaseInputs) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Name, and all arguments but the rules."""
    for name, (counts, width) in SWIGLU_CASES.items():
        tiles = tiles_of_counts(counts, draw.device)
        rows = sum(counts)
        inner = max(width, 128)
        da_RF = draw.normal(rows, inner)
        weight_R = draw.wide(rows, seed=2).abs()
        h_RN = draw.normal(rows, 2 * inner, seed=3)
        h_PN = pad_to_tiles(h_RN, tiles)  # products of padding are zeros without a sign
        blocks = quantise_blocks(h_PN, ScaleRule())
        yield f"{name}, h in its own precision", (da_RF, h_PN, weight_R, tiles)
        yield f"{name}, h in FP8", (da_RF, blocks, weight_R, tiles)


@quantise_swiglu_gradient.register_cases
def quantise_swiglu_gradient_cases(draw: CaseInputs) -> Cases:
    rule = ScaleRule()
    fp8_rules = GradientRules(rule, rule, True)
    plain_rules = GradientRules(rule, rule, False)
    for name, inputs in kept_cases(draw):
        yield KernelCase(f"{name}, FP8 weight gradients", (*inputs, fp8_rules))
        yield KernelCase(f"{name}, plain weight gradients", (*inputs, plain_rules))
