"""Moments of an optimizer in memory: plain tensors, or codes in blocks (kernels/optimizer/block_moments.py).

The grid of blocks begins with the share of a bucket. Shares and parameters begin at multiples of a block, so a block
lies in one parameter and in one share: how many replicas there are changes no code. Checkpoints have fp32 values, from
which the same grid gets the same codes and any other type gets the nearest values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.kernels.optimizer.block_moments import (
    MOMENT_BLOCK,
    block_count,
    block_dtypes,
    encode_blocks,
)
from moefold.kernels.optimizer.decode_moment import decode_moment

Decode = Callable[[Tensor, Tensor, Tensor, bool], None]  # the op decode_moment


@dataclass
class BlockMoment:
    """A moment as codes and scales; of these, the elements first..last. Values are decoded and encoded part by part."""

    codes: Tensor
    scales: Tensor
    is_second: bool
    first: int
    last: int
    decode: Decode = decode_moment
    dtype: torch.dtype = torch.float32

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, window: slice) -> BlockMoment:
        start, stop, _ = window.indices(len(self))
        first = self.first + start
        last = self.first + max(start, stop)
        return replace(self, first=first, last=last)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def get(self, first: int, last: int) -> Tensor:
        begin, values = self.blocks_around(first, last)
        offset = self.first - begin
        return values[offset + first : offset + last]

    def put(self, first: int, last: int, values: Tensor) -> None:
        """Encode values. Blocks that they fill in part are decoded before."""
        begin, around = self.blocks_around(first, last)
        offset = self.first - begin
        replaced = around[offset + first : offset + last]
        replaced.copy_(values)
        codes, scales = encode_blocks(around, self.codes.dtype, self.is_second)
        end = begin + len(around)
        self.codes[begin:end] = codes
        first_block = begin // MOMENT_BLOCK
        last_block = first_block + len(scales)
        self.scales[first_block:last_block] = scales

    def blocks_around(self, first: int, last: int) -> tuple[int, Tensor]:
        """The first element of the blocks that hold elements first..last of this part, and the values of the blocks."""
        first_block = (self.first + first) // MOMENT_BLOCK
        last_block = block_count(self.first + last)
        begin = first_block * MOMENT_BLOCK
        end = last_block * MOMENT_BLOCK
        codes = self.codes[begin:end]
        scales = self.scales[first_block:last_block]
        values = torch.empty_like(codes, dtype=self.dtype)
        self.decode(values, codes, scales, self.is_second)
        return begin, values


Moment = Tensor | BlockMoment


class CodesAndScales(NamedTuple):
    """Tensors of a moment in a window. `scales` None: the codes are the values themselves."""

    codes: Tensor
    scales: Tensor | None


def new_moment(name: str, like: Tensor, wide: torch.dtype, is_second: bool, decode: Decode = decode_moment) -> Moment:
    """A moment of zeros for a value of `optim.moments`. `wide`: the dtype that `fp32` stands for."""
    size = len(like)
    dtypes = block_dtypes(name)
    if dtypes is None:
        dtype = torch.bfloat16 if name == "bf16" else wide
        return torch.zeros_like(like, dtype=dtype)
    codes = torch.zeros_like(like, dtype=dtypes[is_second])
    blocks = block_count(size)
    scales = like.new_zeros(blocks, dtype=torch.float32)
    return BlockMoment(codes, scales, is_second, 0, size, decode)


def codes_and_scales(moment: Moment, window: slice) -> CodesAndScales:
    """The tensors of a window of a whole moment that begins with a block."""
    if isinstance(moment, Tensor):
        return CodesAndScales(moment[window], None)
    first_block = window.start // MOMENT_BLOCK
    last_block = block_count(window.stop)
    codes = moment.codes[window]
    scales = moment.scales[first_block:last_block]
    return CodesAndScales(codes, scales)
