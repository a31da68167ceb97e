"""Publishing weights: all-gathers of updated shares between replicas, while the next forward already runs.

The gathers of all buckets start at once, in the order in which forward needs them. A module waits for the buckets of
its own parameters when it is called; on one replica there is nothing to wait for, and no hook.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from moefold.comm.collectives import DIST_ALL_GATHER, all_reduce_max_no_grad, announce
from moefold.layout.declare import DeclaringModule
from moefold.layout.weight_copies import count_change
from moefold.shard.buckets import Bucket
from moefold.shard.storage import WeightStorage, Wire


@dataclass
class PendingGather:
    """The gathers of one bucket under way. What they send is kept until they are complete."""

    storage: WeightStorage
    works: list[Any]
    sent: list[Tensor]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.storage.after_gather()


class Publisher:
    def __init__(self, model: nn.Module, buckets: list[Bucket]):
        self.buckets = buckets
        self.under_way: dict[int, PendingGather] = {}
        self.bucket_of: dict[int, int] = {}  # by the identity of a parameter
        for number, bucket in enumerate(buckets):
            for parameter in bucket.parameters:
                self.bucket_of[id(parameter.tensor)] = number
        for module in model.modules():
            if isinstance(module, DeclaringModule):
                self.attach_module(module)
        model.register_state_dict_pre_hook(self.await_before_saving)

    def attach_module(self, module: DeclaringModule) -> None:
        """Let calls of the module wait for the parameters that it reads."""
        own = module.parameters(recurse=False)
        used = (*own, *module.borrowed)
        needed = {self.bucket_of[id(parameter)] for parameter in used}
        gathered = [number for number in sorted(needed) if self.has_replicas(number)]
        if gathered:
            hook = partial(self.await_before_use, gathered)
            module.register_forward_pre_hook(hook)

    def has_replicas(self, number: int) -> bool:
        return self.buckets[number].replicas.size > 1

    def publish(self) -> None:
        """Start gathering every bucket's weights from the ranks that updated them, or that loaded their share."""
        self.note_new_weights()
        for bucket in self.buckets:  # all of them before the first gather, which agreements would wait for
            agree = partial(all_reduce_max_no_grad, axis=bucket.replicas)
            bucket.storage.before_gather(agree)
        for number in reversed(range(len(self.buckets))):  # buckets are filled from the model's end
            self.publish_bucket(number)

    def note_new_weights(self) -> None:
        """Declare that weights were written: copies of them no longer hold."""
        for bucket in self.buckets:
            count_change(parameter.tensor for parameter in bucket.parameters)

    def publish_bucket(self, number: int) -> None:
        if not self.has_replicas(number):
            return
        bucket = self.buckets[number]
        wires = bucket.storage.wire_tensors(bucket.share)
        works = [self.start_gather(bucket, wire) for wire in wires]
        sent = [wire.mine for wire in wires]
        self.under_way[number] = PendingGather(bucket.storage, works, sent)

    def start_gather(self, bucket: Bucket, wire: Wire) -> Any:
        replicas = bucket.replicas
        mine = wire.mine
        others = replicas.size - 1
        announce("publish", replicas, mine, mine.nbytes * others)
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
