"""Rows that are quantised already, moved to their places in tiles: bytes and scales of tokens to those of expert rows.

N tokens, P padded rows in M tiles (row_tiles.py), D width, B scales of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.kernels.quantise.fp8 import E4M3, Quantised
from moefold.kernels.quantise.row_tiles import CASE_SOURCES, RowTiles, cases_of_tiles, pad_to_tiles
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_inner_op


@register_inner_op
def gather_tiles(values_ND: Tensor, scales_NB: Tensor, tiles: RowTiles, index_R: Tensor | None = None) -> Quantised:
    """Values (P, D), zeros in padding; scales (P, B), 1 in padding, with the rows contiguous in memory."""
    bytes_ND = values_ND.view(torch.uint8)
    bytes_PD = pad_to_tiles(bytes_ND, tiles, index_R)
    values_PD = bytes_PD.view(values_ND.dtype)
    scales_PB = pad_to_tiles(scales_NB, tiles, index_R, padding=1.0)
    scales_BP = scales_PB.T.contiguous()
    scales_PB = scales_BP.T
    return Quantised(values_PD, scales_PB)


@gather_tiles.register_fast("triton")
def gather_tiles_triton(
    values_ND: Tensor, scales_NB: Tensor, tiles: RowTiles, index_R: Tensor | None = None
) -> Quantised:
    """Tiles that are not in use are not written: theirs are undefined."""
    from moefold.kernels.quantise.gather_tiles_triton import launch_gather_tiles

    return launch_gather_tiles(values_ND, scales_NB, tiles, index_R)


GATHER_WIDTHS = [  # and the number of their scales
    (256, 2),
    (72, 1),
]


@gather_tiles.register_cases
def gather_tiles_cases(draw: CaseInputs) -> Cases:
    for name, tiles, index_R in cases_of_tiles(draw.device):
        for width, blocks in GATHER_WIDTHS:
            tokens_ND = draw.normal(CASE_SOURCES, width)
            values_ND = tokens_ND.to(E4M3.dtype)
            scales_NB = draw.wide(CASE_SOURCES, blocks, seed=1)
            inputs = (values_ND, scales_NB, tiles, index_R)
            yield KernelCase(f"{name} of width {width}", inputs)
