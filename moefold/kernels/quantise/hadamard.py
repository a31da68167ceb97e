"""The random Hadamard transform of blocks of 16: the transform spreads outliers, and a product of two transformed
operands is that of the operands, since the transform is orthogonal.

    y = x diag(signs) H / 4      H: Sylvester's matrix of 16 x 16

Signs are fixed. Sums are made in fp32 by four passes of sums and differences, and rounded to the type of x.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from moefold.kernels.quantise.fp8 import in_blocks

HADAMARD_SIZE = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def random_hadamard(x: Tensor) -> Tensor:
    """Along the last dim, whose size is a multiple of 16."""
    y = x.float()
    y = in_blocks(y, -1, HADAMARD_SIZE)
    y = y * signs_on_device(x.device)
    half = 1
    while half < HADAMARD_SIZE:
        y = sums_and_differences(y, half)
        half *= 2
    scaled = y * HADAMARD_SIZE**-0.5
    rounded = scaled.to(x.dtype)
    return rounded.flatten(-2)


def sums_and_differences(y: Tensor, half: int) -> Tensor:
    """Of the two halves of each 2 * half values."""
    pairs = y.unflatten(-1, (-1, 2, half))
    first, second = pairs.unbind(-2)
    sums = first + second
    differences = first - second
    mixed = torch.stack((sums, differences), -2)
    return mixed.flatten(-3)


@cache
def signs_on_device(device: torch.device) -> Tensor:
    """Uploaded once."""
    return torch.tensor(SIGNS, dtype=torch.float32, device=device)
