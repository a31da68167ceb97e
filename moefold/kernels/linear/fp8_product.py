"""Products of FP8 operands, of rows in tiles (kernels/quantise/row_tiles.py). Dense layers are one expert.

    fp8_product          y_RN[r] = a_PK[r] b_ENK[expert of r]^T      forward and data gradient
    fp8_weight_product   dw_END[e] = sum over the expert's tiles of dy_MNB x_MDB^T

Both operands are read along the contraction. Its blocks of 128 values have exact sums, rounded to fp32 once:
`partial`. Blocks are added in their order:

    sums "block"       y = fma(partial * scale_a, scale_b, y)          a scale for each block
    sums "promoted"    y = y + partial, and (y * scale_a) * scale_b    scales of the finished sum
    sums "fast"        as "promoted" here; a fast kernel may leave all of y to the tensor core

R rows, P padded rows in M tiles, K contraction, E experts, N outputs, D inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moefold.config.precision_recipes import Sums
from moefold.kernels.experts.grouped_gemm import grouped_gemm_weight
from moefold.kernels.quantise.fp8 import BLOCK, Quantised, ScaleRule, blocks_for, in_blocks
from moefold.kernels.quantise.quantise_tiles import quantise_tiles
from moefold.kernels.quantise.quantise_weight import quantise_weight
from moefold.kernels.quantise.row_tiles import (
    RowTiles,
    ends_of_experts,
    pad_to_tiles,
    padded_index,
    row_tiles,
    rows_of_experts,
)
from moefold.kernels.quantise.wide_scales import expert_of_tiles
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_in_place_op, register_inner_op


@register_inner_op
def fp8_product(
    a: Quantised,
    b: Quantised,
    tiles: RowTiles,
    rows: int,
    sums: Sums,
    dtype: torch.dtype,
) -> Tensor:
    """y_RN for R = `rows`. a: values (P, K), scales (P, K / 128) or (P, 1). b: values (E, N, K), scales (E, N / 128,
    K / 128), (E, 1, 1) or (E, N, 1). Rows behind the last end are zero."""
    y_PN = padded_product(a, b, tiles, sums)
    y_RN = rows_of_tiles(y_PN, tiles, rows)
    return y_RN.to(dtype, copy=True)  # y_RN is a part of more rows, which an fp32 result would keep


@fp8_product.register_fast("gluon")
def fp8_product_gluon(
    a: Quantised,
    b: Quantised,
    tiles: RowTiles,
    rows: int,
    sums: Sums,
    dtype: torch.dtype,
) -> Tensor:
    """Rows behind the last end are undefined."""
    from moefold.kernels.experts import grouped_gemm_fp8_launch as launch

    return launch.rows_by_weights(a, b, tiles, rows, sums)


def padded_product(a: Quantised, b: Quantised, tiles: RowTiles, sums: Sums) -> Tensor:
    """y_PN in fp32, with the rows in their padded places."""
    expert_M = expert_of_tiles(tiles)
    outputs = b.values.shape[1]
    a_MBK = in_blocks(a.values, 0)
    scale_a_MBG = in_blocks(a.scales, 0)
    scale_ENG = row_scales(b.scales, outputs)
    scale_b_MGN = scale_ENG[expert_M].mT
    m, rows, k = a_MBK.shape
    device = a.scales.device
    y_MBN = torch.zeros(m, rows, outputs, device=device)
    # blocks of the contraction, in their order
    for g, block in enumerate(contraction_blocks(k)):
        a_block = a_MBK[..., block]
        b_block = b.values[..., block]
        wide_block = b_block.double()
        partial = rounded_product(a_block, wide_block[expert_M])
        if sums == "block":
            scale_MB = scale_a_MBG[..., g]
            scaled = partial * scale_MB[..., None]
            scale_MN = scale_b_MGN[:, g]
            scale_M1N = scale_MN[:, None]
            y_MBN = multiply_add(scaled, scale_M1N, y_MBN)
        else:
            y_MBN += partial
    if sums != "block":
        y_MBN = y_MBN * scale_a_MBG
        y_MBN = y_MBN * scale_b_MGN
    return y_MBN.flatten(0, 1)


def rounded_product(a: Tensor, b: Tensor) -> Tensor:
    """a b^T of FP8 numbers: exact sums, rounded to fp32."""
    wide_a = a.double()
    wide_b = b.double()
    exact = wide_a @ wide_b.mT
    return exact.float()


@register_in_place_op
def fp8_weight_product(
    dy: Quantised,
    x: Quantised,
    tiles: RowTiles,
    sums: Sums,
    out_END: Tensor,
    add: bool = False,
) -> None:
    """dy: values (M, N, 128), scales (M, N, 1). x: values (M, D, 128), scales (M, D, 1). With `sums` other than "block"
    the scales of an expert's tiles are equal. An expert without rows has the gradient zero. `add`: to `out_END`."""
    tiles_M4 = tiles.tiles_M4
    expert_M = expert_of_tiles(tiles)
    real_M = tiles_M4[:, 2]
    used_M = real_M > 0
    shape = out_END.shape
    total_END = torch.zeros(shape, device=out_END.device)
    # tiles in their order, each added to its expert's sum
    for m in range(len(expert_M)):
        dy_NB = dy.values[m]
        x_DB = x.values[m]
        partial_ND = rounded_product(dy_NB, x_DB)
        expert = expert_M[m : m + 1]
        before_ND = total_END[expert][0]
        if sums == "block":
            scaled_ND = partial_ND * dy.scales[m]
            scale_D = x.scales[m, :, 0]
            after_ND = multiply_add(scaled_ND, scale_D, before_ND)
        else:
            after_ND = before_ND + partial_ND
        is_used = used_M[m]
        total_END[expert] = torch.where(is_used, after_ND, before_ND)
    if sums != "block":
        scale_EN = expert_scales(dy.scales, tiles)
        scale_ED = expert_scales(x.scales, tiles)
        total_END = total_END * scale_EN[..., None]
        total_END = total_END * scale_ED[:, None]
    write_gradient(total_END, out_END, add)


