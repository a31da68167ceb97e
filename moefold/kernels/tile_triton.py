"""Tiles of a matrix in Triton: which elements exist, where they lie, their values. Imported only where Triton is."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit
def tile_mask(rows, columns):
    """Elements whose row and whose column exist."""
    return rows[:, None] & columns[None, :]


@triton.jit
def tile_offsets(row, column, width):
    """Where elements lie in a matrix of that width."""
    return row[:, None] * width + column[None, :]


@triton.jit
def tile_pointers(matrix, row, column, width):
    return matrix + row[:, None] * width + column[None, :]


@triton.jit
def load_or_zero(at, inside):
    return tl.load(at, mask=inside, other=0)


@triton.jit
def load_as_fp32(at, inside):
    values = load_or_zero(at, inside)
    return values.to(tl.float32)


@triton.jit
def store_inside(at, values, inside):
    tl.store(at, values, mask=inside)


@triton.jit
def zero_outside(values, inside):
    return tl.where(inside, values, 0.0)


@triton.jit
def fp32_zeros(ROWS: constexpr, COLUMNS: constexpr):
    shape: constexpr = (ROWS, COLUMNS)
    return tl.zeros(shape, tl.float32)


@triton.jit
def numbers_from(first, SIZE: constexpr):
    return first + tl.arange(0, SIZE)


@triton.jit
def program_block(AXIS: constexpr, SIZE: constexpr):
    """The SIZE numbers of this program along an axis of the grid."""
    first = tl.program_id(AXIS) * SIZE
    return numbers_from(first, SIZE)


@triton.jit
def wide_program_id(AXIS: constexpr):
    """This program's number along an axis of the grid, in 64 bits, as offsets in large tensors need."""
    return tl.program_id(AXIS).to(tl.int64)
