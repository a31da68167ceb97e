"""Products of few rows in Triton, such as those of a step of generation: every weight is read once, by many programs.
Imported only where Triton is.

A program has all rows and a few outputs, of one of up to three layers that read the same input: one launch serves
queries, keys and values.

T rows, D inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.linear.product import WeightAndBias
from moefold.kernels.tile_triton import (
    fp32_zeros,
    load_as_fp32,
    load_or_zero,
    numbers_from,
    store_inside,
    tile_mask,
    tile_pointers,
)

LAYERS = 3  # of a launch
COLUMNS = 16  # outputs of a program
DEPTH = 256  # inputs of a step
OPTIONS = {"num_warps": 4, "num_stages": 4}


@triton.jit
def load_matrix(matrix, row, is_row, d, width):
    """Some columns of rows of a matrix; zeros where there is none."""
    inside = tile_mask(is_row, d < width)
    at = tile_pointers(matrix, row, d, width)
    return load_or_zero(at, inside)


@triton.jit
def dot_rows(total, x, w):
    """The sum so far, plus rows times rows."""
    return tl.dot(x, tl.trans(w), total, input_precision="ieee")


@triton.jit
def store_layer(total, bias, y, n, T, N, ROWS: constexpr):
    t = tl.arange(0, ROWS)
    is_column = n < N
    if bias is not None:
        added = load_as_fp32(bias + n, is_column)
        total += added[None, :]
    at = tile_pointers(y, t, n, N)
    inside = tile_mask(t < T, is_column)
    store_inside(at, total.to(y.dtype.element_ty), inside)


@triton.jit
def few_rows_kernel(
    x,
    w0,
    w1,
    w2,
    bias0,
    bias1,
    bias2,
    y0,
    y1,
    y2,
    T,
    D,
    N0,
    N1,
    N2,
    END0,
    END1,
    ROWS: constexpr,
    COLUMNS: constexpr,
    DEPTH: constexpr,
):
    """END0, END1: where the programs of the first and of the second layer end. All layers share the loop: a loop of
    each would have shared memory of its own, and fewer programs would be resident."""
    program = tl.program_id(0)
    # the layer of this program
    w = w0
    N = N0
    begin = 0
    if program >= END1:
        w = w2
        N = N2
        begin = END1
    elif program >= END0:
        w = w1
        N = N1
        begin = END0
    block = program - begin
    n = numbers_from(block * COLUMNS, COLUMNS)
    is_column = n < N
    wide_n = n.to(tl.int64)
    t = tl.arange(0, ROWS)
    is_row = t < T
    # main loop over the inputs
    total = fp32_zeros(ROWS, COLUMNS)
    for first in range(0, D, DEPTH):
        d = numbers_from(first, DEPTH)
        rows = load_matrix(x, t, is_row, d, D)
        weights = load_matrix(w, wide_n, is_column, d, D)
        total = dot_rows(total, rows, weights)
    # epilogue
    if program < END0:
        store_layer(total, bias0, y0, n, T, N0, ROWS)
    elif program < END1:
        store_layer(total, bias1, y1, n, T, N1, ROWS)
    else:
        store_layer(total, bias2, y2, n, T, N2, ROWS)


def tile_rows(rows: int) -> int:
    """A power of two, and at least 16: the least of a product on tensor cores."""
    return max(16, triton.next_power_of_2(rows))


def launch_few_rows(x_TD: Tensor, layers: Sequence[WeightAndBias]) -> list[Tensor]:
    """(T, N) of each layer."""
    outputs: list[Tensor] = []
    for first in range(0, len(layers), LAYERS):
        outputs += launch_layers(x_TD, layers[first : first + LAYERS])
    return outputs


def launch_layers(x_TD: Tensor, layers: Sequence[WeightAndBias]) -> list[Tensor]:
    """Layers that are missing of three are the last one once more, and have no program."""
    x_TD = x_TD.contiguous()
    rows, inputs = x_TD.shape
    weights = [weight.contiguous() for weight, _ in layers]
    biases = [bias for _, bias in layers]
    widths = [len(weight) for weight in weights]
    outputs = [x_TD.new_empty(rows, width) for width in widths]
    blocks = [triton.cdiv(width, COLUMNS) for width in widths]
    ends = [sum(blocks[: number + 1]) for number in range(len(blocks))]
    missing = LAYERS - len(layers)
    tensors: list[Tensor | None] = []
    for each in (weights, biases, outputs):
        tensors += [*each, *[each[-1]] * missing]
    widths += widths[-1:] * missing
    ends += ends[-1:] * missing
    tile = {"ROWS": tile_rows(rows), "COLUMNS": COLUMNS, "DEPTH": DEPTH}
    launch = few_rows_kernel[(ends[-1],)]
    launch(x_TD, *tensors, rows, inputs, *widths, *ends[:2], **tile, **OPTIONS)
    return outputs
