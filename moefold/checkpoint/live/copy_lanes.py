"""Lanes of copies to the host: streams of a GPU that are used by turns; on a CPU none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import torch

LANES = 2


class CopyLanes:
    """On two streams by turns one chunk is made, of moments in 8 bits for instance, while another is copied. Copies go
    before the training's kernels, which would let each of those short ones wait, and behind all that is queued now."""

    def __init__(self, device: torch.device):
        self.device = device
        self.streams: list[Any] = []
        if device.type == "cuda":
            queued = torch.cuda.current_stream(device)
            ready = queued.record_event()
            self.streams = [torch.cuda.Stream(device, priority=-1) for _ in range(LANES)]
            for stream in self.streams:
                stream.wait_event(ready)
        self.in_turn = cycle(self.streams)

    @contextmanager
    def next_lane(self) -> Iterator[None]:
        if not self.streams:
            yield
            return
        stream = next(self.in_turn)
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield

    def synchronize(self) -> None:
        """Wait until all copies are done."""
        for stream in self.streams:
            stream.synchronize()
