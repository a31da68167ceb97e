"""Epilogues of the grouped GEMM (Gluon device functions).

Two warps run them concurrently with the consumer warpgroups, which hand over every 64 rows of 256 columns in shared
memory, rounded to bf16, and go on with the next tile: they would idle for up to a quarter of the time otherwise.
Results that need no arithmetic are stored by TMA, which clips at the edges of planes: gate and up are two planes,
experts' weight gradients one each, everything else is one. Results that need arithmetic, and an expert's last rows,
behind which another expert's begin, are processed in slabs of 16 rows and 64 columns, 16 values to a thread, and are
stored from registers.

Accumulation onto existing gradients stays in the consumer warpgroups: rounded to bf16 first, it would lose precision.
"""

# ruff: noqa: RUF059  (device code takes tuples apart by name)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from moefold.kernels.hopper import split_columns

SLAB_ROWS = gl.constexpr(16)
SLABS = gl.constexpr(4)  # of 64 rows
SLAB_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0]))  # a thread has 16 bytes of a row


@gluon.jit
def column_quarters(x, BN: gl.constexpr):
    left, right = split_columns(x, 64, BN)
    c0, c1 = split_columns(left, 64, BN // 2)
    c2, c3 = split_columns(right, 64, BN // 2)
    return c0, c1, c2, c3


@gluon.jit
def tanh_sigmoid(x):
    """sigmoid(x) = (1 + tanh(x / 2)) / 2: one special-function instruction, where exp and a division take two."""
    t = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x * 0.5], gl.float32, True, 1)
    return 0.5 * t + 0.5


@gluon.jit
def output_chunk(bufs, i):
    """The i-th block of 64 rows and 64 columns in these buffers."""
    count: gl.constexpr = bufs.numel // (64 * 64)
    chunks = bufs._reinterpret(gl.bfloat16, [count, 64, 64], bufs.type.layout)
    return chunks.index(i).reshape([1, 64, 64])


@gluon.jit
def load_output_slab(bufs, i):
    """The i-th slab in these buffers."""
    count: gl.constexpr = bufs.numel // (SLAB_ROWS * 64)
    slabs = bufs._reinterpret(gl.bfloat16, [count, SLAB_ROWS, 64], bufs.type.layout)
    return slabs.index(i).load(SLAB_LAYOUT)


@gluon.jit
def row_numbers():
    """0 to 15, one for each row of a slab."""
    return gl.arange(0, SLAB_ROWS, layout=gl.SliceLayout(1, SLAB_LAYOUT))


@gluon.jit
def load_slab_weights(at, r, first, real):
    return gl.load(at + first, mask=r + first < real, other=0.0)


@gluon.jit
def load_row_weights(weight_R, row, real):
    """The router's weights of 64 rows, slab by slab; zero from `real` on."""
    r = row_numbers()
    at = weight_R + row + r
    w0 = load_slab_weights(at, r, 0, real)
    w1 = load_slab_weights(at, r, SLAB_ROWS, real)
    w2 = load_slab_weights(at, r, 2 * SLAB_ROWS, real)
    w3 = load_slab_weights(at, r, 3 * SLAB_ROWS, real)
    return w0, w1, w2, w3


@gluon.jit
def slab_offsets(row, column, stride, width, real):
    """Offsets of a slab in an array with rows of `stride`, and its mask: `real` rows, columns below `width`."""
    r = row_numbers()
    c = gl.arange(0, 64, layout=gl.SliceLayout(0, SLAB_LAYOUT))
    row_start = (row + r).to(gl.int64)[:, None] * stride
    at = row_start + (column + c)[None, :]
    row_there = (r < real)[:, None]
    column_there = (column + c < width)[None, :]
    return at, row_there & column_there


