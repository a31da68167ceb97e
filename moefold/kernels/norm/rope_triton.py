"""Rotation of heads by position in Triton, with the norm of queries and keys before it: one pass over memory each way.
Imported only where Triton is.

B sequences, S positions, H heads, D head width, of which a and b are the halves; d = D / 2. A program has all heads of
a token, so that angles are read once for them and a norm may be over one head or over all. Backward loops over the
tokens with persistent programs, as that of RMSNorm does over rows (norm_triton.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.norm.norm_triton import weight_gradient
from moefold.kernels.tile_triton import load_as_fp32, load_or_zero, tile_mask, tile_pointers

WARPS = 2112  # of backward's programs together: sixteen for each multiprocessor of an H200, all resident at once


class HeadRows(NamedTuple):
    """Heads in memory: their pointer, and the strides of sequences, positions and heads."""

    x: Any
    b_stride: Any
    s_stride: Any
    h_stride: Any


class HeadSizes(NamedTuple):
    """Positions of a sequence, rows of the tables of angles (one for each position, or for each token), heads of a
    token, half the width of a head."""

    S: Any
    ANGLES: Any
    H: Any
    HALF: Any


class HeadTile(NamedTuple):
    """What a kernel is compiled for: over what the norm is, and rows and columns of a token's tile, powers of two."""

    NORM: Any
    HEADS: Any
    WIDTH: Any


@triton.jit
def store_halves(at, a, b, HALF, inside):
    tl.store(at, a, mask=inside)
    tl.store(at + HALF, b, mask=inside)


@triton.jit
def halves_as_fp32(halves):
    a, b = halves
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    return a, b


@triton.jit
def head_mask(h, d, sizes):
    """Which elements of a token's tile exist, of one half."""
    return tile_mask(h < sizes.H, d < sizes.HALF)


@triton.jit
def load_rotary_halves(heads, token, sizes, tile):
    """The two halves of a token's heads."""
    S = sizes.S
    h = tl.arange(0, tile.HEADS)
    h = h.to(tl.int64)
    d = tl.arange(0, tile.WIDTH)
    # where its heads begin, in 64 bits
    sequence = h * 0 + token // S
    position = h * 0 + token % S
    row = h * heads.h_stride
    row += sequence * heads.b_stride
    row += position * heads.s_stride
    row_at = heads.x + row[:, None]
    at = row_at + d[None, :]
    inside = head_mask(h, d, sizes)
    a = load_or_zero(at, inside)
    b = load_or_zero(at + sizes.HALF, inside)
    return a, b


@triton.jit
def store_rotary_halves(out, token, a, b, sizes, tile):
    H = sizes.H
    HALF = sizes.HALF
    h = tl.arange(0, tile.HEADS)
    h = h.to(tl.int64)
    d = tl.arange(0, tile.WIDTH)
    token_h = h * 0 + token  # in 64 bits
    head = token_h * H + h
    width = HALF * 2
    at = tile_pointers(out, head, d, width)
    inside = head_mask(h, d, sizes)
    a = a.to(out.dtype.element_ty)
    b = b.to(out.dtype.element_ty)
    store_halves(at, a, b, HALF, inside)


@triton.jit
def load_rope_angles(cos_Sd, sin_Sd, token, sizes, tile):
    HALF = sizes.HALF
    d = tl.arange(0, tile.WIDTH)
    row = token % sizes.ANGLES
    at = row * HALF + d
    cos_at = cos_Sd + at
    inside = d < HALF
    cos = load_as_fp32(cos_at, inside)
    sin_at = sin_Sd + at
    sin = load_as_fp32(sin_at, inside)
    return cos[None, :], sin[None, :]


@triton.jit
def load_weight_halves(w, sizes, tile):
    """A norm over one head shares one weight among all heads; a norm over all heads has a weight for each."""
    HALF = sizes.HALF
    h = tl.arange(0, tile.HEADS)
    d = tl.arange(0, tile.WIDTH)
    row = h if tile.NORM == "full" else h * 0
    width = 2 * HALF
    at = tile_pointers(w, row, d, width)
    inside = head_mask(h, d, sizes)
    wa = load_as_fp32(at, inside)
    wb = load_as_fp32(at + HALF, inside)
    return wa, wb


