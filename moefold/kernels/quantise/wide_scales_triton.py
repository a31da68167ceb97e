"""Scales from largest magnitudes in Triton: of each, and of each expert's tiles. Imported only where Triton is."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.quantise.fp8 import ScaleRule
from moefold.kernels.quantise.fp8_triton import magnitude_bits, scale_from_bits
from moefold.kernels.quantise.row_tiles import RowTiles
from moefold.kernels.tile_triton import load_or_zero, program_block

MAXIMA = 1024  # of one program
COLUMNS = 256  # of one program


@triton.jit
def scales_kernel(maxima, scales, count, LARGEST: constexpr, POWER_OF_TWO: constexpr, SIZE: constexpr):
    i = program_block(0, SIZE)
    there = i < count
    most = load_or_zero(maxima + i, there)
    bits = magnitude_bits(most)
    scale = scale_from_bits(bits, LARGEST, POWER_OF_TWO)
    tl.store(scales + i, scale, mask=there)


@triton.jit
def expert_scales_kernel(
    maxima_MD, scales_MD, first_tile_E, M, D, E, LARGEST: constexpr, POWER_OF_TWO: constexpr, SIZE: constexpr
):
    """The scale of the largest of an expert's tiles, at each of them. The last expert has the tiles not in use, too."""
    e = tl.program_id(0)
    c = program_block(1, SIZE)
    real_c = c < D
    # its tiles
    at = first_tile_E + e
    first = tl.load(at)
    last = tl.load(at + 1, mask=e + 1 < E, other=M)
    # the largest of them
    bits = tl.zeros([SIZE], tl.int32)
    for m in range(first, last):
        wide_m = m.to(tl.int64)
        line = maxima_MD + wide_m * D
        most = load_or_zero(line + c, real_c)
        bits_of_tile = magnitude_bits(most)
        bits = tl.maximum(bits, bits_of_tile)
    # its scale
    scale = scale_from_bits(bits, LARGEST, POWER_OF_TWO)
    for m in range(first, last):
        wide_m = m.to(tl.int64)
        line = scales_MD + wide_m * D
        tl.store(line + c, scale, mask=real_c)


def scales_of_maxima(maxima: Tensor, rule: ScaleRule) -> Tensor:
    maxima = maxima.contiguous()
    scales = torch.empty_like(maxima)
    count = maxima.numel()
    programs = triton.cdiv(count, MAXIMA)
    constants = (rule.format.largest, rule.power_of_two, MAXIMA)
    launch = scales_kernel[(programs,)]
    launch(maxima, scales, count, *constants)
    return scales


def scales_of_experts(maxima_MD: Tensor, tiles: RowTiles, rule: ScaleRule) -> Tensor:
    """For each tile the scales of its expert's columns. Tiles not in use hold the maximum zero."""
    m, d = maxima_MD.shape
    experts = len(tiles.ends_E)
    maxima_MD = maxima_MD.contiguous()
    scales_MD = torch.empty_like(maxima_MD)
    column_programs = triton.cdiv(d, COLUMNS)
    sizes = (m, d, experts)
    constants = (rule.format.largest, rule.power_of_two, COLUMNS)
    launch = expert_scales_kernel[experts, column_programs]
    launch(maxima_MD, scales_MD, tiles.first_tile_E, *sizes, *constants)
    return scales_MD
