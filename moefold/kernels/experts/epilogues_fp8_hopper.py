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

from moefold.kernels.experts.epilogues_hopper import (
    BlockPlace,
    SwigluGradient,
    block_columns,
    block_offsets,
    block_rows,
    load_or_zero,
    output_blocks,
    store_rounded,
    swiglu_gradient,
    tanh_sigmoid,
)
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
LARGEST = gl.constexpr(448.0)


class Fp8Outputs(NamedTuple):
    """Where an epilogue writes. `side_ptr` and what follows belong to SwiGLU's epilogues. `side_rows_E`: scales of the
    activation that are known before, one for each expert; `side_scales` are then those of its rows."""

    out_desc: Any = None
    out_ptr: Any = None
    side_ptr: Any = None
    side_scales: Any = None
    h_ptr: Any = None
    h_scales: Any = None
    weight_R: Any = None
    dots_nP: Any = None
    side_rows_E: Any = None


class PreActivationAhead(NamedTuple):
    """Shared memory for the kept pre-activation, fetched ahead: blocks, and scales of rows."""

    blocks: Any
    scales: Any


@gluon.jit
def row_maximum(x):
    magnitude = gl.abs(x)
    return gl.reduce(magnitude, 1, larger_magnitude)


@gluon.jit
def block_scale(x0, x1, POWER_OF_TWO: gl.constexpr):
    """The scale of each row of two parts, and its reciprocal."""
    amax0 = row_maximum(x0)
    amax1 = row_maximum(x1)
    amax = larger_magnitude(amax0, amax1)
    scale = scale_from_amax(amax, LARGEST, POWER_OF_TWO)
    return scale, reciprocal(scale)


@gluon.jit
def load_part(bufs, chunk, s):
    """Slab s of a chunk of 64 rows and 64 columns, in fp32."""
    slabs = output_blocks(bufs, SLAB)
    slab = slabs.index(chunk * SLABS + s)
    part = slab.load(PART_LAYOUT)
    return part.to(gl.float32)


@gluon.jit
def load_pair(bufs, chunk, s):
    """Slab s of 128 columns, as two parts."""
    left = load_part(bufs, chunk, s)
    right = load_part(bufs, chunk + 1, s)
    return left, right


@gluon.jit
def row_numbers():
    """0 to 7, one for each row of a slab."""
    return block_rows(SLAB, PART_LAYOUT)


@gluon.jit
def store_part(ptr, at, stride, x):
    r = row_numbers()
    c = block_columns(64, PART_LAYOUT)
    offsets, there = block_offsets(r, c, at, stride)
    store_rounded(ptr + offsets, x, there)


@gluon.jit
def store_pair(ptr, at, stride, x0, x1):
    """128 columns of a slab, in an array with rows of `stride`, in the type of the memory."""
    store_part(ptr, at, stride, x0)
    column = at.column + 64
    right = BlockPlace(at.row, column, at.width, SLAB)
    store_part(ptr, right, stride, x1)


@gluon.jit
def store_block(out, line, at, stride, block, POWER_OF_TWO: gl.constexpr):
    """A block of 128 columns of a slab: in bf16 without scales, else as FP8 with scales, which begin at `line`."""
    values, scales = out
    x0, x1 = block
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
def store_with_scale(outs, of_expert, at, F, x0, x1):
    """A block of the activation as FP8 with its expert's scale, which is that of its rows."""
    factor = reciprocal(of_expert)
    store_pair(outs.side_ptr, at, F, x0 * factor[:, None], x1 * factor[:, None])
    of_first_block = (row_numbers() >= 0) & (at.column == 0)
    gl.store(outs.side_scales + at.row + row_numbers(), of_expert, mask=of_first_block)


@gluon.jit
def load_weights(weight_R, row, real):
    """The router's weights of 64 rows, a tuple of slabs; zero from `real` on. All are loaded before the first is
    needed: a load takes longer than a slab."""
    weights = ()
    for s in gl.static_range(SLABS):
        r = s * SLAB + row_numbers()
        at = weight_R + row + r
        there = r < real
        w = load_or_zero(at, there)
        weights += (w,)
    return weights


