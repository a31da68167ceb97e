"""Pinned host memory of exact size. torch's own is rounded up to a power of two, and its pages are made one by one: of
36 GB, 64 GiB in 28 s.

Pages are made by all threads of torch, large ones where the system has them, and then registered with the driver.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from math import prod
from typing import Any

import torch
from torch import Tensor

LEAST_REGISTERED = 1 << 20  # bytes: of less, torch's pinned memory, which it keeps for reuse, wastes little


def host_bytes(size: int, pinned: bool) -> Tensor:
    """Host memory in zeros that begins at the border of a page."""
    length = max(size, 1)
    memory = mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = ctypes.c_ubyte * length
    pages = array.from_buffer(memory)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    if pinned:
        pin_pages(memory, whole)
        place = whole.data_ptr()
        unpin = weakref.finalize(pages, unpin_pages, memory, place)
        unpin.atexit = False  # the driver frees what a process has pinned
    return whole[:size]


def pin_pages(memory: mmap.mmap, whole: Tensor) -> None:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole.zero_()
    driver: Any = torch.cuda.cudart()
    place = whole.data_ptr()
    code = driver.cudaHostRegister(place, len(whole), 0)
    torch.cuda.check_error(int(code))


def unpin_pages(memory: mmap.mmap, place: int) -> None:
    """Before the pages go: `memory` keeps them until this returns."""
    driver: Any = torch.cuda.cudart()
    code = driver.cudaHostUnregister(place)
    torch.cuda.check_error(int(code))


def pinned_copy(x: Tensor) -> Tensor:
    """A copy in host memory."""
    on_host = host_memory(x)
    return on_host.copy_(x)


def host_memory(like: Tensor) -> Tensor:
    """Memory of this shape and type on the host, pinned where a GPU reads it; without values."""
    size = prod(like.shape) * like.element_size()
    if size < LEAST_REGISTERED:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
    raw = host_bytes(size, like.is_cuda)
    flat = raw.view(like.dtype)
    return flat.view(like.shape)
