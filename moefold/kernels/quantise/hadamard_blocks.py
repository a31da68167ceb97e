"""The random Hadamard transform of whole operands as an op: what hadamard.py says of blocks of rows, gathered, in one
read and one write on a GPU."""

from __future__ import annotations

from torch import Tensor

from moefold.kernels.quantise.hadamard import HADAMARD_SIZE, random_hadamard
from moefold.kernels.quantise.row_blocks import places_of_case, rows_to_blocks
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_inner_op


@register_inner_op
def hadamard_blocks(x_RD: Tensor, source_P: Tensor) -> Tensor:
    """Rows from these places in blocks of 16, transformed and transposed: (B, D, 16). -1: zeros."""
    x_BDK = rows_to_blocks(x_RD, source_P, HADAMARD_SIZE)
    return random_hadamard(x_BDK)


@hadamard_blocks.register_fast("triton")
def hadamard_blocks_triton(x_RD: Tensor, source_P: Tensor) -> Tensor:
    from moefold.kernels.quantise.hadamard_triton import launch_hadamard

    return launch_hadamard(x_RD, source_P)


@hadamard_blocks.register_cases
def hadamard_blocks_cases(draw: CaseInputs) -> Cases:
    rows = draw.normal(37, 96)
    places = places_of_case(rows, HADAMARD_SIZE)
    yield KernelCase("rows", (rows, places))
    yield KernelCase("no places", (rows, places[:0]))
    wide = draw.normal(40, 37)
    yield KernelCase("transposed rows", (wide.mT, places))
