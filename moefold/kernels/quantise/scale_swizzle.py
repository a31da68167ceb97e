"""The order of block scales that Blackwell's tensor cores read: tiles of 128 rows by 4 scales, 512 bytes each.

Within a tile, byte 16 * (row % 32) + 4 * (row / 32) + scale. Tiles lie row by row; rows and scales are padded with
zeros to whole tiles.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

TILE_ROWS = 128
TILE_SCALES = 4
QUARTER = 32  # rows of a quarter tile


def swizzle_scales(scales: Tensor) -> Tensor:
    """(rows, scales) of a type of one byte, as one row of bytes in the order of the tensor core."""
    rows, columns = scales.shape
    padded = pad(scales, (0, -columns % TILE_SCALES, 0, -rows % TILE_ROWS))
    tiles = padded.unflatten(0, (-1, TILE_ROWS // QUARTER, QUARTER)).unflatten(-1, (-1, TILE_SCALES))
    ordered = tiles.permute(0, 3, 2, 1, 4)  # tile row, tile column, row in a quarter, quarter, scale
    return ordered.flatten()


def unswizzle_scales(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse, without the padding."""
    tile_columns = -(-columns // TILE_SCALES)
    quarters = TILE_ROWS // QUARTER
    tiles = swizzled.view(-1, tile_columns, QUARTER, quarters, TILE_SCALES)
    ordered = tiles.permute(0, 3, 2, 1, 4)
    padded = ordered.reshape(-1, tile_columns * TILE_SCALES)
    return padded[:rows, :columns].contiguous()
