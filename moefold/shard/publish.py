"""Handing updated shares back to all replicas, while the next forward already runs.

Every bucket's gather starts at once, those that forward needs first first; a module waits for the buckets of its own
parameters when it is called.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from moefold.comm import byte_counters
from moefold.comm.check_collectives import check_agreement
from moefold.comm.collectives import DIST_ALL_GATHER
from moefold.layout.declare import DeclaringModule
from moefold.shard.buckets import Bucket


class Publisher:
    def __init__(self, model: nn.Module, buckets: list[Bucket]):
        self.buckets = buckets
        self.under_way: dict[int, tuple[object, torch.Tensor]] = {}
        where = {id(p.tensor): i for i, bucket in enumerate(buckets) for p in bucket.parameters}
        for module in model.modules():
            if isinstance(module, DeclaringModule):
                needed = sorted({where[id(p)] for p in (*module.parameters(recurse=False), *module.borrowed)})
                module.register_forward_pre_hook(partial(self.await_before_use, needed))
        model.register_state_dict_pre_hook(lambda *_: self.await_all_buckets())

    def publish(self) -> None:
        """Start gathering every bucket's weights from the ranks that updated them."""
        for number in reversed(range(len(self.buckets))):  # buckets are filled from the model's end
            bucket = self.buckets[number]
            if bucket.replicas.size > 1:
                mine = bucket.weights[bucket.share].clone()
                check_agreement("publish", bucket.replicas, mine)
                byte_counters.note_bytes_sent("publish", bucket.replicas, mine.nbytes * (bucket.replicas.size - 1))
                work = DIST_ALL_GATHER(bucket.weights, mine, group=bucket.replicas.group, async_op=True)
                self.under_way[number] = (work, mine)

    def await_before_use(self, needed: list[int], *_: object) -> None:
        self.await_buckets(needed)

    def await_all_buckets(self) -> None:
        self.await_buckets(list(self.under_way))

    def await_buckets(self, numbers: list[int]) -> None:
        for number in numbers:
            if number in self.under_way:
                work, _ = self.under_way.pop(number)
                work.wait()  # pyright: ignore[reportAttributeAccessIssue]
