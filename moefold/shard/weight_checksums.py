"""Checksums of weights, to compare replicas: the bits of all weights of a rank, as integers, added up on the device.

They are added before each update and taken every few steps. So a bit that has flipped in any step is seen, though
gathers of updated shares have overwritten it since. Weights that are stored in FP8 alone have no checksum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moefold.layout.weight_copies import keeps_values
from moefold.shard.buckets import Bucket
from moefold.shard.storage import ShardedWeights

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
HeldPart = tuple[Any, ...]  # which weights: the same for all replicas
Checksums = dict[HeldPart, int]


class WeightChecksums:
    """Sums over steps of the bits of a rank's weights, a number for each bucket."""

    def __init__(self, buckets: Sequence[Bucket], device: torch.device):
        self.buckets = [bucket for bucket in buckets if bucket_weights(bucket) is not None]
        count = len(self.buckets)
        self.sums = torch.zeros(count, dtype=torch.int64, device=device)
        self.since = 0  # the last step that was compared

    @torch.no_grad()
    def add_step(self) -> None:
        """Add the bits of the weights as they are. All of them must have been gathered."""
        for number, bucket in enumerate(self.buckets):
            weights = bucket_weights(bucket)
            assert weights is not None
            self.sums[number] += sum_of_bits(weights)

    def take(self) -> Checksums:
        """What has added up, which begins anew. Waits for the device."""
        parts = map(held_part, self.buckets)
        taken = dict(zip(parts, self.sums.tolist(), strict=True))
        self.sums.zero_()
        return taken


def bucket_weights(bucket: Bucket) -> Tensor | None:
    """The weights of a bucket that this rank keeps between steps; None where none has values."""
    storage = bucket.storage
    if isinstance(storage, ShardedWeights):
        return storage.weights_of_share(bucket.share)
    return bucket.weights if keeps_values(bucket.weights) else None


def sum_of_bits(weights: Tensor) -> Tensor:
    integers = weights.view(INTEGERS[weights.element_size()])
    return integers.sum(dtype=torch.int64)


def held_part(bucket: Bucket) -> HeldPart:
    first = bucket.parameters[0]
    part = tuple(first.part)
    whole = not isinstance(bucket.storage, ShardedWeights)
    begin = 0 if whole else bucket.share.start
    return first.name, part, len(bucket.parameters), begin
