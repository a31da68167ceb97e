"""Blocks of positions of one attention head, in Triton: which head a program has, loads, stores, statistics. Imported
only where Triton is.

B sequences, S positions, H heads, D head width; M queries are worked on at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.tile_triton import load_or_zero, store_inside, wide_program_id

LOG2E = tl.constexpr(1.4426950408889634)


class TileOptions(NamedTuple):
    """Queries and keys of a tile, and the options of the launch."""

    M: int
    N: int
    num_warps: int
    num_stages: int


@triton.jit
def program_head(H):
    """The sequence and the head of this program: the second axis of the grid runs over all heads of all sequences."""
    head = wide_program_id(1)
    return head // H, head % H


@triton.jit
def head_block(base, places, stride, end, D: constexpr, WIDE: constexpr):
    """Pointers to (positions, WIDE) of one head; and which lie before the end and within its width. Offsets have 64
    bits: a sequence may have more than 2^31 elements."""
    d = tl.arange(0, WIDE)
    d = d[None, :]
    row = places[:, None]
    row = row.to(tl.int64)
    inside = row < end
    if D < WIDE:
        inside = inside & (d < D)
    pointers = base + row * stride + d
    return pointers, inside


@triton.jit
def load_head_block(base, places, stride, end, D: constexpr, WIDE: constexpr):
    """Zeros behind the end and beyond the width."""
    pointers, inside = head_block(base, places, stride, end, D, WIDE)
    return load_or_zero(pointers, inside)


@triton.jit
def store_head_block(base, places, stride, end, values, D: constexpr, WIDE: constexpr):
    pointers, inside = head_block(base, places, stride, end, D, WIDE)
    rounded = values.to(base.dtype.element_ty)
    store_inside(pointers, rounded, inside)


@triton.jit
def load_log_sums(lse, head, rows, S):
    """The log-sum-exp of some queries of a head, to the base of two; infinite behind the end, where P is then zero."""
    at = lse + head * S + rows
    inside = rows < S
    natural = tl.load(at, mask=inside, other=float("inf"))
    return natural * LOG2E


@triton.jit
def load_delta(delta, head, rows, S):
    at = delta + head * S + rows
    return load_or_zero(at, rows < S)


@triton.jit
def row_dots(a, b):
    """The product of each row of `a` with that of `b`: delta, of results and their gradients."""
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    products = a * b
    return tl.sum(products, 1)


def power_of_two(size: int) -> int:
    """The next one, and at least 16: the least of a product on tensor cores."""
    return max(16, triton.next_power_of_2(size))


def split_width(width: int) -> tuple[int, int]:
    """A power of two and what is behind it, rounded up to one."""
    next_power = triton.next_power_of_2(width)
    main = next_power if next_power == width else next_power // 2
    main = max(16, main)
    rest = width - main
    return main, power_of_two(rest) if rest > 0 else 0


def contiguous_heads(x_BSHD: Tensor) -> Tensor:
    """Heads whose elements lie side by side."""
    if x_BSHD.stride(-1) == 1:
        return x_BSHD
    return x_BSHD.contiguous()


def empty_gradients(*tensors: Tensor) -> list[Tensor]:
    """Contiguous memory for the gradient of each."""
    gradients = []
    for x in tensors:
        memory = x.new_empty(x.shape)
        gradients.append(memory)
    return gradients


def outer_strides(*tensors: Tensor) -> list[int]:
    """The strides of sequences, positions and heads; the elements of a head are contiguous."""
    strides: list[int] = []
    for x in tensors:
        *outer, _ = x.stride()
        strides += outer
    return strides
