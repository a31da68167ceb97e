"""Quantisation of rows in tiles, and largest magnitudes of tiles, in Gluon. Imported only where Triton is.

One program takes 128 rows (a tile) by 128 columns. A thread has 16 rows of 4 columns, and a pair of threads 32 rows:
their 32 bytes of a column are contiguous in the transposed copy, so that no value moves between threads.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moefold.kernels.quantise.fp8_hopper import larger_magnitude, reciprocal, scale_from_amax

COLUMNS_OF_THREAD = [[0, 1], [0, 2]]
ROWS_OF_THREAD = [[1, 0], [2, 0], [4, 0], [8, 0]]
LANES = [[16, 0], [0, 4], [0, 8], [0, 16], [0, 32]]
WARPS = [[32, 0], [64, 0], [0, 64]]
ROWS_FIRST = ROWS_OF_THREAD + COLUMNS_OF_THREAD
COLUMNS_FIRST = COLUMNS_OF_THREAD + ROWS_OF_THREAD
TILE_LAYOUT = gl.constexpr(gl.DistributedLinearLayout(COLUMNS_FIRST, LANES, WARPS, [], [128, 128]))
BY_COLUMN = gl.constexpr(gl.DistributedLinearLayout(ROWS_FIRST, LANES, WARPS, [], [128, 128]))  # the same places


@gluon.jit
def load_tile(source_ND, tiles_M4, index_R, m, D):
    """128 x 128 values in fp32, zero where there is no row or no column."""
    r = gl.arange(0, 128, layout=gl.SliceLayout(1, TILE_LAYOUT))
    c = gl.program_id(1) * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, TILE_LAYOUT))
    row = gl.load(tiles_M4 + 4 * m + 1)
    real = gl.load(tiles_M4 + 4 * m + 2)
    n = row + r
    inside = r < real
    if index_R is not None:
        n = gl.load(index_R + n, mask=inside, other=-1).to(gl.int32)
        inside = n >= 0
    at = source_ND + n.to(gl.int64)[:, None] * D + c[None, :]
    mask = inside[:, None] & (c < D)[None, :]
    return gl.load(at, mask=mask, other=0.0).to(gl.float32)


@gluon.jit
def quantise_tiles_kernel(
    source_ND, tiles_M4, index_R, values_PD, row_scales, values_MDB, column_scales_MD, M, D,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, LARGEST: gl.constexpr, POWER_OF_TWO: gl.constexpr,
):  # fmt: skip
    """ROWS: "block" (scales (B, P)), "given" (scales (P,)) or None. COLUMNS: the same, with scales (M, D) for both."""
    m = gl.program_id(0)
    if gl.load(tiles_M4 + 4 * m + 2) > 0:  # in use
        x = load_tile(source_ND, tiles_M4, index_R, m, D)
        P = M * 128
        first = m.to(gl.int64) * 128
        block = gl.program_id(1).to(gl.int64)
        if ROWS is not None:
            r = gl.arange(0, 128, layout=gl.SliceLayout(1, TILE_LAYOUT))
            c = gl.program_id(1) * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, TILE_LAYOUT))
            if ROWS == "block":
                amax = gl.reduce(gl.abs(x), 1, larger_magnitude)
                scale = scale_from_amax(amax, LARGEST, POWER_OF_TWO)
                gl.store(row_scales + block * P + first + r, scale)
            else:
                scale = gl.load(row_scales + first + r)
            q = x * reciprocal(scale)[:, None]
            at = values_PD + (first + r)[:, None] * D + c[None, :]
            mask = (r >= 0)[:, None] & (c < D)[None, :]
            gl.store(at, q.to(values_PD.dtype.element_ty), mask=mask)
        if COLUMNS is not None:
            c = gl.program_id(1) * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, TILE_LAYOUT))
            scale_at = column_scales_MD + m.to(gl.int64) * D + c
            if COLUMNS == "block":
                amax = gl.reduce(gl.abs(x), 0, larger_magnitude)
                scale = scale_from_amax(amax, LARGEST, POWER_OF_TWO)
                gl.store(scale_at, scale, mask=c < D)
            else:
                scale = gl.load(scale_at, mask=c < D, other=1.0)
            q = x * reciprocal(scale)[None, :]
            q = gl.convert_layout(q.to(values_MDB.dtype.element_ty), BY_COLUMN)
            r = gl.arange(0, 128, layout=gl.SliceLayout(1, BY_COLUMN))
            c = gl.program_id(1) * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, BY_COLUMN))
            at = values_MDB + first * D + (c[None, :] * 128 + r[:, None])
            mask = (r >= 0)[:, None] & (c < D)[None, :]
            gl.store(at, q, mask=mask)


@gluon.jit
def tile_maxima_kernel(source_ND, tiles_M4, index_R, parts_BP, columns_MD, M, D):
    """Largest magnitudes within 128 columns of each row, and of each column. A tile not in use has zeros."""
    m = gl.program_id(0)
    x = gl.abs(load_tile(source_ND, tiles_M4, index_R, m, D))
    r = gl.arange(0, 128, layout=gl.SliceLayout(1, TILE_LAYOUT))
    c = gl.program_id(1) * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, TILE_LAYOUT))
    line = gl.program_id(1).to(gl.int64) * (M * 128)
    gl.store(parts_BP + line + m * 128 + r, gl.reduce(x, 1, larger_magnitude))
    gl.store(columns_MD + m.to(gl.int64) * D + c, gl.reduce(x, 0, larger_magnitude), mask=c < D)
