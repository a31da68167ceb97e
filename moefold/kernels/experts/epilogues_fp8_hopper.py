"""Epilogues of the grouped FP8 GEMMs (grouped_gemm_fp8_hopper.py) that quantise: SwiGLU and its gradient.

The two epilogue warps get 64 rows of a tile in shared memory, rounded to bf16, and process them in slabs of 8 rows and
128 columns, as two parts of 64 columns: a block of 128 values that share a scale lies in 8 threads.

Rows are in their padded places (kernels/quantise/row_tiles.py). The pre-activation is kept for backward as FP8 with a
scale for each 128 values of the gate and of up: values (P, 2, F), scales (2, F / 128, P).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from moefold.kernels.experts.epilogues_hopper import tanh_sigmoid
from moefold.kernels.quantise.fp8_hopper import larger_magnitude, reciprocal, scale_from_amax

SLAB = gl.constexpr(8)  # rows
SLABS = gl.constexpr(8)  # of 64 rows
PART_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0]))  # a thread has 8 columns of a row
BLOCK_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [2, 1], [1, 0]))  # of 128 columns, for copies
ROW_LAYOUT = gl.constexpr(gl.SliceLayout(1, PART_LAYOUT))
LARGEST = gl.constexpr(448.0)


@gluon.jit
def block_scale(x0, x1, POWER_OF_TWO: gl.constexpr):
    """The scale of each row of two parts, and its reciprocal."""
    amax0 = gl.reduce(gl.abs(x0), 1, larger_magnitude)
    amax1 = gl.reduce(gl.abs(x1), 1, larger_magnitude)
    scale = scale_from_amax(larger_magnitude(amax0, amax1), LARGEST, POWER_OF_TWO)
    return scale, reciprocal(scale)


@gluon.jit
def load_part(bufs, chunk, s):
    """Slab s of a chunk of 64 rows and 64 columns, in fp32."""
    count: gl.constexpr = bufs.numel // (SLAB * 64)
    slabs = bufs._reinterpret(gl.bfloat16, [count, SLAB, 64], bufs.type.layout)
    return slabs.index(chunk * SLABS + s).load(PART_LAYOUT).to(gl.float32)


@gluon.jit
def part_offsets(row, column, stride, width):
    """Offsets of a part in an array with rows of `stride`, and whether its columns lie below `width`."""
    r = gl.arange(0, SLAB, layout=ROW_LAYOUT)
    c = gl.arange(0, 64, layout=gl.SliceLayout(0, PART_LAYOUT))
    at = (row + r).to(gl.int64)[:, None] * stride + (column + c)[None, :]
    there = (column + c < width)[None, :] & (r >= 0)[:, None]
    return at, there


@gluon.jit
def store_pair(ptr, row, column, stride, width, x0, x1):
    """128 columns of a slab, in the type of the memory."""
    at, there = part_offsets(row, column, stride, width)
    gl.store(ptr + at, x0.to(ptr.dtype.element_ty), mask=there)
    at, there = part_offsets(row, column + 64, stride, width)
    gl.store(ptr + at, x1.to(ptr.dtype.element_ty), mask=there)


@gluon.jit
def store_block(values, scales, line, row, column, stride, width, x0, x1, POWER_OF_TWO: gl.constexpr):
    """A block of 128 columns of a slab: in bf16 without `scales`, else as FP8 with scales, which begin at `line`."""
    if scales is None:
        store_pair(values, row, column, stride, width, x0, x1)
    else:
        scale, factor = block_scale(x0, x1, POWER_OF_TWO)
        x0 = x0 * factor[:, None]
        x1 = x1 * factor[:, None]
        store_pair(values, row, column, stride, width, x0, x1)
        r = gl.arange(0, SLAB, layout=ROW_LAYOUT)
        gl.store(scales + line + row + r, scale)


@gluon.jit
def load_slab_weights(weight_R, row, s: gl.constexpr, real):
    r = s * SLAB + gl.arange(0, SLAB, layout=ROW_LAYOUT)
    return gl.load(weight_R + row + r, mask=r < real, other=0.0)


@gluon.jit
def load_weights(weight_R, row, real):
    """The router's weights of 64 rows, slab by slab; zero from `real` on. All are loaded before the first is needed: a
    load takes longer than a slab."""
    w0 = load_slab_weights(weight_R, row, 0, real)
    w1 = load_slab_weights(weight_R, row, 1, real)
    w2 = load_slab_weights(weight_R, row, 2, real)
    w3 = load_slab_weights(weight_R, row, 3, real)
    w4 = load_slab_weights(weight_R, row, 4, real)
    w5 = load_slab_weights(weight_R, row, 5, real)
    w6 = load_slab_weights(weight_R, row, 6, real)
    w7 = load_slab_weights(weight_R, row, 7, real)
    return w0, w1, w2, w3, w4, w5, w6, w7


@gluon.jit
def epilogue_swiglu_fp8(outs, tile, bar, phase, half, row, pad, n, F, real, padded, POWER_OF_TWO: gl.constexpr):
    """The left half of the tile is gate, the right half up. Pre-activation and activation are quantised by blocks, or
    stored in bf16 where there are no scales for them."""
    a_ptr, a_scales, h_ptr, h_scales, weight_R = outs
    F = F // 16 * 16  # tells the compiler that it is a multiple of 16
    blocks = gl.cdiv(F, 128)
    w0, w1, w2, w3, w4, w5, w6, w7 = load_weights(weight_R, row, real)
    mbarrier.wait(bar, phase)
    column = n * 128
    chunk = half * 4
    # loop over slabs of 8 rows
    for s in range(SLABS if real > 0 else 0):
        w = w0[:, None]
        w0, w1, w2, w3, w4, w5, w6 = w1, w2, w3, w4, w5, w6, w7
        g0 = load_part(tile, chunk, s)
        g1 = load_part(tile, chunk + 1, s)
        u0 = load_part(tile, chunk + 2, s)
        u1 = load_part(tile, chunk + 3, s)
        # the pre-activation
        at = pad + s * SLAB
        line = n.to(gl.int64) * padded
        up_line = line + blocks.to(gl.int64) * padded
        store_block(h_ptr, h_scales, line, at, column, 2 * F, F, g0, g1, POWER_OF_TWO)
        store_block(h_ptr + F, h_scales, up_line, at, column, 2 * F, F, u0, u1, POWER_OF_TWO)
        # the activation
        a0 = g0 * tanh_sigmoid(g0) * u0 * w
        a1 = g1 * tanh_sigmoid(g1) * u1 * w
        store_block(a_ptr, a_scales, line, at, column, F, F, a0, a1, POWER_OF_TWO)


@gluon.jit
def prefetch_block(h_ptr, buf, row, column, F):
    r = gl.arange(0, SLAB, layout=gl.SliceLayout(1, BLOCK_LAYOUT))
    c = gl.arange(0, 128, layout=gl.SliceLayout(0, BLOCK_LAYOUT))
    at = (row + r).to(gl.int64)[:, None] * (2 * F) + (column + c)[None, :]
    there = (column + c < F)[None, :] & (r >= 0)[:, None]
    async_copy.async_copy_global_to_shared(buf, h_ptr + at, mask=there)


@gluon.jit
def prefetch_pre_activation(h_ptr, ahead, p, pad, n, F):
    """Start the copy of gate and up of block p (slab p // 2, 128 columns p % 2) to shared memory, which has room for
    four blocks."""
    row = pad + p // 2 % SLABS * SLAB
    column = n * 256 + p % 2 * 128
    first = p % 4 * 2
    prefetch_block(h_ptr, ahead.index(first), row, column, F)
    prefetch_block(h_ptr + F, ahead.index(first + 1), row, column, F)
    async_copy.commit_group()


@gluon.jit
def prefetch_scales(scales, buf, pad, n, blocks, padded):
    """Start the copy of 64 rows' scales to shared memory: gate, gate, up, up of the tile's two blocks of columns."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [2, 1], [1, 0])
    q = gl.arange(0, 4, layout=gl.SliceLayout(1, layout))
    r = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    block = gl.minimum(n * 2 + q % 2, blocks - 1) + q // 2 * blocks
    at = scales + block.to(gl.int64)[:, None] * padded + (pad + r)[None, :]
    async_copy.async_copy_global_to_shared(buf, at)


@gluon.jit
def load_slab_scales(buf, q, s):
    slabs = buf._reinterpret(gl.float32, [4 * SLABS, SLAB, 1], buf.type.layout)
    return slabs.index(q * SLABS + s).load(PART_LAYOUT)


@gluon.jit
def load_kept_pair(ahead, first, scales, q, s, FP8: gl.constexpr):
    """A block of gate or up, from the copy of the pre-activation in shared memory."""
    block = ahead.index(first)
    x0 = block.slice(0, 64, 1).load(PART_LAYOUT).to(gl.float32)
    x1 = block.slice(64, 64, 1).load(PART_LAYOUT).to(gl.float32)
    if FP8:
        scale = load_slab_scales(scales, q, s)
        x0 *= scale
        x1 *= scale
    return x0, x1


@gluon.jit
def swiglu_gradient(d, g, u, w):
    """dgate, dup, the activation times the weight, and the summands of the weight's gradient."""
    sig = tanh_sigmoid(g)
    silu = g * sig
    act = silu * u
    dot = d * act
    d *= w
    dsilu = sig + silu * (1 - sig)
    return d * u * dsilu, d * silu, act * w, dot


@gluon.jit
def epilogue_dswiglu_fp8(outs, tile, ahead, bar, phase, half, row, pad, n, F, real, padded):
    """The tile is the gradient of the activation. Writes the gradient of the pre-activation and the activation once
    more, both in bf16, from the kept pre-activation, which is prefetched three blocks ahead."""
    dh_ptr, a_ptr, h_ptr, h_scales, weight_R, dots_nP = outs
    F = F // 16 * 16  # tells the compiler that it is a multiple of 16
    real = gl.minimum(real, 64)
    blocks = gl.cdiv(F, 128)
    # prologue: scales, and three blocks in flight
    ahead, ahead_scales = ahead
    FP8: gl.constexpr = h_scales is not None
    if FP8:
        prefetch_scales(h_scales, ahead_scales, pad, n, blocks, padded)
    for p in range(3):
        prefetch_pre_activation(h_ptr, ahead, p, pad, n, F)
    w0, w1, w2, w3, w4, w5, w6, w7 = load_weights(weight_R, row, real)
    mbarrier.wait(bar, phase)
    # main loop over slabs of 8 rows, and over their columns
    for s in range(SLABS if real > 0 else 0):
        w = w0[:, None]
        w0, w1, w2, w3, w4, w5, w6 = w1, w2, w3, w4, w5, w6, w7
        dots = gl.zeros([SLAB, 64], gl.float32, PART_LAYOUT)
        for c in range(2):
            p = s * 2 + c
            prefetch_pre_activation(h_ptr, ahead, p + 3, pad, n, F)
            async_copy.wait_group(3)
            # gate and up of this block
            first = p % 4 * 2
            g0, g1 = load_kept_pair(ahead, first, ahead_scales, c, s, FP8)
            u0, u1 = load_kept_pair(ahead, first + 1, ahead_scales, 2 + c, s, FP8)
            # the gradient of its activation
            chunk = half * 4 + c * 2
            d0 = load_part(tile, chunk, s)
            d1 = load_part(tile, chunk + 1, s)
            dg0, du0, a0, dot0 = swiglu_gradient(d0, g0, u0, w)
            dg1, du1, a1, dot1 = swiglu_gradient(d1, g1, u1, w)
            dots += dot0 + dot1
            # dgate, dup, and the activation
            at = pad + s * SLAB
            column = n * 256 + c * 128
            store_pair(dh_ptr, at, column, 2 * F, F, dg0, dg1)
            store_pair(dh_ptr + F, at, column, 2 * F, F, du0, du1)
            store_pair(a_ptr, at, column, F, F, a0, a1)
        # the gradient of the rows' weights
        r = s * SLAB + gl.arange(0, SLAB, layout=ROW_LAYOUT)
        dots_at = dots_nP + n.to(gl.int64) * padded + row + r
        gl.store(dots_at, gl.sum(dots, 1), mask=r < real)
    # padding: zeros, which the weight gradients read
    zero = gl.zeros([SLAB, 64], gl.float32, PART_LAYOUT)
    for p in range(2 * SLABS if real <= 0 else 0):
        at = pad + p // 2 * SLAB
        column = n * 256 + p % 2 * 128
        store_pair(dh_ptr, at, column, 2 * F, F, zero, zero)
        store_pair(dh_ptr + F, at, column, 2 * F, F, zero, zero)
        store_pair(a_ptr, at, column, F, F, zero, zero)
    async_copy.wait_group(0)  # copies beyond the last block: the next half reuses their buffers
