"""What becomes of a tile once it is multiplied: device functions of the grouped GEMMs' epilogues, in Gluon.

Two warps do this beside the multiplying ones, which hand every 64 rows of 256 columns over in shared memory, rounded to
bf16, and go on with the next tile: they would stand still for up to a quarter of the time otherwise. What needs no
arithmetic leaves by the copy engine, which knows the edges of planes: gate and up are two, experts' weight gradients as
many as there are experts, all else is one. What needs some, and the last rows of an expert, behind which another's
begin, is taken up in slabs of 16 rows and 64 columns, 16 values to a thread, and leaves from the registers.

Sums onto gradients that are there already stay with the multiplying warps: rounded they would lose what they are for.
"""

# ruff: noqa: RUF059  (device code takes tuples apart by name)

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportReturnType=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from moefold.kernels.hopper import split_columns

SLAB_ROWS = gl.constexpr(16)  # of a slab
SLABS = gl.constexpr(4)  # of 64 rows
SLAB_LAYOUT = gl.constexpr(
    gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
)  # of a slab: 16 bytes of a row are one thread's


@gluon.jit
def column_quarters(x, BN: gl.constexpr):
    left, right = split_columns(x, 64, BN)
    c0, c1 = split_columns(left, 64, BN // 2)
    c2, c3 = split_columns(right, 64, BN // 2)
    return c0, c1, c2, c3


@gluon.jit
def tanh_sigmoid(x):
    """(1 + tanh(x / 2)) / 2: one instruction of the special unit where exp and a division would take two."""
    t = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x * 0.5], gl.float32, True, 1)
    return 0.5 * t + 0.5


@gluon.jit
def output_chunk(bufs, i):
    """64 rows of 64 columns, the i-th of all in these buffers."""
    count: gl.constexpr = bufs.numel // (64 * 64)
    return bufs._reinterpret(gl.bfloat16, [count, 64, 64], bufs.type.layout).index(i).reshape([1, 64, 64])


@gluon.jit
def output_slab(bufs, i):
    count: gl.constexpr = bufs.numel // (SLAB_ROWS * 64)
    return bufs._reinterpret(gl.bfloat16, [count, SLAB_ROWS, 64], bufs.type.layout).index(i)


@gluon.jit
def load_row_weights(weight_R, row, real):
    """The router's weights of 64 rows, slab by slab; zero from `real` on."""
    r = gl.arange(0, SLAB_ROWS, layout=gl.SliceLayout(1, SLAB_LAYOUT))
    at = weight_R + row + r
    return (
        gl.load(at, mask=r < real, other=0.0),
        gl.load(at + SLAB_ROWS, mask=r + SLAB_ROWS < real, other=0.0),
        gl.load(at + 2 * SLAB_ROWS, mask=r + 2 * SLAB_ROWS < real, other=0.0),
        gl.load(at + 3 * SLAB_ROWS, mask=r + 3 * SLAB_ROWS < real, other=0.0),
    )


@gluon.jit
def slab_offsets(row, column, stride, width, real):
    """Where a slab lies in an array with rows of `stride`, and what is there: `real` rows, columns below `width`."""
    r = gl.arange(0, SLAB_ROWS, layout=gl.SliceLayout(1, SLAB_LAYOUT))
    c = gl.arange(0, 64, layout=gl.SliceLayout(0, SLAB_LAYOUT))
    at = (row + r).to(gl.int64)[:, None] * stride + (column + c)[None, :]
    return at, (r < real)[:, None] & (column + c < width)[None, :]


