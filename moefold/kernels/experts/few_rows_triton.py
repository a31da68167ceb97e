"""The experts' MLP for few tokens in Triton, such as those of a step of generation: the weights of each expert that has
rows are read once, by many programs. Imported only where Triton is.

A program has the rows of one expert and a few outputs. There are programs for each expert, or for as many as there are
rows where these are fewer; those without rows end at once. More rows than ROWS are further rounds over the same
weights, which the cache of the device then holds.

N tokens, R rows in expert order, D width, F inner width, E experts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.linear.few_rows_triton import dot_rows, load_matrix
from moefold.kernels.tile_triton import (
    fp32_zeros,
    load_as_fp32,
    load_or_zero,
    numbers_from,
    store_inside,
    tile_mask,
    tile_pointers,
)

UP_COLUMNS = 32  # inner columns of a program: so many rows of gate, and so many of up
DOWN_COLUMNS = 64
DEPTH = 128
OPTIONS = {"num_warps": 4, "num_stages": 4}


@triton.jit
def rows_of_expert(ends_E, expert, E):
    """Where the experts' rows begin and end."""
    is_expert = expert < E
    end = tl.load(ends_E + expert, mask=is_expert, other=0)
    begin = tl.load(ends_E + expert - 1, mask=is_expert & (expert > 0), other=0)
    return begin, end


@triton.jit
def expert_with_rows(ends_E, number, E, EXPERTS: constexpr):
    """The expert of that number among those with rows; where there is none, behind the last."""
    e = tl.arange(0, EXPERTS)
    begin, end = rows_of_expert(ends_E, e, E)
    has_rows = end > begin
    up_to = tl.cumsum(has_rows.to(tl.int32), 0)
    is_before = up_to <= number
    return tl.sum(is_before.to(tl.int32), 0)


@triton.jit
def multiply_gate_up(
    source,
    token,
    is_token,
    gate_up,
    expert,
    f,
    D,
    F,
    ROWS: constexpr,
    COLUMNS: constexpr,
    DEPTH: constexpr,
):
    """Products of gathered rows with some columns of an expert's gate and of its up."""
    is_column = f < F
    gate_row = expert.to(tl.int64) * 2 * F + f
    up_row = gate_row + F
    gate = fp32_zeros(ROWS, COLUMNS)
    up = fp32_zeros(ROWS, COLUMNS)
    for start in range(0, D, DEPTH):
        d = numbers_from(start, DEPTH)
        x = load_matrix(source, token, is_token, d, D)
        gates = load_matrix(gate_up, gate_row, is_column, d, D)
        gate = dot_rows(gate, x, gates)
        ups = load_matrix(gate_up, up_row, is_column, d, D)
        up = dot_rows(up, x, ups)
    return gate, up


@triton.jit
def multiply_down(
    a,
    r,
    is_row,
    down,
    expert,
    c,
    D,
    F,
    ROWS: constexpr,
    COLUMNS: constexpr,
    DEPTH: constexpr,
):
    """Products of rows with some columns of an expert's second matrix."""
    is_column = c < D
    down_row = expert.to(tl.int64) * D + c
    y = fp32_zeros(ROWS, COLUMNS)
    for start in range(0, F, DEPTH):
        f = numbers_from(start, DEPTH)
        rows = load_matrix(a, r, is_row, f, F)
        weights = load_matrix(down, down_row, is_column, f, F)
        y = dot_rows(y, rows, weights)
    return y


@triton.jit
def few_rows_up_kernel(
    source,
    gate_up,
    weight_R,
    index_R,
    ends_E,
    a,
    E,
    D,
    F,
    EXPERTS: constexpr,
    ROWS: constexpr,
    COLUMNS: constexpr,
    DEPTH: constexpr,
):
    """silu(gate) * up * the router's weight. EXPERTS: as many places where programs are for experts with rows alone."""
    expert = tl.program_id(1)
    if EXPERTS is not None:
        expert = expert_with_rows(ends_E, expert, E, EXPERTS)
    begin, end = rows_of_expert(ends_E, expert, E)
    f = numbers_from(tl.program_id(0) * COLUMNS, COLUMNS)
    for first in range(begin, end, ROWS):
        # prologue: the rows and their tokens
        r = numbers_from(first, ROWS)
        is_row = r < end
        token = load_or_zero(index_R + r, is_row)
        is_token = is_row & (token >= 0)
        # main loop over the inputs
        gate, up = multiply_gate_up(source, token, is_token, gate_up, expert, f, D, F, ROWS, COLUMNS, DEPTH)
        # epilogue
        weight = load_as_fp32(weight_R + r, is_row)
        silu = gate * tl.sigmoid(gate)
        activated = silu * up * weight[:, None]
        at = tile_pointers(a, r, f, F)
        inside = tile_mask(is_row, f < F)
        store_inside(at, activated.to(a.dtype.element_ty), inside)


@triton.jit
def few_rows_down_kernel(
    a,
    down,
    ends_E,
    y,
    E,
    D,
    F,
    EXPERTS: constexpr,
    ROWS: constexpr,
    COLUMNS: constexpr,
    DEPTH: constexpr,
):
    expert = tl.program_id(1)
    if EXPERTS is not None:
        expert = expert_with_rows(ends_E, expert, E, EXPERTS)
    begin, end = rows_of_expert(ends_E, expert, E)
    n = numbers_from(tl.program_id(0) * COLUMNS, COLUMNS)
    for first in range(begin, end, ROWS):
        r = numbers_from(first, ROWS)
        is_row = r < end
        total = multiply_down(a, r, is_row, down, expert, n, D, F, ROWS, COLUMNS, DEPTH)
        at = tile_pointers(y, r, n, D)
        inside = tile_mask(is_row, n < D)
        store_inside(at, total.to(y.dtype.element_ty), inside)


def launch_few_rows_experts(
    source_ND: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    weight_R: Tensor,
    index_R: Tensor,
    ends_E: Tensor,
) -> Tensor:
    """y_RD: each row through its expert, times its weight."""
    tokens, width = source_ND.shape
    experts, _, inner, _ = gate_up_E2FD.shape
    rows = len(index_R)
    source_ND = source_ND.contiguous()
    places = triton.next_power_of_2(experts) if rows < experts else None
    tile = {"EXPERTS": places, "ROWS": 16 if tokens <= 32 else 32, "DEPTH": DEPTH}
    with_rows = min(rows, experts)
    a_RF = source_ND.new_empty(rows, inner)
    blocks = triton.cdiv(inner, UP_COLUMNS)
    up = few_rows_up_kernel[(blocks, with_rows)]
    tensors = (source_ND, gate_up_E2FD, weight_R, index_R, ends_E, a_RF)
    up(*tensors, experts, width, inner, COLUMNS=UP_COLUMNS, **tile, **OPTIONS)
    y_RD = source_ND.new_empty(rows, width)
    blocks = triton.cdiv(width, DOWN_COLUMNS)
    project = few_rows_down_kernel[(blocks, with_rows)]
    project(a_RF, down_EDF, ends_E, y_RD, experts, width, inner, COLUMNS=DOWN_COLUMNS, **tile, **OPTIONS)
    return y_RD
