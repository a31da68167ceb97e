"""Boxes tile what they stand for, exactly and few."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.checkpoint.format.boxes import box_slices, contiguous_range, element_count, flat_range_boxes

SHAPES = st.lists(st.integers(1, 5), max_size=4)


@given(data=st.data(), shape=SHAPES)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_boxes_tile_a_range_exactly_and_in_order(data: st.DataObject, shape: list[int]):
    size = prod(shape)
    first = data.draw(st.integers(0, size - 1))
    last = data.draw(st.integers(first + 1, size))
    whole = np.arange(size).reshape(shape)
    boxes = list(flat_range_boxes(first, last, shape))
    seen = [n for _, box in boxes for n in whole[box_slices(box)].flatten()]
    assert seen == list(range(first, last))
    assert [begin for begin, _ in boxes] == [whole[box_slices(box)].flatten()[0] for _, box in boxes]
    assert all(contiguous_range(box, shape) == (begin, element_count(box)) for begin, box in boxes)
    assert len(boxes) <= max(1, 2 * len(shape) - 1), "few boxes"


@given(data=st.data(), shape=SHAPES)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_box_is_a_run_if_its_elements_follow_one_another(data: st.DataObject, shape: list[int]):
    box = ()
    for size in shape:
        start = data.draw(st.integers(0, size - 1))
        box = (*box, (start, data.draw(st.integers(1, size - start))))
    found = np.arange(prod(shape)).reshape(shape)[box_slices(box)].flatten()
    follows = (np.diff(found) == 1).all()
    assert contiguous_range(box, shape) == ((found[0], len(found)) if follows else None)


def test_the_boxes_of_the_documentation():
    assert list(flat_range_boxes(3, 17, (4, 5))) == [
        (3, ((0, 1), (3, 2))),
        (5, ((1, 2), (0, 5))),
        (15, ((3, 1), (0, 2))),
    ]
