"""MXFP8 of whole operands and back, as ops: what mxfp8.py says of blocks, in one read and one write on a GPU.

Lines of a matrix are quantised along the last dim, whose size is a multiple of 32; squares of 32 x 32 need lines in a
multiple of 32 too. Dequantised values are exact: E4M3 has 4 digits of the 8 of bf16, and a power of two changes none; a
scale below 2^-124 would take the smallest of them beneath bf16's range.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.config.precision_recipes import MX_BLOCK
from moefold.kernels.quantise.fp8 import Quantised
from moefold.kernels.quantise.mxfp8 import ScaleRounding, dequantise_mxfp8, quantise_mxfp8, quantise_mxfp8_squares
from moefold.kernels.quantise.row_blocks import places_of_case, rows_to_blocks
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_inner_op


@register_inner_op
def quantise_mx(
    x: Tensor, rounding: ScaleRounding = "up", squares: bool = False, source_P: Tensor | None = None
) -> Quantised:
    """(M, N) or (A, M, N) in any strides. Scales: (..., M, N / 32), or (..., M / 32, N / 32) of squares. `source_P`: x
    are rows (R, D), taken from these places in blocks of 32, which are quantised transposed: (B, D, 32); -1: zeros."""
    if source_P is not None:
        x = rows_to_blocks(x, source_P, MX_BLOCK)
    if squares:
        return quantise_mxfp8_squares(x, rounding)
    return quantise_mxfp8(x, rounding)


@quantise_mx.register_fast("triton")
def quantise_mx_triton(
    x: Tensor, rounding: ScaleRounding = "up", squares: bool = False, source_P: Tensor | None = None
) -> Quantised:
    """Rows are gathered where they are read."""
    from moefold.kernels.quantise.mx_blocks_triton import launch_quantise_mx

    return launch_quantise_mx(x, rounding, squares, source_P)


@register_inner_op
def dequantise_mx(
    values: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    transposed: bool = False,
) -> Tensor:
    """What bytes stand for, in fp32 or bf16. `transposed`: the result of a fast implementation lies in memory such that
    its transpose has no gaps."""
    quantised = Quantised(values, scales)
    return dequantise_mxfp8(quantised).to(dtype)


@dequantise_mx.register_fast("triton")
def dequantise_mx_triton(
    values: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    transposed: bool = False,
) -> Tensor:
    from moefold.kernels.quantise.mx_blocks_triton import launch_dequantise_mx

    return launch_dequantise_mx(values, scales, dtype, transposed)


CASE_SHAPES = {
    "rows": (37, 96),
    "blocks of rows": (3, 40, MX_BLOCK),
    "matrices": (2, 64, 160),
    "no rows": (0, 64),
}


@quantise_mx.register_cases
def quantise_mx_cases(draw: CaseInputs) -> Cases:
    for name, shape in CASE_SHAPES.items():
        x = draw.normal(*shape)
        yield KernelCase(f"{name}, rounded up", (x, "up"))
        yield KernelCase(f"{name}, rounded down", (x, "down"))
    matrices = draw.normal(2, 64, 160)
    yield KernelCase("squares", (matrices, "up", True))
    yield KernelCase("squares of the transpose", (matrices.mT, "up", True))
    rows = draw.normal(37, 40)
    yield KernelCase("rows in blocks", (rows, "up", False, places_of_case(rows, MX_BLOCK)))


@dequantise_mx.register_cases
def dequantise_mx_cases(draw: CaseInputs) -> Cases:
    for name, shape in CASE_SHAPES.items():
        x = draw.normal(*shape)
        quantised = quantise_mx(x)
        yield KernelCase(name, (*quantised, torch.float32))
    matrices = draw.normal(2, 64, 160)
    squares = quantise_mx(matrices, "up", True)
    yield KernelCase("squares in bf16", (*squares, torch.bfloat16))
    yield KernelCase("squares, transposed", (*squares, torch.float32, True))
