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


@triton.jit
def store_halves(at, a, b, HALF, inside):
    tl.store(at, a, mask=inside)
    tl.store(at + HALF, b, mask=inside)


@triton.jit
def load_rotary_halves(heads, token, S, H, HALF, HEADS: constexpr, WIDTH: constexpr):
    """The two halves of a token's heads."""
    h = tl.arange(0, HEADS).to(tl.int64)
    d = tl.arange(0, WIDTH)
    # where its heads begin, in 64 bits
    sequence = h * 0 + token // S
    position = h * 0 + token % S
    row = h * heads.h_stride + sequence * heads.b_stride + position * heads.s_stride
    at = heads.x + row[:, None] + d[None, :]
    inside = tile_mask(h < H, d < HALF)
    a = load_or_zero(at, inside)
    b = load_or_zero(at + HALF, inside)
    return a, b


@triton.jit
def store_rotary_halves(out, token, a, b, H, HALF, HEADS: constexpr, WIDTH: constexpr):
    h = tl.arange(0, HEADS).to(tl.int64)
    d = tl.arange(0, WIDTH)
    token_h = h * 0 + token  # in 64 bits
    head = token_h * H + h
    at = tile_pointers(out, head, d, HALF * 2)
    inside = tile_mask(h < H, d < HALF)
    a = a.to(out.dtype.element_ty)
    b = b.to(out.dtype.element_ty)
    store_halves(at, a, b, HALF, inside)


@triton.jit
def load_rope_angles(cos_Sd, sin_Sd, position, HALF, WIDTH: constexpr):
    d = tl.arange(0, WIDTH)
    at = position * HALF + d
    cos = load_as_fp32(cos_Sd + at, d < HALF)
    sin = load_as_fp32(sin_Sd + at, d < HALF)
    return cos[None, :], sin[None, :]


@triton.jit
def load_weight_halves(w, H, HALF, NORM: constexpr, HEADS: constexpr, WIDTH: constexpr):
    """A norm over one head shares one weight among all heads; a norm over all heads has a weight for each."""
    h = tl.arange(0, HEADS)
    d = tl.arange(0, WIDTH)
    row = h if NORM == "full" else h * 0
    at = tile_pointers(w, row, d, 2 * HALF)
    inside = tile_mask(h < H, d < HALF)
    wa = load_as_fp32(at, inside)
    wb = load_as_fp32(at + HALF, inside)
    return wa, wb


@triton.jit
def norm_size(H, HALF, NORM: constexpr):
    """How many elements are normed together."""
    heads = H if NORM == "full" else 1
    return 2 * HALF * heads


@triton.jit
def sum_per_norm(x, NORM: constexpr):
    """The sum over the elements that are normed together, to be broadcast over them."""
    per_head = tl.sum(x, 1)
    if NORM == "full":
        return tl.sum(per_head, 0)
    else:
        return per_head[:, None]


@triton.jit
def inverse_root_mean_square(a, b, size, eps, NORM: constexpr):
    squares = a * a + b * b
    mean = sum_per_norm(squares, NORM) / size
    return tl.rsqrt(mean + eps)


@triton.jit
def norm_rope_kernel(
    x, w, cos_Sd, sin_Sd, out,
    S, b_stride, s_stride, h_stride, H, HALF, eps,
    NORM: constexpr, BACK: constexpr, HEADS: constexpr, WIDTH: constexpr,
):  # fmt: skip
    """One token. BACK rotates the other way."""
    token = tl.program_id(0)
    heads = HeadRows(x, b_stride, s_stride, h_stride)
    a, b = load_rotary_halves(heads, token, S, H, HALF, HEADS, WIDTH)
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    # norm
    if NORM != "none":
        size = norm_size(H, HALF, NORM)
        inverse = inverse_root_mean_square(a, b, size, eps, NORM)
        wa, wb = load_weight_halves(w, H, HALF, NORM, HEADS, WIDTH)
        a = a * inverse * wa
        b = b * inverse * wb
    # rotation
    position = token % S
    cos, sin = load_rope_angles(cos_Sd, sin_Sd, position, HALF, WIDTH)
    if BACK:
        sin = -sin
    rotated_a = a * cos - b * sin
    rotated_b = b * cos + a * sin
    store_rotary_halves(out, token, rotated_a, rotated_b, H, HALF, HEADS, WIDTH)