@gluon.jit
def epilogue_plain(outs, tile, bar, phase, half, plane, row, n, N, real, BN: gl.constexpr):
    out_desc, out_ptr, side_desc, side_ptr, weight_R, dots_nR = outs
    mbarrier.wait(bar, phase)
    for c in range(BN // 64):
        column = n * BN + 64 * c
        i = half * (BN // 64) + c
        if real >= 64:
            tma.async_copy_shared_to_global(out_desc, [plane, row, column], output_chunk(tile, i))
        else:
            for s in range(SLABS):
                at, there = slab_offsets(row + s * SLAB_ROWS, column, N, N, real - s * SLAB_ROWS)
                gl.store(out_ptr + at, output_slab(tile, i * SLABS + s).load(SLAB_LAYOUT), mask=there)


@gluon.jit
def epilogue_swiglu(outs, tile, bar, phase, half, row, n, N, real, BN: gl.constexpr):
    """The left half of the tile is gate, the right one up."""
    out_desc, out_ptr, side_desc, side_ptr, weight_R, dots_nR = outs
    F = N // 16 * 8  # as the compiler learns that it is a multiple of 8
    w0, w1, w2, w3 = load_row_weights(weight_R, row, real)
    mbarrier.wait(bar, phase)
    for c in range(BN // 128):
        column = n * (BN // 2) + 64 * c
        left = half * (BN // 64) + c
        right = left + BN // 128
        if real >= 64:
            tma.async_copy_shared_to_global(side_desc, [0, row, column], output_chunk(tile, left))
            tma.async_copy_shared_to_global(side_desc, [1, row, column], output_chunk(tile, right))
        for s in range(SLABS):
            gate = output_slab(tile, left * SLABS + s).load(SLAB_LAYOUT)
            up = output_slab(tile, right * SLABS + s).load(SLAB_LAYOUT)
            g = gate.to(gl.float32)
            act = g * tanh_sigmoid(g) * up.to(gl.float32) * w0[:, None]
            w0, w1, w2, w3 = w1, w2, w3, w0
            at, there = slab_offsets(row + s * SLAB_ROWS, column, F, F, real - s * SLAB_ROWS)
            gl.store(out_ptr + at, act.to(gl.bfloat16), mask=there)
            if real < 64:
                at, there = slab_offsets(row + s * SLAB_ROWS, column, N, F, real - s * SLAB_ROWS)
                gl.store(side_ptr + at, gate, mask=there)
                gl.store(side_ptr + at + F, up, mask=there)


@gluon.jit
def prefetch_gate_up(h_ptr, ahead, p, row, n, F, real, BN: gl.constexpr):
    """Have gate and up of a half's slab p copied, to lie beside each other; there are four places for such pairs."""
    first = p // (BN // 64) * SLAB_ROWS
    at, there = slab_offsets(row + first, n * BN + p % (BN // 64) * 64, 2 * F, F, real - first)
    async_copy.async_copy_global_to_shared(ahead.index(p % 4 * 2), h_ptr + at, mask=there)
    async_copy.async_copy_global_to_shared(ahead.index(p % 4 * 2 + 1), h_ptr + at + F, mask=there)
    async_copy.commit_group()


@gluon.jit
def epilogue_dswiglu(outs, tile, ahead, bar, phase, half, row, pad, n, F, real, rows, BN: gl.constexpr):
    """The tile is the gradient of the activation; those of gate and up take the place of gate and up, which are fetched
    three slabs ahead: memory that is this busy answers late. Rows behind an expert's last have the weight zero, so that
    the activation written there is zero."""
    out_desc, h_ptr, side_desc, side_ptr, weight_R, dots_nR = outs
    real = gl.minimum(real, 64)
    w0, w1, w2, w3 = load_row_weights(weight_R, row, real)
    for p in range(3):
        prefetch_gate_up(h_ptr, ahead, p, row, n, F, real, BN)
    r = gl.arange(0, SLAB_ROWS, layout=gl.SliceLayout(1, SLAB_LAYOUT))
    mbarrier.wait(bar, phase)
    for s in range(SLABS if real > 0 else 0):
        dot_r = gl.zeros([SLAB_ROWS], gl.float32, gl.SliceLayout(1, SLAB_LAYOUT))
        for c in range(BN // 64):
            p = s * (BN // 64) + c
            prefetch_gate_up(h_ptr, ahead, p + 3, row, n, F, real, BN)
            async_copy.wait_group(3)
            g = ahead.index(p % 4 * 2).load(SLAB_LAYOUT).to(gl.float32)
            u = ahead.index(p % 4 * 2 + 1).load(SLAB_LAYOUT).to(gl.float32)
            d = output_slab(tile, (half * (BN // 64) + c) * SLABS + s).load(SLAB_LAYOUT).to(gl.float32)
            sig = tanh_sigmoid(g)
            silu = g * sig
            act = silu * u
            dot_r += gl.sum(d * act, axis=1)
            d *= w0[:, None]
            column = n * BN + 64 * c
            at, there = slab_offsets(pad + s * SLAB_ROWS, column, F, F, SLAB_ROWS)
            gl.store(side_ptr + at, (act * w0[:, None]).to(gl.bfloat16), mask=there)
            at, there = slab_offsets(row + s * SLAB_ROWS, column, 2 * F, F, real - s * SLAB_ROWS)
            gl.store(h_ptr + at, (d * u * (sig + silu * (1 - sig))).to(gl.bfloat16), mask=there)
            gl.store(h_ptr + at + F, (d * silu).to(gl.bfloat16), mask=there)
        gl.store(dots_nR + n * rows + row + s * SLAB_ROWS + r, dot_r, mask=r < real - s * SLAB_ROWS)
        w0, w1, w2 = w1, w2, w3
    async_copy.wait_group(0)  # zeros asked for beyond the last slab: the next half's slabs go to the same places


@gluon.jit
def accumulate_block(ptr, row, column, width, real, value):
    """Add to what is there, in the precision that has."""
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, value.type.layout))
    c = gl.arange(0, 64, layout=gl.SliceLayout(0, value.type.layout))
    at = ptr + (row + r).to(gl.int64)[:, None] * width + (column + c)[None, :]
    mask = (r < real)[:, None] & (column + c < width)[None, :]
    total = gl.load(at, mask=mask, other=0.0).to(gl.float32) + value
    gl.store(at, total.to(ptr.dtype.element_ty), mask=mask)


@gluon.jit
def epilogue_add(out_ptr, acc, plane, row, column, M, N, BN: gl.constexpr):
    c0, c1, c2, c3 = column_quarters(acc, BN)
    first = out_ptr + plane.to(gl.int64) * M * N
    for c in range(BN // 64):
        accumulate_block(first, row, column + 64 * c, N, M - row, c0)
        c0, c1, c2 = c1, c2, c3
