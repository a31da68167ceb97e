"""The random Hadamard transform of blocks of 16: the transform spreads outliers, and a product of two transformed
operands is that of the operands, since the transform is orthogonal.

    y = x diag(signs) H / 4      H: Sylvester's matrix of 16 x 16

Signs are fixed. Sums are made in fp32 by four passes of sums and differences, and rounded to the type of x.
"""

from __future__ import annotations

import torch
from torch import Tensor

HADAMARD_SIZE = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def random_hadamard(x: Tensor) -> Tensor:
    """Along the last dim, whose size is a multiple of 16."""
    signs = torch.tensor(SIGNS, dtype=torch.float32, device=x.device)
    y = x.float().unflatten(-1, (-1, HADAMARD_SIZE)) * signs
    half = 1
    while half < HADAMARD_SIZE:
        pairs = y.unflatten(-1, (-1, 2, half))
        first, second = pairs.unbind(-2)
        y = torch.stack((first + second, first - second), -2).flatten(-3)
        half *= 2
    scaled = y * HADAMARD_SIZE**-0.5
    return scaled.flatten(-2).to(x.dtype)
