"""Frozen weights in blocks of few bits (`lora.base`) as the storage of a bucket: the rows of its parameters, which are
equally wide, one after another.

    values     | row 0 | row 1 | ...      what blocks lie in: their values, and in the same order their scales
    share        whole rows, so that a rank quantises, saves and loads its own; ranks gather values and scales, and
                 products dequantise them (precision/base_blocks.py)

A parameter has its shape and dtype, and no memory: its elements are one NaN, which a loss would show.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.layout.held_blocks import HeldBlocks, attach_held_blocks, held_blocks_of
from moefold.shard.storage import MoveTensor, PlainWeights, ShardedWeights, Wire


class PlacedBlocks(NamedTuple):
    """A weight in blocks, and the first of its elements in the bucket."""

    weight: Tensor
    start: int


class BlockWeights(PlainWeights):
    """Blocks of all rows, in memory of their own."""

    def __init__(self, size: int, placed: Iterable[PlacedBlocks]):
        weights = list(placed)
        first = weights[0].weight
        nothing = first.new_full((1,), torch.nan)
        self.weights = nothing.expand(size)
        declared = blocks_of(first)
        rows = size // declared.width
        make_rows = partial(zero_rows, rows)
        self.blocks = declared.remade(make_rows)
        for weight, start in weights:
            end = start + weight.numel()
            window = slice(start, end)
            part = self.blocks.elements(window)
            blocks = part.view(weight.shape)
            attach_held_blocks(weight, blocks)

    def open_main_weights(self, share: slice) -> None:
        raise AssertionError("a base in blocks is frozen: it has no main weights")

    def weight_bytes(self) -> int:
        return bytes_of_blocks(self.blocks)


class ShardedBlockWeights(ShardedWeights, BlockWeights):
    """Blocks of which a rank keeps its share of the rows (ZeRO-3). Those of all rows are there while the unit is."""

    own_blocks: HeldBlocks | None = None

    def keep_share(self, share: slice, copy: MoveTensor = torch.clone) -> HeldBlocks:
        if self.own_blocks is None:
            mine = self.blocks.elements(share)
            self.own_blocks = mine.remade(copy)
        return self.own_blocks

    def free_weights(self) -> None:
        for tensor in self.gathered_memory():
            memory = tensor.untyped_storage()
            memory.resize_(0)

    def gathered_memory(self) -> list[Tensor]:
        tensors = self.blocks.tensors()
        return list(tensors)

    def wire_tensors(self, share: slice) -> list[Wire]:
        mine = self.keep_share(share)
        wires: list[Wire] = []
        pairs = zip(self.blocks.tensors(), mine.tensors(), strict=True)
        for whole, own in pairs:
            gathered = flat_bytes(whole)
            sent = flat_bytes(own)
            wire = Wire(gathered, sent)
            wires.append(wire)
        return wires

    def weight_bytes(self) -> int:
        if self.own_blocks is None:
            return 0
        return bytes_of_blocks(self.own_blocks)


def blocks_of(weight: Tensor) -> HeldBlocks:
    blocks = held_blocks_of(weight)
    assert blocks is not None, "a weight of this bucket is held in blocks"
    return blocks


def bytes_of_blocks(blocks: HeldBlocks) -> int:
    total = 0
    for tensor in blocks.tensors():
        total += tensor.nbytes
    return total


def zero_rows(rows: int, like: Tensor) -> Tensor:
    row_size = like.shape[-1]
    shape = (rows, row_size)
    return like.new_zeros(shape)


def flat_bytes(rows: Tensor) -> Tensor:
    flat = rows.view(-1)
    return flat.view(torch.uint8)
