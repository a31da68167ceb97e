"""Offload: memory that autograd saves inside a region lies on the host between forward and backward.

    forward    a tensor saved inside an offloaded region is copied to the host while later steps run; its device memory
               is freed at the end of the second layer behind it; at the end of a stage's last two layers all is freed
               but what the layer that ends has offloaded
    backward   the first tensor of a layer that is asked for begins the copies of the layer before

What is copied is a tensor's whole storage: views of it, and tensors that steps outside of the region save of it, refer
to that one copy. Parameters, small storages, and storages that something else keeps alive stay on the device, and so
does everything when the host pool is full.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from moefold.config.memory_regions import REGIONS
from moefold.memory.copies import Arrival, Copier, Departure
from moefold.memory.host_pool import HostBlock, HostPool
from moefold.memory.policy import Function, regions_with_layers
from moefold.memory.recompute import SavedTensor, SaveHooks, ViewForm, memory_of
from moefold.model.steps import Carry, Step, StepRewrite
from moefold.model.transformer import Transformer

OFFLOADS = "offloads"  # the entry of the carry that has what a pass has offloaded

OffloadedLayers = Mapping[str, frozenset[int]]  # by region
UnderWay = tuple[int, ...]  # layers whose copies to the host may go on behind the end of a layer
Weights = Callable[[], Iterable[Tensor]]


class SavedMemory:
    """The storage of tensors that autograd saves: on the device, on the host, or under way."""

    def __init__(self, offloader: Offloader, x: Tensor):
        self.offloader = offloader
        self.packed: Any = None  # what hooks outside of the offloader made of it, as long as it stays
        self.version: int = x._version  # pyright: ignore[reportPrivateUsage]
        memory = bytes_of(x.untyped_storage())
        self.memory: Tensor | None = memory
        self.nbytes = memory.numel()
        self.block: HostBlock | None = None
        self.bundle: Bundle | None = None
        self.departure = Departure()
        self.arrival: Arrival | None = None

    def leave(self, bundle: Bundle) -> None:
        """Begin the copy to the host, if there is room and none has begun."""
        if self.bundle is not None or self.memory is None:
            return
        offloader = self.offloader
        block = offloader.pool.take(self.nbytes)
        if block is None:
            offloader.refused_bytes += self.nbytes
            return
        self.block = block
        self.bundle = bundle
        copier = offloader.copier
        self.departure = copier.to_host(self.memory, block)
        bundle.members.append(weakref.ref(self))
        offloader.leaving.append(self)
        offloader.copied_bytes += self.nbytes

    def free_device_memory(self) -> None:
        """End the copy to the host. Memory that something else holds is not freed, so it stays here too."""
        if self.memory is None or self.block is None:
            return
        self.departure.let_stream_wait()
        reference = StorageWeakRef(self.memory.untyped_storage())
        self.memory = None
        self.packed = None
        if reference.expired():
            return
        storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)  # pyright: ignore
        self.memory = bytes_of(storage)  # pyright: ignore[reportUnknownArgumentType]
        self.offloader.staying[reference.cdata] = reference
        self.offloader.returned_bytes += self.nbytes
        self.give_block_back(self.block)

    def come_back(self) -> None:
        """Begin the copy to the device, unless the memory is there."""
        block = self.block
        if block is None:
            return
        if self.memory is None:
            copier = self.offloader.copier
            self.arrival = copier.to_device(block, self.nbytes, self.departure)
            block.readers = self.arrival.events
        else:
            self.offloader.leaving.remove(self)  # the memory is used here, and freed with this object
        self.give_block_back(block)

    def give_block_back(self, block: HostBlock) -> None:
        self.block = None
        self.offloader.pool.give_back(block)

    def on_device(self) -> Tensor:
        """All bytes, when the copy is there."""
        if self.block is not None:
            self.come_back()
        if self.memory is not None:
            return self.memory
        assert self.arrival is not None
        return self.arrival.take()

    def __del__(self) -> None:
        if self.arrival is not None:
            self.arrival.let_stream_wait()
        elif self.memory is not None:
            self.departure.let_stream_wait()
        if self.block is not None:
            self.give_block_back(self.block)


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    with torch.no_grad():
        empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return empty.set_(storage)  # pyright: ignore


class SavedView(NamedTuple):
    """A saved tensor as a view of saved memory, and what the layer that saved it has offloaded."""

    saved: SavedMemory
    layer: Bundle | None
    dtype: torch.dtype
    form: ViewForm

    def tensor(self) -> Tensor:
        offloader = self.saved.offloader
        with offloader.lock, torch.no_grad():
            if self.layer is not None:
                self.layer.ask_for(offloader)
            memory = self.saved.on_device()
            size, stride, offset = self.form
            view = torch.empty(0, dtype=self.dtype, device=memory.device)
            return view.set_(memory.untyped_storage(), offset, size, stride)  # pyright: ignore


class Bundle:
    """What one layer of a pass has offloaded, if anything: it comes back together, when backward is at the layer behind
    it."""

    def __init__(self, before: Bundle | None):
        self.before = before
        self.members: list[weakref.ref[SavedMemory]] = []

    def come_back(self) -> None:
        members = self.members
        self.members = []
        for reference in members:
            member = reference()
            if member is not None:
                member.come_back()

    def ask_for(self, offloader: Offloader) -> None:
        """Bring this layer back, and begin with the one before."""
        if self.members:
            offloader.late_layers += 1
        self.come_back()
        if self.before is not None:
            self.before.come_back()


class PassOffloads:
    """What a microbatch's pass through a stage has offloaded, by layer."""

    def __init__(self, offloader: Offloader):
        self.offloader = offloader
        weights = offloader.weights()
        self.weights = set(map(memory_of, weights))  # they may have moved
        self.bundles: dict[int, Bundle] = {}
        self.last: Bundle | None = None

    def bundle_of(self, layer: int) -> Bundle:
        if layer not in self.bundles:
            self.last = Bundle(before=self.last)
            self.bundles[layer] = self.last
        return self.bundles[layer]

    def begin_backward(self) -> None:
        """Bring back the last layer, where backward begins."""
        with self.offloader.lock:
            if self.last is not None:
                self.last.come_back()