@gluon.jit
def epilogue_plain(outs, tile, bar, phase, half, plane, row, n, N, real, BN: gl.constexpr):
    """out = tile: by TMA, or from registers where the expert's rows end within these 64."""
    out_desc, out_ptr, side_desc, side_ptr, weight_R, dots_nR = outs
    mbarrier.wait(bar, phase)
    # 64 columns at a time
    for c in range(BN // 64):
        column = n * BN + 64 * c
        i = half * (BN // 64) + c
        if real >= 64:
            here = [plane, row, column]
            tma.async_copy_shared_to_global(out_desc, here, output_chunk(tile, i))
        else:
            for s in range(SLABS):
                above = s * SLAB_ROWS
                at, there = slab_offsets(row + above, column, N, N, real - above)
                out_at = out_ptr + at
                slab = load_output_slab(tile, i * SLABS + s)
                gl.store(out_at, slab, mask=there)


@gluon.jit
def epilogue_swiglu(outs, tile, bar, phase, half, row, n, N, real, BN: gl.constexpr):
    """The left half of the tile is gate, the right half up."""
    out_desc, out_ptr, side_desc, side_ptr, weight_R, dots_nR = outs
    F = N // 16 * 8  # tells the compiler that it is a multiple of 8
    w0, w1, w2, w3 = load_row_weights(weight_R, row, real)
    mbarrier.wait(bar, phase)
    # main loop over 64 columns of the gate and those of up
    for c in range(BN // 128):
        column = n * (BN // 2) + 64 * c
        left = half * (BN // 64) + c
        right = left + BN // 128
        # the pre-activation, by TMA
        if real >= 64:
            tma.async_copy_shared_to_global(side_desc, [0, row, column], output_chunk(tile, left))
            tma.async_copy_shared_to_global(side_desc, [1, row, column], output_chunk(tile, right))
        # the activation, slab by slab
        for s in range(SLABS):
            gate = load_output_slab(tile, left * SLABS + s)
            up = load_output_slab(tile, right * SLABS + s)
            g = gate.to(gl.float32)
            silu = g * tanh_sigmoid(g)
            act = silu * up.to(gl.float32)
            act *= w0[:, None]
            w0, w1, w2, w3 = w1, w2, w3, w0
            above = s * SLAB_ROWS
            at, there = slab_offsets(row + above, column, F, F, real - above)
            gl.store(out_ptr + at, act.to(gl.bfloat16), mask=there)
            # the pre-activation of an expert's last rows
            if real < 64:
                at, there = slab_offsets(row + above, column, N, F, real - above)
                gl.store(side_ptr + at, gate, mask=there)
                gl.store(side_ptr + at + F, up, mask=there)


@gluon.jit
def prefetch_gate_up(h_ptr, ahead, p, row, n, F, real, BN: gl.constexpr):
    """Start the copy of gate and up of a half's slab p to shared memory, which has room for four such pairs."""
    above = p // (BN // 64) * SLAB_ROWS
    first_row = row + above
    column = n * BN + p % (BN // 64) * 64
    at, there = slab_offsets(first_row, column, 2 * F, F, real - above)
    gate_buf = ahead.index(p % 4 * 2)
    async_copy.async_copy_global_to_shared(gate_buf, h_ptr + at, mask=there)
    up_buf = ahead.index(p % 4 * 2 + 1)
    async_copy.async_copy_global_to_shared(up_buf, h_ptr + at + F, mask=there)
    async_copy.commit_group()


@gluon.jit
def epilogue_dswiglu(outs, tile, ahead, bar, phase, half, row, pad, n, F, real, rows, BN: gl.constexpr):
    """The tile is the gradient of the activation; the gradients of gate and up overwrite gate and up, which are
    prefetched three slabs ahead to hide HBM latency under load. Rows behind an expert's last have weight zero, so that
    the activation stored there is zero."""
    out_desc, h_ptr, side_desc, side_ptr, weight_R, dots_nR = outs
    real = gl.minimum(real, 64)
    w0, w1, w2, w3 = load_row_weights(weight_R, row, real)
    # prologue: three slabs in flight
    for p in range(3):
        prefetch_gate_up(h_ptr, ahead, p, row, n, F, real, BN)
    r = row_numbers()
    mbarrier.wait(bar, phase)
    # main loop over slabs of 16 rows, and over their columns
    for s in range(SLABS if real > 0 else 0):
        row_layout: gl.constexpr = gl.SliceLayout(1, SLAB_LAYOUT)
        dot_r = gl.zeros([SLAB_ROWS], gl.float32, row_layout)
        for c in range(BN // 64):
            p = s * (BN // 64) + c
            prefetch_gate_up(h_ptr, ahead, p + 3, row, n, F, real, BN)
            async_copy.wait_group(3)
            # gate and up of this slab, and the gradient of its activation
            gate = ahead.index(p % 4 * 2).load(SLAB_LAYOUT)
            g = gate.to(gl.float32)
            up = ahead.index(p % 4 * 2 + 1).load(SLAB_LAYOUT)
            u = up.to(gl.float32)
            chunk = half * (BN // 64) + c
            d = load_output_slab(tile, chunk * SLABS + s).to(gl.float32)
            # SwiGLU again, and its gradient
            sig = tanh_sigmoid(g)
            silu = g * sig
            act = silu * u
            dot_r += gl.sum(d * act, axis=1)
            d *= w0[:, None]
            # the activation, padded
            column = n * BN + 64 * c
            above = s * SLAB_ROWS
            at, there = slab_offsets(pad + above, column, F, F, SLAB_ROWS)
            side_at = side_ptr + at
            weighted = act * w0[:, None]
            gl.store(side_at, weighted.to(gl.bfloat16), mask=there)
            # dgate and dup, in place
            at, there = slab_offsets(row + above, column, 2 * F, F, real - above)
            dsilu = sig + silu * (1 - sig)
            dgate = d * u * dsilu
            dup = d * silu
            gl.store(h_ptr + at, dgate.to(gl.bfloat16), mask=there)
            gl.store(h_ptr + at + F, dup.to(gl.bfloat16), mask=there)
        # the gradient of the rows' weights
        there = r < real - s * SLAB_ROWS
        dots_at = dots_nR + n * rows + row + s * SLAB_ROWS + r
        gl.store(dots_at, dot_r, mask=there)
        w0, w1, w2 = w1, w2, w3
    async_copy.wait_group(0)  # copies beyond the last slab: the next half reuses their buffers


@gluon.jit
def accumulate_block(ptr, row, column, width, real, value):
    """Add to memory, in its own precision."""
    layout: gl.constexpr = value.type.layout
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    row_start = (row + r).to(gl.int64)[:, None] * width
    at = ptr + row_start + (column + c)[None, :]
    row_there = (r < real)[:, None]
    column_there = (column + c < width)[None, :]
    mask = row_there & column_there
    sum_so_far = gl.load(at, mask=mask, other=0.0)
    total = sum_so_far.to(gl.float32) + value
    gl.store(at, total.to(ptr.dtype.element_ty), mask=mask)


@gluon.jit
def epilogue_add(out_ptr, acc, plane, row, column, M, N, BN: gl.constexpr):
    """out += accumulator, 64 columns at a time."""
    c0, c1, c2, c3 = column_quarters(acc, BN)
    first = out_ptr + plane.to(gl.int64) * M * N
    for c in range(BN // 64):
        accumulate_block(first, row, column + 64 * c, N, M - row, c0)
        c0, c1, c2 = c1, c2, c3
