"""Fully sharded weights (ZeRO-3): units are gathered before the steps that use them, and freed behind them.

    forward    | unit 0 | unit 1 | unit 2 |           a rank holds its share of all units, and of two units all weights:
    network    | gather 1 | gather 2 |                of the one in use, and of the next, which is on its way

A unit is a block, the embedding or the head (`unit_of_parameter`). When units come and go is the window's
(model/unit_window.py): a forward that is run again in backward gathers nothing of its own.

Shares of frozen experts may lie on the host (`memory.offload expert_weights`): they are copied to the device before
they are gathered, on a stream of their own. Experts without replicas are a share that is all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moefold.comm.collectives import all_reduce_max_no_grad
from moefold.layout.declare import DeclaringModule
from moefold.layout.weight_copies import count_change, drop_copies
from moefold.model.unit_window import Units, UnitWindow
from moefold.observe.trace import SpanRecorder
from moefold.shard.buckets import Bucket, block_of_parameter
from moefold.shard.publish import PendingGather, gather_shares
from moefold.shard.storage import ShardedWeights
from moefold.shard.unit_gradients import UnitGradients

FINAL_NORM = "head.norm.weight"


def unit_of_parameter(name: str, held: frozenset[str], tied_head: bool) -> str:
    """The unit of a parameter: its block, or the embedding or head. `held` are the modules of this rank.

    The final norm lies with what is used beside it, so that no step uses more than two units: with the first layer of
    multi-token prediction, which reads the normed stream, or with the matrix of the head."""
    if name != FINAL_NORM:
        return block_of_parameter(name)
    if "ahead.0" in held:
        return "ahead.0"
    if tied_head and "embedding" in held:
        return "embedding"
    return "head"


class GatheredUnits(UnitWindow):
    """The weights of a model in units, of which at most `most` are whole at a time, or as many as a step uses."""

    arrives = "gathers"

    def __init__(
        self, model: nn.Module, buckets: list[Bucket], gradients: UnitGradients, spans: SpanRecorder, most: int = 2
    ):  # fmt: skip
        super().__init__(spans, most)
        self.buckets = buckets
        self.gradients = gradients
        self.sharded = defaultdict[str, list[Bucket]](list)  # by unit: buckets of which this rank keeps a share
        self.are_prepared = False  # shares, for gathers
        self.stream: Any = None  # of shares from the host
        unit_of: dict[int, str] = {}  # by the identity of a parameter
        for bucket in buckets:
            if isinstance(bucket.storage, ShardedWeights):
                self.sharded[bucket.unit].append(bucket)
            for parameter in bucket.parameters:
                identity = id(parameter.tensor)
                unit_of[identity] = bucket.unit
        for module in model.modules():
            if isinstance(module, DeclaringModule):
                self.attach_module(module, unit_of)

    def attach_module(self, module: DeclaringModule, unit_of: dict[int, str]) -> None:
        """Let calls of the module gather the units of the parameters that it reads."""
        read = module.parameters_read()
        units = frozenset(unit_of[id(parameter)] for parameter in read)
        if units:
            self.attach_units(module, units)

    # ---- as a window

    def units(self) -> Collection[str]:
        return self.sharded.keys()

    def tensors_of(self, unit: str) -> list[Tensor]:
        storages = map(sharded_storage, self.sharded[unit])
        return [tensor for storage in storages for tensor in storage.gathered_memory()]

    def enter_backward(self, units: Units) -> None:
        self.gradients.enter_units(units)

    def bring(self, unit: str, readers: Sequence[Any]) -> list[PendingGather]:
        buckets = self.sharded[unit]
        if not self.are_prepared:  # the first gather of a run
            self.prepare_shares()
        for event in readers:
            event.wait()
        if copies_to_device(buckets):
            return self.bring_from_host(buckets)
        return gather_all(buckets)

    def bring_from_host(self, buckets: list[Bucket]) -> list[PendingGather]:
        """Gather shares behind their copies from the host, beside what the present stream computes."""
        if self.stream is None:
            self.stream = torch.cuda.Stream()
        present = torch.cuda.current_stream()
        self.stream.wait_stream(present)  # whose work may still use this memory
        with torch.cuda.stream(self.stream):
            return gather_all(buckets)

    def release(self, unit: str) -> None:
        for bucket in self.sharded[unit]:
            sharded_storage(bucket).forget_gathered()
            weights = [parameter.tensor for parameter in bucket.parameters]
            drop_copies(weights)

    def prepare_shares(self) -> None:
        """Let storages prepare their shares for gathers, all of them at once: replicas may have to agree on scales,
        which no lane must wait for beside the gathers of another."""
        for bucket in self.buckets:
            agree = partial(all_reduce_max_no_grad, axis=bucket.replicas)
            bucket.storage.before_gather(agree)
        self.are_prepared = True

    # ---- as a Publisher, for weights that are gathered when they are needed

    def publish(self) -> None:
        """Weights were updated or loaded: what was gathered before no longer holds."""
        for bucket in self.buckets:
            written = [parameter.tensor for parameter in bucket.parameters]
            count_change(written)
            bucket.await_update()
        self.free_all()
        self.prepare_shares()

    def await_all_buckets(self) -> None:
        """There is nothing to wait for: shares are up to date."""


def copies_to_device(buckets: list[Bucket]) -> bool:
    """Whether shares of a unit lie on the host, and its weights on a GPU."""
    for bucket in buckets:
        weights = bucket.weights
        if bucket.key.on_host and weights.is_cuda:
            return True
    return False


def gather_all(buckets: list[Bucket]) -> list[PendingGather]:
    return [gather_shares(bucket, "unit") for bucket in buckets]


def sharded_storage(bucket: Bucket) -> ShardedWeights:
    storage = bucket.storage
    assert isinstance(storage, ShardedWeights)
    return storage
