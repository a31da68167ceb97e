"""Asynchronous copies between host and device: pinned memory, copies on a stream, and events for their completion.

    host     step 1 | step 2 | reads 1 | step 3 | reads 2        results are requested at once and read a step later
    device     ---- step 1 ---- | ---- step 2 ---- | ----

On a CPU nothing is copied, and the same calls return the tensors themselves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class ToHost:
    """A copy of a tensor to the host, in progress. `read` waits for it."""

    def __init__(self, x: Tensor):
        self.host_tensor = x
        self.arrived = None
        if x.is_cuda:
            pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            pinned.copy_(x, non_blocking=True)
            self.host_tensor = pinned
            stream = torch.cuda.current_stream(x.device)
            self.arrived = stream.record_event()

    def read(self) -> Tensor:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.host_tensor


def integers_on_device(values: Sequence[int], device: torch.device) -> Tensor:
    """A few whole numbers of the host as a tensor, copied without waiting."""
    on_host = torch.tensor(values, dtype=torch.int64)
    if device.type != "cuda":
        return on_host
    return copy_from_pinned(on_host, device)


def copy_from_pinned(x: Tensor, device: torch.device) -> Tensor:
    pinned = x.pin_memory()
    return pinned.to(device, non_blocking=True)


class UploadStream:
    """A stream for copies to the device, concurrent with its compute."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)

    def begin(self, tensors: Sequence[Tensor]) -> ToDevice:
        if self.stream is None:
            return ToDevice(list(tensors), None)
        with torch.cuda.stream(self.stream):
            copies = [copy_from_pinned(x, self.device) for x in tensors]
            arrived = self.stream.record_event()
        return ToDevice(copies, arrived)


@dataclass
class ToDevice:
    """Copies of tensors to the device, in progress. `arrived` is the event behind them."""

    tensors: list[Tensor]
    arrived: Any

    def take(self) -> list[Tensor]:
        """The tensors; the current stream waits for the copies before it uses them."""
        if self.arrived is not None:
            device = self.tensors[0].device
            current = torch.cuda.current_stream(device)
            current.wait_event(self.arrived)
            for x in self.tensors:
                x.record_stream(current)
        return self.tensors


class DeviceTime:
    """A time stamp in a device's stream; on a CPU, the present time."""

    def __init__(self, device: torch.device):
        self.event = None
        self.clock = time.perf_counter()
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            stream = torch.cuda.current_stream(device)
            self.event.record(stream)

    def wait(self) -> None:
        """Wait until the device has reached it."""
        if self.event is not None:
            self.event.synchronize()

    def seconds_until(self, later: DeviceTime) -> float:
        """Waits until the device has reached the later one."""
        if self.event is None or later.event is None:
            return later.clock - self.clock
        later.wait()
        return self.event.elapsed_time(later.event) / 1e3
