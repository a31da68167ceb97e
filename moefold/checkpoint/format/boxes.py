"""Boxes: hyper-rectangles of a tensor, one (start, size) range for every dim. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

Range = tuple[int, int]  # (start, size)
Box = tuple[Range, ...]
IndexedBox = tuple[int, Box]  # with the flat index of its first element


def whole_box(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def box_sizes(box: Iterable[Range]) -> list[int]:
    return [size for _, size in box]


def box_corner(box: Iterable[Range]) -> list[int]:
    return [start for start, _ in box]


def element_count(box: Box) -> int:
    return prod(box_sizes(box))


def box_slices(box: Box) -> tuple[slice, ...]:
    slices = [slice(start, start + size) for start, size in box]
    return tuple(slices)


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
    offset = [-start for start in box_corner(outer)]
    return shifted_box(inner, offset)


def shifted_box(box: Box, offset: Iterable[int]) -> Box:
    shifted: list[Range] = []
    for (start, size), shift in zip(box, offset, strict=True):
        shifted.append((start + shift, size))
    return tuple(shifted)


def flat_range_boxes(first: int, last: int, shape: Sequence[int]) -> Iterator[IndexedBox]:
    """Elements first..last of a flattened tensor as few boxes as possible, in order.

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
            box = ((row, whole_rows), *whole_box(row_shape))
            yield first, box
            first += whole_rows * row_size
            continue
        # A part of one row: its end, its beginning, or something in between.
        row_start = row * row_size
        end = min(last, row_start + row_size)
        part_boxes = flat_range_boxes(column, end - row_start, row_shape)
        for index, box in part_boxes:
            yield row_start + index, ((row, 1), *box)
        first = end


def contiguous_range(box: Box, shape: Sequence[int]) -> Range | None:
    """The range of flat indices that a box covers, as (first, count), or None if the box is not contiguous."""
    sizes = box_sizes(box)
    outer = 0
    while outer < len(box) and sizes[outer] == 1:
        outer += 1
    # Behind the outermost dim of more than one element, all dims must be whole.
    inner_sizes = shape[outer + 1 :]
    if box[outer + 1 :] != whole_box(inner_sizes):
        return None
    first = 0
    corner = box_corner(box)
    for start, size in zip(corner, shape, strict=True):
        first = first * size + start
    return first, element_count(box)
