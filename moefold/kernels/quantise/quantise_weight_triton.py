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

from moefold.kernels.quantise.fp8 import BLOCK, ScaleRule
from moefold.kernels.quantise.fp8_triton import magnitude_bits, magnitude_of_bits, round_to_fp8, scale_from_bits
from moefold.kernels.tile_triton import load_as_fp32, program_block, tile_mask, tile_pointers, wide_program_id

ROOM = {"num_warps": 16, "maxnreg": 64}  # two programs share a multiprocessor: one loads while the other stores


class WeightMaxima(NamedTuple):
    """Largest magnitudes: of each output's inputs, (E, N), and of each input's outputs, (E, D)."""

    outputs_EN: Tensor
    inputs_ED: Tensor


@triton.jit
def round_to_bf16(x):
    """The nearest bf16 of fp32, as fp32 (split_fp32.py)."""
    bits = x.to(tl.int32, bitcast=True) + 0x8000
    upper = bits & -65536
    return upper.to(tl.float32, bitcast=True)


@triton.jit
def load_block(w_END, e, n, d, N, D):
    """A block of expert e in fp32, zeros outside the matrix."""
    at = tile_pointers(w_END + e * N * D, n, d, D)
    return load_as_fp32(at, tile_mask(n < N, d < D))


@triton.jit
def store_both_layouts(forward_q, transposed_q, values_END, values_EDN, e, n, d, N, D):
    real_n = n < N
    real_d = d < D
    at = tile_pointers(values_END + e * N * D, n, d, D)
    tl.store(at, forward_q, mask=tile_mask(real_n, real_d))
    at = tile_pointers(values_EDN + e * N * D, d, n, N)
    tl.store(at, tl.trans(transposed_q), mask=tile_mask(real_d, real_n))


@triton.jit
def store_quantised_block(
    w, values_END, values_EDN, scales_EIJ, scales_EJI, e, n, d, N, D, LARGEST: constexpr, POWER_OF_TWO: constexpr
):  # fmt: skip
    """This program's block with one scale: both layouts hold the same bytes."""
    bits = magnitude_bits(w)
    by_outputs = tl.max(tl.max(bits, 1), 0)
    by_inputs = tl.max(tl.max(bits, 0), 0)  # the same number, found in another order
    scale = scale_from_bits(by_outputs, LARGEST, POWER_OF_TWO)
    transposed_scale = scale_from_bits(by_inputs, LARGEST, POWER_OF_TWO)
    forward_q = round_to_fp8(w, scale, LARGEST, values_END.dtype.element_ty)
    transposed_q = round_to_fp8(w, transposed_scale, LARGEST, values_END.dtype.element_ty)
    store_both_layouts(forward_q, transposed_q, values_END, values_EDN, e, n, d, N, D)
    j = tl.program_id(0)
    i = tl.program_id(1)
    inputs = tl.num_programs(0)
    outputs = tl.num_programs(1)
    block = e * inputs * outputs
    tl.store(scales_EIJ + block + i * inputs + j, scale)
    tl.store(scales_EJI + block + j * outputs + i, scale)


@triton.jit
def quantise_blocks_kernel(
    w_END, values_END, values_EDN, scales_EIJ, scales_EJI, N, D,
    LARGEST: constexpr, POWER_OF_TWO: constexpr, BLOCK: constexpr,
):  # fmt: skip
    e = wide_program_id(2)
    n = program_block(1, BLOCK).to(tl.int64)
    d = program_block(0, BLOCK).to(tl.int64)
    w = load_block(w_END, e, n, d, N, D)
    store_quantised_block(
        w, values_END, values_EDN, scales_EIJ, scales_EJI, e, n, d, N, D, LARGEST, POWER_OF_TWO
    )  # fmt: skip


@triton.jit
def weight_maxima_kernel(w_END, outputs_JEN, inputs_IED, N, D, BLOCK: constexpr):
    """Largest magnitudes within the block of each output and of each input."""
    e = wide_program_id(2)
    n = program_block(1, BLOCK).to(tl.int64)
    d = program_block(0, BLOCK).to(tl.int64)
    bits = magnitude_bits(load_block(w_END, e, n, d, N, D))
    experts = tl.num_programs(2)
    line = tl.program_id(0) * experts + e
    tl.store(outputs_JEN + line * N + n, magnitude_of_bits(tl.max(bits, 1)), mask=n < N)
    line = tl.program_id(1) * experts + e
    tl.store(inputs_IED + line * D + d, magnitude_of_bits(tl.max(bits, 0)), mask=d < D)


