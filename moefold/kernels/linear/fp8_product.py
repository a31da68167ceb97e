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
def fp8_product(a: Quantised, b: Quantised, tiles: RowTiles, rows: int, sums: Sums, dtype: torch.dtype) -> Tensor:
    """y_RN for R = `rows`. a: values (P, K), scales (P, K / 128) or (P, 1). b: values (E, N, K), scales (E, N / 128,
    K / 128), (E, 1, 1) or (E, N, 1). Rows behind the last end are zero."""
    y_PN = padded_product(a, b, tiles, sums)
    y_RN = rows_of_tiles(y_PN, tiles, rows)
    return y_RN.to(dtype, copy=True)  # y_RN is a part of more rows, which an fp32 result would keep


@fp8_product.register_fast("gluon")
def fp8_product_gluon(
    a: Quantised, b: Quantised, tiles: RowTiles, rows: int, sums: Sums, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """Rows behind the last end are undefined."""
    from moefold.kernels.experts import grouped_gemm_fp8_launch as launch

    return launch.rows_by_weights(a, b, tiles, rows, sums)


def padded_product(a: Quantised, b: Quantised, tiles: RowTiles, sums: Sums) -> Tensor:
    """y_PN in fp32, with the rows in their padded places."""
    expert_M = tiles.tiles_M4[:, 0].long()
    outputs = b.values.shape[1]
    a_MBK = a.values.unflatten(0, (-1, BLOCK))
    scale_a_MBG = a.scales.unflatten(0, (-1, BLOCK))
    scale_b_MNG = row_scales(b.scales, outputs)[expert_M]
    scale_b_MGN = scale_b_MNG.mT
    y_MBN = torch.zeros(*a_MBK.shape[:2], outputs, device=a.scales.device)
    for g, block in enumerate(contraction_blocks(a_MBK.shape[2])):
        b_ENK = b.values[:, :, block].double()
        partial = (a_MBK[..., block].double() @ b_ENK[expert_M].mT).float()
        if sums == "block":
            scaled = partial * scale_a_MBG[..., g, None]
            y_MBN = multiply_add(scaled, scale_b_MGN[:, g, None], y_MBN)
        else:
            y_MBN += partial
    if sums != "block":
        y_MBN = (y_MBN * scale_a_MBG) * scale_b_MGN
    return y_MBN.flatten(0, 1)


@register_in_place_op
def fp8_weight_product(
    dy: Quantised, x: Quantised, tiles: RowTiles, sums: Sums, out_END: Tensor, add: bool = False
) -> None:
    """dy: values (M, N, 128), scales (M, N, 1). x: values (M, D, 128), scales (M, D, 1). With `sums` other than "block"
    the scales of an expert's tiles are equal. An expert without rows has the gradient zero. `add`: to `out_END`."""
    expert_M = tiles.tiles_M4[:, 0].long()
    used_M = tiles.tiles_M4[:, 2] > 0
    total_END = torch.zeros(out_END.shape, device=out_END.device)
    for m in range(len(expert_M)):
        partial = (dy.values[m].double() @ x.values[m].double().T).float()
        expert = expert_M[m : m + 1]
        before = total_END[expert][0]
        if sums == "block":
            scaled = partial * dy.scales[m]
            after = multiply_add(scaled, x.scales[m, :, 0], before)
        else:
            after = before + partial
        total_END[expert] = torch.where(used_M[m], after, before)
    if sums != "block":
        scale_EN = expert_scales(dy.scales, tiles)
        scale_ED = expert_scales(x.scales, tiles)
        total_END = (total_END * scale_EN[..., None]) * scale_ED[:, None]
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
    last = tiles.count * BLOCK
    ends_E = torch.cat((tiles.first_tile_E[1:] * BLOCK, last))
    write_gradient(grouped_gemm_weight(dy_PN, x_PD, ends_E), out_END, add)


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
    firsts = range(0, size, BLOCK)
    return [slice(first, min(first + BLOCK, size)) for first in firsts]


def row_scales(scales_EHG: Tensor, outputs: int) -> Tensor:
    """Scales of blocks of 128 outputs, or of all outputs, as scales of each output."""
    blocks = scales_EHG.shape[1]
    if blocks == outputs:
        return scales_EHG
    covered = max(BLOCK, -(-outputs // blocks))
    return scales_EHG.repeat_interleave(covered, 1)[:, :outputs]


def expert_scales(scales_MD1: Tensor, tiles: RowTiles) -> Tensor:
    """The scales of each expert, which all of its tiles have; 1 for an expert without rows."""
    last_tile = len(scales_MD1) - 1
    first_tile_E = tiles.first_tile_E.clamp(max=last_tile).long()
    zero = tiles.ends_E.new_zeros(1)
    rows_E = tiles.ends_E.diff(prepend=zero)
    return torch.where(rows_E[:, None] > 0, scales_MD1[first_tile_E, :, 0], 1.0)


def multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a b + c of fp32 numbers, rounded once but for the sum's fp64, whose own rounding shows in one of 2^29 sums."""
    exact = a.double() * b.double()
    return (exact + c.double()).float()


def rows_of_tiles(y_PN: Tensor, tiles: RowTiles, rows: int) -> Tensor:
    """The rows without padding, in their own order."""
    index_P = padded_index(tiles)
    y_RN = y_PN.new_zeros(rows + 1, y_PN.shape[1])  # padding goes to the last row, which is dropped
    target_P = torch.where(index_P < 0, rows, index_P).long()
    y_RN[target_P] = y_PN
    return y_RN[:rows]


# ---- cases


PRODUCT_CASES = {  # name: rows of each expert, inputs, outputs
    "one matrix": ([200], 256, 128),
    "skewed experts, one of them empty": ([3, 0, 129, 40], 160, 144),
    "no rows": ([0, 0], 128, 128),
    "narrow": ([20, 0, 5], 16, 32),
    "two tiles": ([130], 16, 16),
    "few rows": ([5], 144, 16),
}


def case_tiles(draw: CaseInputs, counts: list[int]) -> tuple[RowTiles, int]:
    ends_E = torch.tensor(counts, device=draw.device).cumsum(0)
    rows = sum(counts)
    return row_tiles(ends_E, rows), rows


def case_gradient(draw: CaseInputs, experts: int, outputs: int, inputs: int, add: bool) -> Tensor:
    """Memory of a gradient in the weight's own type; a running sum is wide."""
    make = draw.wide if add else draw.normal
    return make(experts, outputs, inputs, seed=2)


@fp8_product.register_cases
def fp8_product_cases(draw: CaseInputs) -> Cases:
    rule = ScaleRule()
    for name, (counts, inputs, outputs) in PRODUCT_CASES.items():
        tiles, rows = case_tiles(draw, counts)
        x_RD = draw.normal(max(rows, 1), inputs)
        w_END = draw.normal(len(counts), outputs, inputs, seed=1)
        x = quantise_tiles(x_RD, tiles, rule, rows="block").rows
        w = quantise_weight(w_END, "block", rule)
        yield KernelCase(f"{name}, scales of blocks", (x, w.forward, tiles, rows, "block", draw.dtype))
        ones_P = torch.ones(tiles.padded_rows, device=draw.device)
        x = quantise_tiles(x_RD, tiles, rule, rows=ones_P).rows
        w = quantise_weight(w_END, "channel", rule)
        yield KernelCase(f"{name}, scales of channels", (x, w.forward, tiles, rows, "promoted", draw.dtype))


@fp8_weight_product.register_cases
def fp8_weight_product_cases(draw: CaseInputs) -> Cases:
    rule = ScaleRule()
    for name, (counts, inputs, outputs) in PRODUCT_CASES.items():
        tiles, rows = case_tiles(draw, counts)
        x_RD = draw.normal(max(rows, 1), inputs)
        dy_RN = draw.normal(max(rows, 1), outputs, seed=1)
        x = quantise_tiles(x_RD, tiles, rule, columns="block").columns
        dy = quantise_tiles(dy_RN, tiles, rule, columns="block").columns
        for add in (False, True):
            out_END = case_gradient(draw, len(counts), outputs, inputs, add)
            yield KernelCase(f"{name}{', added' if add else ''}", (dy, x, tiles, "block", out_END, add))
        ones_MN = torch.ones(len(tiles.tiles_M4), outputs, device=draw.device)
        ones_MD = torch.ones(len(tiles.tiles_M4), inputs, device=draw.device)
        x = quantise_tiles(x_RD, tiles, rule, columns=ones_MD / 64).columns
        dy = quantise_tiles(dy_RN, tiles, rule, columns=ones_MN / 32).columns
        out_END = case_gradient(draw, len(counts), outputs, inputs, add=False)
        yield KernelCase(f"{name}, scales of channels", (dy, x, tiles, "promoted", out_END))


@tile_weight_product.register_cases
def tile_weight_product_cases(draw: CaseInputs) -> Cases:
    for name, (counts, inputs, outputs) in PRODUCT_CASES.items():
        tiles, rows = case_tiles(draw, counts)
        x_PD = pad_to_tiles(draw.normal(max(rows, 1), inputs), tiles)
        dy_PN = pad_to_tiles(draw.normal(max(rows, 1), outputs, seed=1), tiles)
        for add in (False, True):
            out_END = case_gradient(draw, len(counts), outputs, inputs, add)
            yield KernelCase(f"{name}{', added' if add else ''}", (dy_PN, x_PD, tiles, out_END, add))
