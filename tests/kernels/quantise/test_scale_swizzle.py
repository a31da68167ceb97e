"""The order of block scales for Blackwell's tensor cores."""

from __future__ import annotations

import pytest
import torch

from moefold.kernels.quantise.scale_swizzle import swizzle_scales, unswizzle_scales


def place(row: int, column: int, columns: int) -> int:
    tile = row // 128 * -(-columns // 4) + column // 4
    return 512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4


@pytest.mark.parametrize("shape", [(128, 4), (256, 12), (1, 1), (130, 5), (31, 9)], ids=str)
def test_every_scale_is_in_its_place(shape: tuple[int, int]):
    rows, columns = shape
    scales = torch.randint(1, 256, shape, dtype=torch.uint8)
    swizzled = swizzle_scales(scales)
    places = [place(row, column, columns) for row in range(rows) for column in range(columns)]
    assert torch.equal(swizzled[places], scales.flatten())
    assert int(swizzled.count_nonzero()) == rows * columns, "padding is zero"
    assert torch.equal(unswizzle_scales(swizzled, rows, columns), scales)


def test_rows_of_a_tile_follow_in_the_order_0_32_64_96_1_33():
    rows = torch.arange(128, dtype=torch.uint8)[:, None].expand(128, 4)
    assert swizzle_scales(rows)[::4][:6].tolist() == [0, 32, 64, 96, 1, 33]
