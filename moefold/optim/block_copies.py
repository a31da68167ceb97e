"""FP8 copies that an update writes: those with scales of 128 x 128 blocks, of weights that lie whole in a share.

A wider scale is known only when all of a matrix has been updated, and a block that is cut is updated by several ranks:
such copies are made when the weight is next read, once a step (layout/weight_copies.py), or by the weights' storage.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import NamedTuple

from torch import Tensor

from moefold.kernels.quantise.fp8 import ScaleRule
from moefold.kernels.quantise.quantise_weight import QuantisedWeight, WeightFormat
from moefold.layout.weight_copies import copy_to_rewrite
from moefold.optim.rule import BucketShare
from moefold.shard.buckets import BucketPiece


class BlockCopy(NamedTuple):
    """The memory of a weight's copy, and the rule of its bytes."""

    copy: QuantisedWeight
    rule: ScaleRule

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Values (E, N, D) and (E, D, N), scales (E, I, J) and (E, J, I)."""
        forward, transposed = self.copy
        return forward.values, transposed.values, forward.scales, transposed.scales


PartToUpdate = tuple[slice, BlockCopy | None]


def parts_to_update(share: BucketShare) -> Iterator[PartToUpdate]:
    """Windows of the share, one after another: weights whose copies the update writes, and what lies between."""
    begin = 0
    for piece in share.bucket.pieces():
        copy = block_copy_of(share, piece)
        if copy is None:
            continue
        if begin < piece.offset:
            yield slice(begin, piece.offset), None
        yield piece.window, copy
        begin = piece.window.stop
    end = len(share.weights)
    if begin < end:
        yield slice(begin, end), None


def block_copy_of(share: BucketShare, piece: BucketPiece) -> BlockCopy | None:
    """The copy of a weight that the update of its piece writes."""
    weight = piece.parameter.tensor
    size = piece.last - piece.first
    is_cut = size < weight.numel()
    if is_cut or gathers_copies(share):
        return None
    found = copy_to_rewrite(weight, has_block_scales)
    if found is None:
        return None
    format, copy = found
    return BlockCopy(copy, format.rule)


def gathers_copies(share: BucketShare) -> bool:
    """Whether replicas exchange the copies themselves, and not weights."""
    bucket = share.bucket
    return bucket.key.format is not None and bucket.replicas.size > 1


def has_block_scales(format: Hashable) -> bool:
    return isinstance(format, WeightFormat) and format.scales == "block"