@triton.jit
def norm_size(sizes, tile):
    """How many elements are normed together."""
    heads = sizes.H if tile.NORM == "full" else 1
    return 2 * sizes.HALF * heads


@triton.jit
def mean_per_norm(x, size, tile):
    """The mean over the elements that are normed together, to be broadcast over them."""
    per_head = tl.sum(x, 1)
    if tile.NORM == "full":
        total = tl.sum(per_head, 0)
    else:
        total = per_head[:, None]
    return total / size


@triton.jit
def inverse_root_mean_square(a, b, eps, sizes, tile):
    size = norm_size(sizes, tile)
    squares = a * a + b * b
    mean_square = mean_per_norm(squares, size, tile)
    return tl.rsqrt(mean_square + eps)


@triton.jit
def norm_rope_kernel(
    x, w, cos_Sd, sin_Sd, out,
    S, ANGLES, b_stride, s_stride, h_stride, H, HALF, eps,
    NORM: constexpr, BACK: constexpr, HEADS: constexpr, WIDTH: constexpr,
):  # fmt: skip
    """One token. BACK rotates the other way."""
    token = tl.program_id(0)
    sizes = HeadSizes(S, ANGLES, H, HALF)
    tile: constexpr = HeadTile(NORM, HEADS, WIDTH)
    heads = HeadRows(x, b_stride, s_stride, h_stride)
    halves = load_rotary_halves(heads, token, sizes, tile)
    a, b = halves_as_fp32(halves)
    # norm
    if NORM != "none":
        inverse = inverse_root_mean_square(a, b, eps, sizes, tile)
        wa, wb = load_weight_halves(w, sizes, tile)
        a = a * inverse * wa
        b = b * inverse * wb
    # rotation
    cos, sin = load_rope_angles(cos_Sd, sin_Sd, token, sizes, tile)
    if BACK:
        sin = -sin
    rotated_a = a * cos - b * sin
    rotated_b = b * cos + a * sin
    store_rotary_halves(out, token, rotated_a, rotated_b, sizes, tile)


@triton.jit
def norm_rope_backward_kernel(
    dy, x, w, cos_Sd, sin_Sd, dx, dw_PW,
    T, S, ANGLES, db_stride, ds_stride, dh_stride, b_stride, s_stride, h_stride, H, HALF, eps,
    NORM: constexpr, HEADS: constexpr, WIDTH: constexpr,
):  # fmt: skip
    # prologue: the weight, and the first token
    sizes = HeadSizes(S, ANGLES, H, HALF)
    tile: constexpr = HeadTile(NORM, HEADS, WIDTH)
    size = norm_size(sizes, tile)
    wa, wb = load_weight_halves(w, sizes, tile)
    dwa = tl.zeros([HEADS, WIDTH], tl.float32)
    dwb = tl.zeros([HEADS, WIDTH], tl.float32)
    first = tl.program_id(0)
    step = tl.num_programs(0)
    dy_heads = HeadRows(dy, db_stride, ds_stride, dh_stride)
    next_dy = load_rotary_halves(dy_heads, first, sizes, tile)
    x_heads = HeadRows(x, b_stride, s_stride, h_stride)
    next_x = load_rotary_halves(x_heads, first, sizes, tile)
    # main loop over this program's tokens
    for token in range(first, T, step):
        ya, yb = halves_as_fp32(next_dy)
        a, b = halves_as_fp32(next_x)
        # prefetch the next token
        ahead = tl.minimum(token + step, T - 1)
        next_dy = load_rotary_halves(dy_heads, ahead, sizes, tile)
        next_x = load_rotary_halves(x_heads, ahead, sizes, tile)
        # rotate the gradient back
        cos, sin = load_rope_angles(cos_Sd, sin_Sd, token, sizes, tile)
        ga = ya * cos + yb * sin
        gb = yb * cos - ya * sin
        # the normed heads again
        inverse = inverse_root_mean_square(a, b, eps, sizes, tile)
        a = a * inverse
        b = b * inverse
        # gradient of the weight
        dwa += ga * a
        dwb += gb * b
        # gradient of the heads
        ga = ga * wa
        gb = gb * wb
        products = ga * a + gb * b
        along = mean_per_norm(products, size, tile)
        across_a = ga - a * along
        dxa = across_a * inverse
        across_b = gb - b * along
        dxb = across_b * inverse
        store_rotary_halves(dx, token, dxa, dxb, sizes, tile)
    # epilogue: this program's summand of the weight's gradient
    h = tl.arange(0, HEADS)
    d = tl.arange(0, WIDTH)
    program = first.to(tl.int64)
    line = dw_PW + program * size
    if NORM == "full":
        width = 2 * HALF
        at = tile_pointers(line, h, d, width)
        inside = head_mask(h, d, sizes)
        store_halves(at, dwa, dwb, HALF, inside)
    else:
        dwa_d = tl.sum(dwa, 0)
        dwb_d = tl.sum(dwb, 0)
        at = line + d
        inside = d < HALF
        store_halves(at, dwa_d, dwb_d, HALF, inside)


