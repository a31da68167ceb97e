"""Rows cut into the pages of a stash, and the state of its pool."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from moefold.config.stash_pages import PAGE_ROWS

HEAD, TAIL, MOST, OVERFLOWED = range(4)  # of the state


class PageGrid(NamedTuple):
    """How rows are cut into pages: blocks of 64 rows, cells of a row, elements of a cell."""

    blocks: int
    cells: int
    cell: int

    @classmethod
    def of(cls, x_RW: Tensor, pool_PC: Tensor) -> PageGrid:
        rows, width = x_RW.shape
        cell = pool_PC.shape[1] // PAGE_ROWS
        blocks = divide_up(rows, PAGE_ROWS)
        return cls(blocks, divide_up(width, cell), cell)

    @property
    def pages(self) -> int:
        return self.blocks * self.cells

    def tiles_of(self, x_RW: Tensor) -> Tensor:
        """(pages, 64 x cell): the rows as they lie in pages, zeros beyond."""
        rows, width = x_RW.shape
        more_columns = self.cells * self.cell - width
        more_rows = self.blocks * PAGE_ROWS - rows
        padded = F.pad(x_RW, (0, more_columns, 0, more_rows))
        split = padded.view(self.blocks, PAGE_ROWS, self.cells, self.cell)
        return split.transpose(1, 2).reshape(self.pages, -1)

    def rows_of(self, tiles: Tensor, like_RW: Tensor) -> Tensor:
        """The inverse."""
        rows, width = like_RW.shape
        split = tiles.view(self.blocks, self.cells, PAGE_ROWS, self.cell)
        joined = split.transpose(1, 2).reshape(self.blocks * PAGE_ROWS, -1)
        return joined[:rows, :width]


def divide_up(number: int, divisor: int) -> int:
    return -(-number // divisor)
