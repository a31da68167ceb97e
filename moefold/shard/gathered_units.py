"""Fully sharded weights (ZeRO-3): units are gathered before the steps that use them, and freed behind them.

    forward    | unit 0 | unit 1 | unit 2 |           a rank holds its share of all units, and of two units all weights:
    network    | gather 1 | gather 2 |                of the one in use, and of the next, which is on its way

A unit is a block, the embedding or the head (`unit_of_parameter`). Which units a step uses is seen in its first
forward: a module gathers what it needs when it is called. From then on the units of a step are known before it runs,
forward and backward, and so are those that come next. Weights do not change within a step of the optimizer, so a unit
that is still here is not gathered again: the last one of a forward serves the backward that follows, and a forward that
is run again in backward (recompute) uses what backward needs anyway.

Everything is issued by the thread that runs steps with weights, in the order of the program: the same on all ranks.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from moefold.comm.collectives import all_reduce_max_no_grad
from moefold.layout.declare import DeclaringModule
from moefold.layout.weight_copies import count_change, drop_copies
from moefold.model.steps import PassKey, PassKind, Step
from moefold.observe.trace import SpanRecorder
from moefold.shard.buckets import Bucket, block_of_parameter
from moefold.shard.publish import PendingGather, gather_shares
from moefold.shard.storage import ShardedWeights
from moefold.shard.unit_gradients import UnitGradients

FINAL_NORM = "head.norm.weight"
Units = frozenset[str]
StepListKey = tuple[int, bool]  # stage, and whether gradients are wanted


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


class UnitsInTurn(NamedTuple):
    """Neighbouring steps that use the same units: the number of their turn in the order of forward."""

    order: list[Units]
    number: int

    @property
    def units(self) -> Units:
        return self.order[self.number]

    def neighbour(self, kind: PassKind) -> Units:
        """The units of the turn that comes next, forward or backward."""
        step = 1 if kind == "F" else -1
        number = self.number + step
        if 0 <= number < len(self.order):
            return self.order[number]
        return frozenset()


@dataclass
class UnitGather:
    """The gathers of a unit that has memory, and when they were begun. Every thread waits for them once: lanes of a GPU
    are streams, each of which must wait. The first one makes what is made of gathered bytes."""

    unit: str
    begun: float
    pending: list[PendingGather]
    waited: set[int] = field(default_factory=set)  # threads
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_made: torch.cuda.Event | None = None  # on the stream of the first thread

    def wait(self, spans: SpanRecorder) -> None:
        thread = threading.get_ident()
        with self.lock:
            if thread in self.waited:
                return
            is_first = not self.waited
            for gather in self.pending:
                if is_first:
                    gather.wait()
                else:
                    gather.wait_for_works()
            self.keep_for_this_stream(is_first)
            self.waited.add(thread)
        if is_first and spans.recording:
            spans.add_span(self.unit, "gathers", self.begun)

    def keep_for_this_stream(self, is_first: bool) -> None:
        """Keep the allocator from reusing memory, once it is freed, before the current stream is done with it; and the
        stream from reading what the first one has not made."""
        for gather in self.pending:
            storage = gather.storage
            assert isinstance(storage, ShardedWeights)
            for tensor in storage.gathered_tensors():
                if not tensor.is_cuda:
                    return
                stream = torch.cuda.current_stream()
                tensor.record_stream(stream)
        if is_first:
            self.is_made = torch.cuda.Event()
            self.is_made.record()
        elif self.is_made is not None:
            self.is_made.wait()


class SeenUnits(threading.local):
    """The units that modules have asked for in the step that this thread runs; None outside of a first forward."""

    units: set[str] | None = None


class GatheredUnits:
    """The weights of a model in units, of which at most `most` are whole at a time, or as many as a step uses. An
    observer of steps."""

    def __init__(
        self, model: nn.Module, buckets: list[Bucket], gradients: UnitGradients, spans: SpanRecorder, most: int = 2
    ):  # fmt: skip
        self.buckets = buckets
        self.spans = spans
        self.gradients = gradients
        self.most = most
        self.sharded = defaultdict[str, list[Bucket]](list)  # by unit: buckets of which this rank keeps a share
        self.whole: dict[str, UnitGather] = {}  # units with memory, the one used last at the end
        self.in_use: Units = frozenset()
        self.are_prepared = False  # shares, for gathers
        self.turns: dict[int, UnitsInTurn] = {}  # by the identity of a step
        self.steps: list[Step] = []  # those steps, kept so that none takes the identity of another
        self.orders = defaultdict[StepListKey, list[Units]](list)
        self.seen = SeenUnits()
        self.lock = threading.RLock()
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
        own = module.parameters(recurse=False)
        used = (*own, *module.borrowed)
        units = frozenset(unit_of[id(parameter)] for parameter in used)
        if units:
            hook = partial(self.before_module, units)
            module.register_forward_pre_hook(hook)

    # ---- what modules and steps ask for

    def before_module(self, units: Units, *_: object) -> None:
        """A module is about to read the weights of these units."""
        if self.seen.units is not None:
            self.seen.units |= units
        self.require(units)

    def before(self, step: Step, kind: PassKind, key: PassKey) -> None:
        turn = self.turns.get(id(step))
        if turn is None:
            self.seen.units = set()
            self.in_use = frozenset()
            return
        if not turn.units:
            return
        with self.lock:
            if kind == "D":
                self.gradients.enter_units(turn.units)
            self.in_use = turn.units
        self.require(turn.units)
        following = turn.neighbour(kind)
        with self.lock:
            self.gather_ahead(following)

    def after(self, step: Step, kind: PassKind, key: PassKey) -> None:
        if self.seen.units is None:
            return
        units = frozenset(self.seen.units)
        self.seen.units = None
        with self.lock:
            self.remember(step, units, key)

    def remember(self, step: Step, units: Units, key: PassKey) -> None:
        """Note the units of a step after its first forward. A step without weights belongs to no turn."""
        stage, _ = key
        has_gradients = torch.is_grad_enabled()
        order = self.orders[stage, has_gradients]
        self.steps.append(step)
        identity = id(step)
        if not units:
            self.turns[identity] = UnitsInTurn([units], 0)
            return
        if not order or order[-1] != units:
            order.append(units)
        number = len(order) - 1
        self.turns[identity] = UnitsInTurn(order, number)

    # ---- gathers

    def require(self, units: Iterable[str]) -> None:
        """Have these units whole: gathered and awaited. Nobody waits under the lock: gathers end when other ranks have
        begun them, which the other lane of this rank may have to let them."""
        wanted = [unit for unit in sorted(units) if unit in self.sharded]
        gathers: list[UnitGather] = []
        with self.lock:
            keep = {*wanted, *self.in_use}
            for unit in wanted:
                self.begin_gather(unit, keep)
            for unit in wanted:
                gather = self.whole.pop(unit)
                self.whole[unit] = gather  # at the end: used last
                gathers.append(gather)
        for gather in gathers:
            gather.wait(self.spans)

    def gather_ahead(self, units: Units) -> None:
        """Begin to gather units that come next, as far as there is room beside those in use."""
        keep = {unit for unit in self.in_use if unit in self.sharded}
        following = units & self.sharded.keys()
        for unit in sorted(following):
            keep.add(unit)
            if len(keep) > self.most:
                return
            self.begin_gather(unit, keep)

    def begin_gather(self, unit: str, keep: set[str]) -> None:
        if unit in self.whole:
            return
        self.make_room(keep)
        begun = time.time()
        buckets = self.sharded[unit]
        if not self.are_prepared:  # the first gather of a run
            self.prepare_shares()
        pending = [begin_bucket_gather(bucket) for bucket in buckets]
        self.whole[unit] = UnitGather(unit, begun, pending)

    def prepare_shares(self) -> None:
        """Let storages prepare their shares for gathers, all of them at once: replicas may have to agree on scales,
        which no lane must wait for beside the gathers of another."""
        for bucket in self.buckets:
            agree = partial(all_reduce_max_no_grad, axis=bucket.replicas)
            bucket.storage.before_gather(agree)
        self.are_prepared = True

    def make_room(self, keep: set[str]) -> None:
        """Free the units that were used longest ago, but none of `keep`, until there is room for one more."""
        for unit in list(self.whole):
            if len(self.whole) < self.most:
                return
            if unit not in keep:
                self.free(unit)

    def free(self, unit: str) -> None:
        gather = self.whole.pop(unit)
        gather.wait(self.spans)
        for bucket in self.sharded[unit]:
            assert isinstance(bucket.storage, ShardedWeights)
            bucket.storage.free()
            weights = [parameter.tensor for parameter in bucket.parameters]
            drop_copies(weights)

    # ---- as a Publisher, for weights that are gathered when they are needed

    def publish(self) -> None:
        """Weights were updated or loaded: what was gathered before no longer holds."""
        for bucket in self.buckets:
            written = [parameter.tensor for parameter in bucket.parameters]
            count_change(written)
            bucket.await_update()
        self.in_use = frozenset()
        for unit in list(self.whole):
            self.free(unit)
        self.prepare_shares()

    def await_all_buckets(self) -> None:
        """There is nothing to wait for: shares are up to date."""


def begin_bucket_gather(bucket: Bucket) -> PendingGather:
    storage = bucket.storage
    assert isinstance(storage, ShardedWeights)
    storage.allocate()
    return gather_shares(bucket, "unit")
