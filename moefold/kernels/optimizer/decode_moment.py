"""A moment in blocks (state_blocks.py) as fp32 values: what a checkpoint has of it."""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.kernels.optimizer.state_blocks import CODE_DTYPES, decode_blocks, encode_blocks
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_in_place_op


@register_in_place_op
def decode_moment(values: Tensor, codes: Tensor, scales: Tensor, is_second: bool) -> None:
    """Write the fp32 values of codes that begin with a block, as a checkpoint has them."""
    decoded = decode_blocks(codes, scales, is_second)
    values.copy_(decoded)


@decode_moment.register_fast("triton")
def decode_moment_triton(values: Tensor, codes: Tensor, scales: Tensor, is_second: bool) -> None:
    from moefold.kernels.optimizer import optimizer_triton

    optimizer_triton.launch_decode_moment(values, codes, scales, is_second)


MOMENT_SIZES = (0, 1, 128, 5000)


@decode_moment.register_cases
def decode_moment_cases(draw: CaseInputs) -> Cases:
    for size in MOMENT_SIZES:
        drawn = draw.normal(size, seed=size)
        wide = torch.promote_types(drawn.dtype, torch.float32)
        for is_second, order in enumerate(("first", "second")):
            moment = drawn.square() if is_second else drawn
            dtype = CODE_DTYPES["int8"][is_second]
            codes, scales = encode_blocks(moment, dtype, bool(is_second))
            values = torch.zeros_like(drawn, dtype=wide)
            inputs = (values, codes, scales.to(wide), bool(is_second))
            yield KernelCase(f"{order} moment, {size} elements", inputs)
