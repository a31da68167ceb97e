"""The share of a parameter that a rank holds, where it does not hold the parameter whole.

Fully sharded parameters have values only while a step uses them (shard/gathered_units.py). Whoever saves, loads or
compares weights reads and writes the share instead.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from moefold.layout.held_blocks import Held, held_blocks_of


class HeldShare(NamedTuple):
    """Elements of this rank's flattened part of a parameter, from `first` on; no element where the share of a bucket
    has nothing of the parameter. In blocks they are whole rows."""

    first: int
    values: Held


def attach_held_share(parameter: Tensor, share: HeldShare) -> None:
    parameter.held_share = share  # pyright: ignore[reportAttributeAccessIssue]


def detach_held_share(parameter: Tensor) -> None:
    """The share is no longer the parameter's."""
    parameter.held_share = None  # pyright: ignore[reportAttributeAccessIssue]


def held_share_of(parameter: Tensor) -> HeldShare | None:
    """The share that stands for the parameter; None where the parameter is held whole."""
    return getattr(parameter, "held_share", None)


def held_values_of(parameter: Tensor) -> HeldShare:
    """What this rank holds of its part of a parameter: the share, or all of it, in blocks or as values."""
    whole = HeldShare(0, held_blocks_of(parameter) or parameter)
    return held_share_of(parameter) or whole
