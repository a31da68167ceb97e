"""Saturated values: how many of the values that scales were not made from lie beyond the range of FP8 and are clamped.

A value saturates if its scaled magnitude is nearer to the number that would follow the format's largest
(`Fp8Format.saturates`); a value that merely rounds down to the largest number does not.

P padded rows in M tiles (row_tiles.py), D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.kernels.quantise.fp8 import Fp8Format, ScaleRule, in_blocks, scale_from_amax
from moefold.kernels.quantise.quantise_tiles import CASE_WIDTHS, TileMaxima, tile_maxima
from moefold.kernels.quantise.row_tiles import RowTiles, cases_of_tiles, pad_to_tiles
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_inner_op


@register_inner_op
def count_saturated(
    source_ND: Tensor,
    tiles: RowTiles,
    maxima: TileMaxima,
    format: Fp8Format,
    rows_P: Tensor | None = None,
    columns_MD: Tensor | None = None,
    index_R: Tensor | None = None,
) -> Tensor:
    """(1,) int64: those of the copy along rows and of the copy along columns, whichever has scales. `maxima` are those
    of the same rows: what they show to be in range need not be read."""
    x_PD = pad_to_tiles(source_ND, tiles, index_R)
    count = torch.zeros(1, dtype=torch.int64, device=x_PD.device)
    if rows_P is not None:
        scales_P1 = rows_P[:, None]
        count += count_beyond(x_PD, scales_P1, format)
    if columns_MD is not None:
        x_MBD = in_blocks(x_PD, 0)
        scales_M1D = columns_MD[:, None]
        count += count_beyond(x_MBD, scales_M1D, format)
    return count


def count_beyond(x: Tensor, scale: Tensor, format: Fp8Format) -> Tensor:
    inverse = 1.0 / scale.float()
    scaled = x.float() * inverse
    is_beyond = scaled.abs() > format.saturates
    return is_beyond.sum()


@count_saturated.register_fast("triton")
def count_saturated_triton(
    source_ND: Tensor,
    tiles: RowTiles,
    maxima: TileMaxima,
    format: Fp8Format,
    rows_P: Tensor | None = None,
    columns_MD: Tensor | None = None,
    index_R: Tensor | None = None,
) -> Tensor:
    from moefold.kernels.quantise.count_saturated_triton import launch_count_saturated

    return launch_count_saturated(source_ND, tiles, maxima, format, rows_P, columns_MD, index_R)


@count_saturated.register_cases
def count_saturated_cases(draw: CaseInputs) -> Cases:
    rule = ScaleRule()
    for name, tiles, index_R in cases_of_tiles(draw.device):
        for width in CASE_WIDTHS:
            about = f"{name} of width {width}"
            rows = len(index_R)
            rows_RD = draw.normal(rows, width)
            maxima = tile_maxima(rows_RD, tiles)
            inputs = (rows_RD, tiles, maxima, rule.format)
            # scales in range, and scales that are too small
            rows_P = scale_from_amax(maxima.rows_P, rule)
            columns_MD = scale_from_amax(maxima.columns_MD, rule)
            small_P = rows_P * 0.5
            small_MD = columns_MD * 0.5
            yield KernelCase(f"{about}, all in range", (*inputs, rows_P, columns_MD))
            yield KernelCase(f"{about}, some beyond", (*inputs, small_P, small_MD))
            yield KernelCase(f"{about}, rows alone", (*inputs, small_P, None))
            yield KernelCase(f"{about}, columns alone", (*inputs, None, small_MD))
