"""Epilogues of the grouped FP8 GEMMs (grouped_gemm_fp8_hopper.py) that quantise: SwiGLU and its gradient.

The two epilogue warps get 64 rows of a tile in shared memory, rounded to bf16, and process them in slabs of 8 rows and
128 columns, as two parts of 64 columns: a block of 128 values that share a scale lies in 8 threads.

Rows are in their padded places (kernels/quantise/row_tiles.py). The pre-activation is kept for backward as FP8 with a
scale for each 128 values of the gate and of up: values (P, 2, F), scales (2, F / 128, P).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from moefold.kernels.experts.epilogues_hopper import block_offsets, store_rounded, swiglu_gradient, tanh_sigmoid
from moefold.kernels.quantise.fp8_hopper import larger_magnitude, reciprocal, scale_from_amax

SLAB = gl.constexpr(8)  # rows
SLABS = gl.constexpr(8)  # of 64 rows
PART_LAYOUT = gl.constexpr(  # a thread has 8 columns of a row
    gl.BlockedLayout(
        size_per_thread=[1, 8],
        threads_per_warp=[4, 8],
        warps_per_cta=[2, 1],
        order=[1, 0],
    )
)
BLOCK_LAYOUT = gl.constexpr(  # of 128 columns, for copies
    gl.BlockedLayout(
        size_per_thread=[1, 16],
        threads_per_warp=[4, 8],
        warps_per_cta=[2, 1],
        order=[1, 0],
    )
)
SCALES_LAYOUT = gl.constexpr(  # of 4 lines of 64 rows' scales
    gl.BlockedLayout(
        size_per_thread=[1, 1],
        threads_per_warp=[1, 32],
        warps_per_cta=[2, 1],
        order=[1, 0],
    )
)
ROW_LAYOUT = gl.constexpr(gl.SliceLayout(1, PART_LAYOUT))
LARGEST = gl.constexpr(448.0)


class Fp8Outputs(NamedTuple):
    """Where an epilogue writes. `side_ptr` and what follows belong to SwiGLU's epilogues."""

    out_desc: Any = None
    out_ptr: Any = None
    side_ptr: Any = None
    side_scales: Any = None
    h_ptr: Any = None
    h_scales: Any = None
    weight_R: Any = None
    dots_nP: Any = None


class BlockPlace(NamedTuple):
    """Where a block of 8 rows and 128 columns goes: first row and column, and the number of columns there are."""

    row: Any
    column: Any
    width: Any


@gluon.jit
def block_scale(x0, x1, POWER_OF_TWO: gl.constexpr):
    """The scale of each row of two parts, and its reciprocal."""
    amax0 = gl.reduce(gl.abs(x0), 1, larger_magnitude)
    amax1 = gl.reduce(gl.abs(x1), 1, larger_magnitude)
    amax = larger_magnitude(amax0, amax1)
    scale = scale_from_amax(amax, LARGEST, POWER_OF_TWO)
    return scale, reciprocal(scale)


@gluon.jit
def load_part(bufs, chunk, s):
    """Slab s of a chunk of 64 rows and 64 columns, in fp32."""
    count: gl.constexpr = bufs.numel // (SLAB * 64)
    shape: gl.constexpr = [count, SLAB, 64]
    slabs = bufs._reinterpret(gl.bfloat16, shape, bufs.type.layout)
    slab = slabs.index(chunk * SLABS + s)
    return slab.load(PART_LAYOUT).to(gl.float32)


@gluon.jit
def row_numbers():
    """0 to 7, one for each row of a slab."""
    return gl.arange(0, SLAB, layout=ROW_LAYOUT)


@gluon.jit
def store_part(ptr, at, stride, x):
    columns: gl.constexpr = gl.SliceLayout(0, PART_LAYOUT)
    r = row_numbers()
    c = gl.arange(0, 64, layout=columns)
    offsets, there = block_offsets(r, c, at.row, at.column, stride, at.width, SLAB)
    store_rounded(ptr + offsets, x, there)


@gluon.jit
def store_pair(ptr, at, stride, x0, x1):
    """128 columns of a slab, in an array with rows of `stride`, in the type of the memory."""
    store_part(ptr, at, stride, x0)
    right = BlockPlace(at.row, at.column + 64, at.width)
    store_part(ptr, right, stride, x1)


