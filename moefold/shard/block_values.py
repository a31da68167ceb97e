"""Flat values in memory: plain tensors, or codes in blocks (kernels/optimizer/state_blocks.py).

The grid of blocks begins with the share of a bucket. Shares and parameters begin at multiples of a block, so a block
lies in one parameter and in one share: how many replicas there are changes no code. Checkpoints have fp32 values, from
which the same grid gets the same codes and any other type gets the nearest values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.kernels.optimizer.decode_moment import decode_moment
from moefold.kernels.optimizer.state_blocks import (
    STATE_BLOCK,
    block_count,
    block_dtypes,
    encode_blocks,
)

DECODED_TOGETHER = 1 << 24  # elements
Decode = Callable[[Tensor, Tensor, Tensor, bool], None]  # the op decode_moment


@dataclass
class BlockValues:
    """Codes and scales; of these, the elements first..last. Values are decoded and encoded part by part."""

    codes: Tensor
    scales: Tensor
    is_second: bool
    first: int
    last: int
    decode: Decode = decode_moment
    dtype: torch.dtype = torch.float32

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, window: slice) -> BlockValues:
        start, stop, _ = window.indices(len(self))
        first = self.first + start
        last = self.first + max(start, stop)
        return replace(self, first=first, last=last)

    def any(self) -> Tensor:
        """Whether a value is not zero, of a part that has its blocks for itself."""
        first_block = self.first // STATE_BLOCK
        last_block = block_count(self.last)
        return self.scales[first_block:last_block].any()

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def moved(self, move: Callable[[Tensor], Tensor]) -> BlockValues:
        """The same values in memory where plain torch decodes them."""
        codes = move(self.codes)
        scales = move(self.scales)
        return replace(self, codes=codes, scales=scales, decode=decode_moment)

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
        first_block = begin // STATE_BLOCK
        last_block = first_block + len(scales)
        self.scales[first_block:last_block] = scales

    def blocks_around(self, first: int, last: int) -> tuple[int, Tensor]:
        """The first element of the blocks that hold elements first..last of this part, and the values of the blocks."""
        first_block = (self.first + first) // STATE_BLOCK
        last_block = block_count(self.first + last)
        begin = first_block * STATE_BLOCK
        end = last_block * STATE_BLOCK
        codes = self.codes[begin:end]
        scales = self.scales[first_block:last_block]
        values = torch.empty_like(codes, dtype=self.dtype)
        self.decode(values, codes, scales, self.is_second)
        return begin, values


FlatValues = Tensor | BlockValues


def whole_values(values: FlatValues) -> Tensor:
    """All values in fp32 or better: the tensor itself where it is that, else a copy."""
    tensor = decoded(values)
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.to(wide)


def decoded(values: FlatValues) -> Tensor:
    """All values as a tensor, in its own dtype where it is one."""
    if isinstance(values, BlockValues):
        return values.get(0, len(values))
    return values


def decoded_in_parts(values: FlatValues) -> Iterator[Tensor]:
    """The values, those in blocks a part at a time."""
    if isinstance(values, Tensor):
        yield values
        return
    for first in range(0, len(values), DECODED_TOGETHER):
        last = min(first + DECODED_TOGETHER, len(values))
        yield values.get(first, last)


class CodesAndScales(NamedTuple):
    """Tensors of flat values in a window. `scales` None: the codes are the values themselves."""

    codes: Tensor
    scales: Tensor | None


def zeros_in_blocks(
    name: str, size: int, device: torch.device, is_second: bool = False, decode: Decode = decode_moment
) -> BlockValues:  # fmt: skip
    """Zeros in a type that has blocks."""
    dtypes = block_dtypes(name)
    assert dtypes is not None, f"{name} has no blocks"
    codes = torch.zeros(size, dtype=dtypes[is_second], device=device)
    blocks = block_count(size)
    scales = torch.zeros(blocks, device=device, dtype=torch.float32)
    return BlockValues(codes, scales, is_second, 0, size, decode)


def values_in_blocks(name: str, values: Tensor, decode: Decode = decode_moment) -> BlockValues:
    """These values in a type that has blocks, rounded to nearest."""
    size = len(values)
    coded = zeros_in_blocks(name, size, values.device, decode=decode)
    coded.put(0, size, values)
    return coded


def codes_and_scales(values: FlatValues, window: slice) -> CodesAndScales:
    """The tensors of a window that begins with a block, of whole values."""
    if isinstance(values, Tensor):
        return CodesAndScales(values[window], None)
    first_block = window.start // STATE_BLOCK
    last_block = block_count(window.stop)
    codes = values.codes[window]
    scales = values.scales[first_block:last_block]
    return CodesAndScales(codes, scales)
