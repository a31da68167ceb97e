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
from moefold.kernels.quantise.fp8 import BLOCK, Quantised, ScaleRule
from moefold.kernels.quantise.quantise_tiles import quantise_tiles
from moefold.kernels.quantise.quantise_weight import quantise_weight
from moefold.kernels.quantise.row_tiles import RowTiles, pad_to_tiles, padded_index, row_tiles
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
    expert_M = tiles.tiles_M4[:, 0].long()
    outputs = b.values.shape[1]
    a_MBK = a.values.unflatten(0, (-1, BLOCK))
    scale_a_MBG = a.scales.unflatten(0, (-1, BLOCK))
    scale_ENG = row_scales(b.scales, outputs)
    scale_b_MGN = scale_ENG[expert_M].mT
    m, rows, k = a_MBK.shape
    y_MBN = torch.zeros(m, rows, outputs, device=a.scales.device)
    # blocks of the contraction, in their order
    for g, block in enumerate(contraction_blocks(k)):
        b_ENK = b.values[:, :, block].double()
        b_MNK = b_ENK[expert_M]
        partial = rounded_product(a_MBK[..., block], b_MNK)
        if sums == "block":
            scaled = partial * scale_a_MBG[..., g, None]
            scale_MN = scale_b_MGN[:, g]
            y_MBN = multiply_add(scaled, scale_MN[:, None], y_MBN)
        else:
            y_MBN += partial
    if sums != "block":
        y_MBN = y_MBN * scale_a_MBG
        y_MBN = y_MBN * scale_b_MGN
    return y_MBN.flatten(0, 1)


def rounded_product(a: Tensor, b: Tensor) -> Tensor:
    """a b^T of FP8 numbers: exact sums, rounded to fp32."""
    exact = a.double() @ b.double().mT
    return exact.float()


@register_in_place_op
def fp8_weight_product(
    dy: Quantised, x: Quantised, tiles: RowTiles, sums: Sums, out_END: Tensor, add: bool = False
) -> None:
    """dy: values (M, N, 128), scales (M, N, 1). x: values (M, D, 128), scales (M, D, 1). With `sums` other than "block"
    the scales of an expert's tiles are equal. An expert without rows has the gradient zero. `add`: to `out_END`."""
    expert_M = tiles.tiles_M4[:, 0].long()
    used_M = tiles.tiles_M4[:, 2] > 0
    total_END = torch.zeros(out_END.shape, device=out_END.device)
    # tiles in their order, each added to its expert's sum
    for m in range(len(expert_M)):
        partial_ND = rounded_product(dy.values[m], x.values[m])
        expert = expert_M[m : m + 1]
        before_ND = total_END[expert][0]
        if sums == "block":
            scaled_ND = partial_ND * dy.scales[m]
            scale_D = x.scales[m, :, 0]
            after_ND = multiply_add(scaled_ND, scale_D, before_ND)
        else:
            after_ND = before_ND + partial_ND
        total_END[expert] = torch.where(used_M[m], after_ND, before_ND)
    if sums != "block":
        scale_EN = expert_scales(dy.scales, tiles)
        scale_ED = expert_scales(x.scales, tiles)
        total_END = total_END * scale_EN[..., None]
        total_END = total_END * scale_ED[:, None]
    write_gradient(total_END, out_END, add)


@fp8_weight_product.register_fast("gluon")
def fp8_weight_product_gluon(
    dy: Quantised, x: Quantised, tiles: RowTiles, sums: Sums, out_END: Tensor, add: bool = False
) -> None:
    from moefold.kernels.experts import grouped_gemm_fp8_launch as launch

    launch.columns_by_columns(dy, x, tiles, sums, out_END, add)


@register_in_place_op
def tile_weight_product(dy_PN: Tensor, x_PD: Tensor, tiles: RowTiles, out_END: Tensor, add: bool = False) -> None:
    """The same gradient from rows in tiles in their own precision. Padding is zero."""
    next_tile_E = torch.cat((tiles.first_tile_E[1:], tiles.count))
    ends_E = next_tile_E * BLOCK
    gradient_END = grouped_gemm_weight(dy_PN, x_PD, ends_E)
    write_gradient(gradient_END, out_END, add)


