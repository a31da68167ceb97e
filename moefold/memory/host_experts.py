"""Frozen experts on the host (`memory.offload expert_weights`): a layer's weights are fetched ahead of its experts.

    compute    | attend 0 | experts 0 | attend 1 | experts 1 | attend 2 | ...      forward, and in reverse backward
    host link  | layer 1 ------------ | layer 2 ------------ |

A unit is the weights of a layer's routed experts on this rank: in the model's precision, or in the blocks of
`lora.base`. Two units have device memory at a time, the one in use and the next (model/unit_window.py); with paired
slots two of each pass. A unit takes the memory that one before it left (model/unit_memory.py). The copy stream waits
for what used that memory, and the compute stream for the copy; the host waits for nothing. On a CPU the same code
copies at once.

With full sharding there is no window of experts: a rank's share of them lies on the host, and comes with the unit of
its layer (shard/gathered_units.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moefold.anatomy.weight_units import units_at_a_time
from moefold.config.run import Config
from moefold.layout.declare import declared_parameters
from moefold.layout.held_blocks import attach_fetched_blocks, attach_held_blocks, held_blocks_of
from moefold.layout.held_share import HeldShare, attach_held_share
from moefold.layout.host_copies import HostCopy, attach_host_copies, host_copies_of, put_share_on_host
from moefold.layout.pinned_memory import host_memory
from moefold.layout.weight_copies import drop_copies
from moefold.model.moe.experts import Experts
from moefold.model.unit_window import UnitWindow
from moefold.observe.trace import SpanRecorder
from moefold.precision.recipes import named_products, placed_weight


class PendingFetch(NamedTuple):
    """Copies from the host under way. `event`: behind them; None where they end at once."""

    copies: tuple[HostCopy, ...]
    event: Any = None

    def wait(self) -> None:
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)

    def wait_for_works(self) -> None:
        self.wait()

    def arriving_tensors(self) -> list[Tensor]:
        return [copy.on_device for copy in self.copies]


class FetchedExperts(UnitWindow):
    """The experts of a model whose weights lie on the host. An observer of steps. `fetched_bytes`: since its start."""

    arrives = "fetches"

    def __init__(self, model: nn.Module, spans: SpanRecorder, most: int):
        super().__init__(spans, most)
        self.weights: dict[str, list[Tensor]] = {}  # by unit
        self.stream: Any = None
        self.fetched_bytes = 0
        for name, module in model.named_modules():
            if isinstance(module, Experts):
                self.attach_experts(name, module)

    def attach_experts(self, name: str, experts: Experts) -> None:
        weights = [weight for weight in experts.parameters(recurse=False) if host_copies_of(weight)]
        if not weights:
            return
        self.weights[name] = list[Tensor](weights)
        self.attach_units(experts, frozenset([name]))
        device = weights[0].device
        if device.type == "cuda" and self.stream is None:
            self.stream = torch.cuda.Stream(device)

    def units(self) -> Collection[str]:
        return self.weights.keys()

    def tensors_of(self, unit: str) -> list[Tensor]:
        return [copy.on_device for copy in self.copies(unit)]

    def copies(self, unit: str) -> tuple[HostCopy, ...]:
        found: tuple[HostCopy, ...] = ()
        for weight in self.weights[unit]:
            found += host_copies_of(weight)
        return found

    @torch.no_grad()
    def bring(self, unit: str, readers: Sequence[Any]) -> list[PendingFetch]:
        copies = self.copies(unit)
        self.fetched_bytes += sum(copy.on_host.nbytes for copy in copies)
        if self.stream is None:
            fill_from_host(copies)
            return [PendingFetch(copies)]
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)  # which may still use this memory for what was in it before
        for event in readers:
            self.stream.wait_event(event)
        with torch.cuda.stream(self.stream):
            fill_from_host(copies)
        event = self.stream.record_event()
        return [PendingFetch(copies, event)]

    def release(self, unit: str) -> None:
        drop_copies(self.weights[unit])


def fill_from_host(copies: Iterable[HostCopy]) -> None:
    for copy in copies:
        copy.on_device.copy_(copy.on_host, non_blocking=True)


@torch.no_grad()
def hold_experts_on_host(model: nn.Module, products: Collection[str], in_shares: bool) -> None:
    """Give the weights of these products, or the blocks that stand for them, host memory. The model was declared
    without; products of other pipeline ranks are left. Weights `in_shares` get it when they are shared out."""
    hold = put_share_on_host if in_shares else move_to_host
    here = named_products(model)
    on_host = [placed_weight(here[name]).declaration for name in products if name in here]
    identities = set(map(id, on_host))
    for parameter in declared_parameters(model):
        if id(parameter.declaration) in identities:
            hold(parameter.tensor)


def move_to_host(weight: Tensor) -> None:
    """Products read what is on the device, where it comes to."""
    blocks = held_blocks_of(weight)
    if blocks is None:
        values = host_memory(weight)
        attach_held_share(weight, HeldShare(0, values.view(-1)))
        copy = HostCopy(values, weight.data)
        attach_host_copies(weight, [copy])
        return
    held = blocks.remade(host_memory)
    attach_held_blocks(weight, held)
    attach_fetched_blocks(weight, blocks)
    copies = map(HostCopy, held.tensors(), blocks.tensors())
    attach_host_copies(weight, list(copies))


def fetch_experts(config: Config, model: nn.Module, spans: SpanRecorder) -> tuple[FetchedExperts, ...]:
    """What fetches the experts of a run's model from the host; nothing where all are on the device."""
    fetched = FetchedExperts(model, spans, units_at_a_time(config.pipeline))
    return (fetched,) if fetched.weights else ()
