"""Moments of an optimizer, each in a type of its own: plain tensors, or values in blocks (shard/block_values.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.config.run import OptimConfig
from moefold.kernels.optimizer.decode_moment import decode_moment
from moefold.kernels.optimizer.state_blocks import CODE_DTYPES
from moefold.shard.block_values import Decode, FlatValues, zeros_in_blocks


def new_moment(
    name: str, like: Tensor, wide: torch.dtype, is_second: bool, decode: Decode = decode_moment
) -> FlatValues:  # fmt: skip
    """A moment of zeros for a value of `optim.moments`. `wide`: the dtype that `fp32` stands for."""
    if name in CODE_DTYPES:
        return zeros_in_blocks(name, len(like), like.device, is_second, decode)
    dtype = torch.bfloat16 if name == "bf16" else wide
    return torch.zeros_like(like, dtype=dtype)


def moment_types(optim: OptimConfig) -> tuple[str, str]:
    """The types of the first and of the second moment."""
    first = optim.moments
    second = optim.second_moment
    if second == "as_first":
        return first, first
    return first, second
