"""Boxes: hyper-rectangles of a tensor, one (start, size) range for every dim. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

Range = tuple[int, int]  # (start, size)
Box = tuple[Range, ...]


def whole_box(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def box_sizes(box: Iterable[Range]) -> list[int]:
    return [size for _, size in box]


def box_corner(box: Iterable[Range]) -> list[int]:
    return [start for start, _ in box]


def element_count(box: Box) -> int:
    return prod(box_sizes(box))


def box_slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in box)


def range_overlap(a: Range, b: Range) -> Range | None:
    start = max(a[0], b[0])
    end = min(sum(a), sum(b))
    if end <= start:
        return None
    return start, end - start


def box_overlap(a: Iterable[Range], b: Iterable[Range]) -> Box | None:
    """The intersection of two boxes, or None if it is empty."""
    shared: list[Range] = []
    for a_range, b_range in zip(a, b, strict=True):
        overlap = range_overlap(a_range, b_range)
        if overlap is None:
            return None
        shared.append(overlap)
    return tuple(shared)


def relative_box(inner: Box, outer: Box) -> Box:
    """A box in the coordinates of a box that contains it."""
    return shifted_box(inner, [-start for start in box_corner(outer)])


def shifted_box(box: Box, offset: Iterable[int]) -> Box:
    pairs = zip(box, offset, strict=True)
    return tuple((start + shift, size) for (start, size), shift in pairs)


def flat_range_boxes(first: int, last: int, shape: Sequence[int]) -> Iterator[tuple[int, Box]]:
    """Elements first..last of a flattened tensor as few boxes as possible, in order. Each box comes with the flat
    index of its first element.

    shape 4 x 5, elements 3..17:     . . . a a        a, b and c are boxes: the end of a row, whole rows,
                                     b b b b b        the beginning of a row
                                     b b b b b
                                     c c . . .
    """
    if first >= last:
        return
    if not shape:
        yield first, ()
        return
    if len(shape) == 1:
        yield first, ((first, last - first),)
        return
    row_shape = shape[1:]
    row_size = prod(row_shape)
    while first < last:
        row, column = divmod(first, row_size)
        whole_rows = (last - first) // row_size
        if column == 0 and whole_rows:
            yield first, ((row, whole_rows), *whole_box(row_shape))
            first += whole_rows * row_size
            continue
        # A part of one row: its end, its beginning, or something in between.
        row_start = row * row_size
        end = min(last, row_start + row_size)
        for index, box in flat_range_boxes(column, end - row_start, row_shape):
            yield row_start + index, ((row, 1), *box)
        first = end


def contiguous_range(box: Box, shape: Sequence[int]) -> Range | None:
    """The range of flat indices that a box covers, as (first, count), or None if the box is not contiguous."""
    sizes = box_sizes(box)
    outer = 0
    while outer < len(box) and sizes[outer] == 1:
        outer += 1
    # Behind the outermost dim of more than one element, all dims must be whole.
    inner_dims = slice(outer + 1, None)
    if box[inner_dims] != whole_box(shape[inner_dims]):
        return None
    first = 0
    for start, size in zip(box_corner(box), shape, strict=True):
        first = first * size + start
    return first, element_count(box)
