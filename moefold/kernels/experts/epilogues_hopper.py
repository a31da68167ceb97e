"""Epilogues of the grouped GEMM (Gluon device functions).

Two warps run them concurrently with the consumer warpgroups, which hand over every 64 rows of 256 columns in shared
memory, rounded to bf16, and go on with the next tile: they would idle for up to a quarter of the time otherwise.
Results that need no arithmetic are stored by TMA, which clips at the edges of planes: gate and up are two planes,
experts' weight gradients one each, everything else is one. Results that need arithmetic, and an expert's last rows,
behind which another expert's begin, are processed in slabs of 16 rows and 64 columns, 16 values to a thread, and are
stored from registers.

Accumulation onto existing gradients stays in the consumer warpgroups: rounded to bf16 first, it would lose precision.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from moefold.kernels.hopper import split_columns

SLAB_ROWS = gl.constexpr(16)
SLABS = gl.constexpr(4)  # of 64 rows
SLAB_LAYOUT = gl.constexpr(  # a thread has 16 bytes of a row
    gl.BlockedLayout(
        size_per_thread=[1, 8],
        threads_per_warp=[4, 8],
        warps_per_cta=[2, 1],
        order=[1, 0],
    )
)


class EpilogueOutputs(NamedTuple):
    """Where an epilogue writes: the result as descriptor (for TMA) and as pointer, and further tensors that SwiGLU's
    epilogues read and write."""

    out_desc: Any
    out_ptr: Any
    side_desc: Any = None
    side_ptr: Any = None
    weight_R: Any = None
    dots_nR: Any = None


@gluon.jit
def column_quarters(x, BN: gl.constexpr):
    left, right = split_columns(x, 64, BN)
    c0, c1 = split_columns(left, 64, BN // 2)
    c2, c3 = split_columns(right, 64, BN // 2)
    return c0, c1, c2, c3


@gluon.jit
def tanh_sigmoid(x):
    """sigmoid(x) = (1 + tanh(x / 2)) / 2: one special-function instruction, where exp and a division take two."""
    half = x * 0.5
    t = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [half], gl.float32, True, 1)
    return 0.5 * t + 0.5


@gluon.jit
def swiglu_gradient(d, g, u, w):
    """dgate, dup, the activation times the weight, and the summands of the weight's gradient."""
    sig = tanh_sigmoid(g)
    silu = g * sig
    act = silu * u
    dot = d * act
    d *= w
    dsilu = sig + silu * (1 - sig)
    dgate = d * u * dsilu
    dup = d * silu
    return dgate, dup, act * w, dot


@gluon.jit
def output_chunk(bufs, i):
    """The i-th block of 64 rows and 64 columns in these buffers."""
    count: gl.constexpr = bufs.numel // (64 * 64)
    shape: gl.constexpr = [count, 64, 64]
    chunks = bufs._reinterpret(gl.bfloat16, shape, bufs.type.layout)
    chunk = chunks.index(i)
    return chunk.reshape([1, 64, 64])


@gluon.jit
def load_output_slab(bufs, i):
    """The i-th slab in these buffers."""
    count: gl.constexpr = bufs.numel // (SLAB_ROWS * 64)
    shape: gl.constexpr = [count, SLAB_ROWS, 64]
    slabs = bufs._reinterpret(gl.bfloat16, shape, bufs.type.layout)
    return slabs.index(i).load(SLAB_LAYOUT)


@gluon.jit
def row_numbers():
    """0 to 15, one for each row of a slab."""
    rows: gl.constexpr = gl.SliceLayout(1, SLAB_LAYOUT)
    return gl.arange(0, SLAB_ROWS, layout=rows)


@gluon.jit
def load_row_weights(weight_R, row, real):
    """The router's weights of 64 rows, a tuple of slabs; zero from `real` on."""
    r = row_numbers()
    at = weight_R + row + r
    weights = ()
    for s in gl.static_range(SLABS):
        above = s * SLAB_ROWS
        there = r + above < real
        w = gl.load(at + above, mask=there, other=0.0)
        weights += (w,)
    return weights