@tile_weight_product.register_fast("gluon")
def tile_weight_product_gluon(
    dy_PN: Tensor, x_PD: Tensor, tiles: RowTiles, out_END: Tensor, add: bool = False
) -> None:  # fmt: skip
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
    covered = max(BLOCK, -(-outputs // blocks))
    scales_of_outputs = scales_EHG.repeat_interleave(covered, 1)
    return scales_of_outputs[:, :outputs]


def expert_scales(scales_MD1: Tensor, tiles: RowTiles) -> Tensor:
    """The scales of each expert, which all of its tiles have; 1 for an expert without rows."""
    last_tile = len(scales_MD1) - 1
    first_tile_E = tiles.first_tile_E.clamp(max=last_tile).long()
    zero = tiles.ends_E.new_zeros(1)
    rows_E = tiles.ends_E.diff(prepend=zero)
    has_rows_E = rows_E > 0
    scales_ED = scales_MD1[first_tile_E, :, 0]
    return torch.where(has_rows_E[:, None], scales_ED, 1.0)


def multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a b + c of fp32 numbers, rounded once but for the sum's fp64, whose own rounding shows in one of 2^29 sums."""
    exact = a.double() * b.double()
    total = exact + c.double()
    return total.float()


def rows_of_tiles(y_PN: Tensor, tiles: RowTiles, rows: int) -> Tensor:
    """The rows without padding, in their own order."""
    index_P = padded_index(tiles)
    y_RN = y_PN.new_zeros(rows + 1, y_PN.shape[1])  # padding goes to the last row, which is dropped
    target_P = torch.where(index_P < 0, rows, index_P).long()
    y_RN[target_P] = y_PN
    return y_RN[:rows]


# ---- cases


class ProductCase(NamedTuple):
    """Sizes of a case: rows of each expert, inputs, outputs."""

    name: str
    counts: list[int]
    inputs: int
    outputs: int


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
    counts_E = torch.tensor(case.counts, device=draw.device)
    ends_E = counts_E.cumsum(0)
    rows = sum(case.counts)
    some_rows = max(rows, 1)
    x_RD = draw.normal(some_rows, case.inputs)
    dy_RN = draw.normal(some_rows, case.outputs, seed=1)
    return CaseRows(row_tiles(ends_E, rows), rows, x_RD, dy_RN)


def case_gradient(draw: CaseInputs, case: ProductCase, add: bool) -> Tensor:
    """Memory of a gradient in the weight's own type; a running sum is wide."""
    make = draw.wide if add else draw.normal
    return make(len(case.counts), case.outputs, case.inputs, seed=2)


@fp8_product.register_cases
def fp8_product_cases(draw: CaseInputs) -> Cases:
    rule = ScaleRule()
    for case in PRODUCT_CASES:
        tiles, rows, x_RD, _ = case_rows(draw, case)
        w_END = draw.normal(len(case.counts), case.outputs, case.inputs, seed=1)
        # scales of blocks
        x = quantise_tiles(x_RD, tiles, rule, rows="block")
        w = quantise_weight(w_END, "block", rule)
        inputs = (x.rows, w.forward, tiles, rows, "block", draw.dtype)
        yield KernelCase(f"{case.name}, scales of blocks", inputs)
        # scales of channels
        ones_P = torch.ones(tiles.padded_rows, device=draw.device)
        x = quantise_tiles(x_RD, tiles, rule, rows=ones_P)
        w = quantise_weight(w_END, "channel", rule)
        inputs = (x.rows, w.forward, tiles, rows, "promoted", draw.dtype)
        yield KernelCase(f"{case.name}, scales of channels", inputs)


@fp8_weight_product.register_cases
def fp8_weight_product_cases(draw: CaseInputs) -> Cases:
    rule = ScaleRule()
    for case in PRODUCT_CASES:
        tiles, _, x_RD, dy_RN = case_rows(draw, case)
        # scales of blocks
        x = quantise_tiles(x_RD, tiles, rule, columns="block").columns
        dy = quantise_tiles(dy_RN, tiles, rule, columns="block").columns
        for add, name in ((False, case.name), (True, f"{case.name}, added")):
            out_END = case_gradient(draw, case, add)
            yield KernelCase(name, (dy, x, tiles, "block", out_END, add))
        # scales of channels
        tile_count = len(tiles.tiles_M4)
        ones_MN = torch.ones(tile_count, case.outputs, device=draw.device)
        ones_MD = torch.ones(tile_count, case.inputs, device=draw.device)
        x = quantise_tiles(x_RD, tiles, rule, columns=ones_MD / 64).columns
        dy = quantise_tiles(dy_RN, tiles, rule, columns=ones_MN / 32).columns
        out_END = case_gradient(draw, case, add=False)
        inputs = (dy, x, tiles, "promoted", out_END)
        yield KernelCase(f"{case.name}, scales of channels", inputs)


@tile_weight_product.register_cases
def tile_weight_product_cases(draw: CaseInputs) -> Cases:
    for case in PRODUCT_CASES:
        tiles, _, x_RD, dy_RN = case_rows(draw, case)
        x_PD = pad_to_tiles(x_RD, tiles)
        dy_PN = pad_to_tiles(dy_RN, tiles)
        for add, name in ((False, case.name), (True, f"{case.name}, added")):
            out_END = case_gradient(draw, case, add)
            yield KernelCase(name, (dy_PN, x_PD, tiles, out_END, add))
