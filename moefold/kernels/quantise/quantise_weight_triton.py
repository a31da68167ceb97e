"""Quantisation of weights in Triton. Imported only where Triton is.

One program takes 128 x 128 values: it reads them once and writes both layouts. Values are cast apart for each layout,
with scales that the compiler cannot know to be equal: where one cast is both stored in fours and split into bytes for
the transposed layout, ptxas 12.8 reads the split bytes before they are made.

E experts, N outputs, D inputs, I blocks of 128 outputs, J blocks of 128 inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.quantise.fp8 import BLOCK, Layouts, ScaleRule
from moefold.kernels.quantise.fp8_triton import (
    load_scales,
    magnitude_bits,
    magnitude_of_bits,
    round_to_fp8,
    scale_from_bits,
)
from moefold.kernels.tile_triton import load_as_fp32, program_block, tile_mask, tile_pointers, wide_program_id

ROOM = {"num_warps": 16, "maxnreg": 64}  # two programs share a multiprocessor: one loads while the other stores


class WeightMaxima(NamedTuple):
    """Largest magnitudes: of each output's inputs, (E, N), and of each input's outputs, (E, D)."""

    outputs_EN: Tensor
    inputs_ED: Tensor


@triton.jit
def round_to_bf16(x):
    """The nearest bf16 of fp32, as fp32 (split_fp32.py)."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = bits + 0x8000
    upper = rounded & -65536
    return upper.to(tl.float32, bitcast=True)


@triton.jit
def wide_block(AXIS: constexpr, SIZE: constexpr):
    """The SIZE numbers of this program along an axis of the grid, in 64 bits."""
    return program_block(AXIS, SIZE).to(tl.int64)


@triton.jit
def load_block(w_END, N, D, BLOCK: constexpr):
    """This program's block in fp32, zeros outside the matrix."""
    e = wide_program_id(2)
    n = wide_block(1, BLOCK)
    d = wide_block(0, BLOCK)
    w_ND = w_END + e * N * D
    at = tile_pointers(w_ND, n, d, D)
    inside = tile_mask(n < N, d < D)
    return load_as_fp32(at, inside)


@triton.jit
def store_both_layouts(forward_q, transposed_q, values_END, values_EDN, N, D, BLOCK: constexpr):
    """The bytes of this program's block."""
    matrix = wide_program_id(2) * N * D
    n = wide_block(1, BLOCK)
    d = wide_block(0, BLOCK)
    real_n = n < N
    real_d = d < D
    # (E, N, D)
    at = tile_pointers(values_END + matrix, n, d, D)
    inside = tile_mask(real_n, real_d)
    tl.store(at, forward_q, mask=inside)
    # (E, D, N)
    at = tile_pointers(values_EDN + matrix, d, n, N)
    by_input = tl.trans(transposed_q)
    inside = tile_mask(real_d, real_n)
    tl.store(at, by_input, mask=inside)


@triton.jit
def store_quantised_block(
    w,
    values_END,
    values_EDN,
    scales_EIJ,
    scales_EJI,
    N,
    D,
    LARGEST: constexpr,
    POWER_OF_TWO: constexpr,
    BLOCK: constexpr,
):
    """This program's block with one scale: both layouts hold the same bytes."""
    # largest magnitude: the same number, found in two orders
    bits = magnitude_bits(w)
    of_outputs = tl.max(bits, 1)
    by_outputs = tl.max(of_outputs, 0)
    of_inputs = tl.max(bits, 0)
    by_inputs = tl.max(of_inputs, 0)
    # bytes
    scale = scale_from_bits(by_outputs, LARGEST, POWER_OF_TWO)
    transposed_scale = scale_from_bits(by_inputs, LARGEST, POWER_OF_TWO)
    FORMAT: constexpr = values_END.dtype.element_ty
    forward_q = round_to_fp8(w, scale, LARGEST, FORMAT)
    transposed_q = round_to_fp8(w, transposed_scale, LARGEST, FORMAT)
    store_both_layouts(forward_q, transposed_q, values_END, values_EDN, N, D, BLOCK)
    # the scale in both layouts
    e = wide_program_id(2)
    j = tl.program_id(0)
    i = tl.program_id(1)
    inputs = tl.num_programs(0)
    outputs = tl.num_programs(1)
    block = e * inputs * outputs
    at = scales_EIJ + block + i * inputs + j
    tl.store(at, scale)
    at = scales_EJI + block + j * outputs + i
    tl.store(at, scale)


@triton.jit
def quantise_blocks_kernel(
    w_END,
    values_END,
    values_EDN,
    scales_EIJ,
    scales_EJI,
    N,
    D,
    LARGEST: constexpr,
    POWER_OF_TWO: constexpr,
    BLOCK: constexpr,
):
    w = load_block(w_END, N, D, BLOCK)
    store_quantised_block(w, values_END, values_EDN, scales_EIJ, scales_EJI, N, D, LARGEST, POWER_OF_TWO, BLOCK)


