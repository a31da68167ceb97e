"""Copies of a parameter in another number format, kept until the parameter moves and reused until then.

A copy holds as long as two counts stay: torch's count of changes in place, and the parameter's generation. The
generation is counted here because weights are updated through other tensors of the same memory (buckets, kernels,
checkpoints), which torch's count does not see. Whoever writes weights so calls `count_change`.

A weight may have no values of its own: a stored copy is then all that there is of it, until it is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

from torch import Tensor

from moefold.layout.gradient_sink import underlying_parameter

C = TypeVar("C")


class WeightCopies:
    """The copies of one parameter, an attribute of it."""

    def __init__(self) -> None:
        self.generation = 0
        self.made: dict[Hashable, tuple[tuple[int, int], Any]] = {}  # by format: the counts at that time, and the copy
        self.stored: tuple[Hashable, Any] | None = None  # the format and the copy of a weight without values


def copies_of(weight: Tensor) -> WeightCopies:
    parameter = underlying_parameter(weight)
    copies = getattr(parameter, "copies", None)
    if copies is None:
        copies = WeightCopies()
        parameter.copies = copies  # pyright: ignore[reportAttributeAccessIssue]
    return copies


def cached_copy(weight: Tensor, format: Hashable, make: Callable[[Tensor], C]) -> C:
    """The weight's copy in that format, made now unless the last one still holds."""
    copies = copies_of(weight)
    if copies.stored is not None:
        stored_format, copy = copies.stored
        assert format == stored_format, f"a weight stored as {stored_format} has no copy as {format}"
        return copy
    counts = (underlying_parameter(weight)._version, copies.generation)
    if format in copies.made:
        made_at, copy = copies.made[format]
        if made_at == counts:
            return copy
    copies.made.pop(format, None)  # its memory first
    copy = make(weight)
    copies.made[format] = (counts, copy)
    return copy


def store_copy(weight: Tensor, format: Hashable, copy: object) -> None:
    """Make this copy all that there is of the weight, in place of the one stored before."""
    copies_of(weight).stored = (format, copy)


def release_stored(weight: Tensor) -> None:
    """Free the stored copy, before the next one is made."""
    copies_of(weight).stored = None


def count_change(weights: Iterable[Tensor]) -> None:
    """Declare that these weights have new values."""
    for weight in weights:
        copies = getattr(weight, "copies", None)
        if copies is not None:
            copies.generation += 1
