"""Device-side scalars of a step: learning rates, bias corrections and seeds, in one small tensor at a fixed address.

The host writes them once a step without waiting. Kernels read them by pointer, so a captured graph that is replayed
reads the numbers of the present step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class StepScalars:
    """One row of fp64 for every bucket of an optimizer."""

    def __init__(self, rows: int, columns: int, device: torch.device):
        self.on_device = torch.zeros(rows, columns, dtype=torch.float64, device=device)

    def write(self, rows: Sequence[Sequence[float]]) -> None:
        """Replace all rows. A copy to a GPU is asynchronous: its pinned memory stays until the copy is done."""
        width = self.on_device.shape[1]
        padded = [[*row, *(0.0,) * (width - len(row))] for row in rows]
        on_host = torch.tensor(padded, dtype=torch.float64).view_as(self.on_device)
        if self.on_device.is_cuda:
            on_host = on_host.pin_memory()
        self.on_device.copy_(on_host, non_blocking=True)

    def row(self, number: int) -> torch.Tensor:
        return self.on_device[number]
