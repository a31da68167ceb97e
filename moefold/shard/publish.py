"""Publishing weights: all-gathers of updated shares between replicas, while the next forward already runs.

The gathers of all buckets start at once, in the order in which forward needs them. A module waits for the buckets of
its own parameters when it is called; on one replica there is nothing to wait for, and no hook, unless updates run on
another stream (optim/host_states.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from moefold.comm.blocked_times import blocked
from moefold.comm.collectives import all_reduce_max_no_grad
from moefold.comm.two_levels import PendingWork, gather_over_levels
from moefold.layout.declare import DeclaringModule
from moefold.layout.weight_copies import count_change, repeat_change
from moefold.shard.buckets import Bucket
from moefold.shard.storage import ShardedWeights, WeightStorage


@dataclass
class PendingGather:
    """The gathers of one bucket under way. What they send is kept until they are complete."""

    storage: WeightStorage
    works: list[PendingWork]
    sent: list[Tensor]

    def wait(self) -> None:
        self.wait_for_works()
        self.storage.after_gather()

    def wait_for_works(self) -> None:
        with blocked():
            for work in self.works:
                work.wait()

    def arriving_tensors(self) -> list[Tensor]:
        """What has memory from the gather until it is freed; nothing where weights have memory of their own."""
        return self.storage.gathered_tensors() if isinstance(self.storage, ShardedWeights) else []


class Publisher:
    def __init__(self, model: nn.Module, buckets: list[Bucket], late_updates: bool = False):
        self.buckets = buckets
        self.late_updates = late_updates
        self.under_way: dict[int, PendingGather] = {}
        self.bucket_of: dict[int, int] = {}  # by the identity of a parameter
        for number, bucket in enumerate(buckets):
            for parameter in bucket.parameters:
                identity = id(parameter.tensor)
                self.bucket_of[identity] = number
        for module in model.modules():
            if isinstance(module, DeclaringModule):
                self.attach_module(module)
        model.register_state_dict_pre_hook(self.await_before_saving)

    def attach_module(self, module: DeclaringModule) -> None:
        """Let calls of the module wait for the parameters that it reads. Frozen ones are in no bucket."""
        read = module.parameters_read()
        in_order = self.awaited_buckets(read)
        if in_order:
            hook = partial(self.await_buckets, in_order)
            module.register_forward_pre_hook(hook)

    def awaited_buckets(self, parameters: Iterable[Tensor]) -> list[int]:
        """The numbers of the buckets that readers of these parameters have to wait for."""
        needed: set[int] = set()
        for parameter in parameters:
            if parameter.requires_grad:
                number = self.bucket_of[id(parameter)]
                needed.add(number)
        awaited = needed if self.late_updates else filter(self.has_replicas, needed)
        return sorted(awaited)

    def waiter_for(self, parameters: Iterable[Tensor]) -> Callable[[], None]:
        """What waits for the present values of these parameters, as calls of their modules do."""
        in_order = self.awaited_buckets(parameters)
        return partial(self.await_buckets, in_order)

    def has_replicas(self, number: int) -> bool:
        replicas = self.buckets[number].replicas
        return not replicas.is_alone

    def publish(self) -> None:
        """Start gathering every bucket's weights from the ranks that updated them, or that loaded their share."""
        self.note_new_weights()
        for bucket in self.buckets:  # all of them before the first gather, which agreements would wait for
            replicas = bucket.replicas
            agree = partial(all_reduce_max_no_grad, axis=replicas)
            bucket.storage.before_gather(agree)
        numbers = range(len(self.buckets))
        for number in reversed(numbers):  # buckets are filled from the model's end
            self.publish_bucket(number)

    def note_new_weights(self) -> None:
        """Declare that weights were written: copies of them no longer hold."""
        for bucket in self.buckets:
            written = [parameter.tensor for parameter in bucket.parameters]
            count_change(written)

    def publish_bucket(self, number: int) -> None:
        if not self.has_replicas(number):
            return
        bucket = self.buckets[number]
        bucket.await_update()
        self.under_way[number] = gather_shares(bucket, "publish")

    def await_before_saving(self, *_: object) -> None:
        self.await_all_buckets()

    def await_all_buckets(self) -> None:
        numbers = range(len(self.buckets))
        self.await_buckets(list(numbers))

    def await_buckets(self, numbers: list[int], *_: object) -> None:
        for number in numbers:
            self.buckets[number].await_update()
            gather = self.under_way.pop(number, None)
            if gather is not None:
                gather.wait()


def gather_shares(bucket: Bucket, what: str) -> PendingGather:
    """Start to gather the weights of a bucket from its replicas."""
    storage = bucket.storage
    wires = storage.wire_tensors(bucket.share)
    works: list[PendingWork] = []
    sent: list[Tensor] = []
    for gathered, own in wires:
        if bucket.replicas.is_alone:
            works += copy_from_host(gathered, own)
            continue
        mine = own.to(gathered.device, non_blocking=True)  # from the host, if it lies there
        work = gather_over_levels(gathered, mine, bucket.replicas, what)
        works.append(work)
        sent.append(mine)
    return PendingGather(storage, works, sent)


def copy_from_host(whole: Tensor, own: Tensor) -> list[PendingWork]:
    """Start to copy a share that is all of the weights."""
    whole.copy_(own, non_blocking=True)
    if not whole.is_cuda:
        return []
    behind = torch.cuda.current_stream().record_event()
    return [behind]


def note_replayed_update(buckets: list[Bucket]) -> None:
    """Declare that a replay of the last step has written weights, and again those copies that the step wrote."""
    for bucket in buckets:
        written = [parameter.tensor for parameter in bucket.parameters]
        repeat_change(written)
