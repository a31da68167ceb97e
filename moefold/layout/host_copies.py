"""Frozen weights that lie on the host: a parameter has memory on its device only while a step uses it.

memory/host_experts.py fetches them; precision/base_blocks.py makes those that are in blocks. A weight in its own
precision is saved, loaded and compared by its host memory, as its held share (layout/held_share.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class HostCopy(NamedTuple):
    """A tensor on the host, and its place on the device, which is without memory between uses."""

    on_host: Tensor
    on_device: Tensor


def place_without_memory(like: Tensor, device: torch.device) -> Tensor:
    """A tensor of this shape and type whose storage has no memory yet."""
    place = torch.empty(like.shape, dtype=like.dtype, device=device)
    place.untyped_storage().resize_(0)
    return place


def attach_host_copies(parameter: Tensor, copies: Sequence[HostCopy]) -> None:
    parameter.host_copies = tuple(copies)  # pyright: ignore[reportAttributeAccessIssue]


def host_copies_of(parameter: Tensor) -> tuple[HostCopy, ...]:
    """What is fetched before the parameter is read; nothing where it is always on its device."""
    return getattr(parameter, "host_copies", ())
