"""Saturated values: how many of the values that scales were not made from lie beyond the range of FP8 and are clamped.

A value saturates if its scaled magnitude is nearer to the number that would follow the format's largest
(`Fp8Format.saturates`); a value that merely rounds down to the largest number does not.

P padded rows in M tiles (row_tiles.py), D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.kernels.quantise.fp8 import BLOCK, Fp8Format, ScaleRule, scale_from_amax
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
        count += count_beyond(x_PD, rows_P[:, None], format)
    if columns_MD is not None:
        x_MBD = x_PD.unflatten(0, (-1, BLOCK))
        count += count_beyond(x_MBD, columns_MD[:, None], format)
    return count


def count_beyond(x: Tensor, scale: Tensor, format: Fp8Format) -> Tensor:
    scaled = x.float() * (1.0 / scale.float())
    return (scaled.abs() > format.saturates).sum()


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
            rows_RD = draw.normal(len(index_R), width)
            maxima = tile_maxima(rows_RD, tiles)
            rows_P = scale_from_amax(maxima.rows_P, rule)
            columns_MD = scale_from_amax(maxima.columns_MD, rule)
            several = {"all in range": 1.0, "some beyond": 0.5}
            for range_name, factor in several.items():
                scales = (rows_P * factor, columns_MD * factor)
                yield KernelCase(
                    f"{name} of width {width}, {range_name}", (rows_RD, tiles, maxima, rule.format, *scales)
                )
            rows_alone = (rows_RD, tiles, maxima, rule.format, rows_P * 0.5, None)
            yield KernelCase(f"{name} of width {width}, rows alone", rows_alone)
            columns_alone = (rows_RD, tiles, maxima, rule.format, None, columns_MD * 0.5)
            yield KernelCase(f"{name} of width {width}, columns alone", columns_alone)
