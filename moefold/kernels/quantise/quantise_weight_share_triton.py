"""Quantisation of a share of weights in Triton: one program for a block of 128 x 128 values, or what the share holds of
it. Imported only where Triton is.

E experts, N outputs, D inputs, I blocks of outputs, J blocks of inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.quantise.fp8 import BLOCK, ScaleRule
from moefold.kernels.quantise.fp8_triton import magnitude_bits, round_to_fp8
from moefold.kernels.quantise.quantise_weight_share import MatrixPlace
from moefold.kernels.quantise.quantise_weight_triton import ROOM, grid_of_blocks, round_to_bf16
from moefold.kernels.tile_triton import (
    load_as_fp32,
    load_or_zero,
    program_block,
    tile_mask,
    tile_offsets,
    tile_pointers,
    wide_program_id,
)


@triton.jit
def share_offsets(e, n, d, N, D, begin):
    """Where the elements of a block lie in the share, whose first element is number `begin` of the matrices."""
    return e * N * D + tile_offsets(n, d, D) - begin


@triton.jit
def held_elements(at, n, d, N, D, size):
    """Elements of the block that exist and that the share holds."""
    in_share = (at >= 0) & (at < size)
    return in_share & tile_mask(n < N, d < D)


@triton.jit
def load_held(share, at, held, ROUND: constexpr):
    """Values as the model would have them, zeros elsewhere."""
    w = load_as_fp32(share + at, held)
    if ROUND:
        w = round_to_bf16(w)
    return w


@triton.jit
def share_maxima_kernel(
    share, maxima_EIJ, begin, size, first_expert, N, D, ROUND: constexpr, BLOCK: constexpr
):  # fmt: skip
    e = wide_program_id(2) + first_expert
    n = program_block(1, BLOCK).to(tl.int64)
    d = program_block(0, BLOCK).to(tl.int64)
    at = share_offsets(e, n, d, N, D, begin)
    held = held_elements(at, n, d, N, D, size)
    bits = magnitude_bits(load_held(share, at, held, ROUND))
    block = (e * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    tl.store(maxima_EIJ + block, tl.max(tl.max(bits, 1), 0))


@triton.jit
def cast_share_kernel(
    share, values, scales_EIJ, begin, size, first_expert, N, D,
    ROUND: constexpr, LARGEST: constexpr, BLOCK: constexpr,
):  # fmt: skip
    e = wide_program_id(2) + first_expert
    n = program_block(1, BLOCK).to(tl.int64)
    d = program_block(0, BLOCK).to(tl.int64)
    at = share_offsets(e, n, d, N, D, begin)
    held = held_elements(at, n, d, N, D, size)
    w = load_held(share, at, held, ROUND)
    block = (e * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    scale = tl.load(scales_EIJ + block)
    q = round_to_fp8(w, scale, LARGEST, values.dtype.element_ty)
    tl.store(values + at, q, mask=held)


@triton.jit
def transpose_kernel(values_END, values_EDN, N, D, BLOCK: constexpr):
    e = wide_program_id(2)
    n = program_block(1, BLOCK).to(tl.int64)
    d = program_block(0, BLOCK).to(tl.int64)
    matrix = e * N * D
    at = tile_pointers(values_END + matrix, n, d, D)
    q = load_or_zero(at, tile_mask(n < N, d < D))
    at = tile_pointers(values_EDN + matrix, d, n, N)
    tl.store(at, tl.trans(q), mask=tile_mask(d < D, n < N))


def experts_in_share(place: MatrixPlace, begin: int, size: int) -> tuple[int, int]:
    """The first matrix of which the share holds something, and the number of such matrices."""
    _, n, d = place.shape
    first, last = place.within(begin, size)
    if first >= last:
        return 0, 0
    first_expert = first // (n * d)
    return first_expert, triton.cdiv(last, n * d) - first_expert


def launch_share_maxima(share: Tensor, begin: int, place: MatrixPlace, dtype: torch.dtype, maxima_B: Tensor) -> None:
    """Write the maxima of the blocks of this place."""
    first_expert, experts = experts_in_share(place, begin, len(share))
    if not experts:
        return
    _, n, d = place.shape
    _, i, j = place.block_shape
    sizes = (begin - place.start, len(share), first_expert, n, d)
    rounds = dtype == torch.bfloat16
    share_maxima_kernel[(j, i, experts)](share, maxima_B[place.first_block :], *sizes, rounds, BLOCK, **ROOM)


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
    first_expert, experts = experts_in_share(place, begin, len(share))
    if not experts:
        return
    _, n, d = place.shape
    _, i, j = place.block_shape
    sizes = (begin - place.start, len(share), first_expert, n, d)
    scales = scales_B[place.first_block :]
    constants = (dtype == torch.bfloat16, rule.format.largest, BLOCK)
    cast_share_kernel[(j, i, experts)](share, values, scales, *sizes, *constants, **ROOM)


def launch_transpose(values_END: Tensor) -> Tensor:
    experts, n, d = values_END.shape
    values_EDN = values_END.new_empty(experts, d, n)
    source = values_END.view(torch.uint8)
    target = values_EDN.view(torch.uint8)
    transpose_kernel[grid_of_blocks(values_END)](source, target, n, d, BLOCK, **ROOM)
    return values_EDN
