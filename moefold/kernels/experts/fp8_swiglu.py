"""The experts' FP8 products that have SwiGLU in their epilogue: up, and the data gradient of down.

    fp8_swiglu_product     h = x W_gate_up^T     a = silu(gate) * up * weight
    fp8_dswiglu_product    da = dy W_down        dh, a and the gradient of the weight, from da and the kept h

h is kept for backward, and a is computed from it once more. In FP8, h has a scale for each 128 values of the gate and
of up, whatever scales the recipe has. A recipe whose weight gradients are bf16 keeps h as it is.

Rows are in their padded places, padding is zero. P padded rows, R rows, D width, F inner width, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.config.precision_recipes import Sums
from moefold.kernels.experts.activation_formats import ActivationFormats
from moefold.kernels.linear.fp8_product import padded_product, rows_of_tiles
from moefold.kernels.quantise.fp8 import BLOCK, Quantised, ScaleRule
from moefold.kernels.quantise.quantise_tiles import quantise_rows, quantise_tiles
from moefold.kernels.quantise.quantise_weight import quantise_weight
from moefold.kernels.quantise.row_tiles import RowTiles, padded_index, row_tiles
from moefold.kernels.quantise.wide_scales import repeat_for_rows, scales_of_tiles
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_inner_op

Kept = Quantised | Tensor  # by blocks of 128 in FP8, or in the model's own precision


class SwigluGradients(NamedTuple):
    """Gradient of the pre-activation (P, 2F), the activation (P, F), gradient of the router's weights (R,)."""

    dh_PN: Tensor
    a_PF: Tensor
    dweight_R: Tensor


@register_inner_op
def fp8_swiglu_product(
    x: Quantised,
    w: Quantised,
    weight_R: Tensor,
    tiles: RowTiles,
    sums: Sums,
    formats: ActivationFormats,
    a_rows_E1: Tensor | None = None,
) -> tuple[Kept, Kept]:
    """h and a. x: values (P, D). w: values (E, 2F, D), gates first. `a_rows_E1`: scales of a's rows, those of their
    experts, where these are known before; nothing counts what is beyond their range (delayed_swiglu_tiles.py does)."""
    product_PN = padded_product(x, w, tiles, sums)
    h_PN = product_PN.to(formats.dtype)
    wide_PN = h_PN.float()
    gate_PF, up_PF = wide_PN.chunk(2, 1)
    weight_P1 = padded_weights(weight_R, tiles)
    a_PF = F.silu(gate_PF) * up_PF * weight_P1
    rule = formats.rule
    kept = quantise_blocks(h_PN, rule) if formats.fp8_kept else h_PN
    if a_rows_E1 is not None:
        return kept, quantise_with_scales(a_PF, a_rows_E1, tiles, rule)
    if formats.fp8_activation:
        return kept, quantise_blocks(a_PF, rule)
    return kept, a_PF.to(formats.dtype)


@fp8_swiglu_product.register_fast("gluon")
def fp8_swiglu_product_gluon(
    x: Quantised,
    w: Quantised,
    weight_R: Tensor,
    tiles: RowTiles,
    sums: Sums,
    formats: ActivationFormats,
    a_rows_E1: Tensor | None = None,
) -> tuple[Kept, Kept]:
    from moefold.kernels.experts import grouped_gemm_fp8_launch as launch

    return launch.swiglu_product(x, w, weight_R, tiles, sums, formats, a_rows_E1)


@register_inner_op
def fp8_dswiglu_product(
    dy: Quantised,
    w: Quantised,
    h: Kept,
    weight_R: Tensor,
    tiles: RowTiles,
    sums: Sums,
    dtype: torch.dtype,
) -> SwigluGradients:
    """dy: values (P, D). w: values (E, F, D), the transposed weights of down."""
    product_PF = padded_product(dy, w, tiles, sums)
    da_PF = product_PF.to(dtype)
    wide = swiglu_gradients(da_PF, h, weight_R, tiles)
    dh_PN = wide.dh_PN.to(dtype)
    a_PF = wide.a_PF.to(dtype)
    return SwigluGradients(dh_PN, a_PF, wide.dweight_R)


def swiglu_gradients(da_PF: Tensor, h: Kept, weight_R: Tensor, tiles: RowTiles) -> SwigluGradients:
    """In fp32."""
    da_PF = da_PF.float()
    h_PN = dequantise_blocks(h) if isinstance(h, Quantised) else h.float()
    gate_PF, up_PF = h_PN.chunk(2, 1)
    weight_P1 = padded_weights(weight_R, tiles)
    # SwiGLU again, and the gradient of the weight
    sigmoid_PF = gate_PF.sigmoid()
    silu_PF = gate_PF * sigmoid_PF
    a_PF = silu_PF * up_PF
    dots_PF = da_PF * a_PF
    dweight_P1 = dots_PF.sum(1, keepdim=True)
    # gradients of gate and up
    da_PF = da_PF * weight_P1
    rest_PF = 1 - sigmoid_PF
    dsilu_PF = sigmoid_PF + silu_PF * rest_PF
    dgate_PF = da_PF * up_PF * dsilu_PF
    dup_PF = da_PF * silu_PF
    dh_PN = torch.cat((dgate_PF, dup_PF), 1)
    a_PF = a_PF * weight_P1
    dweight_R1 = rows_of_tiles(dweight_P1, tiles, len(weight_R))
    dweight_R = dweight_R1[:, 0]
    return SwigluGradients(dh_PN, a_PF, dweight_R)