@gluon.jit
def epilogue_swiglu_fp8(outs, tile, at, expert, F, padded, POWER_OF_TWO: gl.constexpr):
    """The left half of the tile is gate, the right half up. Pre-activation and activation are quantised by blocks, or
    stored in bf16 where there are no scales for them; the activation may have the scale of its expert."""
    F = F // 16 * 16  # tells the compiler that it is a multiple of 16
    blocks = gl.cdiv(F, 128)
    if outs.side_rows_E is not None:
        scale = gl.load(outs.side_rows_E + expert)
        of_expert = gl.full([SLAB], scale, gl.float32, gl.SliceLayout(1, PART_LAYOUT))
    weights = load_weights(outs.weight_R, at.row, at.real)
    mbarrier.wait(at.made, at.phase)
    chunk = at.half * 4
    # loop over slabs of 8 rows
    for s in range(SLABS if at.real > 0 else 0):
        weight = weights[0]
        w = weight[:, None]
        weights = weights[1:] + weights[7:]  # of the next slab first
        gate = load_pair(tile, chunk, s)
        up = load_pair(tile, chunk + 2, s)
        # the pre-activation
        row = at.pad + s * SLAB
        column = at.n * 128
        here = BlockPlace(row, column, F, SLAB)
        n = at.n.to(gl.int64)
        line = n * padded
        wide_blocks = blocks.to(gl.int64)
        up_line = line + wide_blocks * padded
        gate_out = (outs.h_ptr, outs.h_scales)
        store_block(gate_out, line, here, 2 * F, gate, POWER_OF_TWO)
        up_out = (outs.h_ptr + F, outs.h_scales)
        store_block(up_out, up_line, here, 2 * F, up, POWER_OF_TWO)
        # the activation
        a0 = weighted_swiglu(gate[0], up[0], w)
        a1 = weighted_swiglu(gate[1], up[1], w)
        if outs.side_rows_E is not None:
            store_with_scale(outs, of_expert, here, F, a0, a1)
        else:
            act_out = (outs.side_ptr, outs.side_scales)
            store_block(act_out, line, here, F, (a0, a1), POWER_OF_TWO)


@gluon.jit
def weighted_swiglu(g, u, w):
    silu = g * tanh_sigmoid(g)
    return silu * u * w


@gluon.jit
def prefetch_block(h_ptr, buf, at):
    r = block_rows(SLAB, BLOCK_LAYOUT)
    c = block_columns(128, BLOCK_LAYOUT)
    stride = 2 * at.width
    offsets, there = block_offsets(r, c, at, stride)
    async_copy.async_copy_global_to_shared(buf, h_ptr + offsets, mask=there)


@gluon.jit
def prefetch_pre_activation(h_ptr, bufs, p, at, F):
    """Start the copy of gate and up of block p (slab p // 2, 128 columns p % 2) to shared memory, which has room for
    four blocks."""
    slab = p // 2 % SLABS
    row = at.pad + slab * SLAB
    column = at.n * 256 + p % 2 * 128
    first = p % 4 * 2
    gate_buf = bufs.index(first)
    up_buf = bufs.index(first + 1)
    here = BlockPlace(row, column, F, SLAB)
    prefetch_block(h_ptr, gate_buf, here)
    prefetch_block(h_ptr + F, up_buf, here)
    async_copy.commit_group()


@gluon.jit
def prefetch_scales(scales, buf, at, blocks, padded):
    """Start the copy of 64 rows' scales to shared memory: gate, gate, up, up of the tile's two blocks of columns."""
    q = block_rows(4, SCALES_LAYOUT)
    r = block_columns(64, SCALES_LAYOUT)
    column_block = at.n * 2 + q % 2
    column_block = gl.minimum(column_block, blocks - 1)
    block = column_block + q // 2 * blocks
    block = block.to(gl.int64)
    line = block[:, None] * padded
    row = at.pad + r
    scales_at = scales + line + row[None, :]
    async_copy.async_copy_global_to_shared(buf, scales_at)


@gluon.jit
def load_slab_scales(buf, q, s):
    count: gl.constexpr = 4 * SLABS
    shape: gl.constexpr = [count, SLAB, 1]
    layout: gl.constexpr = buf.type.layout
    slabs = buf._reinterpret(gl.float32, shape, layout)
    slab = slabs.index(q * SLABS + s)
    return slab.load(PART_LAYOUT)


