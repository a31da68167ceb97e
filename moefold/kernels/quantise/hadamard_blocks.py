"""The random Hadamard transform of whole operands as an op: what hadamard.py says of blocks of rows, gathered, in one
read and one write on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moefold.kernels.quantise.fp8 import largest_magnitude
from moefold.kernels.quantise.hadamard import HADAMARD_SIZE, random_hadamard
from moefold.kernels.quantise.row_blocks import places_of_case, rows_to_blocks
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_inner_op


class TransformedBlocks(NamedTuple):
    """Blocks (B, D, 16) behind the transform, and the largest magnitude of each in fp32."""

    x_BDK: Tensor
    amax_B: Tensor


@register_inner_op
def hadamard_blocks(x_RD: Tensor, source_P: Tensor) -> TransformedBlocks:
    """Rows from these places in blocks of 16, transformed and transposed. -1: zeros."""
    rows_BDK = rows_to_blocks(x_RD, source_P, HADAMARD_SIZE)
    x_BDK = random_hadamard(rows_BDK)
    amax_B = x_BDK.new_zeros(len(x_BDK), dtype=torch.float32)
    if x_BDK.numel():
        amax_B = largest_magnitude(x_BDK.flatten(1), 1)
    return TransformedBlocks(x_BDK, amax_B)


@hadamard_blocks.register_fast("triton")
def hadamard_blocks_triton(x_RD: Tensor, source_P: Tensor) -> TransformedBlocks:
    from moefold.kernels.quantise.hadamard_triton import launch_hadamard

    return TransformedBlocks(*launch_hadamard(x_RD, source_P))


@hadamard_blocks.register_cases
def hadamard_blocks_cases(draw: CaseInputs) -> Cases:
    rows = draw.normal(37, 96)
    places = places_of_case(rows, HADAMARD_SIZE)
    yield KernelCase("rows", (rows, places))
    yield KernelCase("no places", (rows, places[:0]))
    wide = draw.normal(40, 37)
    yield KernelCase("transposed rows", (wide.mT, places))