def head_tile_shape(heads: int, half: int) -> dict[str, int]:
    many = triton.next_power_of_2(heads)
    width = triton.next_power_of_2(half)
    warps = many * width // 256
    warps = max(1, warps)
    warps = min(8, warps)
    return {"HEADS": many, "WIDTH": width, "num_warps": warps}


def contiguous_tables(angles) -> list[Tensor]:
    return [x_Sd.contiguous() for x_Sd in angles]


def rows_of_tables(tables: list[Tensor]) -> int:
    cos = tables[0]
    return cos.numel() // cos.shape[-1]


def contiguous_heads(x_BSHD: Tensor) -> Tensor:
    if x_BSHD.stride(-1) == 1:
        return x_BSHD
    return x_BSHD.contiguous()


def norm_extent(w: Tensor | None, head_dim: int) -> str:
    if w is None:
        return "none"
    return "head" if w.numel() == head_dim else "full"


def rotate_heads(x_BSHD, w, angles, eps: float = 0.0, back: bool = False) -> Tensor:
    """Heads normed, if there is a weight, and rotated; or rotated back."""
    x_BSHD = contiguous_heads(x_BSHD)
    b, s, h, d = x_BSHD.shape
    half = d // 2
    tile = head_tile_shape(h, half)
    out_BSHD = x_BSHD.new_empty(b, s, h, d)
    if out_BSHD.numel():
        tables = contiguous_tables(angles)
        strides = x_BSHD.stride()[:3]
        extent = norm_extent(w, d)
        tensors = (x_BSHD, w, *tables, out_BSHD)
        sizes = (s, rows_of_tables(tables), *strides, h, half, eps)
        launch = norm_rope_kernel[(b * s,)]
        launch(*tensors, *sizes, NORM=extent, BACK=back, **tile)
    return out_BSHD


def rotate_heads_backward(dy_BSHD, x_BSHD, w, angles, eps: float) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the norm's weight."""
    dy = contiguous_heads(dy_BSHD)
    x = contiguous_heads(x_BSHD)
    b, s, h, d = x.shape
    tokens = b * s
    half = d // 2
    dx = x.new_empty(b, s, h, d)
    tile = head_tile_shape(h, half)
    resident = WARPS // tile["num_warps"]
    programs = min(resident, tokens)
    weights = w.numel()
    dw_PW = x.new_empty(programs, weights, dtype=torch.float32)
    if dx.numel():
        tables = contiguous_tables(angles)
        dy_strides = dy.stride()[:3]
        strides = x.stride()[:3]
        extent = norm_extent(w, d)
        tensors = (dy, x, w, *tables, dx, dw_PW)
        all_strides = (*dy_strides, *strides)
        sizes = (tokens, s, rows_of_tables(tables), *all_strides, h, half, eps)
        launch = norm_rope_backward_kernel[(programs,)]
        launch(*tensors, *sizes, NORM=extent, **tile)
    return dx, weight_gradient(dw_PW, w)