@gluon.jit
def load_kept_part(block, COLUMN: gl.constexpr):
    part = block.slice(COLUMN, 64, 1)
    return part.load(PART_LAYOUT)


@gluon.jit
def load_kept_pair(ahead, first, q, s, FP8: gl.constexpr):
    """A block of gate or up, from the copy of the pre-activation in shared memory."""
    block = ahead.blocks.index(first)
    left = load_kept_part(block, 0)
    right = load_kept_part(block, 64)
    x0 = left.to(gl.float32)
    x1 = right.to(gl.float32)
    if FP8:
        scale = load_slab_scales(ahead.scales, q, s)
        x0 *= scale
        x1 *= scale
    return x0, x1


@gluon.jit
def store_gradients(outs, at, F, left, right):
    """Of one block's two parts: dgate, dup, and the activation."""
    gate_ptr = outs.out_ptr
    store_pair(gate_ptr, at, 2 * F, left.dgate, right.dgate)
    store_pair(gate_ptr + F, at, 2 * F, left.dup, right.dup)
    store_pair(outs.side_ptr, at, F, left.act, right.act)


@gluon.jit
def epilogue_dswiglu_fp8(outs, tile, ahead, at, F, padded):
    """The tile is the gradient of the activation. Writes the gradient of the pre-activation and the activation once
    more, both in bf16, from the kept pre-activation, which is prefetched three blocks ahead."""
    F = F // 16 * 16  # tells the compiler that it is a multiple of 16
    real = gl.minimum(at.real, 64)
    blocks = gl.cdiv(F, 128)
    # prologue: scales, and three blocks in flight
    FP8: gl.constexpr = outs.h_scales is not None
    if FP8:
        prefetch_scales(outs.h_scales, ahead.scales, at, blocks, padded)
    for p in range(3):
        prefetch_pre_activation(outs.h_ptr, ahead.blocks, p, at, F)
    weights = load_weights(outs.weight_R, at.row, real)
    mbarrier.wait(at.made, at.phase)
    # main loop over slabs of 8 rows, and over their columns
    for s in range(SLABS if real > 0 else 0):
        weight = weights[0]
        w = weight[:, None]
        weights = weights[1:] + weights[7:]  # of the next slab first
        dots = gl.zeros([SLAB, 64], gl.float32, PART_LAYOUT)
        for c in range(2):
            p = s * 2 + c
            prefetch_pre_activation(outs.h_ptr, ahead.blocks, p + 3, at, F)
            async_copy.wait_group(3)
            # gate and up of this block
            first = p % 4 * 2
            g0, g1 = load_kept_pair(ahead, first, c, s, FP8)
            u0, u1 = load_kept_pair(ahead, first + 1, 2 + c, s, FP8)
            # the gradient of its activation
            chunk = at.half * 4 + c * 2
            d0, d1 = load_pair(tile, chunk, s)
            left = swiglu_gradient(d0, g0, u0, w)
            right = swiglu_gradient(d1, g1, u1, w)
            dots += left.dot + right.dot
            row = at.pad + s * SLAB
            column = at.n * 256 + c * 128
            here = BlockPlace(row, column, F, SLAB)
            store_gradients(outs, here, F, left, right)
        # the gradient of the rows' weights
        r = s * SLAB + row_numbers()
        n = at.n.to(gl.int64)
        line = n * padded
        dots_at = outs.dots_nP + line + at.row + r
        there = r < real
        dot_r = gl.sum(dots, 1)
        gl.store(dots_at, dot_r, mask=there)
    # padding: zeros, which the weight gradients read
    zero = gl.zeros([SLAB, 64], gl.float32, PART_LAYOUT)
    nothing = SwigluGradient(zero, zero, zero, zero)
    for p in range(2 * SLABS if real <= 0 else 0):
        slab = p // 2
        row = at.pad + slab * SLAB
        column = at.n * 256 + p % 2 * 128
        here = BlockPlace(row, column, F, SLAB)
        store_gradients(outs, here, F, nothing, nothing)
    async_copy.wait_group(0)  # copies beyond the last block: the next half reuses their buffers
