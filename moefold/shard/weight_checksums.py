"""Checksums of weights, to compare replicas: the bits of each share of a rank's weights, as integers, added up on the
device.

    held      bits of each share that the rank holds, before every update: the same on all replicas
    own       bits of its own share behind the update before, which nothing has written since: the same as held

They are taken every few steps. So a bit that has flipped in any step is seen, though gathers of updated shares have
overwritten it since; and a rank whose own share has changed is known without its replicas. Nothing writes frozen
weights, so a flipped bit stays: they are added up when the first step begins, and when they are compared. Weights that
are stored in FP8 alone have no checksum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moefold.layout.declare import declared_parameters
from moefold.layout.held_share import held_values_of
from moefold.layout.weight_copies import keeps_values
from moefold.shard.buckets import Bucket
from moefold.shard.storage import ShardedWeights

INTEGERS = {  # by bytes
    1: torch.int8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}
HeldPart = tuple[Any, ...]  # which weights: the same for all replicas


class Checksum(NamedTuple):
    """What the bits of a share have added up to. `own`: what they should, on the rank that updates the share."""

    held: int
    own: int | None = None

    @property
    def is_sound(self) -> bool:
        """Whether this rank updates the share, and holds what it has computed."""
        return self.own == self.held

    @property
    def has_changed(self) -> bool:
        """Whether this rank updates the share, and holds something else."""
        return self.own is not None and self.own != self.held


Checksums = dict[HeldPart, Checksum]


class WeightChecksums:
    """Sums over steps of the bits of a rank's weights, a number for each share of each bucket."""

    def __init__(self, buckets: Sequence[Bucket], model: nn.Module, device: torch.device):
        self.frozen = FrozenChecksums(model, device)
        self.buckets = [bucket for bucket in buckets if bucket_weights(bucket) is not None]
        shares = [shares_held(bucket) for bucket in self.buckets]
        held = zero_sums(sum(shares), device)
        self.held = held.split(shares)
        self.own = zero_sums(len(shares), device)
        self.updated = zero_sums(len(shares), device)  # bits of own shares behind the last update
        self.has_begun = False
        self.since = 0  # the last step that was compared

    def begin(self) -> None:
        """Note the weights with which the first step begins. All of them must have been gathered."""
        if not self.has_begun:
            self.note_update()
            self.frozen.begin()
            self.has_begun = True

    @torch.no_grad()
    def note_update(self) -> None:
        """Note this rank's own shares, which have just been updated."""
        for number, bucket in enumerate(self.buckets):
            mine = bucket.storage.weights_of_share(bucket.share)
            (total,) = sum_of_bits(mine[None])
            self.updated[number] = total

    @torch.no_grad()
    def add_step(self) -> None:
        """Add the bits of the weights as they are. All of them must have been gathered."""
        for bucket, held_S in zip(self.buckets, self.held, strict=True):
            weights = bucket_weights(bucket)
            assert weights is not None
            by_share = weights.view(len(held_S), -1)
            held_S += sum_of_bits(by_share)
        self.own += self.updated

    def take(self) -> Checksums:
        """What has added up, which begins anew. Waits for the device."""
        taken = self.frozen.take()
        owns: list[int] = self.own.tolist()
        for bucket, held_S, own in zip(self.buckets, self.held, owns, strict=True):
            by_share: list[int] = held_S.tolist()
            for share, held in enumerate(by_share):
                is_own = len(by_share) == 1 or share == bucket.replicas.index
                part = held_part(bucket, share)
                taken[part] = Checksum(held, own if is_own else None)
            held_S.zero_()
        self.own.zero_()
        return taken


class FrozenChecksums:
    """Sums of the bits of frozen weights, whole or in shares: as they were at first, and as they are."""

    def __init__(self, model: nn.Module, device: torch.device):
        self.device = device
        self.held: dict[HeldPart, tuple[Tensor, ...]] = {}
        for parameter in declared_parameters(model):
            if parameter.tensor.requires_grad:
                continue
            first, held = held_values_of(parameter.tensor)
            part = tuple(parameter.part)
            key = (parameter.name, part, first, held.numel())
            self.held[key] = (held,) if isinstance(held, Tensor) else held.tensors()
        self.begun: dict[HeldPart, int] = {}

    def begin(self) -> None:
        self.begun = self.sums()

    def take(self) -> Checksums:
        """The rank that holds a frozen weight knows what it should be."""
        taken: Checksums = {}
        sums = self.sums()
        for part, held in sums.items():
            own = self.begun.get(part)
            taken[part] = Checksum(held, own)
        return taken

    @torch.no_grad()
    def sums(self) -> dict[HeldPart, int]:
        totals = zero_sums(len(self.held), self.device)
        for total, tensors in zip(totals, self.held.values(), strict=True):
            for tensor in tensors:
                row = tensor.detach().reshape(1, -1)
                (bits,) = sum_of_bits(row)
                total += bits.to(self.device)
        on_host: list[int] = totals.tolist()
        return dict(zip(self.held, on_host, strict=True))


def zero_sums(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.int64, device=device)


def bucket_weights(bucket: Bucket) -> Tensor | None:
    """The weights of a bucket that this rank keeps between steps; None where none has values."""
    storage = bucket.storage
    if isinstance(storage, ShardedWeights):
        return storage.held_weights(bucket.share)
    return bucket.weights if keeps_values(bucket.weights) else None


def shares_held(bucket: Bucket) -> int:
    return 1 if isinstance(bucket.storage, ShardedWeights) else bucket.replicas.size


def sum_of_bits(weights_Sn: Tensor) -> Tensor:
    """(S,): the sum of each row."""
    nbytes = weights_Sn.element_size()
    integers = weights_Sn.view(INTEGERS[nbytes])
    return integers.sum(1, dtype=torch.int64)


def held_part(bucket: Bucket, share: int) -> HeldPart:
    first = bucket.parameters[0]
    part = tuple(first.part)
    size = bucket.share.stop - bucket.share.start
    begin = share * size
    if isinstance(bucket.storage, ShardedWeights):
        begin = bucket.share.start
    return first.name, part, len(bucket.parameters), begin