@gluon.jit
def store_block(values, scales, line, at, stride, x0, x1, POWER_OF_TWO: gl.constexpr):
    """A block of 128 columns of a slab: in bf16 without `scales`, else as FP8 with scales, which begin at `line`."""
    if scales is None:
        store_pair(values, at, stride, x0, x1)
    else:
        scale, factor = block_scale(x0, x1, POWER_OF_TWO)
        x0 = x0 * factor[:, None]
        x1 = x1 * factor[:, None]
        store_pair(values, at, stride, x0, x1)
        scales_at = scales + line + at.row + row_numbers()
        gl.store(scales_at, scale)


@gluon.jit
def load_weights(weight_R, row, real):
    """The router's weights of 64 rows, a tuple of slabs; zero from `real` on. All are loaded before the first is
    needed: a load takes longer than a slab."""
    weights = ()
    for s in gl.static_range(SLABS):
        r = s * SLAB + row_numbers()
        at = weight_R + row + r
        w = gl.load(at, mask=r < real, other=0.0)
        weights += (w,)
    return weights


@gluon.jit
def epilogue_swiglu_fp8(outs, tile, at, F, padded, POWER_OF_TWO: gl.constexpr):
    """The left half of the tile is gate, the right half up. Pre-activation and activation are quantised by blocks, or
    stored in bf16 where there are no scales for them."""
    F = F // 16 * 16  # tells the compiler that it is a multiple of 16
    blocks = gl.cdiv(F, 128)
    weights = load_weights(outs.weight_R, at.row, at.real)
    mbarrier.wait(at.made, at.phase)
    chunk = at.half * 4
    # loop over slabs of 8 rows
    for s in range(SLABS if at.real > 0 else 0):
        w = weights[0][:, None]
        weights = weights[1:] + weights[7:]  # of the next slab first
        g0 = load_part(tile, chunk, s)
        g1 = load_part(tile, chunk + 1, s)
        u0 = load_part(tile, chunk + 2, s)
        u1 = load_part(tile, chunk + 3, s)
        # the pre-activation
        row = at.pad + s * SLAB
        here = BlockPlace(row, at.n * 128, F)
        line = at.n.to(gl.int64) * padded
        up_line = line + blocks.to(gl.int64) * padded
        store_block(outs.h_ptr, outs.h_scales, line, here, 2 * F, g0, g1, POWER_OF_TWO)
        store_block(outs.h_ptr + F, outs.h_scales, up_line, here, 2 * F, u0, u1, POWER_OF_TWO)
        # the activation
        a0 = g0 * tanh_sigmoid(g0) * u0 * w
        a1 = g1 * tanh_sigmoid(g1) * u1 * w
        store_block(outs.side_ptr, outs.side_scales, line, here, F, a0, a1, POWER_OF_TWO)


@gluon.jit
def prefetch_block(h_ptr, buf, row, column, F):
    rows: gl.constexpr = gl.SliceLayout(1, BLOCK_LAYOUT)
    columns: gl.constexpr = gl.SliceLayout(0, BLOCK_LAYOUT)
    r = gl.arange(0, SLAB, layout=rows)
    c = gl.arange(0, 128, layout=columns)
    offsets, there = block_offsets(r, c, row, column, 2 * F, F, SLAB)
    async_copy.async_copy_global_to_shared(buf, h_ptr + offsets, mask=there)


@gluon.jit
def prefetch_pre_activation(h_ptr, ahead, p, pad, n, F):
    """Start the copy of gate and up of block p (slab p // 2, 128 columns p % 2) to shared memory, which has room for
    four blocks."""
    row = pad + p // 2 % SLABS * SLAB
    column = n * 256 + p % 2 * 128
    first = p % 4 * 2
    gate_buf = ahead.index(first)
    up_buf = ahead.index(first + 1)
    prefetch_block(h_ptr, gate_buf, row, column, F)
    prefetch_block(h_ptr + F, up_buf, row, column, F)
    async_copy.commit_group()


@gluon.jit
def prefetch_scales(scales, buf, pad, n, blocks, padded):
    """Start the copy of 64 rows' scales to shared memory: gate, gate, up, up of the tile's two blocks of columns."""
    lines: gl.constexpr = gl.SliceLayout(1, SCALES_LAYOUT)
    rows: gl.constexpr = gl.SliceLayout(0, SCALES_LAYOUT)
    q = gl.arange(0, 4, layout=lines)
    r = gl.arange(0, 64, layout=rows)
    column_block = gl.minimum(n * 2 + q % 2, blocks - 1)
    block = column_block + q // 2 * blocks
    line = block.to(gl.int64)[:, None] * padded
    row = pad + r
    at = scales + line + row[None, :]
    async_copy.async_copy_global_to_shared(buf, at)


