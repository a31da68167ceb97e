"""Quantisation of weights in Gluon: both layouts from one read. Imported only where Triton is.

One program takes 128 x 128 values. A thread has 16 outputs of 4 inputs (quantise_tiles_hopper.py): its 16 bytes of an
input are contiguous in the transposed layout, so that no value moves between threads. Values are cast apart for each
layout, in pairs that lie side by side there: no byte is taken out of a pair.

E experts, N outputs, D inputs, I blocks of 128 outputs, J blocks of 128 inputs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moefold.kernels.quantise.fp8_hopper import larger_magnitude, scale_from_amax
from moefold.kernels.quantise.quantise_tiles_hopper import BY_COLUMN, TILE_LAYOUT


@gluon.jit
def block_places(N, D, LAYOUT: gl.constexpr):
    """Outputs and inputs of this program's block, and whether they lie inside the matrix."""
    n = gl.program_id(1) * 128 + gl.arange(0, 128, layout=gl.SliceLayout(1, LAYOUT))
    d = gl.program_id(0) * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
    inside = (n < N)[:, None] & (d < D)[None, :]
    return n, d, inside


@gluon.jit
def load_block(w_END, e, N, D):
    """128 x 128 values in fp32, zeros outside the matrix."""
    n, d, inside = block_places(N, D, TILE_LAYOUT)
    at = w_END + e * N * D + n.to(gl.int64)[:, None] * D + d[None, :]
    return gl.load(at, mask=inside, other=0.0).to(gl.float32)


@gluon.jit
def store_forward(values_END, e, x, N, D):
    n, d, inside = block_places(N, D, TILE_LAYOUT)
    at = values_END + e * N * D + n.to(gl.int64)[:, None] * D + d[None, :]
    gl.store(at, x.to(values_END.dtype.element_ty), mask=inside)


@gluon.jit
def store_transposed(values_EDN, e, x, N, D):
    """x: in the layout BY_COLUMN."""
    n, d, inside = block_places(N, D, BY_COLUMN)
    at = values_EDN + e * N * D + d.to(gl.int64)[None, :] * N + n[:, None]
    gl.store(at, x.to(values_EDN.dtype.element_ty), mask=inside)


@gluon.jit
def quantise_blocks_kernel(
    w_END, values_END, values_EDN, scales_EIJ, scales_EJI, N, D, LARGEST: gl.constexpr, POWER_OF_TWO: gl.constexpr
):
    """One scale for the block: both layouts hold the same bytes."""
    e = gl.program_id(2).to(gl.int64)
    x = load_block(w_END, e, N, D)
    of_threads = gl.reduce(gl.abs(x).reshape([8, 16, 128]), 1, larger_magnitude)  # a thread's own 16 outputs first
    of_warps = gl.reduce(of_threads, 1, larger_magnitude)
    amax = gl.reduce(of_warps, 0, larger_magnitude)
    scale = scale_from_amax(amax, LARGEST, POWER_OF_TWO)
    x *= gl.div_rn(1.0, scale)
    store_forward(values_END, e, x, N, D)
    store_transposed(values_EDN, e, gl.convert_layout(x, BY_COLUMN), N, D)
    j = gl.program_id(0)
    i = gl.program_id(1)
    inputs = gl.num_programs(0)
    outputs = gl.num_programs(1)
    block = e * inputs * outputs
    gl.store(scales_EIJ + block + i * inputs + j, scale)
    gl.store(scales_EJI + block + j * outputs + i, scale)


@gluon.jit
def weight_maxima_kernel(w_END, outputs_JEN, inputs_IED, N, D):
    """Largest magnitudes within the block of each output and of each input."""
    e = gl.program_id(2).to(gl.int64)
    x = gl.abs(load_block(w_END, e, N, D))
    n, d, _ = block_places(N, D, TILE_LAYOUT)
    experts = gl.num_programs(2)
    line = gl.program_id(0) * experts + e
    gl.store(outputs_JEN + line * N + n, gl.reduce(x, 1, larger_magnitude), mask=n < N)
    line = gl.program_id(1) * experts + e
    gl.store(inputs_IED + line * D + d, gl.reduce(x, 0, larger_magnitude), mask=d < D)


@gluon.jit
def quantise_with_scales_kernel(w_END, values_END, values_EDN, scales_EN, scales_ED, N, D):
    """Scales given: one for each output, of the first layout, and one for each input, of the second."""
    e = gl.program_id(2).to(gl.int64)
    x = load_block(w_END, e, N, D)
    n, _, _ = block_places(N, D, TILE_LAYOUT)
    scale = gl.load(scales_EN + e * N + n, mask=n < N, other=1.0)
    store_forward(values_END, e, x * gl.div_rn(1.0, scale)[:, None], N, D)
    x = gl.convert_layout(x, BY_COLUMN)
    _, d, _ = block_places(N, D, BY_COLUMN)
    scale = gl.load(scales_ED + e * D + d, mask=d < D, other=1.0)
    store_transposed(values_EDN, e, x * gl.div_rn(1.0, scale)[None, :], N, D)
