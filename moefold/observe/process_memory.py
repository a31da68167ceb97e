"""The most memory that this process has used."""

from __future__ import annotations

import resource
import sys

import torch

RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes


def peak_memory_gib(device: torch.device) -> float:
    """GiB: of tensors on a GPU; on a CPU, of the whole process. Reading it waits for nothing."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_maxrss * RSS_UNIT / 2**30
