"""NF4, as bitsandbytes has it: blocks of 64 values along the last dim, each with its largest magnitude as the scale.

    scale  = largest magnitude of the block
    code   = number of borders below x * (1 / scale)
    x      is about the code's number * scale

The 16 numbers are quantiles of a normal distribution (QLoRA, https://arxiv.org/abs/2305.14314); borders lie halfway
between two of them. Two codes share a byte, the first in the high half. Numbers of a block times their scale, quantised
again, give the same codes and the same scale: 1 and -1 are among the numbers.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from moefold.kernels.quantise.fp8 import Quantised, in_blocks, largest_magnitude
from moefold.kernels.quantise.half_bytes import unpack_pairs

NF4_BLOCK = 64
NF4_NUMBERS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
BORDERS = (
    -0.8480964004993439,
    -0.6106329262256622,
    -0.4599952697753906,
    -0.33967943489551544,
    -0.23460740596055984,
    -0.13791173323988914,
    -0.045525018125772476,
    0.03979014977812767,
    0.1202552504837513,
    0.2035212516784668,
    0.2920137718319893,
    0.3893125355243683,
    0.5016634166240692,
    0.6427869200706482,
    0.8614784181118011,
)


@cache
def border_values(device: torch.device) -> Tensor:
    return torch.tensor(BORDERS, dtype=torch.float32, device=device)


def quantise_nf4(x: Tensor) -> Quantised:
    """The size of the last dim is a multiple of 64. Scales: fp32. A value that is not finite makes its scale so."""
    wide = x.float()
    blocks = in_blocks(wide, -1, NF4_BLOCK)
    scales = largest_magnitude(blocks, -1)
    is_zero = scales == 0
    divisor = torch.where(is_zero, 1.0, scales)
    factor = divisor.reciprocal()
    scaled = blocks * factor[..., None]
    borders = border_values(x.device)
    codes = torch.bucketize(scaled, borders, out_int32=True)
    codes = codes.flatten(-2).to(torch.uint8)
    pairs = in_blocks(codes, -1, 2)
    first, second = pairs.unbind(-1)
    packed = (first << 4) | second
    return Quantised(packed, scales)


def dequantise_nf4(quantised: Quantised) -> Tensor:
    """fp32 values."""
    values = unpack_pairs(quantised.values, NF4_NUMBERS, first_is_high=True)
    blocks = in_blocks(values, -1, NF4_BLOCK)
    blocks *= quantised.scales.float()[..., None]
    return values
