"""Lines times numbers in Triton. Imported only where Triton is."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.tile_triton import load_as_fp32, wide_program_id

SPAN = 2048  # values of a program


@triton.jit
def scale_lines_kernel(x_LN, factor_L, out_LN, N, SPAN: constexpr):
    program = wide_program_id(0)  # of one dim: the second has at most 65,535 programs
    spans = tl.cdiv(N, SPAN)
    line = program // spans
    n = program % spans * SPAN + tl.arange(0, SPAN)
    there = n < N
    first = line * N
    x = load_as_fp32(x_LN + first + n, there)
    scaled = x * tl.load(factor_L + line)
    tl.store(out_LN + first + n, scaled.to(out_LN.dtype.element_ty), mask=there)


def launch_scale_lines(x_LN: Tensor, factor_L: Tensor, dtype: torch.dtype) -> Tensor:
    lines, width = x_LN.shape
    x_LN = x_LN.contiguous()
    out_LN = torch.empty_like(x_LN, dtype=dtype)
    grid = (lines * triton.cdiv(width, SPAN),)
    if x_LN.numel():
        scale_lines_kernel[grid](x_LN, factor_L.contiguous(), out_LN, width, SPAN=SPAN)
    return out_LN