def bring_back_ahead(carry: Carry) -> None:
    """Begin the copies for a backward that is near, from the carry at the end of its forward."""
    offloads: PassOffloads | None = carry.get(OFFLOADS)
    if offloads is not None:
        offloads.begin_backward()


class Saving(threading.local):
    """Where this thread saves tensors: in which pass and layer, and whether inside an offloaded region."""

    offloads: PassOffloads | None = None
    layer: int | None = None
    inside: bool = False


SAVING = Saving()


def current_bundle() -> Bundle | None:
    """The bundle of the layer that this thread runs; None outside of layers."""
    if SAVING.offloads is None or SAVING.layer is None:
        return None
    return SAVING.offloads.bundle_of(SAVING.layer)


class KnownMemory(NamedTuple):
    """A storage in memory, and what was saved of it."""

    memory: StorageWeakRef
    saved: weakref.ref[SavedMemory]

    def expired(self) -> bool:
        return self.memory.expired()


class Offloader:
    """Offloading for one model. Bytes are counted since its start: `copied_bytes` to the host, of these
    `returned_bytes` of memory that stayed in use on the device; `refused_bytes` for want of room. `late_layers`: layers
    whose copies back began only when backward asked for them."""

    def __init__(self, layers: OffloadedLayers, weights: Weights, copier: Copier, limit: int, least: int):
        self.layers = layers
        self.weights = weights
        self.copier = copier
        self.least = least
        self.pool = HostPool(limit, copier.allocate)
        self.lock = threading.RLock()  # segments may run on two threads
        self.known: dict[int, KnownMemory] = {}  # by address
        self.staying: dict[int, StorageWeakRef] = {}  # copied in vain: something else kept it on the device
        self.leaving: list[SavedMemory] = []
        self.copied_bytes = 0
        self.returned_bytes = 0
        self.refused_bytes = 0
        self.late_layers = 0

    # ---- forward

    def spans_step(self, step: Step) -> bool:
        """Whether the step lies inside an offloaded region, or is one."""
        step_name = step.spec.name
        for name, layers in self.layers.items():
            region = REGIONS[name]
            is_inside = step_name in region.spans or step_name == name
            if is_inside and step.layer in layers:
                return True
        return False

    def around_step(self, step: Step, under_way: UnderWay | None) -> Step:
        spans = self.spans_step(step)

        def run_and_offload(carry: Carry) -> Carry:
            if not torch.is_grad_enabled():
                return step.run(carry)
            offloads = carry.get(OFFLOADS) or PassOffloads(self)
            with self.saving(offloads, step.layer, spans):
                carry = step.run(carry)
            self.end_step(offloads, under_way)
            return carry | {OFFLOADS: offloads}

        return replace(step, run=run_and_offload)

    @contextmanager
    def saving(self, offloads: PassOffloads, layer: int | None, inside: bool) -> Iterator[None]:
        """Tensors that autograd saves inside belong to this pass and layer."""
        pack = partial(self.pack, SaveHooks.current())
        before = SAVING.offloads, SAVING.layer, SAVING.inside
        SAVING.offloads = offloads
        SAVING.layer = layer
        SAVING.inside = inside
        try:
            with saved_tensors_hooks(pack, unpack_view):
                yield
        finally:
            SAVING.offloads, SAVING.layer, SAVING.inside = before

    def around_region(self, around: Function, fn: Function, *inputs: Any) -> Any:
        """A region inside a step, under the policy that it has besides."""
        before = SAVING.inside
        SAVING.inside = True
        try:
            return around(fn, *inputs)
        finally:
            SAVING.inside = before

    def pack(self, outer: SaveHooks, x: Tensor) -> SavedView | SavedTensor:
        if self.stays(x):
            return outer.save(x)
        with self.lock, torch.no_grad():
            saved = self.saved_memory(x)
            bundle = current_bundle()
            if SAVING.inside and bundle is not None:
                saved.leave(bundle)
            if saved.block is None and saved.packed is None:
                detached = x.detach()
                saved.packed = outer.pack(detached)
        form = ViewForm.of(x)
        return SavedView(saved, bundle, x.dtype, form)

    def stays(self, x: Tensor) -> bool:
        """Whether a tensor's memory is small, or is kept on the device in any case."""
        address = memory_of(x)
        offloads = SAVING.offloads
        is_weight = offloads is not None and address in offloads.weights
        if is_weight or address in self.staying:
            return True
        nbytes = x.untyped_storage().nbytes()
        return nbytes < self.least

    def saved_memory(self, x: Tensor) -> SavedMemory:
        """The saved memory of a tensor: that of an earlier one with the same storage, unless it was written since."""
        # A weak reference holds the address, so no other memory has it.
        address = memory_of(x)
        saved = None
        if address in self.known:
            saved = self.known[address].saved()
        if saved is None or saved.version != x._version:  # pyright: ignore[reportPrivateUsage]
            saved = SavedMemory(self, x)
            memory = StorageWeakRef(x.untyped_storage())
            reference = weakref.ref(saved)
            self.known[address] = KnownMemory(memory, reference)
        return saved

    def end_step(self, offloads: PassOffloads, under_way: UnderWay | None) -> None:
        with self.lock:
            forget_freed(self.known)
            forget_freed(self.staying)
            if under_way is not None:
                kept = list(map(offloads.bundles.get, under_way))
                self.free_all_but(kept)

    def free_all_but(self, kept: list[Bundle | None]) -> None:
        """Free the device memory of what was copied to the host, except in these bundles."""
        leaving = self.leaving
        self.leaving = []
        for member in leaving:
            if member.bundle in kept:
                self.leaving.append(member)
            else:
                member.free_device_memory()


