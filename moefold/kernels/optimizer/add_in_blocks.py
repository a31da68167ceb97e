"""Sums in blocks (state_blocks.py): values are added to what codes hold, and the sum is rounded to nearest."""

from __future__ import annotations

from torch import Tensor

from moefold.kernels.optimizer.state_blocks import CODE_DTYPES, STATE_BLOCK, decode_blocks, encode_blocks
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_in_place_op

ENCODED_TOGETHER = 1 << 22  # elements; a multiple of a block


@register_in_place_op
def add_in_blocks(codes: Tensor, scales: Tensor, x: Tensor, adds: bool) -> None:
    """Add flat x to values in blocks, whose first element begins one, or write it in their place. Values that are not
    finite leave a block without finite ones."""
    blocks = scales.split(ENCODED_TOGETHER // STATE_BLOCK)
    parts = codes.split(ENCODED_TOGETHER)
    for part, scales_of_part, added in zip(parts, blocks, x.split(ENCODED_TOGETHER), strict=True):
        total = added.to(scales.dtype)
        if adds:
            total = total + decode_blocks(part, scales_of_part, is_second=False)
        encoded = encode_blocks(total, part.dtype, is_second=False)
        part.copy_(encoded.codes)
        scales_of_part.copy_(encoded.scales)


@add_in_blocks.register_fast("triton")
def add_in_blocks_triton(codes: Tensor, scales: Tensor, x: Tensor, adds: bool) -> None:
    from moefold.kernels.optimizer import optimizer_triton

    optimizer_triton.launch_add_in_blocks(codes, scales, x, adds)


@add_in_blocks.register_cases
def add_in_blocks_cases(draw: CaseInputs) -> Cases:
    for size in (1, 128, 5000):
        held = draw.wide(size, seed=1)
        codes, scales = encode_blocks(held, CODE_DTYPES["int8"][0], is_second=False)
        x = draw.normal(size, seed=size)
        for adds in (False, True):
            name = f"{size} elements, adds {adds}"
            yield KernelCase(name, (codes, scales.to(held.dtype), x, adds))
