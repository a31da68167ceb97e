"""The order of block scales that Blackwell's tensor cores read: tiles of 128 rows by 4 scales, 512 bytes each.

Within a tile, byte 16 * (row % 32) + 4 * (row / 32) + scale. Tiles lie row by row; rows and scales are padded with
zeros to whole tiles.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from moefold.kernels.quantise.fp8 import blocks_for, in_blocks

TILE_ROWS = 128
TILE_SCALES = 4
QUARTERS = 4
QUARTER = 32  # rows of a quarter tile
TILE_ORDER = (0, 3, 2, 1, 4)  # exchanges quarters and columns of tiles; twice, it changes nothing


def swizzle_scales(scales: Tensor) -> Tensor:
    """(rows, scales) of a type of one byte, as one row of bytes in the order of the tensor core."""
    rows, columns = scales.shape
    missing_rows = -rows % TILE_ROWS
    missing_scales = -columns % TILE_SCALES
    padded = pad(scales, (0, missing_scales, 0, missing_rows))
    tiles = in_blocks(padded, -1, TILE_SCALES)
    tiles = tiles.unflatten(0, (-1, QUARTERS, QUARTER))
    ordered = tiles.permute(TILE_ORDER)  # tile row, tile column, row in a quarter, quarter, scale
    return ordered.flatten()


def unswizzle_scales(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse, without the padding."""
    tile_columns = blocks_for(columns, TILE_SCALES)
    tiles = swizzled.view(-1, tile_columns, QUARTER, QUARTERS, TILE_SCALES)
    ordered = tiles.permute(TILE_ORDER)
    padded_columns = tile_columns * TILE_SCALES
    padded = ordered.reshape(-1, padded_columns)
    scales = padded[:rows, :columns]
    return scales.contiguous()
