"""The random Hadamard transform of whole operands as an op: what hadamard.py says of blocks, in one read and one write
on a GPU."""

from __future__ import annotations

from torch import Tensor

from moefold.kernels.quantise.hadamard import HADAMARD_SIZE, random_hadamard
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_inner_op


@register_inner_op
def hadamard_blocks(x: Tensor) -> Tensor:
    """(M, N) or (A, M, N) in any strides, along the last dim, whose size is a multiple of 16."""
    return random_hadamard(x)


@hadamard_blocks.register_fast("triton")
def hadamard_blocks_triton(x: Tensor) -> Tensor:
    from moefold.kernels.quantise.hadamard_triton import launch_hadamard

    return launch_hadamard(x)


@hadamard_blocks.register_cases
def hadamard_blocks_cases(draw: CaseInputs) -> Cases:
    rows = draw.normal(37, 96)
    yield KernelCase("rows", (rows,))
    yield KernelCase("no rows", (rows[:0],))
    blocks = draw.normal(3, HADAMARD_SIZE, 40)
    yield KernelCase("transposed blocks", (blocks.mT,))