def unpack_view(saved: SavedView | SavedTensor) -> Tensor:
    return saved.tensor()


def forget_freed(memories: dict[int, Any]) -> None:
    """Drop the entries whose memory is free."""
    present = list(memories.items())
    for address, memory in present:
        if memory.expired():
            del memories[address]


@dataclass(frozen=True, eq=False)
class OffloadingSteps:
    """The rewrite of a step list under which every step's saved tensors are known to an offloader."""

    offloader: Offloader
    rewrite: StepRewrite

    def __call__(self, steps: list[Step]) -> list[Step]:
        rewritten = self.rewrite(steps)
        following = [*rewritten[1:], None]
        layers = [step.layer for step in rewritten if step.layer is not None]
        last = max(layers, default=0)
        offloading: list[Step] = []
        for step, next_step in zip(rewritten, following, strict=True):
            ends_layer = next_step is None or next_step.layer != step.layer
            under_way = layers_under_way(step.layer, last) if ends_layer else None
            wrapped = self.offloader.around_step(step, under_way)
            offloading.append(wrapped)
        return offloading


def layers_under_way(layer: int | None, last: int) -> UnderWay:
    """The layer that ends and the one before; near the last layer, where memory is at its peak, the layer alone."""
    if layer is None:
        return ()
    if layer >= last - 1:
        return (layer,)
    return (layer, layer - 1)


def attach_offloader(model: Transformer, offloader: Offloader) -> None:
    """Offload regions of a model, whatever policies they have besides."""
    for region, layer in regions_with_layers(model):
        offloaded = offloader.layers.get(region.name, ())
        if layer in offloaded:
            region.around = partial(offloader.around_region, region.around)
    model.rewrite_steps = OffloadingSteps(offloader, model.rewrite_steps)


def offloader_of(model: Transformer) -> Offloader | None:
    rewrite = model.rewrite_steps
    if isinstance(rewrite, OffloadingSteps):
        return rewrite.offloader
    return None
