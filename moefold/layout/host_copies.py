"""Frozen weights that lie on the host: a parameter has memory on its device only while a step uses it.

memory/host_experts.py makes and fetches them; with full sharding a rank's share lies there, which is gathered
(shard/buckets.py). A weight in its own precision is saved, loaded and compared by its host memory, as its held share
(layout/held_share.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class HostCopy(NamedTuple):
    """A tensor on the host, and its place on the device, which is without memory between uses."""

    on_host: Tensor
    on_device: Tensor


def put_share_on_host(parameter: Tensor) -> None:
    """When the parameter is shared out, let this rank's share lie on the host."""
    parameter.share_on_host = True  # pyright: ignore[reportAttributeAccessIssue]


def is_share_on_host(parameter: Tensor) -> bool:
    return getattr(parameter, "share_on_host", False)


def attach_host_copies(parameter: Tensor, copies: Sequence[HostCopy]) -> None:
    parameter.host_copies = tuple(copies)  # pyright: ignore[reportAttributeAccessIssue]


def host_copies_of(parameter: Tensor) -> tuple[HostCopy, ...]:
    """What is fetched before the parameter is read; nothing where it is always on its device."""
    return getattr(parameter, "host_copies", ())