@triton.jit
def norm_rope_backward_kernel(
    dy, x, w, cos_Sd, sin_Sd, dx, dw_PW,
    T, S, db_stride, ds_stride, dh_stride, b_stride, s_stride, h_stride, H, HALF, eps,
    NORM: constexpr, HEADS: constexpr, WIDTH: constexpr,
):  # fmt: skip
    # prologue: the weight, and the first token
    size = norm_size(H, HALF, NORM)
    wa, wb = load_weight_halves(w, H, HALF, NORM, HEADS, WIDTH)
    dwa = tl.zeros([HEADS, WIDTH], tl.float32)
    dwb = tl.zeros([HEADS, WIDTH], tl.float32)
    first = tl.program_id(0)
    step = tl.num_programs(0)
    dy_heads = HeadRows(dy, db_stride, ds_stride, dh_stride)
    next_ya, next_yb = load_rotary_halves(dy_heads, first, S, H, HALF, HEADS, WIDTH)
    x_heads = HeadRows(x, b_stride, s_stride, h_stride)
    next_a, next_b = load_rotary_halves(x_heads, first, S, H, HALF, HEADS, WIDTH)
    # main loop over this program's tokens
    for token in range(first, T, step):
        ya = next_ya.to(tl.float32)
        yb = next_yb.to(tl.float32)
        a = next_a.to(tl.float32)
        b = next_b.to(tl.float32)
        # prefetch the next token
        ahead = tl.minimum(token + step, T - 1)
        next_ya, next_yb = load_rotary_halves(dy_heads, ahead, S, H, HALF, HEADS, WIDTH)
        next_a, next_b = load_rotary_halves(x_heads, ahead, S, H, HALF, HEADS, WIDTH)
        # rotate the gradient back
        position = token % S
        cos, sin = load_rope_angles(cos_Sd, sin_Sd, position, HALF, WIDTH)
        ga = ya * cos + yb * sin
        gb = yb * cos - ya * sin
        # the normed heads again
        inverse = inverse_root_mean_square(a, b, size, eps, NORM)
        a = a * inverse
        b = b * inverse
        # gradient of the weight
        dwa += ga * a
        dwb += gb * b
        # gradient of the heads
        ga = ga * wa
        gb = gb * wb
        products = ga * a + gb * b
        along = sum_per_norm(products, NORM) / size
        dxa = (ga - a * along) * inverse
        dxb = (gb - b * along) * inverse
        store_rotary_halves(dx, token, dxa, dxb, H, HALF, HEADS, WIDTH)
    # epilogue: this program's summand of the weight's gradient
    h = tl.arange(0, HEADS)
    d = tl.arange(0, WIDTH)
    line = dw_PW + first.to(tl.int64) * size
    if NORM == "full":
        at = tile_pointers(line, h, d, 2 * HALF)
        inside = tile_mask(h < H, d < HALF)
        store_halves(at, dwa, dwb, HALF, inside)
    else:
        dwa_d = tl.sum(dwa, 0)
        dwb_d = tl.sum(dwb, 0)
        store_halves(line + d, dwa_d, dwb_d, HALF, d < HALF)


def head_tile_shape(heads: int, half: int) -> dict[str, int]:
    many = triton.next_power_of_2(heads)
    width = triton.next_power_of_2(half)
    warps = max(1, many * width // 256)
    warps = min(8, warps)
    return {"HEADS": many, "WIDTH": width, "num_warps": warps}


def contiguous_tables(angles) -> list[Tensor]:
    return [x_Sd.contiguous() for x_Sd in angles]


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
        cos_Sd, sin_Sd = contiguous_tables(angles)
        strides = x_BSHD.stride()[:3]
        extent = norm_extent(w, d)
        tensors = (x_BSHD, w, cos_Sd, sin_Sd, out_BSHD)
        sizes = (s, *strides, h, half, eps)
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
    dw_PW = x.new_empty(programs, w.numel(), dtype=torch.float32)
    if dx.numel():
        cos_Sd, sin_Sd = contiguous_tables(angles)
        dy_strides = dy.stride()[:3]
        strides = x.stride()[:3]
        extent = norm_extent(w, d)
        tensors = (dy, x, w, cos_Sd, sin_Sd, dx, dw_PW)
        sizes = (tokens, s, *dy_strides, *strides, h, half, eps)
        launch = norm_rope_backward_kernel[(programs,)]
        launch(*tensors, *sizes, NORM=extent, **tile)
    return dx, weight_gradient(dw_PW, w)
