"""Rows moved while the tensor cores work: a role of the grouped GEMMs that takes two warps, which wait otherwise.

What a later kernel needs, or an earlier one left to be summed, need not wait for a kernel of its own, in which nothing
is multiplied. N source rows, R rows in expert order, D width, K rows at most per source row.

    "gather"   to_RD[r] = from_ND[index_R[r]], zeros where the index is -1
    "sum"      to_ND[n] = sum over k of from_RD[index_NK[n, k]], in fp32 and in this order; -1 counts as nothing
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportReturnType=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def carry(load, D, KIND: gl.constexpr, K: gl.constexpr):
    if KIND == "gather":
        gather(load, D)
    else:
        add_up(load, D, K)


@gluon.jit
def gather(load, D):
    """This program's part of the rows, eight rows of 256 columns at a time."""
    from_ptr, index_ptr, to_ptr, rows = load
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [2, 1], [1, 0])
    r = gl.arange(0, 8, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, 256, layout=gl.SliceLayout(0, layout))
    for first in range(gl.program_id(0) * 8, rows, gl.num_programs(0) * 8):
        row = (first + r).to(gl.int64)
        n = gl.load(index_ptr + row, mask=row < rows, other=-1).to(gl.int64)
        for column in range(0, D, 256):
            inside = (column + c < D)[None, :]
            at = (column + c)[None, :]
            x = gl.load(from_ptr + n[:, None] * D + at, mask=(n >= 0)[:, None] & inside, other=0.0)
            gl.store(to_ptr + row[:, None] * D + at, x, mask=(row < rows)[:, None] & inside)


@gluon.jit
def add_up(load, D, K: gl.constexpr):
    """This program's part of the source rows, two rows of 256 columns at a time."""
    from_ptr, index_ptr, to_ptr, rows = load
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [2, 1], [1, 0])
    r = gl.arange(0, 2, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, 256, layout=gl.SliceLayout(0, layout))
    for first in range(gl.program_id(0) * 2, rows, gl.num_programs(0) * 2):
        row = (first + r).to(gl.int64)
        for column in range(0, D, 256):
            inside = (column + c < D)[None, :]
            at = (column + c)[None, :]
            total = gl.zeros([2, 256], gl.float32, layout)
            for k in gl.static_range(K):
                n = gl.load(index_ptr + row * K + k, mask=row < rows, other=-1).to(gl.int64)
                y = gl.load(from_ptr + n[:, None] * D + at, mask=(n >= 0)[:, None] & inside, other=0.0)
                total += y.to(gl.float32)
            value = total.to(to_ptr.dtype.element_ty)
            gl.store(to_ptr + row[:, None] * D + at, value, mask=(row < rows)[:, None] & inside)