@gluon.jit
def block_offsets(r, c, row, column, stride, width, real):
    """Offsets of rows r and columns c of a block in an array with rows of `stride`, and their mask: `real` rows,
    columns below `width`."""
    rows = (row + r).to(gl.int64)
    row_start = rows[:, None] * stride
    columns = column + c
    at = row_start + columns[None, :]
    row_there = r < real
    column_there = columns < width
    return at, row_there[:, None] & column_there[None, :]


@gluon.jit
def store_rounded(at, x, there):
    """Store in the type of the memory."""
    rounded = x.to(at.dtype.element_ty)
    gl.store(at, rounded, mask=there)


@gluon.jit
def slab_offsets(row, column, stride, width, real):
    """The same of a slab."""
    columns: gl.constexpr = gl.SliceLayout(0, SLAB_LAYOUT)
    r = row_numbers()
    c = gl.arange(0, 64, layout=columns)
    return block_offsets(r, c, row, column, stride, width, real)


@gluon.jit
def epilogue_plain(outs, tile, at, N, BN: gl.constexpr):
    """out = tile: by TMA, or from registers where the expert's rows end within these 64."""
    mbarrier.wait(at.made, at.phase)
    # 64 columns at a time
    for c in range(BN // 64):
        column = at.n * BN + 64 * c
        i = at.half * (BN // 64) + c
        if at.real >= 64:
            chunk = output_chunk(tile, i)
            here = [at.plane, at.row, column]
            tma.async_copy_shared_to_global(outs.out_desc, here, chunk)
        else:
            for s in range(SLABS):
                above = s * SLAB_ROWS
                row = at.row + above
                offsets, there = slab_offsets(row, column, N, N, at.real - above)
                slab = load_output_slab(tile, i * SLABS + s)
                gl.store(outs.out_ptr + offsets, slab, mask=there)


@gluon.jit
def epilogue_swiglu(outs, tile, at, N, BN: gl.constexpr):
    """The left half of the tile is gate, the right half up."""
    F = N // 16 * 8  # tells the compiler that it is a multiple of 8
    weights = load_row_weights(outs.weight_R, at.row, at.real)
    mbarrier.wait(at.made, at.phase)
    # main loop over 64 columns of the gate and those of up
    for c in range(BN // 128):
        column = at.n * (BN // 2) + 64 * c
        left = at.half * (BN // 64) + c
        right = left + BN // 128
        # the pre-activation, by TMA
        if at.real >= 64:
            gate_chunk = output_chunk(tile, left)
            tma.async_copy_shared_to_global(outs.side_desc, [0, at.row, column], gate_chunk)
            up_chunk = output_chunk(tile, right)
            tma.async_copy_shared_to_global(outs.side_desc, [1, at.row, column], up_chunk)
        # the activation, slab by slab
        for s in range(SLABS):
            gate = load_output_slab(tile, left * SLABS + s)
            up = load_output_slab(tile, right * SLABS + s)
            g = gate.to(gl.float32)
            silu = g * tanh_sigmoid(g)
            act = silu * up.to(gl.float32)
            act *= weights[0][:, None]
            weights = weights[1:] + weights[:1]  # of the next slab
            above = s * SLAB_ROWS
            row = at.row + above
            real = at.real - above
            offsets, there = slab_offsets(row, column, F, F, real)
            store_rounded(outs.out_ptr + offsets, act, there)
            # the pre-activation of an expert's last rows
            if at.real < 64:
                offsets, there = slab_offsets(row, column, N, F, real)
                gate_at = outs.side_ptr + offsets
                gl.store(gate_at, gate, mask=there)
                gl.store(gate_at + F, up, mask=there)


@gluon.jit
def prefetch_gate_up(h_ptr, ahead, p, at, F, real, BN: gl.constexpr):
    """Start the copy of gate and up of a half's slab p to shared memory, which has room for four such pairs."""
    above = p // (BN // 64) * SLAB_ROWS
    column = at.n * BN + p % (BN // 64) * 64
    row = at.row + above
    offsets, there = slab_offsets(row, column, 2 * F, F, real - above)
    gate_at = h_ptr + offsets
    first = p % 4 * 2
    gate_buf = ahead.index(first)
    async_copy.async_copy_global_to_shared(gate_buf, gate_at, mask=there)
    up_buf = ahead.index(first + 1)
    async_copy.async_copy_global_to_shared(up_buf, gate_at + F, mask=there)
    async_copy.commit_group()


@gluon.jit
def epilogue_dswiglu(outs, tile, ahead, at, F, rows, BN: gl.constexpr):
    """The tile is the gradient of the activation; the gradients of gate and up overwrite gate and up, which are
    prefetched three slabs ahead to hide HBM latency under load. Rows behind an expert's last have weight zero, so that
    the activation stored there is zero."""
    h_ptr = outs.out_ptr
    real = gl.minimum(at.real, 64)
    weights = load_row_weights(outs.weight_R, at.row, real)
    # prologue: three slabs in flight
    for p in range(3):
        prefetch_gate_up(h_ptr, ahead, p, at, F, real, BN)
    r = row_numbers()
    mbarrier.wait(at.made, at.phase)
    # main loop over slabs of 16 rows, and over their columns
    for s in range(SLABS if real > 0 else 0):
        row_layout: gl.constexpr = gl.SliceLayout(1, SLAB_LAYOUT)
        dot_r = gl.zeros([SLAB_ROWS], gl.float32, row_layout)
        for c in range(BN // 64):
            p = s * (BN // 64) + c
            prefetch_gate_up(h_ptr, ahead, p + 3, at, F, real, BN)
            async_copy.wait_group(3)
            # gate and up of this slab, and the gradient of its activation
            first = p % 4 * 2
            gate = ahead.index(first).load(SLAB_LAYOUT)
            g = gate.to(gl.float32)
            up = ahead.index(first + 1).load(SLAB_LAYOUT)
            u = up.to(gl.float32)
            chunk = at.half * (BN // 64) + c
            slab = load_output_slab(tile, chunk * SLABS + s)
            d = slab.to(gl.float32)
            # SwiGLU again, and its gradient
            dgate, dup, weighted, dot = swiglu_gradient(d, g, u, weights[0][:, None])
            dot_r += gl.sum(dot, axis=1)
            # the activation, padded
            column = at.n * BN + 64 * c
            above = s * SLAB_ROWS
            pad = at.pad + above
            offsets, there = slab_offsets(pad, column, F, F, SLAB_ROWS)
            side_at = outs.side_ptr + offsets
            store_rounded(side_at, weighted, there)
            # dgate and dup, in place
            row = at.row + above
            offsets, there = slab_offsets(row, column, 2 * F, F, real - above)
            gate_at = h_ptr + offsets
            store_rounded(gate_at, dgate, there)
            store_rounded(gate_at + F, dup, there)
        # the gradient of the rows' weights
        there = r < real - s * SLAB_ROWS
        dots_at = outs.dots_nR + at.n * rows + at.row + s * SLAB_ROWS + r
        gl.store(dots_at, dot_r, mask=there)
        weights = weights[1:] + weights[3:]  # of the next slab
    async_copy.wait_group(0)  # copies beyond the last slab: the next half reuses their buffers


@gluon.jit
def accumulate_block(ptr, row, column, width, real, value):
    """Add 64 x 64 values to memory, in its own precision."""
    rows: gl.constexpr = gl.SliceLayout(1, value.type.layout)
    columns: gl.constexpr = gl.SliceLayout(0, value.type.layout)
    r = gl.arange(0, 64, layout=rows)
    c = gl.arange(0, 64, layout=columns)
    offsets, there = block_offsets(r, c, row, column, width, width, real)
    at = ptr + offsets
    sum_so_far = gl.load(at, mask=there, other=0.0)
    total = sum_so_far.to(gl.float32) + value
    store_rounded(at, total, there)


@gluon.jit
def epilogue_add(out_ptr, acc, plane, row, column, M, N, BN: gl.constexpr):
    """out += accumulator, 64 columns at a time."""
    c0, c1, c2, c3 = column_quarters(acc, BN)
    plane_start = plane.to(gl.int64) * M * N
    first = out_ptr + plane_start
    for c in range(BN // 64):
        accumulate_block(first, row, column + 64 * c, N, M - row, c0)
        c0, c1, c2 = c1, c2, c3
