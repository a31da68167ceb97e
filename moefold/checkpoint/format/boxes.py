"""Boxes of a tensor: a (start, size) for every dim. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

Range = tuple[int, int]  # (start, size)
Box = tuple[Range, ...]


def whole_box(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def element_count(box: Box) -> int:
    return prod(size for _, size in box)


def box_slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in box)


def box_overlap(a: Iterable[Range], b: Iterable[Range]) -> Box | None:
    """The box that two boxes share, or None."""
    shared: list[Range] = []
    for (a_start, a_size), (b_start, b_size) in zip(a, b, strict=True):
        start, end = max(a_start, b_start), min(a_start + a_size, b_start + b_size)
        if end <= start:
            return None
        shared.append((start, end - start))
    return tuple(shared)


def relative_box(inner: Box, outer: Box) -> Box:
    """A box as seen from the corner of one that holds it."""
    return tuple((start - corner, size) for (start, size), (corner, _) in zip(inner, outer, strict=True))


def shifted_box(box: Box, corner: Iterable[int]) -> Box:
    return tuple((start + c, size) for (start, size), c in zip(box, corner, strict=True))


def flat_range_boxes(first: int, last: int, shape: Sequence[int]) -> Iterator[tuple[int, Box]]:
    """The elements first..last of a flattened tensor of that shape, in order, as few boxes as possible; with each the
    number of its first element.

    shape 4 x 5, elements 3..17:     . . . a a        a, b and c are boxes: the end of a row, whole rows,
                                     b b b b b        the beginning of a row
                                     b b b b b
                                     c c . . .
    """
    if first >= last:
        return
    if len(shape) <= 1:
        yield first, ((first, last - first),) if shape else ()
        return
    inner = prod(shape[1:])
    at = first
    while at < last:
        row, inside = divmod(at, inner)
        if inside == 0 and last - at >= inner:
            rows = (last - at) // inner
            yield at, ((row, rows), *whole_box(shape[1:]))
            at += rows * inner
        else:
            end = min(last, (row + 1) * inner)
            for begin, box in flat_range_boxes(inside, inside + end - at, shape[1:]):
                yield row * inner + begin, ((row, 1), *box)
            at = end


def contiguous_range(box: Box, shape: Sequence[int]) -> Range | None:
    """The elements of the flattened tensor that a box is, if they follow one another, as (first, count)."""
    outer = next((dim for dim, (_, size) in enumerate(box) if size != 1), len(box))
    if any(box[dim] != (0, shape[dim]) for dim in range(outer + 1, len(box))):
        return None
    first = 0
    for (start, _), size in zip(box, shape, strict=True):
        first = first * size + start
    return first, element_count(box)
