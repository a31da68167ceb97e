"""Numbers of a step on the device: exact, at a fixed address, in rows that a kernel can load."""

from __future__ import annotations

import torch

from moefold.optim.step_scalars import StepScalars


def test_rows_of_any_length_are_written_exactly_to_the_same_memory():
    first, second = [[0.1, 3.0], [1e-3] * 7], [[0.2, 4.0], [1 / 3] * 7]
    scalars = StepScalars(first, torch.device("cpu"))
    address = scalars.row_of(1).data_ptr()
    for rows in (first, second):
        scalars.write_rows(rows)
        for number, row in enumerate(rows):
            assert scalars.row_of(number)[: len(row)].tolist() == row
        assert scalars.row_of(1).data_ptr() == address
    assert (address - scalars.row_of(0).data_ptr()) % 64 == 0
