"""Epilogues of the grouped GEMM (Gluon device functions).

Two warps run them concurrently with the consumer warpgroups, which hand over every 64 rows of 256 columns in shared
memory, rounded to the type of the result, and go on with the next tile: they would idle for up to a quarter of the
time otherwise. Results that need no arithmetic are stored by TMA, which clips at the edges of planes: gate and up are
two planes, experts' weight gradients one each, everything else is one. Results that need arithmetic, and an expert's
last rows, behind which another expert's begin, are processed in slabs of 16 rows and 64 columns, 16 values to a thread,
and are stored from registers.

Accumulation onto existing gradients stays in the consumer warpgroups: rounded to bf16 first, it would lose precision.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from moefold.kernels.hopper import shared_blocks, split_columns

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


class SwigluGradient(NamedTuple):
    """Gradients of gate and up, the activation times the weight, and the summands of the weight's gradient."""

    dgate: Any
    dup: Any
    act: Any
    dot: Any


class BlockPlace(NamedTuple):
    """Where a block goes: its first row and column, the number of columns there are, and how many of its rows are
    real."""

    row: Any
    column: Any
    width: Any
    real: Any


@gluon.jit
def block_rows(NUMBER: gl.constexpr, layout: gl.constexpr):
    """0, 1, ..., one for each row of a block."""
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    return gl.arange(0, NUMBER, layout=rows)


@gluon.jit
def block_columns(NUMBER: gl.constexpr, layout: gl.constexpr):
    """0, 1, ..., one for each column of a block."""
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    return gl.arange(0, NUMBER, layout=columns)


@gluon.jit
def load_or_zero(at, there):
    return gl.load(at, mask=there, other=0.0)


@gluon.jit
def column_quarters(x, BN: gl.constexpr):
    HALF_BN: gl.constexpr = BN // 2
    left, right = split_columns(x, 64, BN)
    c0, c1 = split_columns(left, 64, HALF_BN)
    c2, c3 = split_columns(right, 64, HALF_BN)
    return c0, c1, c2, c3


@gluon.jit
def tanh_sigmoid(x):
    """sigmoid(x) = (1 + tanh(x / 2)) / 2: one special-function instruction, where exp and a division take two."""
    half = x * 0.5
    t = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [half], gl.float32, True, 1)
    return 0.5 * t + 0.5


@gluon.jit
def swiglu_gradient(d, g, u, w):
    sig = tanh_sigmoid(g)
    silu = g * sig
    act = silu * u
    dot = d * act
    d *= w
    rest = 1 - sig
    dsilu = sig + silu * rest
    dgate = d * u * dsilu
    dup = d * silu
    return SwigluGradient(dgate, dup, act * w, dot)


@gluon.jit
def output_blocks(bufs, ROWS: gl.constexpr):
    """These buffers as blocks of so many rows and 64 columns."""
    return shared_blocks(bufs, ROWS, 64)


@gluon.jit
def output_chunk(bufs, i):
    """The i-th block of 64 rows and 64 columns, as a plane."""
    chunks = output_blocks(bufs, 64)
    chunk = chunks.index(i)
    return chunk.reshape([1, 64, 64])


@gluon.jit
def load_output_slab(bufs, i):
    """The i-th slab in these buffers."""
    slabs = output_blocks(bufs, SLAB_ROWS)
    slab = slabs.index(i)
    return slab.load(SLAB_LAYOUT)


@gluon.jit
def row_numbers():
    """0 to 15, one for each row of a slab."""
    return block_rows(SLAB_ROWS, SLAB_LAYOUT)


@gluon.jit
def load_row_weights(weight_R, row, real):
    """The router's weights of 64 rows, a tuple of slabs; zero from `real` on."""
    r = row_numbers()
    at = weight_R + row + r
    weights = ()
    for s in gl.static_range(SLABS):
        above = s * SLAB_ROWS
        there = r + above < real
        w = load_or_zero(at + above, there)
        weights += (w,)
    return weights


@gluon.jit
def block_offsets(r, c, at, stride):
    """Offsets of rows r and columns c of a block in an array with rows of `stride`, and which of them exist: real
    rows, columns below the width."""
    rows = at.row + r
    rows = rows.to(gl.int64)
    row_start = rows[:, None] * stride
    columns = at.column + c
    offsets = row_start + columns[None, :]
    row_there = r < at.real
    column_there = columns < at.width
    there = row_there[:, None] & column_there[None, :]
    return offsets, there


