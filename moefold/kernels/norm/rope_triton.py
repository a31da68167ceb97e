"""Rotation of heads by position in Triton, with the norm of queries and keys before it: one pass over memory each way.
Imported only where Triton is.

B sequences, S positions, H heads, D head width, of which a and b are the halves; d = D / 2. A program has all heads of
a token, so that angles are read once for them and a norm may be over one head or over all. Backward loops over the
tokens with persistent programs, as that of RMSNorm does over rows (norm_triton.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moefold.kernels.norm.norm_triton import weight_gradient

WARPS = 2112  # of backward's programs together: sixteen for each multiprocessor of an H200, all resident at once


@triton.jit
def load_rotary_halves(x, token, S, b_stride, s_stride, h_stride, H, HALF, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """The two halves of a token's heads."""
    h = tl.arange(0, HEADS).to(tl.int64)
    d = tl.arange(0, WIDTH)
    inside = (h < H)[:, None] & (d < HALF)[None, :]
    row = h * h_stride + (h * 0 + token // S) * b_stride + (h * 0 + token % S) * s_stride  # in 64 bits
    at = x + row[:, None] + d[None, :]
    a = tl.load(at, mask=inside, other=0.0)
    b = tl.load(at + HALF, mask=inside, other=0.0)
    return a, b


@triton.jit
def store_rotary_halves(out, token, a, b, H, HALF, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    h = tl.arange(0, HEADS).to(tl.int64)
    d = tl.arange(0, WIDTH)
    inside = (h < H)[:, None] & (d < HALF)[None, :]
    head = (h * 0 + token) * H + h
    at = out + head[:, None] * (HALF * 2) + d[None, :]
    tl.store(at, a.to(out.dtype.element_ty), mask=inside)
    tl.store(at + HALF, b.to(out.dtype.element_ty), mask=inside)


@triton.jit
def load_rope_angles(cos_Sd, sin_Sd, position, HALF, WIDTH: tl.constexpr):
    d = tl.arange(0, WIDTH)
    at = position * HALF + d
    cos = tl.load(cos_Sd + at, mask=d < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_Sd + at, mask=d < HALF, other=0.0).to(tl.float32)
    return cos[None, :], sin[None, :]


@triton.jit
def load_weight_halves(w, H, HALF, NORM: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """A norm over one head shares one weight among all heads; a norm over all heads has a weight for each."""
    h = tl.arange(0, HEADS)
    d = tl.arange(0, WIDTH)
    own = h * 2 * HALF if NORM == "full" else h * 0
    at = own[:, None] + d[None, :]
    inside = (h < H)[:, None] & (d < HALF)[None, :]
    wa = tl.load(w + at, mask=inside, other=0.0).to(tl.float32)
    wb = tl.load(w + at + HALF, mask=inside, other=0.0).to(tl.float32)
    return wa, wb


@triton.jit
def sum_per_norm(x, NORM: tl.constexpr):
    """The sum over the elements that are normed together, to be broadcast over them."""
    per_head = tl.sum(x, 1)
    if NORM == "full":
        return tl.sum(per_head, 0)
    else:
        return per_head[:, None]


@triton.jit
def norm_rope_kernel(
    x, w, cos_Sd, sin_Sd, out, S, b_stride, s_stride, h_stride, H, HALF, eps,
    NORM: tl.constexpr, BACK: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One token. BACK rotates the other way."""
    token = tl.program_id(0)
    a, b = load_rotary_halves(x, token, S, b_stride, s_stride, h_stride, H, HALF, HEADS, WIDTH)
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    # norm
    if NORM != "none":
        size = 2 * HALF * (H if NORM == "full" else 1)
        inverse = tl.rsqrt(sum_per_norm(a * a + b * b, NORM) / size + eps)
        wa, wb = load_weight_halves(w, H, HALF, NORM, HEADS, WIDTH)
        a = a * inverse * wa
        b = b * inverse * wb
    # rotation
    cos, sin = load_rope_angles(cos_Sd, sin_Sd, token % S, HALF, WIDTH)
    if BACK:
        sin = -sin
    rotated_a = a * cos - b * sin
    rotated_b = b * cos + a * sin
    store_rotary_halves(out, token, rotated_a, rotated_b, H, HALF, HEADS, WIDTH)


@triton.jit
def norm_rope_backward_kernel(
    dy, x, w, cos_Sd, sin_Sd, dx, dw_PW, T, S,
    db_stride, ds_stride, dh_stride, b_stride, s_stride, h_stride, H, HALF, eps,
    NORM: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    # prologue: the weight, and the first token
    size = 2 * HALF * (H if NORM == "full" else 1)
    wa, wb = load_weight_halves(w, H, HALF, NORM, HEADS, WIDTH)
    dwa = tl.zeros([HEADS, WIDTH], tl.float32)
    dwb = tl.zeros([HEADS, WIDTH], tl.float32)
    first = tl.program_id(0)
    next_ya, next_yb = load_rotary_halves(dy, first, S, db_stride, ds_stride, dh_stride, H, HALF, HEADS, WIDTH)
    next_a, next_b = load_rotary_halves(x, first, S, b_stride, s_stride, h_stride, H, HALF, HEADS, WIDTH)
    # main loop over this program's tokens
    for token in range(first, T, tl.num_programs(0)):
        ya, yb = next_ya.to(tl.float32), next_yb.to(tl.float32)
        a, b = next_a.to(tl.float32), next_b.to(tl.float32)
        # prefetch the next token
        ahead = tl.minimum(token + tl.num_programs(0), T - 1)
        next_ya, next_yb = load_rotary_halves(dy, ahead, S, db_stride, ds_stride, dh_stride, H, HALF, HEADS, WIDTH)
        next_a, next_b = load_rotary_halves(x, ahead, S, b_stride, s_stride, h_stride, H, HALF, HEADS, WIDTH)
        # rotate the gradient back
        cos, sin = load_rope_angles(cos_Sd, sin_Sd, token % S, HALF, WIDTH)
        ya, yb = ya * cos + yb * sin, yb * cos - ya * sin
        # backward of the norm
        inverse = tl.rsqrt(sum_per_norm(a * a + b * b, NORM) / size + eps)
        a, b = a * inverse, b * inverse
        dwa += ya * a
        dwb += yb * b
        ya, yb = ya * wa, yb * wb
        along = sum_per_norm(ya * a + yb * b, NORM) / size
        dxa = (ya - a * along) * inverse
        dxb = (yb - b * along) * inverse
        store_rotary_halves(dx, token, dxa, dxb, H, HALF, HEADS, WIDTH)
    # epilogue: this program's summand of the weight's gradient
    h = tl.arange(0, HEADS)
    d = tl.arange(0, WIDTH)
    if NORM == "full":
        at = dw_PW + tl.program_id(0).to(tl.int64) * size + (h * 2 * HALF)[:, None] + d[None, :]
        inside = (h < H)[:, None] & (d < HALF)[None, :]
        tl.store(at, dwa, mask=inside)
        tl.store(at + HALF, dwb, mask=inside)
    else:
        at = dw_PW + tl.program_id(0).to(tl.int64) * size + d
        tl.store(at, tl.sum(dwa, 0), mask=d < HALF)
        tl.store(at + HALF, tl.sum(dwb, 0), mask=d < HALF)


def head_tile_shape(heads: int, half: int) -> dict[str, int]:
    many = triton.next_power_of_2(heads)
    width = triton.next_power_of_2(half)
    warps = max(1, many * width // 256)
    return {"HEADS": many, "WIDTH": width, "num_warps": min(8, warps)}


def contiguous_tables(angles) -> list[torch.Tensor]:
    return [x_Sd.contiguous() for x_Sd in angles]


def contiguous_heads(x_BSHD: torch.Tensor) -> torch.Tensor:
    return x_BSHD if x_BSHD.stride(-1) == 1 else x_BSHD.contiguous()


def norm_extent(w: torch.Tensor | None, head_dim: int) -> str:
    if w is None:
        return "none"
    return "head" if w.numel() == head_dim else "full"


def rotate_heads(x_BSHD, w, angles, eps: float = 0.0, back: bool = False) -> torch.Tensor:
    """Heads normed, if there is a weight, and rotated; or rotated back."""
    x_BSHD = contiguous_heads(x_BSHD)
    b, s, h, d = x_BSHD.shape
    half = d // 2
    out_BSHD = torch.empty(b, s, h, d, dtype=x_BSHD.dtype, device=x_BSHD.device)
    if out_BSHD.numel():
        norm_rope_kernel[(b * s,)](
            x_BSHD, w, *contiguous_tables(angles), out_BSHD, s, *x_BSHD.stride()[:3], h, half, eps,
            NORM=norm_extent(w, d), BACK=back, **head_tile_shape(h, half),
        )  # fmt: skip
    return out_BSHD


def rotate_heads_backward(dy_BSHD, x_BSHD, w, angles, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x and of the norm's weight."""
    dy, x = contiguous_heads(dy_BSHD), contiguous_heads(x_BSHD)
    b, s, h, d = x.shape
    half = d // 2
    dx = torch.empty(b, s, h, d, dtype=x.dtype, device=x.device)
    tile = head_tile_shape(h, half)
    programs = min(WARPS // tile["num_warps"], b * s)
    dw_PW = torch.empty(programs, w.numel(), dtype=torch.float32, device=x.device)
    if dx.numel():
        norm_rope_backward_kernel[(programs,)](
            dy, x, w, *contiguous_tables(angles), dx, dw_PW, b * s, s, *dy.stride()[:3], *x.stride()[:3],
            h, half, eps, NORM=norm_extent(w, d), **tile,
        )  # fmt: skip
    return dx, weight_gradient(dw_PW, w)
