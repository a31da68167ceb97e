"""The device that a benchmark measures: choice, description, synchronization, memory."""

from __future__ import annotations

import gc
import platform
from datetime import date
from typing import Any

import torch

from moefold.bench.versions import installed_version
from moefold.config.errors import UserError

REPORTED_PACKAGES = ("torch", "triton", "transformers")
GIB = 2**30


def resolve_device(wanted: str) -> str:
    has_cuda = torch.cuda.is_available()
    if wanted == "auto":
        return "cuda" if has_cuda else "cpu"
    if wanted == "cuda" and not has_cuda:
        raise UserError("--device cuda, but torch sees no CUDA device here; expected cpu or auto")
    return wanted


def resolve_dtype(wanted: str, device: str) -> str:
    if wanted != "auto":
        return wanted
    return "bf16" if device == "cuda" else "fp32"


def cuda_capability(device: str) -> tuple[int, int]:
    if device == "cuda":
        return torch.cuda.get_device_capability()
    return 0, 0


def machine_facts(device: str) -> dict[str, Any]:
    """Head of every report: date, card and versions."""
    card = platform.machine()
    if device == "cuda":
        card = torch.cuda.get_device_name()
    versions = {name: installed_version(name) for name in REPORTED_PACKAGES}
    today = date.today().isoformat()
    return {"date": today, "card": card, "versions": versions}


def synchronize_device(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def reset_peak_memory(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_device_gib(device: str) -> float | None:
    """GiB of device memory at most since the last reset; none where torch does not count them."""
    if device != "cuda":
        return None
    return torch.cuda.max_memory_allocated() / GIB


def held_device_gib(device: str) -> float:
    """GiB of device memory that torch's allocator has taken; 0 on a CPU."""
    return torch.cuda.memory_reserved() / GIB if device == "cuda" else 0.0


def first_line_of(error: Exception) -> str:
    first_line, *_ = str(error).splitlines()
    return first_line


def free_device_memory(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
