"""Publishing weights: all-gathers of updated shares between replicas, while the next forward already runs.

The gathers of all buckets start at once, in the order in which forward needs them. A module waits for the buckets of
its own parameters when it is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from moefold.comm import byte_counters
from moefold.comm.check_collectives import check_agreement
from moefold.comm.collectives import DIST_ALL_GATHER
from moefold.layout.declare import DeclaringModule
from moefold.shard.buckets import Bucket
from moefold.shard.storage import WeightStorage, Wire


@dataclass
class PendingGather:
    """The gathers of one bucket under way. What they send is kept until they are complete."""

    storage: WeightStorage
    works: list[Any]
    sent: list[torch.Tensor]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.storage.arrived()


class Publisher:
    def __init__(self, model: nn.Module, buckets: list[Bucket]):
        self.buckets = buckets
        self.under_way: dict[int, PendingGather] = {}
        bucket_of = {id(p.tensor): number for number, bucket in enumerate(buckets) for p in bucket.parameters}
        for module in model.modules():
            if isinstance(module, DeclaringModule):
                parameters = (*module.parameters(recurse=False), *module.borrowed)
                needed = sorted({bucket_of[id(p)] for p in parameters})
                module.register_forward_pre_hook(partial(self.await_before_use, needed))
        model.register_state_dict_pre_hook(self.await_before_saving)

    def publish(self) -> None:
        """Start gathering every bucket's weights from the ranks that updated them."""
        for number in reversed(range(len(self.buckets))):  # buckets are filled from the model's end
            self.publish_bucket(number)

    def publish_bucket(self, number: int) -> None:
        bucket = self.buckets[number]
        if bucket.replicas.size == 1:
            return
        wires = bucket.storage.wire(bucket.share)
        works = [self.start_gather(bucket, wire) for wire in wires]
        self.under_way[number] = PendingGather(bucket.storage, works, [wire.mine for wire in wires])

    def start_gather(self, bucket: Bucket, wire: Wire) -> Any:
        replicas, mine = bucket.replicas, wire.mine
        check_agreement("publish", replicas, mine)
        byte_counters.note_bytes_sent("publish", replicas, mine.nbytes * (replicas.size - 1))
        return DIST_ALL_GATHER(wire.gathered, mine, group=replicas.group, async_op=True)

    def await_before_use(self, needed: list[int], *_: object) -> None:
        self.await_buckets(needed)

    def await_before_saving(self, *_: object) -> None:
        self.await_all_buckets()

    def await_all_buckets(self) -> None:
        self.await_buckets(list(self.under_way))

    def await_buckets(self, numbers: list[int]) -> None:
        for number in numbers:
            gather = self.under_way.pop(number, None)
            if gather is not None:
                gather.wait()
