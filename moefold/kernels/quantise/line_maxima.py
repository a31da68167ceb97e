"""Largest magnitudes of lines: one number for each row of a matrix, NaN for a row that holds one."""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.kernels.quantise.fp8 import largest_magnitude
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_inner_op


@register_inner_op
def line_maxima(x_LN: Tensor) -> Tensor:
    """(L,) fp32."""
    if x_LN.shape[1] == 0:
        return x_LN.new_zeros(len(x_LN), dtype=torch.float32)
    return largest_magnitude(x_LN, 1)


@line_maxima.register_fast("triton")
def line_maxima_triton(x_LN: Tensor) -> Tensor:
    from moefold.kernels.quantise.line_maxima_triton import launch_line_maxima

    return launch_line_maxima(x_LN)


@line_maxima.register_cases
def line_maxima_cases(draw: CaseInputs) -> Cases:
    for lines, width in ((5, 48), (3, 3000), (0, 16)):
        x_LN = draw.normal(lines, width)
        yield KernelCase(f"{lines} lines of {width}", (x_LN,))