@gluon.jit
def store_rounded(at, x, there):
    """Store in the type of the memory."""
    rounded = x.to(at.dtype.element_ty)
    gl.store(at, rounded, mask=there)


@gluon.jit
def slab_offsets(at, stride):
    """The same of a slab."""
    r = row_numbers()
    c = block_columns(64, SLAB_LAYOUT)
    return block_offsets(r, c, at, stride)


@gluon.jit
def epilogue_plain(outs, tile, at, N, BN: gl.constexpr):
    """out = tile: by TMA, or from registers where the expert's rows end within these 64."""
    CHUNKS: gl.constexpr = BN // 64
    mbarrier.wait(at.made, at.phase)
    # 64 columns at a time
    for c in range(CHUNKS):
        column = at.n * BN + 64 * c
        i = at.half * CHUNKS + c
        if at.real >= 64:
            chunk = output_chunk(tile, i)
            here = [at.plane, at.row, column]
            tma.async_copy_shared_to_global(outs.out_desc, here, chunk)
        else:
            for s in range(SLABS):
                above = s * SLAB_ROWS
                row = at.row + above
                real = at.real - above
                here = BlockPlace(row, column, N, real)
                offsets, there = slab_offsets(here, N)
                slab = load_output_slab(tile, i * SLABS + s)
                gl.store(outs.out_ptr + offsets, slab, mask=there)


@gluon.jit
def epilogue_swiglu(outs, tile, at, N, BN: gl.constexpr):
    """The left half of the tile is gate, the right half up."""
    F = N // 16 * 8  # tells the compiler that it is a multiple of 8
    HALF_BN: gl.constexpr = BN // 2
    CHUNKS: gl.constexpr = BN // 64
    GATE_CHUNKS: gl.constexpr = BN // 128
    weights = load_row_weights(outs.weight_R, at.row, at.real)
    mbarrier.wait(at.made, at.phase)
    # main loop over 64 columns of the gate and those of up
    for c in range(GATE_CHUNKS):
        column = at.n * HALF_BN + 64 * c
        left = at.half * CHUNKS + c
        right = left + GATE_CHUNKS
        # the pre-activation, by TMA
        if at.real >= 64:
            gate_chunk = output_chunk(tile, left)
            store_plane(outs.side_desc, 0, at.row, column, gate_chunk)
            up_chunk = output_chunk(tile, right)
            store_plane(outs.side_desc, 1, at.row, column, up_chunk)
        # the activation, slab by slab
        for s in range(SLABS):
            gate = load_output_slab(tile, left * SLABS + s)
            up = load_output_slab(tile, right * SLABS + s)
            g = gate.to(gl.float32)
            silu = g * tanh_sigmoid(g)
            u = up.to(gl.float32)
            act = silu * u
            weight = weights[0]
            act *= weight[:, None]
            weights = weights[1:] + weights[:1]  # of the next slab
            above = s * SLAB_ROWS
            row = at.row + above
            real = at.real - above
            here = BlockPlace(row, column, F, real)
            offsets, there = slab_offsets(here, F)
            store_rounded(outs.out_ptr + offsets, act, there)
            # the pre-activation of an expert's last rows
            if at.real < 64:
                offsets, there = slab_offsets(here, N)
                gate_at = outs.side_ptr + offsets
                gl.store(gate_at, gate, mask=there)
                up_at = gate_at + F
                gl.store(up_at, up, mask=there)


@gluon.jit
def store_plane(desc, plane, row, column, chunk):
    """64 x 64 results to one plane, by TMA."""
    at = [plane, row, column]
    tma.async_copy_shared_to_global(desc, at, chunk)


@gluon.jit
def prefetch_gate_up(h_ptr, ahead, p, at, F, real, BN: gl.constexpr):
    """Start the copy of gate and up of a half's slab p to shared memory, which has room for four such pairs."""
    CHUNKS: gl.constexpr = BN // 64
    above = p // CHUNKS * SLAB_ROWS
    column = at.n * BN + p % CHUNKS * 64
    row = at.row + above
    stride = 2 * F
    real -= above
    here = BlockPlace(row, column, F, real)
    offsets, there = slab_offsets(here, stride)
    gate_at = h_ptr + offsets
    first = p % 4 * 2
    gate_buf = ahead.index(first)
    async_copy.async_copy_global_to_shared(gate_buf, gate_at, mask=there)
    up_buf = ahead.index(first + 1)
    up_at = gate_at + F
    async_copy.async_copy_global_to_shared(up_buf, up_at, mask=there)
    async_copy.commit_group()


