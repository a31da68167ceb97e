"""Device-side scalars of a step: learning rates, bias corrections and seeds, in one small tensor at a fixed address.

The host writes them once a step without waiting. Kernels read them by pointer, so a captured graph that is replayed
reads the numbers of the present step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moefold.shard.buckets import round_up

ScalarRows = Sequence[Sequence[float]]
ROW_ALIGNMENT = 8  # numbers: rows begin at multiples of 64 bytes, so that one compiled kernel serves all of them


class StepScalars:
    """One row of fp64 for every bucket of an optimizer."""

    def __init__(self, rows: ScalarRows, device: torch.device):
        longest = max(map(len, rows))
        self.width = round_up(longest, ROW_ALIGNMENT)
        shape = (len(rows), self.width)
        self.on_device = torch.zeros(shape, dtype=torch.float64, device=device)

    def write_rows(self, rows: ScalarRows) -> None:
        """Replace all rows. A copy to a GPU is asynchronous: its pinned memory stays until the copy is done."""
        padded = [self.padded_row(row) for row in rows]
        on_host = torch.tensor(padded, dtype=torch.float64)
        if self.on_device.is_cuda:
            on_host = on_host.pin_memory()
        self.on_device.copy_(on_host, non_blocking=True)

    def padded_row(self, row: Sequence[float]) -> list[float]:
        zeros = [0.0] * (self.width - len(row))
        return [*row, *zeros]

    def row_of(self, number: int) -> Tensor:
        return self.on_device[number]
