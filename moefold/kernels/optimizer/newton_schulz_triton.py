"""Newton-Schulz in Gram form, in Triton: the steps multiply symmetric R x R matrices, of which half the tiles suffice.

    G = X X^T                          before the first step, and anew after the steps of RESTART
    P = a I + b G + c G G              of each step
    Q = Q P                            what the steps since the last G from X multiply X by
    G = (G P) P                        of the next step
    X = Q X                            before each new G, and at the end

G, P and Q are polynomials of one matrix: their products are symmetric. Between kernels numbers are fp16, whose rounding
is a quarter of bf16's. Rounding can make small eigenvalues of G negative, and a step makes those larger by a^2; a new G
from X has none of that. Imported only where Triton is.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportReturnType=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr
from triton.tools.tensor_descriptor import TensorDescriptor

from moefold.kernels.tile_triton import (
    fp32_zeros,
    load_as_fp32,
    load_or_zero,
    numbers_from,
    program_block,
    store_inside,
    tile_mask,
    tile_pointers,
    wide_program_id,
)

TILE = 128  # rows and columns of a tile
DEPTH = 64  # of a block of K: 128 bytes
ROOM = {"num_warps": 4, "num_stages": 3}  # a multiprocessor holds two programs: one multiplies while one stores
SQUARES = 4096  # elements whose squares a program adds
STRIPE = 64  # rows and columns that a program divides by the norm
ALIGNED = 8  # elements: rows begin at multiples of 16 bytes, as TMA needs
RESTART = 2
STEPS_PER_GRAM = 3  # after the first restart
GRAM_ELEMENTS = 2**28  # of all G that are worked on at a time

Step = tuple[float, float, float]  # a, b, c
Steps = Sequence[Step]


# ---- division by the norm


@triton.jit
def squares_kernel(x_NE, sums_NB, E, BLOCK: constexpr):
    """The sum of the squares of a block of one matrix."""
    matrix = wide_program_id(1)
    e = program_block(0, BLOCK)
    x = load_as_fp32(x_NE + matrix * E + e, e < E)
    total = tl.sum(x * x, 0)
    blocks = tl.num_programs(0)
    tl.store(sums_NB + matrix * blocks + tl.program_id(0), total)


@triton.jit
def matrix_norm(sums_NB, matrix, B, BLOCK: constexpr):
    """The norm of a matrix from its sums of squares, in an order that does not depend on the batch."""
    total = tl.zeros([BLOCK], tl.float32)
    row = sums_NB + matrix * B
    for first in range(0, B, BLOCK):
        b = numbers_from(first, BLOCK)
        total += load_or_zero(row + b, b < B)
    return tl.sqrt(tl.sum(total, 0))


@triton.jit
def divide_kernel(
    x_NRC, sums_NB, out_NRC, R, C, B, row_stride, column_stride, out_stride, least, BLOCK: constexpr
):  # fmt: skip
    """x over its norm, from matrices of R C elements that may lie transposed."""
    matrix = wide_program_id(2)
    r = program_block(1, BLOCK)
    c = program_block(0, BLOCK)
    inside = tile_mask(r < R, c < C)
    size = R.to(tl.int64) * C
    x_at = x_NRC + matrix * size + r[:, None] * row_stride + c[None, :] * column_stride
    x = load_as_fp32(x_at, inside)
    norm = matrix_norm(sums_NB, matrix, B, BLOCK)
    scaled = x / tl.maximum(norm, least)
    out = out_NRC + matrix * R * out_stride
    out_at = tile_pointers(out, r, c, out_stride)
    store_inside(out_at, scaled.to(tl.float16), inside)


# ---- products


@triton.jit
def upper_tile(number):
    """Row and column of a tile on or above the diagonal, column by column."""
    root = tl.sqrt(8.0 * number + 1.0)
    column = ((root - 1.0) * 0.5).to(tl.int32)
    row = number - column * (column + 1) // 2
    return row, column


@triton.jit
def load_tile(descriptor, matrix, row, column, ROWS: constexpr, COLUMNS: constexpr):
    block = descriptor.load([matrix, row, column])
    return block.reshape(ROWS, COLUMNS)


@triton.jit
def symmetric_product_kernel(
    a_NRK, b_NRK, add_NRR, out_NRR, R, K, stride, alpha, beta, diagonal,
    ADDS: constexpr, TILE: constexpr, DEPTH: constexpr,
):  # fmt: skip
    """alpha A B^T + beta ADD + diagonal I, where A B^T is symmetric but for rounding. The next product reads B for B^T,
    so the result is symmetric to the bit: a tile above the diagonal is stored twice, and a tile on the diagonal becomes
    the mean of its values and of those mirrored."""
    # place
    tiles = tl.cdiv(R, TILE)
    upper = tiles * (tiles + 1) // 2
    program = tl.program_id(0)
    matrix = program // upper
    tile_row, tile_column = upper_tile(program % upper)
    # main loop
    first_row = tile_row * TILE
    first_column = tile_column * TILE
    sums = fp32_zeros(TILE, TILE)
    for k in range(0, K, DEPTH):
        a = load_tile(a_NRK, matrix, first_row, k, TILE, DEPTH)
        b = load_tile(b_NRK, matrix, first_column, k, TILE, DEPTH)
        sums = tl.dot(a, b.T, sums)
    # epilogue
    if tile_row == tile_column:
        sums = (sums + sums.T) * 0.5
    r = numbers_from(first_row, TILE)
    c = numbers_from(first_column, TILE)
    inside = tile_mask(r < R, c < R)
    matrix_at = matrix.to(tl.int64) * R * stride
    sums *= alpha
    if ADDS:
        add_at = tile_pointers(add_NRR + matrix_at, r, c, stride)
        sums += beta * load_as_fp32(add_at, inside)
    on_diagonal = r[:, None] == c[None, :]
    sums += tl.where(on_diagonal, diagonal, 0.0)
    rounded = sums.to(tl.float16)
    out = out_NRR + matrix_at
    store_inside(tile_pointers(out, r, c, stride), rounded, inside)
    if tile_row != tile_column:
        mirrored = tile_mask(c < R, r < R)
        store_inside(tile_pointers(out, c, r, stride), rounded.T, mirrored)


@triton.jit
def left_product_kernel(
    q_NRR, x_NRC, out_NRC, R, C, matrix_stride, row_stride, column_stride,
    TILE: constexpr, DEPTH: constexpr,
):  # fmt: skip
    """Q X, in the type and the layout of the output."""
    matrix = tl.program_id(2)
    first_row = tl.program_id(0) * TILE
    first_column = tl.program_id(1) * TILE
    sums = fp32_zeros(TILE, TILE)
    for k in range(0, R, DEPTH):
        q = load_tile(q_NRR, matrix, first_row, k, TILE, DEPTH)
        x = load_tile(x_NRC, matrix, k, first_column, DEPTH, TILE)
        sums = tl.dot(q, x, sums)
    r = numbers_from(first_row, TILE)
    c = numbers_from(first_column, TILE)
    inside = tile_mask(r < R, c < C)
    out = out_NRC + matrix.to(tl.int64) * matrix_stride
    out_at = out + r[:, None] * row_stride + c[None, :] * column_stride
    store_inside(out_at, sums.to(out_NRC.dtype.element_ty), inside)


# ---- launches


def launch_newton_schulz(x_NRC: Tensor, coefficients: Steps, least_norm: float) -> Tensor:
    """`least_norm`: matrices of a smaller norm are not scaled up to one."""
    result = torch.empty_like(x_NRC)
    _, rows, columns = x_NRC.shape
    if result.numel() == 0:
        return result
    short = min(rows, columns)
    together = max(1, GRAM_ELEMENTS // short**2)
    for x, out in zip(x_NRC.split(together), result.split(together), strict=True):
        divided = divided_by_norm(x.contiguous(), least_norm)
        orthogonalise(divided, wide_view(out), coefficients)
    return result


def wide_view(x_NRC: Tensor) -> Tensor:
    """The matrices as they are, or transposed, so that they have at least as many columns as rows."""
    _, rows, columns = x_NRC.shape
    return x_NRC.mT if rows > columns else x_NRC


def orthogonalise(x: Tensor, out_NRC: Tensor, coefficients: Steps) -> None:
    """All steps on matrices of norm one that have at least as many columns as rows, into `out_NRC`."""
    *earlier, last = steps_by_gram(coefficients)
    for steps in earlier:
        q = product_of_steps(x, steps)
        following = fp16_like(x)
        launch_left_product(q, x, following)
        x = following
    q = product_of_steps(x, last)
    launch_left_product(q, x, out_NRC)


def steps_by_gram(coefficients: Steps) -> list[Steps]:
    """The steps between one G from X and the next."""
    parts = [coefficients[:RESTART]]
    for first in range(RESTART, len(coefficients), STEPS_PER_GRAM):
        last = first + STEPS_PER_GRAM
        parts.append(coefficients[first:last])
    return parts


def product_of_steps(x: Tensor, steps: Steps) -> Tensor:
    """Q of these steps."""
    gram = symmetric_product(x, x)
    first, *others = steps
    factor = step_factor(gram, first)
    product = factor
    for step in others:
        gram = symmetric_product(gram, factor)
        gram = symmetric_product(gram, factor)
        factor = step_factor(gram, step)
        product = symmetric_product(product, factor)
    return product


def step_factor(gram: Tensor, step: Step) -> Tensor:
    """P of a step."""
    a, b, c = step
    out = fp16_like(gram)
    launch_symmetric(gram, gram, out, gram, (c, b, a))
    return out


def symmetric_product(a: Tensor, b: Tensor) -> Tensor:
    """A B^T, where that is symmetric."""
    rows = a.shape[1]
    out = fp16_matrices(len(a), rows, rows, a.device)
    launch_symmetric(a, b, out, None, (1.0, 0.0, 0.0))
    return out


def fp16_matrices(count: int, rows: int, columns: int, device: torch.device) -> Tensor:
    """Room for matrices whose rows begin at multiples of 16 bytes."""
    width = triton.cdiv(columns, ALIGNED) * ALIGNED
    room = torch.empty(count, rows, width, dtype=torch.float16, device=device)
    return room[:, :, :columns]


def fp16_like(x: Tensor) -> Tensor:
    count, rows, columns = x.shape
    return fp16_matrices(count, rows, columns, x.device)


def divided_by_norm(x_NRC: Tensor, least_norm: float) -> Tensor:
    count = len(x_NRC)
    elements = x_NRC[0].numel()
    blocks = triton.cdiv(elements, SQUARES)
    sums = torch.empty(count, blocks, dtype=torch.float32, device=x_NRC.device)
    squares_kernel[(blocks, count)](x_NRC, sums, elements, SQUARES)
    x = wide_view(x_NRC)
    out = fp16_like(x)
    _, rows, columns = x.shape
    grid = (triton.cdiv(columns, STRIPE), triton.cdiv(rows, STRIPE), count)
    _, *strides = x.stride()
    divide_kernel[grid](x, sums, out, rows, columns, blocks, *strides, out.stride(1), least_norm, STRIPE)
    return out


def launch_symmetric(a: Tensor, b: Tensor, out: Tensor, add: Tensor | None, factors: Step) -> None:
    """The product's factor, that of `add`, and what is added on the diagonal."""
    count, rows, depth = a.shape
    tiles = triton.cdiv(rows, TILE)
    upper = tiles * (tiles + 1) // 2
    grid = (count * upper,)
    blocks = described(a, TILE, DEPTH), described(b, TILE, DEPTH)
    sizes = rows, depth, out.stride(1)
    symmetric_product_kernel[grid](*blocks, add, out, *sizes, *factors, add is not None, TILE, DEPTH, **ROOM)


def launch_left_product(q: Tensor, x: Tensor, out: Tensor) -> None:
    count, rows, columns = x.shape
    grid = (triton.cdiv(rows, TILE), triton.cdiv(columns, TILE), count)
    blocks = described(q, TILE, DEPTH), described(x, DEPTH, TILE)
    left_product_kernel[grid](*blocks, out, rows, columns, *out.stride(), TILE, DEPTH, **ROOM)


def described(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Matrices that a kernel reads in blocks, with zeros beyond their ends."""
    return TensorDescriptor.from_tensor(x, [1, rows, columns])
