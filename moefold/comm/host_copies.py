"""Between host and device without waiting: pinned memory, copies on a stream, and events that tell when they are done.

    host     step 1 | step 2 | reads 1 | step 3 | reads 2        numbers are asked for at once and read a step later
    device     ---- step 1 ---- | ---- step 2 ---- | ----

On a CPU everything is there at once, and the same calls simply return it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch


class ToHost:
    """A tensor on its way to the host. `read` waits until it is there."""

    def __init__(self, x: torch.Tensor):
        self.host_tensor, self.arrived = x, None
        if x.is_cuda:
            self.host_tensor = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self.host_tensor.copy_(x, non_blocking=True)
            self.arrived = torch.cuda.current_stream(x.device).record_event()

    def read(self) -> torch.Tensor:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.host_tensor


def integers_on_device(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """A few whole numbers that the host knows."""
    here = torch.tensor(values, dtype=torch.int64)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


class UploadStream:
    """Copies to the device beside its work, on a stream of their own."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, tensors: Sequence[torch.Tensor]) -> ToDevice:
        if self.stream is None:
            return ToDevice(list(tensors), None)
        with torch.cuda.stream(self.stream):
            copies = [x.pin_memory().to(self.device, non_blocking=True) for x in tensors]
            return ToDevice(copies, self.stream.record_event())


class ToDevice:
    """Tensors on their way to the device."""

    def __init__(self, tensors: list[torch.Tensor], arrived: Any):
        self.tensors, self.arrived = tensors, arrived

    def take(self) -> list[torch.Tensor]:
        """For use on the present stream, from when they are there."""
        if self.arrived is not None:
            here = torch.cuda.current_stream(self.tensors[0].device)
            here.wait_event(self.arrived)
            for x in self.tensors:
                x.record_stream(here)
        return self.tensors


class DeviceTime:
    """A point in a device's work: when it gets there, or on a CPU now."""

    def __init__(self, device: torch.device):
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self.clock = time.perf_counter()
        if self.event is not None:
            self.event.record(torch.cuda.current_stream(device))

    def seconds_until(self, later: DeviceTime) -> float:
        """Waits until the later one is reached."""
        if self.event is None or later.event is None:
            return later.clock - self.clock
        later.event.synchronize()
        return self.event.elapsed_time(later.event) / 1e3
