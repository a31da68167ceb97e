"""Parts shared by the Hopper kernels: the order of a grid, halves of a tile, TMA descriptors. Imported only where
Triton is."""

from __future__ import annotations

from functools import cache

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@gluon.jit
def banded_tile(p, columns, rows, band):
    """The column and row of work item p, in bands of so many columns and row by row inside a band, so that tiles in
    flight share their operands in the L2 cache."""
    first = p // (band * rows) * band
    inside = p % (band * rows)
    width = gl.minimum(columns - first, band)
    return first + inside % width, inside // width


@gluon.jit
def split_columns(x_MN, M: gl.constexpr, N: gl.constexpr):
    """The left and the right half of the columns, without moving anything between threads."""
    return x_MN.reshape([M, 2, N // 2]).permute(0, 2, 1).split()


def block_descriptor(x: Tensor, *shape: int) -> TensorDescriptor:
    """TMA descriptor of x for blocks of this shape."""
    layout = swizzled_layout(shape)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(shape), layout)


@cache
def swizzled_layout(shape: tuple[int, ...]) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(shape), gl.bfloat16)