@triton.jit
def weight_maxima_kernel(w_END, outputs_JEN, inputs_IED, N, D, BLOCK: constexpr):
    """Largest magnitudes within the block of each output and of each input."""
    e = wide_program_id(2)
    n = wide_block(1, BLOCK)
    d = wide_block(0, BLOCK)
    w = load_block(w_END, N, D, BLOCK)
    bits = magnitude_bits(w)
    experts = tl.num_programs(2)
    # of outputs
    line = tl.program_id(0) * experts + e
    at = outputs_JEN + line * N + n
    largest = tl.max(bits, 1)
    magnitude = magnitude_of_bits(largest)
    tl.store(at, magnitude, mask=n < N)
    # of inputs
    line = tl.program_id(1) * experts + e
    at = inputs_IED + line * D + d
    largest = tl.max(bits, 0)
    magnitude = magnitude_of_bits(largest)
    tl.store(at, magnitude, mask=d < D)


@triton.jit
def quantise_with_scales_kernel(
    w_END, values_END, values_EDN, scales_EN, scales_ED, N, D, LARGEST: constexpr, BLOCK: constexpr
):
    """Scales given: one for each output, of the first layout, and one for each input, of the second."""
    e = wide_program_id(2)
    n = wide_block(1, BLOCK)
    d = wide_block(0, BLOCK)
    w = load_block(w_END, N, D, BLOCK)
    # scales
    at = scales_EN + e * N + n
    of_n = load_scales(at, n < N)
    at = scales_ED + e * D + d
    of_d = load_scales(at, d < D)
    # bytes
    FORMAT: constexpr = values_END.dtype.element_ty
    forward_q = round_to_fp8(w, of_n[:, None], LARGEST, FORMAT)
    transposed_q = round_to_fp8(w, of_d[None, :], LARGEST, FORMAT)
    store_both_layouts(forward_q, transposed_q, values_END, values_EDN, N, D, BLOCK)


def grid_of_blocks(w_END: Tensor) -> tuple[int, int, int]:
    experts, n, d = w_END.shape
    j = triton.cdiv(d, BLOCK)
    i = triton.cdiv(n, BLOCK)
    return j, i, experts


def empty_layouts(w_END: Tensor, rule: ScaleRule) -> Layouts:
    experts, n, d = w_END.shape
    values_END = w_END.new_empty(w_END.shape, dtype=rule.format.dtype)
    values_EDN = values_END.new_empty(experts, d, n)
    return values_END, values_EDN


def empty_scales(w_END: Tensor) -> Layouts:
    """Of blocks, (E, I, J) and (E, J, I)."""
    j, i, experts = grid_of_blocks(w_END)
    scales_EIJ = w_END.new_empty(experts, i, j, dtype=torch.float32)
    scales_EJI = scales_EIJ.new_empty(experts, j, i)
    return scales_EIJ, scales_EJI


def empty_maxima(w_END: Tensor) -> tuple[Tensor, Tensor]:
    """Of each block's outputs, (J, E, N), and inputs, (I, E, D)."""
    experts, n, d = w_END.shape
    j, i, _ = grid_of_blocks(w_END)
    outputs_JEN = w_END.new_empty(j, experts, n, dtype=torch.float32)
    inputs_IED = outputs_JEN.new_empty(i, experts, d)
    return outputs_JEN, inputs_IED


def launch_quantise_blocks(w_END: Tensor, rule: ScaleRule) -> tuple[Layouts, Layouts]:
    """Values (E, N, D) and (E, D, N), scales (E, I, J) and (E, J, I)."""
    _, n, d = w_END.shape
    w_END = w_END.contiguous()
    values = empty_layouts(w_END, rule)
    scales = empty_scales(w_END)
    constants = (rule.format.largest, rule.power_of_two, BLOCK)
    launch = quantise_blocks_kernel[grid_of_blocks(w_END)]
    launch(w_END, *values, *scales, n, d, *constants, **ROOM)
    return values, scales


def launch_weight_maxima(w_END: Tensor) -> WeightMaxima:
    _, n, d = w_END.shape
    w_END = w_END.contiguous()
    outputs_JEN, inputs_IED = empty_maxima(w_END)
    launch = weight_maxima_kernel[grid_of_blocks(w_END)]
    launch(w_END, outputs_JEN, inputs_IED, n, d, BLOCK, **ROOM)
    outputs_EN = outputs_JEN.amax(0)
    inputs_ED = inputs_IED.amax(0)
    return WeightMaxima(outputs_EN, inputs_ED)


def launch_quantise_with_scales(w_END: Tensor, rule: ScaleRule, scales: Layouts) -> Layouts:
    """Values (E, N, D) with a scale for each output, (E, N), and (E, D, N) with one for each input, (E, D)."""
    _, n, d = w_END.shape
    w_END = w_END.contiguous()
    scales_EN = scales[0].contiguous()
    scales_ED = scales[1].contiguous()
    values = empty_layouts(w_END, rule)
    launch = quantise_with_scales_kernel[grid_of_blocks(w_END)]
    tensors = (w_END, *values, scales_EN, scales_ED)
    launch(*tensors, n, d, rule.format.largest, BLOCK, **ROOM)
    return values
