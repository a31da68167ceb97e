"""What becomes of a tile once it is multiplied: device functions of the grouped GEMMs' epilogues, in Gluon.

A warpgroup holds 64 rows of 256 columns. Results leave in chunks of 64 columns, through shared memory and the copy
engine, which leaves out what lies beyond a plane's edges; the last rows of an expert, behind which another's begin,
leave straight from the registers. Everything written is seen as (planes, rows, columns): gate and up are two planes,
experts' weight gradients as many as there are experts, all else is one.
"""

# ruff: noqa: RUF059  (device code takes tuples apart by name)

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportReturnType=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma


@gluon.jit
def halves(x_MN, M: gl.constexpr, N: gl.constexpr):
    """The left and the right half of the columns, without moving anything between threads."""
    return x_MN.reshape([M, 2, N // 2]).permute(0, 2, 1).split()


@gluon.jit
def quarters(x, BN: gl.constexpr):
    left, right = halves(x, 64, BN)
    c0, c1 = halves(left, 64, BN // 2)
    c2, c3 = halves(right, 64, BN // 2)
    return c0, c1, c2, c3


@gluon.jit
def sigmoid(x):
    """(1 + tanh(x / 2)) / 2: one instruction of the special unit where exp and a division would take two."""
    t = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x * 0.5], gl.float32, True, 1)
    return 0.5 * t + 0.5


@gluon.jit
def chunks_of(n, N, END: gl.constexpr, BN: gl.constexpr):
    """How many times 64 columns an epilogue has before it. A loop over them that moves the values up in the registers
    is a quarter of the unrolled code, of which the two warpgroups have a copy each: fetching it was half the time."""
    if END == "swiglu":
        return gl.minimum(gl.cdiv(N // 2 - n * (BN // 2), 64), BN // 128)
    return gl.minimum(gl.cdiv(N - n * BN, 64), BN // 64)


@gluon.jit
def send(desc, at, bufs, values, COUNT: gl.constexpr):
    """Write 64 rows of some chunks by way of as many buffers: one wait until they are free, one fence for all. `at`:
    plane, row and column of each."""
    tma.store_wait(0)
    for c in gl.static_range(COUNT):
        bufs[c].store(values[c])
    fence_async_shared()
    for c in gl.static_range(COUNT):
        tma.async_copy_shared_to_global(desc[c], at[c], bufs[c].reshape([1, 64, 64]))


@gluon.jit
def put(ptr, row, column, stride, width, real, value):
    """Write the first `real` of 64 rows and no column from `width` on straight from the registers."""
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, value.type.layout))
    c = gl.arange(0, 64, layout=gl.SliceLayout(0, value.type.layout))
    at = ptr + (row + r).to(gl.int64)[:, None] * stride + (column + c)[None, :]
    gl.store(at, value, mask=(r < real)[:, None] & (column + c < width)[None, :])


@gluon.jit
def add(ptr, row, column, width, real, value):
    """Add to what is there, in the precision that has."""
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, value.type.layout))
    c = gl.arange(0, 64, layout=gl.SliceLayout(0, value.type.layout))
    at = ptr + (row + r).to(gl.int64)[:, None] * width + (column + c)[None, :]
    mask = (r < real)[:, None] & (column + c < width)[None, :]
    total = gl.load(at, mask=mask, other=0.0).to(gl.float32) + value
    gl.store(at, total.to(ptr.dtype.element_ty), mask=mask)


@gluon.jit
def end_whole(outs, bufs, acc, plane, row, column, BN: gl.constexpr):
    """All 64 rows, as far as the plane goes."""
    desc = outs[0]
    at = ([plane, row, column], [plane, row, column + 64], [plane, row, column + 128], [plane, row, column + 192])
    send((desc, desc, desc, desc), at, bufs, quarters(acc.to(gl.bfloat16), BN), 4)


@gluon.jit
def end_plain(outs, bufs, acc, row, column, N, real, BN: gl.constexpr):
    if real >= 64:
        end_whole(outs, bufs, acc, 0, row, column, BN)
    else:
        c0, c1, c2, c3 = quarters(acc.to(gl.bfloat16), BN)
        put(outs[1], row, column, N, N, real, c0)
        put(outs[1], row, column + 64, N, N, real, c1)
        put(outs[1], row, column + 128, N, N, real, c2)
        put(outs[1], row, column + 192, N, N, real, c3)


@gluon.jit
def end_add(outs, acc, plane, row, column, M, N, BN: gl.constexpr):
    c0, c1, c2, c3 = quarters(acc, BN)
    first = outs[1] + plane.to(gl.int64) * M * N
    for c in range(BN // 64):
        add(first, row, column + 64 * c, N, M - row, c0)
        c0, c1, c2 = c1, c2, c3


@gluon.jit
def end_swiglu(outs, bufs, acc, gate_r, row, n, N, real, BN: gl.constexpr):
    """The left half of the tile is gate, the right one up."""
    out_desc, out_ptr, side_desc, side_ptr, gate_R, dots_nR = outs
    c0, c1, c2, c3 = quarters(acc.to(gl.bfloat16), BN)
    for c in range(chunks_of(n, N, "swiglu", BN)):
        g = c0.to(gl.float32)
        act = (g * sigmoid(g) * c2.to(gl.float32) * gate_r[:, None]).to(gl.bfloat16)
        column = n * (BN // 2) + 64 * c
        if real >= 64:
            at = ([0, row, column], [0, row, column], [1, row, column])
            send((out_desc, side_desc, side_desc), at, bufs, (act, c0, c2), 3)
        else:
            put(out_ptr, row, column, N // 2, N // 2, real, act)
            put(side_ptr, row, column, N, N // 2, real, c0)
            put(side_ptr + N // 2, row, column, N, N // 2, real, c2)
        c0, c2 = c1, c3


@gluon.jit
def end_dswiglu(
    outs, bufs, ring, acc, gate_r, row, pad, n, N, real, rows, i,
    HALF: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The tile is the gradient of the activation; gate and up come through the ring of operands. Returns how far along
    the ring is. Rows behind an expert's last have the weight zero, so that zeros are written there."""
    out_desc, out_ptr, side_desc, side_ptr, gate_R, dots_nR = outs
    a_bufs, b_bufs, full, empty = ring
    c0, c1, c2, c3 = quarters(acc.to(gl.bfloat16), BN)
    small: gl.constexpr = c0.type.layout
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, small))
    dot_r = gl.zeros([64], gl.float32, gl.SliceLayout(1, small))
    for c in range(chunks_of(n, N, "dswiglu", BN)):
        s = i % STAGES
        mbarrier.wait(full.index(s), (i // STAGES) & 1)
        h = b_bufs.index(s)._reinterpret(gl.bfloat16, [BN // 64, 64, 64], bufs[0].type.layout)
        g = a_bufs.index(2 * s + HALF).load(small).to(gl.float32)
        u = h.index(HALF).load(small).to(gl.float32)
        mbarrier.arrive(empty.index(s))
        i += 1
        d = c0.to(gl.float32)
        c0, c1, c2 = c1, c2, c3
        sig = sigmoid(g)
        silu = g * sig
        act = silu * u
        dot_r += gl.sum(d * act, axis=1)
        d *= gate_r[:, None]
        act = (act * gate_r[:, None]).to(gl.bfloat16)
        dg = (d * u * (sig + silu * (1 - sig))).to(gl.bfloat16)
        du = (d * silu).to(gl.bfloat16)
        column = n * BN + c * 64
        at = ([0, pad, column], [0, pad, column], [1, pad, column])
        send((side_desc, out_desc, out_desc), at, bufs, (act, dg, du), 3)
    gl.store(dots_nR + n * rows + row + r, dot_r, mask=r < real)
    return i
