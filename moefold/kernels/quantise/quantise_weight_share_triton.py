"""Quantisation of a share of weights in Triton: one program for a block of 128 x 128 values, or what the share holds of
it. Imported only where Triton is.

E experts, N outputs, D inputs, I blocks of outputs, J blocks of inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.quantise.fp8 import BLOCK, ScaleRule
from moefold.kernels.quantise.fp8_triton import magnitude_bits, round_to_fp8
from moefold.kernels.quantise.matrix_places import MatrixPlace
from moefold.kernels.quantise.quantise_weight_triton import ROOM, grid_of_blocks, round_to_bf16, wide_block
from moefold.kernels.tile_triton import (
    load_as_fp32,
    load_or_zero,
    tile_mask,
    tile_offsets,
    tile_pointers,
    wide_program_id,
)


@triton.jit
def held_elements(e, begin, size, N, D, BLOCK: constexpr):
    """Where the elements of this program's block lie in the share, whose first element is number `begin` of the
    matrices, and which of them exist and are held."""
    n = wide_block(1, BLOCK)
    d = wide_block(0, BLOCK)
    matrix = e * N * D
    at = matrix + tile_offsets(n, d, D) - begin
    is_behind_begin = at >= 0
    in_share = is_behind_begin & (at < size)
    exists = tile_mask(n < N, d < D)
    return at, in_share & exists


@triton.jit
def block_number(e):
    """The number of this program's block among the blocks (E, I, J)."""
    line = e * tl.num_programs(1) + tl.program_id(1)
    return line * tl.num_programs(0) + tl.program_id(0)


@triton.jit
def load_held(share, at, held, ROUND: constexpr):
    """Values as the model would have them, zeros elsewhere."""
    w = load_as_fp32(share + at, held)
    if ROUND:
        w = round_to_bf16(w)
    return w


@triton.jit
def share_maxima_kernel(share, maxima_EIJ, begin, size, first_expert, N, D, ROUND: constexpr, BLOCK: constexpr):
    e = wide_program_id(2) + first_expert
    at, held = held_elements(e, begin, size, N, D, BLOCK)
    w = load_held(share, at, held, ROUND)
    bits = magnitude_bits(w)
    at = maxima_EIJ + block_number(e)
    of_outputs = tl.max(bits, 1)
    largest = tl.max(of_outputs, 0)
    tl.store(at, largest)


@triton.jit
def cast_share_kernel(
    share, values, scales_EIJ, begin, size, first_expert, N, D, ROUND: constexpr, LARGEST: constexpr, BLOCK: constexpr
):
    e = wide_program_id(2) + first_expert
    at, held = held_elements(e, begin, size, N, D, BLOCK)
    w = load_held(share, at, held, ROUND)
    block = block_number(e)
    scale = tl.load(scales_EIJ + block)
    FORMAT: constexpr = values.dtype.element_ty
    q = round_to_fp8(w, scale, LARGEST, FORMAT)
    tl.store(values + at, q, mask=held)


@triton.jit
def transpose_kernel(values_END, values_EDN, N, D, BLOCK: constexpr):
    e = wide_program_id(2)
    n = wide_block(1, BLOCK)
    d = wide_block(0, BLOCK)
    matrix = e * N * D
    at = tile_pointers(values_END + matrix, n, d, D)
    inside = tile_mask(n < N, d < D)
    q = load_or_zero(at, inside)
    at = tile_pointers(values_EDN + matrix, d, n, N)
    transposed = tl.trans(q)
    inside = tile_mask(d < D, n < N)
    tl.store(at, transposed, mask=inside)


class ShareLaunch(NamedTuple):
    """The grid of a kernel over what a share holds of matrices, and the sizes that the kernel takes: the share's first
    element, counted from the matrices' start, the share's size, the first expert, N, D."""

    grid: tuple[int, int, int]
    sizes: tuple[int, ...]


def launch_over_share(share: Tensor, begin: int, place: MatrixPlace) -> ShareLaunch | None:
    """None: the share holds nothing of these matrices."""
    size = len(share)
    first, last = place.within(begin, size)
    if first >= last:
        return None
    _, n, d = place.shape
    _, i, j = place.block_shape
    # matrices of which the share holds something
    matrix = n * d
    first_expert = first // matrix
    experts = triton.cdiv(last, matrix) - first_expert
    begin_of_share = begin - place.start
    sizes = (begin_of_share, size, first_expert, n, d)
    grid = (j, i, experts)
    return ShareLaunch(grid, sizes)


def launch_share_maxima(share: Tensor, begin: int, place: MatrixPlace, dtype: torch.dtype, maxima_B: Tensor) -> None:
    """Write the maxima of the blocks of this place."""
    over_share = launch_over_share(share, begin, place)
    if over_share is None:
        return
    maxima = maxima_B[place.first_block :]
    rounds = dtype == torch.bfloat16
    launch = share_maxima_kernel[over_share.grid]
    launch(share, maxima, *over_share.sizes, rounds, BLOCK, **ROOM)


def launch_cast_share(
    share: Tensor,
    begin: int,
    place: MatrixPlace,
    scales_B: Tensor,
    rule: ScaleRule,
    dtype: torch.dtype,
    values: Tensor,
) -> None:
    """Write the bytes of this place's elements."""
    over_share = launch_over_share(share, begin, place)
    if over_share is None:
        return
    scales = scales_B[place.first_block :]
    rounds = dtype == torch.bfloat16
    constants = (rounds, rule.format.largest, BLOCK)
    launch = cast_share_kernel[over_share.grid]
    launch(share, values, scales, *over_share.sizes, *constants, **ROOM)


def launch_transpose(values_END: Tensor) -> Tensor:
    experts, n, d = values_END.shape
    values_EDN = values_END.new_empty(experts, d, n)
    source = values_END.view(torch.uint8)
    target = values_EDN.view(torch.uint8)
    launch = transpose_kernel[grid_of_blocks(values_END)]
    launch(source, target, n, d, BLOCK, **ROOM)
    return values_EDN
