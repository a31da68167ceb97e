"""Rows of experts in tiles of 128: the order in which FP8 kernels read and write them.

R rows sorted by expert; expert e's rows end before `ends_E[e]`. Each expert's rows fill tiles of 128 rows; its last
tile is filled up with zeros. Tile m holds rows 128 m to 128 m + 127 of the padded order, P = 128 M rows in all. M is an
upper bound that depends on shapes alone; `count` tiles are in use, and tiles behind these have no rows. A dense matrix
is one expert.

With `index_R`, row r is `source_ND[index_R[r]]`, and a row whose index is -1 is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.quantise.fp8 import BLOCK, in_blocks
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_inner_op


class RowTiles(NamedTuple):
    """`tiles_M4`: each tile's expert, first row, number of rows (0 for a tile not in use), first padded row (128 m).
    `first_tile_E`: each expert's first tile. All int32, on the device."""

    ends_E: Tensor
    tiles_M4: Tensor
    count: Tensor
    first_tile_E: Tensor

    @property
    def padded_rows(self) -> int:
        return len(self.tiles_M4) * BLOCK


MakeTiles = Callable[[Tensor, int], RowTiles]  # the op


@register_inner_op
def row_tiles(ends_E: Tensor, rows: int) -> RowTiles:
    """The tiles of R rows; `rows` may exceed the last end."""
    experts = len(ends_E)
    most = rows // BLOCK + experts
    # rows and tiles of each expert
    rows_E = rows_of_experts(ends_E)
    begins_E = ends_E - rows_E
    tiles_E = (rows_E + BLOCK - 1) // BLOCK
    last_tile_E = tiles_E.cumsum(0)
    first_tile_E = last_tile_E - tiles_E
    # the expert of each tile, and the tile's number within the expert
    tile_M = torch.arange(most, device=ends_E.device)
    expert_M = torch.searchsorted(last_tile_E, tile_M, right=True)
    expert_M = expert_M.clamp(max=experts - 1)
    first_tile_M = first_tile_E[expert_M]
    number_M = tile_M - first_tile_M
    # its rows
    begin_M = begins_E[expert_M]
    row_M = begin_M + number_M * BLOCK
    end_M = ends_E[expert_M]
    left_M = end_M - row_M
    real_M = left_M.clamp(0, BLOCK)
    padded_row_M = tile_M * BLOCK
    columns = (expert_M, row_M, real_M, padded_row_M)
    tiles_M4 = torch.stack(columns, 1)
    count = last_tile_E[-1:]
    parts = (ends_E, tiles_M4, count, first_tile_E)
    return RowTiles(*(part.int() for part in parts))


def rows_of_experts(ends_E: Tensor) -> Tensor:
    zero = ends_E.new_zeros(1)
    return ends_E.diff(prepend=zero)


@row_tiles.register_fast("triton")
def row_tiles_triton(ends_E: Tensor, rows: int) -> RowTiles:
    from moefold.kernels.routing.rows_triton import plan_padded_tiles

    plan = plan_padded_tiles(ends_E, rows, BLOCK)
    ends_E = ends_E.int()
    return RowTiles(ends_E, plan.tiles_M4, plan.count, plan.first_tile_E)


CASE_SOURCES = 50  # source rows of cases with an index
RowsByName = dict[str, list[int]]  # rows of each expert
ROW_TILE_CASES: RowsByName = {
    "one expert": [300],
    "skewed": [1, 700, 0, 128, 129],
    "many small": [3] * 37,
    "no rows": [0, 0, 0],
    "all rows of the last": [0, 0, 513],
}


@row_tiles.register_cases
def row_tiles_cases(draw: CaseInputs) -> Cases:
    for name, rows_E in ROW_TILE_CASES.items():
        ends_E = ends_of_experts(rows_E, draw.device)
        rows = sum(rows_E)
        more_rows = rows + 200
        yield KernelCase(name, (ends_E, rows))
        yield KernelCase(f"{name}, 200 rows behind the last", (ends_E, more_rows))


FULL_TILES: RowsByName = {  # such that all tiles are in use
    "one expert": [150],
    "four experts": [1, 129, 5, 100],
}


