"""NF4 whose scales are quantised too: scales of 32 blocks are whole numbers from 0 to 255, times one fp32 number.

    top     = largest scale of the 32
    number  = scale / top * 255, rounded
    scale   is about top * number / 255

Of each row, bytes of the numbers come first, then those of the tops. The codes of values are those of NF4. What a block
stands for, quantised again, is the same, in bf16 too: the largest value of a block is its scale, and rounded to bf16 it
is nearer to its own number than to the next, since 254 / 2^9 is less than half a step.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from moefold.config.base_formats import BASE_FORMATS, WIDEST_SCALE
from moefold.kernels.quantise.fp8 import Quantised, in_blocks
from moefold.kernels.quantise.nf4 import dequantise_nf4, quantise_nf4

GROUP = BASE_FORMATS["nf4_double"].group
STEPS = 255


def quantise_nf4_double(x: Tensor) -> Quantised:
    """The size of the last dim is a multiple of 64. Scales: bytes."""
    values, scales = quantise_nf4(x)
    blocks = scales.shape[-1]
    groups = in_blocks(pad(scales, (0, -blocks % GROUP)), -1, GROUP)
    tops = groups.amax(-1)
    divisor = torch.where(tops == 0, 1.0, tops)
    numbers = (groups / divisor[..., None] * STEPS).round()
    numbers = numbers.nan_to_num(STEPS).flatten(-2)[..., :blocks]
    bytes_of_tops = tops.contiguous().view(torch.uint8)
    return Quantised(values, torch.cat((numbers.to(torch.uint8), bytes_of_tops), -1))


def dequantise_nf4_double(quantised: Quantised) -> Tensor:
    """fp32 values."""
    values, scales = quantised
    blocks = values.shape[-1] * 2 // BASE_FORMATS["nf4_double"].block
    count = -(-blocks // GROUP)
    numbers, bytes_of_tops = scales.split((blocks, count * WIDEST_SCALE), -1)
    # A copy: the bytes of a single row may begin where no fp32 number does.
    tops = bytes_of_tops.clone(memory_format=torch.contiguous_format).view(torch.float32)
    top_of_block = tops.repeat_interleave(GROUP, -1)[..., :blocks]
    # A tensor divides; a number would be multiplied by its reciprocal on a GPU.
    steps = torch.full_like(tops[..., :1], STEPS)
    return dequantise_nf4(Quantised(values, top_of_block * numbers / steps))