@gluon.jit
def load_slab_scales(buf, q, s):
    shape: gl.constexpr = [4 * SLABS, SLAB, 1]
    slabs = buf._reinterpret(gl.float32, shape, buf.type.layout)
    slab = slabs.index(q * SLABS + s)
    return slab.load(PART_LAYOUT)


@gluon.jit
def load_kept_pair(ahead, first, scales, q, s, FP8: gl.constexpr):
    """A block of gate or up, from the copy of the pre-activation in shared memory."""
    block = ahead.index(first)
    left = block.slice(0, 64, 1).load(PART_LAYOUT)
    right = block.slice(64, 64, 1).load(PART_LAYOUT)
    x0 = left.to(gl.float32)
    x1 = right.to(gl.float32)
    if FP8:
        scale = load_slab_scales(scales, q, s)
        x0 *= scale
        x1 *= scale
    return x0, x1


@gluon.jit
def store_gradients(outs, at, F, dgate0, dgate1, dup0, dup1, a0, a1):
    """Of one block: dgate, dup, and the activation."""
    store_pair(outs.out_ptr, at, 2 * F, dgate0, dgate1)
    store_pair(outs.out_ptr + F, at, 2 * F, dup0, dup1)
    store_pair(outs.side_ptr, at, F, a0, a1)


@gluon.jit
def epilogue_dswiglu_fp8(outs, tile, ahead, ahead_scales, at, F, padded):
    """The tile is the gradient of the activation. Writes the gradient of the pre-activation and the activation once
    more, both in bf16, from the kept pre-activation, which is prefetched three blocks ahead."""
    F = F // 16 * 16  # tells the compiler that it is a multiple of 16
    real = gl.minimum(at.real, 64)
    blocks = gl.cdiv(F, 128)
    # prologue: scales, and three blocks in flight
    FP8: gl.constexpr = outs.h_scales is not None
    if FP8:
        prefetch_scales(outs.h_scales, ahead_scales, at.pad, at.n, blocks, padded)
    for p in range(3):
        prefetch_pre_activation(outs.h_ptr, ahead, p, at.pad, at.n, F)
    weights = load_weights(outs.weight_R, at.row, real)
    mbarrier.wait(at.made, at.phase)
    # main loop over slabs of 8 rows, and over their columns
    for s in range(SLABS if real > 0 else 0):
        w = weights[0][:, None]
        weights = weights[1:] + weights[7:]  # of the next slab first
        dots = gl.zeros([SLAB, 64], gl.float32, PART_LAYOUT)
        for c in range(2):
            p = s * 2 + c
            prefetch_pre_activation(outs.h_ptr, ahead, p + 3, at.pad, at.n, F)
            async_copy.wait_group(3)
            # gate and up of this block
            first = p % 4 * 2
            g0, g1 = load_kept_pair(ahead, first, ahead_scales, c, s, FP8)
            u0, u1 = load_kept_pair(ahead, first + 1, ahead_scales, 2 + c, s, FP8)
            # the gradient of its activation
            chunk = at.half * 4 + c * 2
            d0 = load_part(tile, chunk, s)
            d1 = load_part(tile, chunk + 1, s)
            dg0, du0, a0, dot0 = swiglu_gradient(d0, g0, u0, w)
            dg1, du1, a1, dot1 = swiglu_gradient(d1, g1, u1, w)
            dots += dot0 + dot1
            row = at.pad + s * SLAB
            column = at.n * 256 + c * 128
            here = BlockPlace(row, column, F)
            store_gradients(outs, here, F, dg0, dg1, du0, du1, a0, a1)
        # the gradient of the rows' weights
        r = s * SLAB + row_numbers()
        line = at.n.to(gl.int64) * padded
        dots_at = outs.dots_nP + line + at.row + r
        gl.store(dots_at, gl.sum(dots, 1), mask=r < real)
    # padding: zeros, which the weight gradients read
    zero = gl.zeros([SLAB, 64], gl.float32, PART_LAYOUT)
    for p in range(2 * SLABS if real <= 0 else 0):
        row = at.pad + p // 2 * SLAB
        column = at.n * 256 + p % 2 * 128
        here = BlockPlace(row, column, F)
        store_gradients(outs, here, F, zero, zero, zero, zero, zero, zero)
    async_copy.wait_group(0)  # copies beyond the last block: the next half reuses their buffers