@fp8_weight_product.register_fast("gluon")
def fp8_weight_product_gluon(
    dy: Quantised,
    x: Quantised,
    tiles: RowTiles,
    sums: Sums,
    out_END: Tensor,
    add: bool = False,
) -> None:
    from moefold.kernels.experts import grouped_gemm_fp8_launch as launch

    launch.columns_by_columns(dy, x, tiles, sums, out_END, add)


@register_in_place_op
def tile_weight_product(dy_PN: Tensor, x_PD: Tensor, tiles: RowTiles, out_END: Tensor, add: bool = False) -> None:
    """The same gradient from rows in tiles in their own precision. Padding is zero."""
    others_E = tiles.first_tile_E[1:]
    next_tile_E = torch.cat((others_E, tiles.count))
    ends_E = next_tile_E * BLOCK
    gradient_END = grouped_gemm_weight(dy_PN, x_PD, ends_E)
    write_gradient(gradient_END, out_END, add)


@tile_weight_product.register_fast("gluon")
def tile_weight_product_gluon(
    dy_PN: Tensor,
    x_PD: Tensor,
    tiles: RowTiles,
    out_END: Tensor,
    add: bool = False,
) -> None:
    from moefold.kernels.experts import grouped_gemm_fp8_launch as launch

    launch.tiles_by_tiles(dy_PN, x_PD, tiles, out_END, add)


def write_gradient(gradient: Tensor, out: Tensor, add: bool) -> None:
    if add:
        out.add_(gradient)
    else:
        out.copy_(gradient)


def contraction_blocks(size: int) -> list[slice]:
    """Every block of 128 values; the last block may be cut short."""
    blocks: list[slice] = []
    for first in range(0, size, BLOCK):
        end = min(first + BLOCK, size)
        blocks.append(slice(first, end))
    return blocks


def row_scales(scales_EHG: Tensor, outputs: int) -> Tensor:
    """Scales of blocks of 128 outputs, or of all outputs, as scales of each output."""
    blocks = scales_EHG.shape[1]
    if blocks == outputs:
        return scales_EHG
    even = blocks_for(outputs, blocks)
    covered = max(BLOCK, even)
    scales_of_outputs = scales_EHG.repeat_interleave(covered, 1)
    return scales_of_outputs[:, :outputs]


def expert_scales(scales_MD1: Tensor, tiles: RowTiles) -> Tensor:
    """The scales of each expert, which all of its tiles have; 1 for an expert without rows."""
    last_tile = len(scales_MD1) - 1
    first_tile_E = tiles.first_tile_E.clamp(max=last_tile)
    scales_MD = scales_MD1[..., 0]
    scales_ED = scales_MD[first_tile_E.long()]
    rows_E = rows_of_experts(tiles.ends_E)
    has_rows_E1 = rows_E[:, None] > 0
    return torch.where(has_rows_E1, scales_ED, 1.0)


def multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a b + c of fp32 numbers, rounded once but for the sum's fp64, whose own rounding shows in one of 2^29 sums."""
    wide_a = a.double()
    wide_b = b.double()
    total = wide_a * wide_b + c.double()
    return total.float()


def rows_of_tiles(y_PN: Tensor, tiles: RowTiles, rows: int) -> Tensor:
    """The rows without padding, in their own order."""
    index_P = padded_index(tiles)
    is_padding_P = index_P < 0
    target_P = torch.where(is_padding_P, rows, index_P)
    width = y_PN.shape[1]
    y_RN = y_PN.new_zeros(rows + 1, width)  # padding goes to the last row, which is dropped
    y_RN[target_P.long()] = y_PN
    return y_RN[:rows]


# ---- cases