@gluon.jit
def load_gate_up(ahead, p):
    """Gate and up of slab p, from the copy in shared memory."""
    first = p % 4 * 2
    gate_buf = ahead.index(first)
    gate = gate_buf.load(SLAB_LAYOUT)
    g = gate.to(gl.float32)
    up_buf = ahead.index(first + 1)
    up = up_buf.load(SLAB_LAYOUT)
    u = up.to(gl.float32)
    return g, u


@gluon.jit
def epilogue_dswiglu(outs, tile, ahead, at, F, rows, BN: gl.constexpr):
    """The tile is the gradient of the activation; the gradients of gate and up overwrite gate and up, which are
    prefetched three slabs ahead to hide HBM latency under load. Rows behind an expert's last have weight zero, so that
    the activation stored there is zero."""
    CHUNKS: gl.constexpr = BN // 64
    row_layout: gl.constexpr = gl.SliceLayout(1, SLAB_LAYOUT)
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
        dot_r = gl.zeros([SLAB_ROWS], gl.float32, row_layout)
        for c in range(CHUNKS):
            p = s * CHUNKS + c
            prefetch_gate_up(h_ptr, ahead, p + 3, at, F, real, BN)
            async_copy.wait_group(3)
            # gate and up of this slab, and the gradient of its activation
            g, u = load_gate_up(ahead, p)
            chunk = at.half * CHUNKS + c
            slab = load_output_slab(tile, chunk * SLABS + s)
            d = slab.to(gl.float32)
            # SwiGLU again, and its gradient
            weight = weights[0]
            gradient = swiglu_gradient(d, g, u, weight[:, None])
            dot_r += gl.sum(gradient.dot, axis=1)
            # the activation, padded
            column = at.n * BN + 64 * c
            above = s * SLAB_ROWS
            pad = at.pad + above
            here = BlockPlace(pad, column, F, SLAB_ROWS)
            offsets, there = slab_offsets(here, F)
            side_at = outs.side_ptr + offsets
            store_rounded(side_at, gradient.act, there)
            # dgate and dup, in place
            row = at.row + above
            stride = 2 * F
            left = real - above
            here = BlockPlace(row, column, F, left)
            offsets, there = slab_offsets(here, stride)
            gate_at = h_ptr + offsets
            store_rounded(gate_at, gradient.dgate, there)
            up_at = gate_at + F
            store_rounded(up_at, gradient.dup, there)
        # the gradient of the rows' weights
        above = s * SLAB_ROWS
        there = r < real - above
        line = outs.dots_nR + at.n * rows
        dots_at = line + at.row + above + r
        gl.store(dots_at, dot_r, mask=there)
        weights = weights[1:] + weights[3:]  # of the next slab
    async_copy.wait_group(0)  # copies beyond the last slab: the next half reuses their buffers


@gluon.jit
def accumulate_block(ptr, row, column, width, real, value):
    """Add 64 x 64 values to memory, in its own precision."""
    layout: gl.constexpr = value.type.layout
    r = block_rows(64, layout)
    c = block_columns(64, layout)
    here = BlockPlace(row, column, width, real)
    offsets, there = block_offsets(r, c, here, width)
    at = ptr + offsets
    sum_so_far = load_or_zero(at, there)
    total = sum_so_far.to(gl.float32) + value
    store_rounded(at, total, there)


@gluon.jit
def epilogue_add(out_ptr, acc, plane, row, column, M, N, BN: gl.constexpr):
    """out += accumulator, 64 columns at a time."""
    c0, c1, c2, c3 = column_quarters(acc, BN)
    wide_plane = plane.to(gl.int64)
    first = out_ptr + wide_plane * M * N
    for c in range(BN // 64):
        at_column = column + 64 * c
        accumulate_block(first, row, at_column, N, M - row, c0)
        c0, c1, c2 = c1, c2, c3