def cases_of_tiles(device: str) -> Iterator[tuple[str, RowTiles, Tensor]]:
    """Name, tiles and index of cases without unused tiles, whose outputs may be undefined; some rows have no source."""
    for name, rows_E in FULL_TILES.items():
        rows = sum(rows_E)
        ends_E = ends_of_experts(rows_E, device)
        tiles = row_tiles(ends_E, rows)
        row_R = torch.arange(rows, device=device)
        choices = CASE_SOURCES + 1
        place_R = row_R * 7 % choices
        index_R = place_R - 1
        yield name, tiles, index_R.int()


def ends_of_experts(rows_E: list[int], device: str) -> Tensor:
    counts_E = torch.tensor(rows_E, device=device)
    ends_E = counts_E.cumsum(0)
    return ends_E.int()


def padded_index(tiles: RowTiles, index_R: Tensor | None = None) -> Tensor:
    """The source row of each padded row; -1 for padding."""
    tiles_M4 = tiles.tiles_M4
    place_B = torch.arange(BLOCK, device=tiles_M4.device)
    row_M1 = tiles_M4[:, 1:2]
    real_M1 = tiles_M4[:, 2:3]
    row_MB = row_M1 + place_B
    inside_MB = place_B < real_M1
    if index_R is not None:
        behind = len(index_R)
        index_and_end = F.pad(index_R, (0, 1), value=-1)
        place_MB = row_MB.clamp(max=behind)
        row_MB = index_and_end[place_MB.long()]
    index_MB = torch.where(inside_MB, row_MB, -1)
    return index_MB.flatten()


def pad_to_tiles(source_ND: Tensor, tiles: RowTiles, index_R: Tensor | None = None, padding: float = 0.0) -> Tensor:
    """x_PD: the rows in their padded order."""
    index_P = padded_index(tiles, index_R).long()
    one_row = (0, 0, 0, 1)
    source_and_padding = F.pad(source_ND, one_row, value=padding)  # the index -1 reads the last row
    return source_and_padding[index_P]


MOST_KEPT = 256
KEPT_TILES: dict[tuple[int, torch.device], RowTiles] = {}  # of dense layers, by rows and GPU


def dense_tiles(make_tiles: MakeTiles, x: Tensor) -> RowTiles:
    """The tiles of all rows of x, as those of one expert. On a GPU they are made once for so many rows, but for graphs:
    a graph has tiles of its own, since others may be forgotten while it still reads them."""
    rows = len(x)
    kept = (rows, x.device)
    is_kept = x.is_cuda and not torch.cuda.is_current_stream_capturing()
    if is_kept and kept in KEPT_TILES:
        return KEPT_TILES[kept]
    with torch.inference_mode(False):  # tiles of evaluation are kept for training too
        ends_E = torch.full((1,), rows, dtype=torch.int32, device=x.device)
        tiles = make_tiles(ends_E, rows)
    if is_kept:
        if len(KEPT_TILES) >= MOST_KEPT:
            KEPT_TILES.clear()
        KEPT_TILES[kept] = tiles
    return tiles


class TileSample(NamedTuple):
    """Some of M = `tiles` tiles of a tensor: those from `first` on, `every` tiles apart."""

    first: int
    every: int
    tiles: int

    @property
    def factor(self) -> float:
        """What sums over them are multiplied by, to tell of all tiles."""
        taken = range(self.first, self.tiles, self.every)
        return self.tiles / len(taken)

    def of(self, x: Tensor) -> Tensor:
        """Their part of a tensor (M, ...)."""
        return x[self.first :: self.every]

    def of_rows(self, x_PD: Tensor) -> Tensor:
        """Their rows of a tensor in padded places."""
        return self.of(in_blocks(x_PD, 0)).flatten(0, 1)

    def of_tiles(self, tiles: RowTiles) -> RowTiles:
        """These tiles alone, in padded places of their own. They begin anywhere inside of an expert: `count` and
        `first_tile_E` do not tell of them."""
        tiles_M4 = self.of(tiles.tiles_M4).clone()
        places_M = torch.arange(len(tiles_M4), device=tiles_M4.device)
        tiles_M4[:, 3] = places_M * BLOCK
        return tiles._replace(tiles_M4=tiles_M4)


def padded_tiles(tiles: RowTiles) -> RowTiles:
    """The same tiles for a tensor whose rows are in their padded places already."""
    tiles_M4 = tiles.tiles_M4.clone()
    padded_row_M = tiles_M4[:, 3]
    tiles_M4[:, 1] = padded_row_M
    return tiles._replace(tiles_M4=tiles_M4)
