"""Collectives over an Axis. On an axis of size one each returns its input and sends nothing."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from moefold.layout.axes import Axis


def sum_(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sum in place over the axis: every rank ends with the same total."""
    if axis.size > 1:
        dist.all_reduce(x, group=axis.group)
    return x


def gather_objects(item: Any, axis: Axis) -> list[Any]:
    """What each rank of the axis gave, in order, on every rank."""
    if axis.size == 1:
        return [item]
    found: list[Any] = [None] * axis.size
    dist.all_gather_object(found, item, group=axis.group)
    return found


def barrier(axis: Axis) -> None:
    """Return when every rank of the axis has come here."""
    gather_objects(None, axis)