class ProductCase(NamedTuple):
    """Sizes of a case: rows of each expert, inputs, outputs."""

    name: str
    counts: list[int]
    inputs: int
    outputs: int

    @property
    def weight_shape(self) -> tuple[int, int, int]:
        experts = len(self.counts)
        return experts, self.outputs, self.inputs


PRODUCT_CASES = [
    ProductCase("one matrix", [200], 256, 128),
    ProductCase("skewed experts, one of them empty", [3, 0, 129, 40], 160, 144),
    ProductCase("no rows", [0, 0], 128, 128),
    ProductCase("narrow", [20, 0, 5], 16, 32),
    ProductCase("two tiles", [130], 16, 16),
    ProductCase("few rows", [5], 144, 16),
]


class CaseRows(NamedTuple):
    """Rows of a case in tiles: inputs, output gradients, and their number without padding."""

    tiles: RowTiles
    rows: int
    x_RD: Tensor
    dy_RN: Tensor


def case_rows(draw: CaseInputs, case: ProductCase) -> CaseRows:
    ends_E = ends_of_experts(case.counts, draw.device)
    rows = sum(case.counts)
    tiles = row_tiles(ends_E, rows)
    some_rows = max(rows, 1)
    x_RD = draw.normal(some_rows, case.inputs)
    dy_RN = draw.normal(some_rows, case.outputs, seed=1)
    return CaseRows(tiles, rows, x_RD, dy_RN)


def case_gradient(draw: CaseInputs, case: ProductCase, add: bool) -> Tensor:
    """Memory of a gradient in the weight's own type; a running sum is wide."""
    make = draw.wide if add else draw.normal
    return make(*case.weight_shape, seed=2)


def names_of_ways(case: ProductCase) -> dict[str, bool]:
    """Names of the case, and whether the gradient is added to what is there."""
    return {case.name: False, f"{case.name}, added": True}


@fp8_product.register_cases
def fp8_product_cases(draw: CaseInputs) -> Cases:
    rule = ScaleRule()
    for case in PRODUCT_CASES:
        tiles, rows, x_RD, _ = case_rows(draw, case)
        w_END = draw.normal(*case.weight_shape, seed=1)
        # scales of blocks
        x = quantise_tiles(x_RD, tiles, rule, rows="block")
        w = quantise_weight(w_END, "block", rule)
        operands = (x.rows, w.forward, tiles, rows)
        inputs = (*operands, "block", draw.dtype)
        yield KernelCase(f"{case.name}, scales of blocks", inputs)
        # scales of channels
        padded_rows = tiles.padded_rows
        ones_P = torch.ones(padded_rows, device=draw.device)
        x = quantise_tiles(x_RD, tiles, rule, rows=ones_P)
        w = quantise_weight(w_END, "channel", rule)
        operands = (x.rows, w.forward, tiles, rows)
        inputs = (*operands, "promoted", draw.dtype)
        yield KernelCase(f"{case.name}, scales of channels", inputs)


@fp8_weight_product.register_cases
def fp8_weight_product_cases(draw: CaseInputs) -> Cases:
    rule = ScaleRule()
    for case in PRODUCT_CASES:
        tiles, _, x_RD, dy_RN = case_rows(draw, case)
        # scales of blocks
        x = quantise_tiles(x_RD, tiles, rule, columns="block")
        dy = quantise_tiles(dy_RN, tiles, rule, columns="block")
        operands = (dy.columns, x.columns, tiles)
        ways = names_of_ways(case)
        for name, add in ways.items():
            out_END = case_gradient(draw, case, add)
            inputs = (*operands, "block", out_END, add)
            yield KernelCase(name, inputs)
        # scales of channels
        tile_count = len(tiles.tiles_M4)
        ones_M1 = torch.ones(tile_count, 1, device=draw.device)
        scales_M1 = ones_M1 / 64
        scales_MD = scales_M1.repeat(1, case.inputs)
        scales_M1 = ones_M1 / 32
        scales_MN = scales_M1.repeat(1, case.outputs)
        x = quantise_tiles(x_RD, tiles, rule, columns=scales_MD)
        dy = quantise_tiles(dy_RN, tiles, rule, columns=scales_MN)
        out_END = case_gradient(draw, case, add=False)
        operands = (dy.columns, x.columns, tiles)
        inputs = (*operands, "promoted", out_END)
        yield KernelCase(f"{case.name}, scales of channels", inputs)


@tile_weight_product.register_cases
def tile_weight_product_cases(draw: CaseInputs) -> Cases:
    for case in PRODUCT_CASES:
        tiles, _, x_RD, dy_RN = case_rows(draw, case)
        x_PD = pad_to_tiles(x_RD, tiles)
        dy_PN = pad_to_tiles(dy_RN, tiles)
        ways = names_of_ways(case)
        for name, add in ways.items():
            out_END = case_gradient(draw, case, add)
            inputs = (dy_PN, x_PD, tiles, out_END, add)
            yield KernelCase(name, inputs)
