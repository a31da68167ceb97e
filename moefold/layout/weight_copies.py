"""Copies of a parameter in another number format, kept until the parameter moves and reused until then.

A copy holds as long as two counts stay: torch's count of changes in place, and the parameter's generation. The
generation is counted here because weights are updated through other tensors of the same memory (buckets, kernels,
checkpoints), which torch's count does not see. Whoever writes weights so calls `count_change`.

Captured graphs read copies where they lie. `noting_copies` tells which copies work asks for, so that they can be held
in place: renewed in the same memory, before each replay that reads them.

A weight may have no values of its own: a stored copy is then all that there is of it, until it is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch.utils._pytree import tree_leaves

from moefold.layout.gradient_sink import underlying_parameter

C = TypeVar("C")
Counts = tuple[int, int]  # of changes in place, and of generations


class WeightCopies:
    """The copies of one parameter, an attribute of it."""

    def __init__(self) -> None:
        self.generation = 0
        self.made: dict[Hashable, tuple[Counts, Any]] = {}  # by format: the counts at that time, and the copy
        self.stored: tuple[Hashable, Any] | None = None  # the format and the copy of a weight without values
        self.rewritten: Hashable | None = None  # the format of the copy that has the weight's next values
        self.last_rewritten: Hashable | None = None  # of the last change
        self.are_in_place = False  # whether copies that are made anew have the memory of those before

    def holding(self, counts: Counts) -> dict[Hashable, Any]:
        """The copies that hold, by format."""
        if self.stored is not None:
            return dict([self.stored])
        holding: dict[Hashable, Any] = {}
        for format, (made_at, copy) in self.made.items():
            if made_at == counts:
                holding[format] = copy
        return holding


def copies_of(weight: Tensor) -> WeightCopies:
    parameter = underlying_parameter(weight)
    copies = getattr(parameter, "copies", None)
    if copies is None:
        copies = WeightCopies()
        parameter.copies = copies  # pyright: ignore[reportAttributeAccessIssue]
    return copies


def counts_of(weight: Tensor) -> Counts:
    parameter = underlying_parameter(weight)
    copies = copies_of(weight)
    return parameter._version, copies.generation


def cached_copy(weight: Tensor, format: Hashable, make: Callable[[Tensor], C]) -> C:
    """The weight's copy in that format, made now unless the last one still holds."""
    copies = copies_of(weight)
    if copies.stored is not None:
        stored_format, copy = copies.stored
        assert format == stored_format, f"a weight stored as {stored_format} has no copy as {format}"
        return copy
    for noted in OPEN_NOTES:
        noted[id(copies), format] = CopyUse(weight, format, make)
    counts = counts_of(weight)
    if format in copies.made:
        made_at, copy = copies.made[format]
        if made_at == counts:
            return copy
        if copies.are_in_place:
            overwrite(copy, make(weight))
            copies.made[format] = (counts, copy)
            return copy
    copies.made.pop(format, None)  # its memory first
    copy = make(weight)
    copies.made[format] = (counts, copy)
    return copy


def overwrite(copy: Any, new: Any) -> None:
    """Write the tensors of a new copy to the memory of an old one, a tree of the same form."""
    for old, values in zip(tree_leaves(copy), tree_leaves(new), strict=True):
        if isinstance(old, Tensor):
            old.copy_(values)


class CopyUse(NamedTuple):
    """A copy that work asks for."""

    weight: Tensor
    format: Hashable
    make: Callable[[Tensor], Any]

    def renew(self) -> None:
        """Make the copy anew, unless the last one still holds."""
        cached_copy(self.weight, self.format, self.make)

    def hold_in_place(self) -> None:
        """From now on, have the copies of this weight in the memory that they lie in."""
        copies_of(self.weight).are_in_place = True


CopyUses = dict[Hashable, CopyUse]  # by weight and format
OPEN_NOTES: list[CopyUses] = []  # a stack; not thread-local, since autograd runs on threads of its own


@contextmanager
def noting_copies(uses: CopyUses) -> Iterator[None]:
    """Add the copies that are asked for inside to `uses`."""
    OPEN_NOTES.append(uses)
    try:
        yield
    finally:
        OPEN_NOTES.pop()


def store_copy(weight: Tensor, format: Hashable, copy: object) -> None:
    """Make this copy all that there is of the weight, in place of the one stored before."""
    copies_of(weight).stored = (format, copy)


def stored_copy(weight: Tensor) -> Any:
    """The copy that is all there is of the weight."""
    stored = copies_of(weight).stored
    assert stored is not None, "the weight has values of its own"
    _, copy = stored
    return copy


def release_stored(weight: Tensor) -> None:
    """Free the stored copy, before the next one is made."""
    copies_of(weight).stored = None


def drop_copies(weights: Iterable[Tensor]) -> None:
    """Free the copies of weights whose memory is freed."""
    for weight in weights:
        copies: WeightCopies | None = getattr(weight, "copies", None)
        if copies is not None:
            copies.made.clear()


def copy_to_rewrite(weight: Tensor, is_wanted: Callable[[Hashable], bool]) -> tuple[Any, Any] | None:
    """Format and copy of a weight as it is now, for the caller to write the copy of the weight's next values into the
    same memory; None if no wanted copy holds. This copy goes on holding, others are made anew."""
    copies: WeightCopies | None = getattr(weight, "copies", None)
    if copies is None:
        return None
    counts = counts_of(weight)
    for format, copy in copies.holding(counts).items():
        if is_wanted(format):
            copies.rewritten = format
            return format, copy
    return None


def take_rewritten(weight: Tensor) -> bool:
    """Whether the stored copy has been rewritten since the last call."""
    copies = copies_of(weight)
    was_rewritten = copies.rewritten is not None
    copies.rewritten = None
    return was_rewritten


def count_change(weights: Iterable[Tensor]) -> None:
    """Declare that these weights have new values. Copies of weights without values are their storage's to renew."""
    for weight in weights:
        copies: WeightCopies | None = getattr(weight, "copies", None)
        if copies is None or copies.stored is not None:
            continue
        copies.generation += 1
        copies.last_rewritten = copies.rewritten
        if copies.rewritten is not None:
            _, copy = copies.made[copies.rewritten]
            copies.made[copies.rewritten] = (counts_of(weight), copy)
            copies.rewritten = None


def repeat_change(weights: Iterable[Tensor]) -> None:
    """Declare the last change once more: the same work was done again, by kernels alone."""
    changed = list(weights)
    for weight in changed:
        copies: WeightCopies | None = getattr(weight, "copies", None)
        if copies is not None:
            copies.rewritten = copies.last_rewritten
    count_change(changed)


def keeps_values(weight: Tensor) -> bool:
    """Whether the weight has values of its own; otherwise its copies are all there is (shard/fp8_weights.py), and one
    element stands for all."""
    return weight.untyped_storage().nbytes() >= weight.nbytes