@fp8_dswiglu_product.register_fast("gluon")
def fp8_dswiglu_product_gluon(
    dy: Quantised,
    w: Quantised,
    h: Kept,
    weight_R: Tensor,
    tiles: RowTiles,
    sums: Sums,
    dtype: torch.dtype,
) -> SwigluGradients:
    from moefold.kernels.experts import grouped_gemm_fp8_launch as launch

    gradients = launch.dswiglu_product(dy, w, h, weight_R, tiles, sums)
    return SwigluGradients(*gradients)


def padded_weights(weight_R: Tensor, tiles: RowTiles) -> Tensor:
    """(P, 1), zero in padding."""
    index_P = padded_index(tiles)
    weight_fp32_R = weight_R.float()
    weight_and_padding = F.pad(weight_fp32_R, (0, 1))  # the index -1 reads the last
    weight_P = weight_and_padding[index_P.long()]
    return weight_P[:, None]


def quantise_blocks(x_PD: Tensor, rule: ScaleRule) -> Quantised:
    blocks = quantise_rows(x_PD, "block", rule)
    assert blocks is not None, "scales of blocks were asked for"
    return blocks


def quantise_with_scales(x_PD: Tensor, scales_E1: Tensor, tiles: RowTiles, rule: ScaleRule) -> Quantised:
    scales_M1 = scales_of_tiles(scales_E1, tiles)
    scales_P = repeat_for_rows(scales_M1)
    rows = quantise_rows(x_PD, scales_P, rule)
    assert rows is not None, "scales of rows were given"
    return rows


def dequantise_blocks(x: Quantised) -> Tensor:
    values = x.values.float()
    width = values.shape[1]
    scales = x.scales.repeat_interleave(BLOCK, 1)
    return values * scales[:, :width]


# ---- cases

SWIGLU_CASES = {  # name: rows of each expert, width
    "skewed experts, one of them empty": ([3, 0, 129, 70], 256),
    "one expert": ([200], 256),
    "few rows": ([3], 16),
}


def tiles_of_counts(counts: list[int], device: str) -> RowTiles:
    """The tiles of experts with so many rows."""
    counts_E = torch.tensor(counts, device=device)
    ends_E = counts_E.cumsum(0)
    return row_tiles(ends_E, sum(counts))


def swiglu_case(draw: CaseInputs, counts: list[int], width: int, outputs: int):
    tiles = tiles_of_counts(counts, draw.device)
    rows = sum(counts)
    experts = len(counts)
    rule = ScaleRule()
    x_RD = draw.normal(rows, width)
    scale = width**-0.5
    w_END = draw.normal(experts, outputs, width, seed=1, scale=scale)
    x_copies = quantise_tiles(x_RD, tiles, rule, rows="block")
    x = x_copies.rows
    w_copies = quantise_weight(w_END, "block", rule)
    w = w_copies.forward
    weight_R = draw.wide(rows, seed=2).abs()
    return x, w, weight_R, tiles, rule


@fp8_swiglu_product.register_cases
def fp8_swiglu_cases(draw: CaseInputs) -> Cases:
    for name, (counts, width) in SWIGLU_CASES.items():
        outputs = max(width, 128) * 2
        x, w, weight_R, tiles, rule = swiglu_case(draw, counts, width, outputs)
        for fp8, about in ((True, "FP8"), (False, "unquantised")):
            formats = ActivationFormats(rule, fp8, fp8, draw.dtype)
            inputs = (x, w, weight_R, tiles, "block", formats)
            yield KernelCase(f"{name}, {about}", inputs)
        experts = len(counts)
        a_rows_E1 = draw.wide(experts, 1, seed=4).abs().float() / 100
        yield KernelCase(f"{name}, scales of experts", (*inputs, a_rows_E1))


@fp8_dswiglu_product.register_cases
def fp8_dswiglu_cases(draw: CaseInputs) -> Cases:
    for name, (counts, width) in SWIGLU_CASES.items():
        dy, w, weight_R, tiles, rule = swiglu_case(draw, counts, width, 128)
        padded = tiles.padded_rows
        h_PN = draw.normal(padded, 256, seed=3)
        blocks = quantise_blocks(h_PN, rule)
        for h, about in ((h_PN, "its own precision"), (blocks, "FP8")):
            inputs = (dy, w, h, weight_R, tiles, "block", draw.dtype)
            yield KernelCase(f"{name}, h in {about}", inputs)
