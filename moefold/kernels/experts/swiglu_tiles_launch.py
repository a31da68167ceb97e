"""The launches of SwiGLU's gradient in tiles. Imported only where Triton is.

P padded rows in M tiles, R rows, F inner width (a multiple of 128), N = 2F.
"""

# pyright: reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
from torch import Tensor

from moefold.kernels.experts.delayed_swiglu_hopper import quantise_delayed_gradient_kernel
from moefold.kernels.experts.grouped_gemm_fp8_launch import values_and_scales
from moefold.kernels.experts.swiglu_tiles_hopper import quantise_gradient_kernel
from moefold.kernels.quantise.delayed_tiles import DelayedScales, DelayedTiles
from moefold.kernels.quantise.fp8 import BLOCK, Quantised, ScaleRule
from moefold.kernels.quantise.quantise_tiles import QuantisedTiles
from moefold.kernels.quantise.row_tiles import RowTiles

WARPS = 8  # as the layout of a chunk asks
REGISTERS = 128  # two programs share a processor
CHUNKS = 4  # of 32 columns
ROUNDS = 4  # of 32 rows


ForWeights = Quantised | Tensor  # a copy along columns, or the values as they are


def launch_quantise_gradient(
    da_RF: Tensor,
    h: Quantised | Tensor,
    weight_R: Tensor,
    tiles: RowTiles,
    dh_rule: ScaleRule,
    a_rule: ScaleRule,
    fp8_wgrad: bool,
) -> tuple[Quantised, ForWeights, ForWeights, Tensor]:
    """dh along rows; dh and a along columns, or as they are; the gradient of the weights."""
    rows, f = da_RF.shape
    width = 2 * f
    tiles_M4 = tiles.tiles_M4
    tile_count = len(tiles_M4)
    padded = tiles.padded_rows
    blocks = f // BLOCK
    # what the kernel writes
    dh_format = dh_rule.format
    values_PN = da_RF.new_empty(padded, width, dtype=dh_format.dtype)
    scales_BP = empty_fp32(da_RF, 2 * blocks, padded)
    dh = empty_copy(da_RF, tiles, width, dh_rule, fp8_wgrad)
    a = empty_copy(da_RF, tiles, f, a_rule, fp8_wgrad)
    dots_BR = empty_fp32(da_RF, blocks, rows)
    # arguments
    kept = (h, None)
    if isinstance(h, Quantised):
        h_scales_BP = h.scales.T.contiguous()
        kept = (h.values, h_scales_BP)
    inputs = (da_RF, *kept, weight_R, tiles_M4)
    dh_tensors = values_and_scales(dh)
    a_tensors = values_and_scales(a)
    outputs = (values_PN, scales_BP, *dh_tensors, *a_tensors, dots_BR)
    sizes = (tile_count, f, rows, CHUNKS)
    a_largest = a_rule.format.largest
    constants = (dh_format.largest, a_largest, dh_rule.power_of_two)
    launch = quantise_gradient_kernel[blocks, tile_count]
    launch(*inputs, *outputs, *sizes, *constants, num_warps=WARPS, maxnreg=REGISTERS)
    by_row = Quantised(values_PN, scales_BP.T)
    return by_row, dh, a, dots_BR.sum(0)


def launch_delayed_gradient(
    da_RF: Tensor,
    h: Quantised | Tensor,
    weight_R: Tensor,
    tiles: RowTiles,
    dh_rule: ScaleRule,
    dh_scales: DelayedScales,
    a_rule: ScaleRule,
    a_scales: DelayedScales,
) -> tuple[DelayedTiles, DelayedTiles, Tensor]:
    """dh along rows and along columns, a along columns, the gradient of the weights."""
    rows, f = da_RF.shape
    width = 2 * f
    tiles_M4 = tiles.tiles_M4
    tile_count = len(tiles_M4)
    padded = tiles.padded_rows
    blocks = f // BLOCK
    # what the kernel writes
    values_PN = da_RF.new_empty(padded, width, dtype=dh_rule.format.dtype)
    scales_P = empty_fp32(da_RF, padded)
    dh = empty_delayed(da_RF, tiles, width, dh_rule)
    a = empty_delayed(da_RF, tiles, f, a_rule)
    dots_BR = empty_fp32(da_RF, blocks, rows)
    # arguments
    h_values, h_scales = values_and_scales(h)
    h_scales_BP = None if h_scales is None else h_scales.T.contiguous()
    scale_tables = [table.contiguous() for table in (*dh_scales, *a_scales)]
    inputs = (da_RF, h_values, h_scales_BP, weight_R, tiles_M4, *scale_tables)
    outputs = (values_PN, scales_P, *dh, *a, dots_BR)
    channels = [table.shape[1] for table in (dh_scales.columns_EC, a_scales.columns_EC)]
    sizes = (tile_count, rows, ROUNDS)
    constants = (f, *channels, dh_rule.format.saturates, a_rule.format.saturates)
    launch = quantise_delayed_gradient_kernel[blocks, tile_count]
    launch(*inputs, *outputs, *sizes, *constants, num_warps=WARPS, maxnreg=REGISTERS)
    by_row = Quantised(values_PN, scales_P[:, None])
    dh_tiles = delayed_tiles(by_row, *dh)
    a_tiles = delayed_tiles(None, *a)
    return dh_tiles, a_tiles, dots_BR.sum(0)


def empty_delayed(da_RF: Tensor, tiles: RowTiles, width: int, rule: ScaleRule) -> tuple[Tensor, ...]:
    """Room for values along columns, their scales and largest magnitudes, and a count of saturated values."""
    tile_count = len(tiles.tiles_M4)
    values = da_RF.new_empty(tile_count, width, BLOCK, dtype=rule.format.dtype)
    scales = empty_fp32(da_RF, tile_count, width)
    maxima = empty_fp32(da_RF, tile_count, width)
    count = torch.zeros(1, dtype=torch.int64, device=da_RF.device)
    return values, scales, maxima, count


def delayed_tiles(
    by_row: Quantised | None, values: Tensor, scales: Tensor, maxima: Tensor, count: Tensor
) -> DelayedTiles:
    by_column = Quantised(values, scales[..., None])
    copies = QuantisedTiles(by_row, by_column)
    return DelayedTiles(copies, maxima, count)


def empty_fp32(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def empty_copy(da_RF: Tensor, tiles: RowTiles, width: int, rule: ScaleRule, fp8_wgrad: bool) -> ForWeights:
    """Room for what a weight gradient reads: values along columns and scales, or values as they are."""
    if not fp8_wgrad:
        return da_RF.new_empty(tiles.padded_rows, width)
    tile_count = len(tiles.tiles_M4)
    dtype = rule.format.dtype
    values = da_RF.new_empty(tile_count, width, BLOCK, dtype=dtype)
    scales = empty_fp32(da_RF, tile_count, width, 1)
    return Quantised(values, scales)
