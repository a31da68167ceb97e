"""Few rows without gradients, such as those of a step of generation: products of theirs are bound by reading weights,
and have kernels of their own."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from moefold.kernels.facts import has_triton

MOST_ROWS = 64


@cache
def device_has_kernels(device: torch.device) -> bool:
    """Triton, and tensor cores that multiply bf16."""
    return has_triton() and torch.cuda.get_device_capability(device) >= (8, 0)


def has_few_rows(x: Tensor) -> bool:
    """Whether rows (..., D), of which no gradient will be asked for, are few, in bf16 on a GPU."""
    if not x.is_cuda or x.dtype != torch.bfloat16:
        return False
    rows = x.numel() // max(1, x.shape[-1])
    return 0 < rows <= MOST_ROWS and device_has_kernels(x.device)
