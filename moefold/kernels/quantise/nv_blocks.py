"""NVFP4 of whole operands and back, as ops: what nvfp4.py says of blocks, in one read and one write on a GPU.

Lines of a matrix are quantised along the last dim, whose size is a multiple of 16; squares of 16 x 16 need lines in a
multiple of 16 too. Back go codes times the scales of their blocks, which are exact in bf16: E2M1 has 2 digits and E4M3
has 4, so that a product has 6 of bf16's 8. The fp32 scale of a matrix is left to the sums of the product.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from moefold.config.precision_recipes import NV_BLOCK
from moefold.kernels.quantise.nvfp4 import Nvfp4, quantise_nvfp4, quantise_nvfp4_squares, unscaled_nvfp4
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_inner_op
from moefold.layout.counter_random import RandomCounters, random_counters


@register_inner_op
def quantise_nv(
    x: Tensor,
    amax: Tensor,
    random: RandomCounters | None = None,
    squares: bool = False,
) -> Nvfp4:
    """(M, N) or (A, M, N) in any strides. `amax`: of the matrix that a line belongs to, (M, 1) or (A, 1, 1). `random`:
    by line and value, or by matrix and the flat place in it; those of four neighbours from a multiple of 4 on follow
    one another from a multiple of 4 on. None rounds to nearest."""
    if squares:
        return quantise_nvfp4_squares(x, amax)
    numbers = None if random is None else random.numbers_of_16_bits().view(x.shape)
    return quantise_nvfp4(x, amax, numbers)


@quantise_nv.register_fast("triton")
def quantise_nv_triton(
    x: Tensor,
    amax: Tensor,
    random: RandomCounters | None = None,
    squares: bool = False,
) -> Nvfp4:
    """Random numbers are drawn where they are used, and never stored."""
    from moefold.kernels.quantise.nv_blocks_triton import launch_quantise_nv

    return launch_quantise_nv(x, amax, random, squares)


@register_inner_op
def round_nv(
    x: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
    random: RandomCounters | None = None,
) -> Tensor:
    """What dequantising gives of lines (M, N) that are quantised, without bytes between: for an operand that one
    emulated product reads at once."""
    packed, scales, _ = quantise_nv(x, amax, random)
    return dequantise_nv(packed, scales, dtype)


@round_nv.register_fast("triton")
def round_nv_triton(
    x: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
    random: RandomCounters | None = None,
) -> Tensor:
    from moefold.kernels.quantise.nv_blocks_triton import launch_round_nv

    return launch_round_nv(x, amax, dtype, random)


@register_inner_op
def dequantise_nv(
    packed: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    transposed: bool = False,
) -> Tensor:
    """Codes times the scales of their blocks, in fp32 or bf16. `transposed`: the result of a fast implementation lies
    in memory such that its transpose has no gaps."""
    quantised = Nvfp4(packed, scales, scales)
    return unscaled_nvfp4(quantised).to(dtype)


@dequantise_nv.register_fast("triton")
def dequantise_nv_triton(
    packed: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    transposed: bool = False,
) -> Tensor:
    from moefold.kernels.quantise.nv_blocks_triton import launch_dequantise_nv

    return launch_dequantise_nv(packed, scales, dtype, transposed)


CASE_SHAPES = {
    "rows": (37, 96),
    "blocks of rows": (3, 40, NV_BLOCK),
    "matrices": (2, 48, 80),
    "no rows": (0, 64),
}


def largest_of_matrices(x: Tensor) -> Tensor:
    """(M, 1) or (A, 1, 1)."""
    if x.dim() == 2:
        return x.new_full((len(x), 1), 3.5)
    return x.abs().amax((1, 2), keepdim=True)


def counters_of_case(x: Tensor) -> RandomCounters:
    count = prod(x.shape[1:])
    numbers = torch.arange(len(x), device=x.device)
    places = torch.arange(count, device=x.device)
    return random_counters(numbers, 7, places)


@quantise_nv.register_cases
def quantise_nv_cases(draw: CaseInputs) -> Cases:
    for name, shape in CASE_SHAPES.items():
        x = draw.normal(*shape)
        amax = largest_of_matrices(x)
        yield KernelCase(f"{name}, to nearest", (x, amax))
        if len(x):
            yield KernelCase(f"{name}, at random", (x, amax, counters_of_case(x)))
    matrices = draw.normal(2, 48, 80)
    amax = largest_of_matrices(matrices)
    yield KernelCase("squares", (matrices, amax, None, True))
    yield KernelCase("squares of the transpose", (matrices.mT, amax, None, True))


@round_nv.register_cases
def round_nv_cases(draw: CaseInputs) -> Cases:
    for lines in (37, 0):
        x = draw.normal(lines, 96)
        amax = largest_of_matrices(x)
        yield KernelCase(f"{lines} rows, to nearest", (x, amax, torch.float32))
        yield KernelCase(f"{lines} rows, at random, in bf16", (x, amax, torch.bfloat16, counters_of_case(x)))


@dequantise_nv.register_cases
def dequantise_nv_cases(draw: CaseInputs) -> Cases:
    for name, shape in CASE_SHAPES.items():
        x = draw.normal(*shape)
        packed, scales, _ = quantise_nv(x, largest_of_matrices(x))
        yield KernelCase(name, (packed, scales, torch.float32))
    matrices = draw.normal(2, 48, 80)
    packed, scales, _ = quantise_nv(matrices, largest_of_matrices(matrices), None, True)
    yield KernelCase("squares in bf16", (packed, scales, torch.bfloat16))
    yield KernelCase("squares, transposed", (packed, scales, torch.float32, True))
