"""Device-side scalars of a step: learning rates, bias corrections and seeds, in one small tensor at a fixed address.

The host writes them once a step without waiting. Kernels read them by pointer, so a captured graph that is replayed
reads the numbers of the present step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moefold.shard.buckets import round_up

ScalarRows = Sequence[Sequence[float]]
ROW_ALIGNMENT = 8  # numbers: rows begin at multiples of 64 bytes, so that one compiled kernel serves all of them


class UpdateNumber(NamedTuple):
    """The number of an update, from one: `highest`, or one less if the flag on the device says that the step before was
    skipped."""

    highest: int
    is_less: Tensor | None = None


class StepScalars:
    """One row of fp64 for every bucket of an optimizer."""

    def __init__(self, rows: ScalarRows, device: torch.device):
        count = len(rows)
        longest = max(map(len, rows))
        self.width = round_up(longest, ROW_ALIGNMENT)
        self.on_device = torch.zeros(count, self.width, dtype=torch.float64, device=device)

    def write_rows(self, rows: ScalarRows) -> None:
        """Replace all rows. A copy to a GPU is asynchronous: its pinned memory stays until the copy is done."""
        on_host = self.rows_on_host(rows)
        self.on_device.copy_(on_host, non_blocking=True)

    def write_rows_where(self, flag: Tensor, rows: ScalarRows) -> None:
        """Replace all rows if the flag is set, which only the device knows."""
        present = self.on_device
        on_host = self.rows_on_host(rows)
        others = on_host.to(present.device, non_blocking=True)
        chosen = others.where(flag, present)
        present.copy_(chosen)

    def rows_on_host(self, rows: ScalarRows) -> Tensor:
        padded: list[list[float]] = []
        for row in rows:
            missing = self.width - len(row)
            zeros = [0.0] * missing
            padded.append([*row, *zeros])
        on_host = torch.from_numpy(np.array(padded, dtype=np.float64))  # in a third of the time of torch.tensor
        if self.on_device.is_cuda:
            return on_host.pin_memory()
        return on_host

    def row_of(self, number: int) -> Tensor:
        return self.on_device[number]
