"""Parts shared by the Hopper kernels: the order of a grid, stages of a pipeline, halves of a tile, TMA descriptors.
Imported only where Triton is.

A pipeline has STAGES stages in shared memory, each with two barriers: filled (by the producer) and free (again, by the
consumers). Step i uses stage i % STAGES.
"""

from __future__ import annotations

from functools import cache

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@gluon.jit
def banded_tile(p, columns, rows, band):
    """The column and row of work item p, in bands of so many columns and row by row inside a band, so that tiles in
    flight share their operands in the L2 cache."""
    items = band * rows
    first = p // items * band
    inside = p % items
    left = columns - first
    width = gl.maximum(gl.minimum(left, band), 1)  # of no columns at all, too
    column = first + inside % width
    row = inside // width
    return column, row


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers in shared memory, each of which waits for so many arrivals."""
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    bars = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], layout)
    for s in gl.static_range(NUMBER):
        bar = bars.index(s)
        mbarrier.init(bar, count=ARRIVALS)
    return bars


@gluon.jit
def wait_until_filled(full, i, STAGES: gl.constexpr):
    """The consumer's wait for step i. Returns its stage."""
    s = i % STAGES
    turn = i // STAGES
    phase = turn & 1
    bar = full.index(s)
    mbarrier.wait(bar, phase)
    return s


@gluon.jit
def wait_until_free(empty, i, STAGES: gl.constexpr):
    """The producer's wait before step i. Returns its stage."""
    s = i % STAGES
    turn = i // STAGES
    phase = turn & 1
    bar = empty.index(s)
    mbarrier.wait(bar, phase ^ 1)
    return s


@gluon.jit
def free_stage_before(empty, i, there, STAGES: gl.constexpr):
    """The consumer's arrival for the step before i, if there is one."""
    s = (i + STAGES - 1) % STAGES
    bar = empty.index(s)
    mbarrier.arrive(bar, pred=there)


@gluon.jit
def split_columns(x_MN, M: gl.constexpr, N: gl.constexpr):
    """The left and the right half of the columns, without moving anything between threads."""
    shape: gl.constexpr = [M, 2, N // 2]
    halves = x_MN.reshape(shape)
    pairs = halves.permute(0, 2, 1)
    return pairs.split()


@gluon.constexpr_function
def wgmma_layout(columns, depth):
    """The layout of a warpgroup's accumulator; `depth` of the contraction in one instruction, 32 bytes."""
    instruction = [16, columns, depth]
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=instruction)


@gluon.jit
def swizzled_buffers(dtype: gl.constexpr, NUMBER: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Shared memory for so many blocks of ROWS x COLUMNS, swizzled as TMA and wgmma expect it."""
    block: gl.constexpr = [ROWS, COLUMNS]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return gl.allocate_shared_memory(dtype, [NUMBER, ROWS, COLUMNS], layout)


@gluon.jit
def shared_blocks(bufs, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Shared memory as blocks of another shape, swizzled alike."""
    size: gl.constexpr = ROWS * COLUMNS
    count: gl.constexpr = bufs.numel // size
    shape: gl.constexpr = [count, ROWS, COLUMNS]
    layout: gl.constexpr = bufs.type.layout
    return bufs._reinterpret(bufs.dtype, shape, layout)


def block_descriptor(x: Tensor, *shape: int) -> TensorDescriptor:
    """TMA descriptor of x for blocks of this shape."""
    layout = swizzled_layout(shape)
    sizes = list(x.shape)
    strides = list(x.stride())
    block = list(shape)
    return TensorDescriptor(x, sizes, strides, block, layout)


@cache
def swizzled_layout(shape: tuple[int, ...]) -> gl.NVMMASharedLayout:
    block = list(shape)
    return gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
