"""Rows of a tile (row_tiles.py) in Triton. Imported only where Triton is."""

from __future__ import annotations

import triton
import triton.language as tl

from moefold.kernels.routing.rows_triton import load_index


@triton.jit
def load_tile_index(tile, index_R, r):
    """Source rows, in 64 bits, of rows r of a tile; -1 where a row is padding."""
    row = tl.load(tile + 1)
    real = tl.load(tile + 2)
    if index_R is None:
        source = tl.where(r < real, row + r, -1)
        n = source.to(tl.int64)
    else:
        n = load_index(index_R + row + r, r < real)
    return n