@triton.jit
def quantise_with_scales_kernel(
    w_END, values_END, values_EDN, scales_EN, scales_ED, N, D, LARGEST: constexpr, BLOCK: constexpr
):  # fmt: skip
    """Scales given: one for each output, of the first layout, and one for each input, of the second."""
    e = wide_program_id(2)
    n = program_block(1, BLOCK).to(tl.int64)
    d = program_block(0, BLOCK).to(tl.int64)
    w = load_block(w_END, e, n, d, N, D)
    of_n = tl.load(scales_EN + e * N + n, mask=n < N, other=1.0)
    of_d = tl.load(scales_ED + e * D + d, mask=d < D, other=1.0)
    forward_q = round_to_fp8(w, of_n[:, None], LARGEST, values_END.dtype.element_ty)
    transposed_q = round_to_fp8(w, of_d[None, :], LARGEST, values_END.dtype.element_ty)
    store_both_layouts(forward_q, transposed_q, values_END, values_EDN, e, n, d, N, D)


def grid_of_blocks(w_END: Tensor) -> tuple[int, int, int]:
    experts, n, d = w_END.shape
    return triton.cdiv(d, BLOCK), triton.cdiv(n, BLOCK), experts


def empty_layouts(w_END: Tensor, rule: ScaleRule) -> tuple[Tensor, Tensor]:
    experts, n, d = w_END.shape
    values_END = w_END.new_empty(experts, n, d, dtype=rule.format.dtype)
    return values_END, values_END.new_empty(experts, d, n)


def empty_scales(w_END: Tensor) -> tuple[Tensor, Tensor]:
    """Of blocks, (E, I, J) and (E, J, I)."""
    j, i, experts = grid_of_blocks(w_END)
    scales_EIJ = w_END.new_empty(experts, i, j, dtype=torch.float32)
    return scales_EIJ, scales_EIJ.new_empty(experts, j, i)


def empty_maxima(w_END: Tensor) -> tuple[Tensor, Tensor]:
    """Of each block's outputs, (J, E, N), and inputs, (I, E, D)."""
    experts, n, d = w_END.shape
    j, i, _ = grid_of_blocks(w_END)
    outputs_JEN = w_END.new_empty(j, experts, n, dtype=torch.float32)
    return outputs_JEN, outputs_JEN.new_empty(i, experts, d)


def launch_quantise_blocks(w_END: Tensor, rule: ScaleRule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values (E, N, D) and (E, D, N), scales (E, I, J) and (E, J, I)."""
    _, n, d = w_END.shape
    outputs = (*empty_layouts(w_END, rule), *empty_scales(w_END))
    constants = (rule.format.largest, rule.power_of_two, BLOCK)
    quantise_blocks_kernel[grid_of_blocks(w_END)](w_END.contiguous(), *outputs, n, d, *constants, **ROOM)
    return outputs


def launch_weight_maxima(w_END: Tensor) -> WeightMaxima:
    _, n, d = w_END.shape
    outputs_JEN, inputs_IED = empty_maxima(w_END)
    weight_maxima_kernel[grid_of_blocks(w_END)](w_END.contiguous(), outputs_JEN, inputs_IED, n, d, BLOCK, **ROOM)
    return WeightMaxima(outputs_JEN.amax(0), inputs_IED.amax(0))


def launch_quantise_with_scales(
    w_END: Tensor, rule: ScaleRule, scales_EN: Tensor, scales_ED: Tensor
) -> tuple[Tensor, Tensor]:
    """Values (E, N, D) with a scale for each output, and (E, D, N) with one for each input."""
    _, n, d = w_END.shape
    values = empty_layouts(w_END, rule)
    inputs = (w_END.contiguous(), *values, scales_EN.contiguous(), scales_ED.contiguous(), n, d)
    quantise_with_scales_kernel[grid_of_blocks(w_END)](*inputs, rule.format.largest, BLOCK, **ROOM)
    return values
