"""Quantisation of weights in Gluon: both layouts from one read. Imported only where Triton is.

One program takes 128 x 128 values. A thread has 16 outputs of 4 inputs (quantise_tiles_hopper.py): its 16 bytes of an
input are contiguous in the transposed layout, so that no value moves between threads. Values are cast apart for each
layout, in pairs that lie side by side there: no byte is taken out of a pair.

E experts, N outputs, D inputs, I blocks of 128 outputs, J blocks of 128 inputs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import constexpr

from moefold.kernels.quantise.fp8_hopper import scale_from_amax
from moefold.kernels.quantise.quantise_tiles_hopper import (
    BY_COLUMN,
    TILE_LAYOUT,
    largest_magnitudes,
    load_scales,
    tile_rows,
    wide_program_id,
)


@gluon.jit
def block_places(N, D, LAYOUT: constexpr):
    """Outputs and inputs of this program's block, and whether they lie inside the matrix."""
    first_n = gl.program_id(1) * 128
    n = first_n + tile_rows(LAYOUT)
    first_d = gl.program_id(0) * 128
    inputs: constexpr = gl.SliceLayout(0, LAYOUT)
    places = gl.arange(0, 128, layout=inputs)
    d = first_d + places
    real_n = (n < N)[:, None]
    real_d = (d < D)[None, :]
    inside = real_n & real_d
    return n, d, inside


@gluon.jit
def forward_pointers(matrices_END, e, n, d, N, D):
    matrix_ND = matrices_END + e * N * D
    output = n.to(gl.int64)
    line = output[:, None] * D
    return matrix_ND + line + d[None, :]


@gluon.jit
def load_block(w_END, e, N, D):
    """128 x 128 values in fp32, zeros outside the matrix."""
    n, d, inside = block_places(N, D, TILE_LAYOUT)
    at = forward_pointers(w_END, e, n, d, N, D)
    w = gl.load(at, mask=inside, other=0.0)
    return w.to(gl.float32)


@gluon.jit
def store_forward(values_END, e, x, N, D):
    n, d, inside = block_places(N, D, TILE_LAYOUT)
    at = forward_pointers(values_END, e, n, d, N, D)
    q = x.to(values_END.dtype.element_ty)
    gl.store(at, q, mask=inside)


@gluon.jit
def store_transposed(values_EDN, e, x, N, D):
    """x: in the layout BY_COLUMN."""
    n, d, inside = block_places(N, D, BY_COLUMN)
    matrix_DN = values_EDN + e * N * D
    input = d.to(gl.int64)
    line = input[None, :] * N
    at = matrix_DN + line + n[:, None]
    q = x.to(values_EDN.dtype.element_ty)
    gl.store(at, q, mask=inside)


@gluon.jit
def quantise_blocks_kernel(
    w_END, values_END, values_EDN, scales_EIJ, scales_EJI, N, D, LARGEST: constexpr, POWER_OF_TWO: constexpr
):
    """One scale for the block: both layouts hold the same bytes."""
    e = wide_program_id(2)
    x = load_block(w_END, e, N, D)
    # largest magnitude, of a thread's own 16 outputs first
    magnitudes = gl.abs(x)
    by_thread = magnitudes.reshape([8, 16, 128])
    of_threads = largest_magnitudes(by_thread, 1)
    of_warps = largest_magnitudes(of_threads, 1)
    amax = largest_magnitudes(of_warps, 0)
    # bytes
    scale = scale_from_amax(amax, LARGEST, POWER_OF_TWO)
    x *= gl.div_rn(1.0, scale)
    store_forward(values_END, e, x, N, D)
    by_column = gl.convert_layout(x, BY_COLUMN)
    store_transposed(values_EDN, e, by_column, N, D)
    # the scale in both layouts
    j = gl.program_id(0)
    i = gl.program_id(1)
    inputs = gl.num_programs(0)
    outputs = gl.num_programs(1)
    block = e * inputs * outputs
    at = scales_EIJ + block + i * inputs + j
    gl.store(at, scale)
    at = scales_EJI + block + j * outputs + i
    gl.store(at, scale)


@gluon.jit
def weight_maxima_kernel(w_END, outputs_JEN, inputs_IED, N, D):
    """Largest magnitudes within the block of each output and of each input."""
    e = wide_program_id(2)
    w = load_block(w_END, e, N, D)
    magnitudes = gl.abs(w)
    n, d, _ = block_places(N, D, TILE_LAYOUT)
    experts = gl.num_programs(2)
    # of outputs
    line = gl.program_id(0) * experts + e
    at = outputs_JEN + line * N + n
    of_outputs = largest_magnitudes(magnitudes, 1)
    gl.store(at, of_outputs, mask=n < N)
    # of inputs
    line = gl.program_id(1) * experts + e
    at = inputs_IED + line * D + d
    of_inputs = largest_magnitudes(magnitudes, 0)
    gl.store(at, of_inputs, mask=d < D)


@gluon.jit
def quantise_with_scales_kernel(w_END, values_END, values_EDN, scales_EN, scales_ED, N, D):
    """Scales given: one for each output, of the first layout, and one for each input, of the second."""
    e = wide_program_id(2)
    x = load_block(w_END, e, N, D)
    # by output
    n, _, _ = block_places(N, D, TILE_LAYOUT)
    at = scales_EN + e * N + n
    scale = load_scales(at, n < N)
    factor = gl.div_rn(1.0, scale)
    scaled = x * factor[:, None]
    store_forward(values_END, e, scaled, N, D)
    # by input
    x = gl.convert_layout(x, BY_COLUMN)
    _, d, _ = block_places(N, D, BY_COLUMN)
    at = scales_ED + e * D + d
    scale = load_scales(at, d < D)
    factor = gl.div_rn(1.0, scale)
    scaled = x * factor[None, :]
    store_transposed(values_EDN, e, scaled, N, D)
