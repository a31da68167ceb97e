"""Largest magnitudes of lines in Triton. Imported only where Triton is.

One program takes one line, 4,096 values at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.quantise.fp8_triton import magnitude_bits, magnitude_of_bits
from moefold.kernels.tile_triton import load_as_fp32, numbers_from, wide_program_id

SPAN = 4096


@triton.jit
def line_maxima_kernel(x_LN, maxima_L, N, stride, SPAN: constexpr):
    line = wide_program_id(0)
    row = x_LN + line * stride
    largest = tl.zeros((SPAN,), tl.int32)
    for first in range(0, N, SPAN):
        n = numbers_from(first, SPAN)
        x = load_as_fp32(row + n, n < N)
        largest = tl.maximum(largest, magnitude_bits(x))
    most = tl.max(largest, 0)
    tl.store(maxima_L + line, magnitude_of_bits(most))


def launch_line_maxima(x_LN: Tensor) -> Tensor:
    lines, width = x_LN.shape
    if x_LN.stride(1) != 1:
        x_LN = x_LN.contiguous()
    maxima_L = x_LN.new_empty(lines, dtype=torch.float32)
    if lines:
        span = min(SPAN, triton.next_power_of_2(max(width, 16)))
        line_maxima_kernel[lines,](x_LN, maxima_L, width, x_LN.stride(0), SPAN=span)
    return maxima_L
