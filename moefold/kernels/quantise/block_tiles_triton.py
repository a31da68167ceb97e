"""Tiles of matrices in small blocks, in Triton, for formats whose blocks lie along the last dim or are squares.
Imported only where Triton is.

A tensor is A matrices of M lines with N values each, in any strides; a program takes a tile of one matrix. A block has
HEIGHT lines, one or as many as values, and BLOCK values of each. Matrices may also be blocks of rows that lie anywhere:
value n of every line of matrix a is then one of row `places`[a, n], zero where that is -1.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.quantise.fp8_triton import magnitude_bits
from moefold.kernels.tile_triton import load_as_fp32, numbers_from, tile_mask

TILE_VALUES = 4096  # of a program
LONGEST_LINE = 128  # of a tile


@triton.jit
def matrix_and_lines(M, TILE_M: constexpr):
    """The matrix of this program, and its lines there."""
    tiles = tl.cast(tl.cdiv(M, TILE_M), tl.uint32)  # one line is a plain number here
    number = tl.program_id(0).to(tl.uint32)  # a division of unsigned numbers takes fewer instructions
    a = (number // tiles).to(tl.int64)
    first = ((number % tiles) * TILE_M).to(tl.int32)
    return a, numbers_from(first, TILE_M)


@triton.jit
def strided_tile(
    tensor,
    a,
    m,
    n,
    stride_a,
    stride_m,
    stride_n,
):
    """Where the values of a tile lie."""
    lines = m.to(tl.int64)[:, None] * stride_m
    values = n.to(tl.int64)[None, :] * stride_n
    return tensor + a * stride_a + lines + values


@triton.jit
def flat_tile(
    tensor,
    a,
    m,
    n,
    M,
    N,
):
    """The same of matrices without gaps."""
    matrix = tensor + a * M * N
    lines = m.to(tl.int64)[:, None] * N
    return matrix + lines + n[None, :]


@triton.jit
def inside_tile(
    m,
    n,
    M,
    N,
):
    return tile_mask(m < M, n < N)


@triton.jit
def load_tile(
    source,
    places,
    a,
    m,
    n,
    M,
    N,
    stride_a,
    stride_m,
    stride_n,
):
    """The values of a tile in fp32. `places`: None, or those of rows; their matrices have no stride."""
    if places is None:
        at = strided_tile(source, a, m, n, stride_a, stride_m, stride_n)
        return load_as_fp32(at, inside_tile(m, n, M, N))
    else:
        row = tl.load(places + a * N + n, mask=n < N, other=-1)
        at = strided_tile(source, 0, m, row, 0, stride_m, stride_n)
        return load_as_fp32(at, tile_mask(m < M, row >= 0))


@triton.jit
def in_blocks(
    x,
    TILE_M: constexpr,
    TILE_N: constexpr,
    HEIGHT: constexpr,
    BLOCK: constexpr,
):
    shape: constexpr = (TILE_M // HEIGHT, HEIGHT, TILE_N // BLOCK, BLOCK)
    return tl.reshape(x, shape)


@triton.jit
def largest_bits(blocks):
    """Bits of the largest magnitude of each block."""
    bits = magnitude_bits(blocks)
    of_lines = tl.max(bits, 3)
    return tl.max(of_lines, 1)


@triton.jit
def block_numbers(
    m,
    n,
    HEIGHT: constexpr,
    BLOCK: constexpr,
    TILE_M: constexpr,
    TILE_N: constexpr,
):
    """The numbers of a tile's blocks along both dims: those of every line and value, of which each block has one."""
    lines: constexpr = TILE_M // HEIGHT
    columns: constexpr = TILE_N // BLOCK
    i = tl.min(m, 0) // HEIGHT + tl.arange(0, lines)
    j = tl.min(n, 0) // BLOCK + tl.arange(0, columns)
    return i, j


class Matrices(NamedTuple):
    """A tensor as A matrices (M, N), and its strides."""

    count: int
    lines: int
    width: int
    strides: tuple[int, int, int]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.count, self.lines, self.width


def as_matrices(x: Tensor) -> Matrices:
    """Of two or three dims."""
    count = len(x) if x.dim() == 3 else 1
    first = x.stride(0) if x.dim() == 3 else 0
    lines, width = x.shape[-2:]
    return Matrices(count, lines, width, (first, x.stride(-2), x.stride(-1)))


def as_row_blocks(
    x_RD: Tensor,
    places_P: Tensor,
    height: int,
) -> Matrices:
    """Blocks of rows that lie anywhere, transposed."""
    count = len(places_P) // height
    width = x_RD.shape[1]
    return Matrices(count, width, height, (0, x_RD.stride(1), x_RD.stride(0)))


class TilePlan(NamedTuple):
    """The grid of a launch and the sizes of its tiles."""

    grid: tuple[int, int]
    constants: dict[str, int]


def plan_tiles(
    matrices: Matrices,
    block: int,
    height: int,
) -> TilePlan:
    """Tiles of whole blocks, as long as lines allow; short lines share a tile."""
    longest = triton.next_power_of_2(max(matrices.width, block))
    tile_n = min(LONGEST_LINE, longest)
    tile_m = TILE_VALUES // tile_n
    shortest = max(16, height)
    highest = triton.next_power_of_2(max(matrices.lines, shortest))
    tile_m = min(tile_m, highest)
    tiles = matrices.count * triton.cdiv(matrices.lines, tile_m)
    grid = (tiles, triton.cdiv(matrices.width, tile_n))
    constants = {"HEIGHT": height, "BLOCK": block, "TILE_M": tile_m, "TILE_N": tile_n}
    return TilePlan(grid, constants)
