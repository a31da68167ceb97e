"""The largest attention logit of each query head in Triton. Scores stay in registers: of each element of a tile the
largest over all blocks of keys is kept. Blocks that no query sees are skipped, blocks that all see have no mask.
Imported only where Triton is.

    first[row]    the first key that a query sees (masked.py)

    keys of M queries     | skipped | masked | seen by all | masked: the diagonal | skipped |
                          0      lowest    latest        own key of the first query     end

A head's columns are MAIN and the REST behind them, so that widths such as 128 + 64 of latent attention waste nothing. A
program writes the maximum of its queries; a maximum does not depend on an order, so runs agree to the bit.

B sequences, S queries, L keys, H query heads, D head width; M queries by N keys are worked on at a time. The first
query is `ahead` positions behind the first key.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.attention.heads_triton import (
    TileOptions,
    contiguous_heads,
    load_head_block,
    outer_strides,
    program_head,
    split_width,
)
from moefold.kernels.attention.masked import first_visible_key
from moefold.kernels.attention.masked_triton import visible_keys
from moefold.kernels.tile_triton import fp32_zeros, numbers_from, wide_program_id

NAN_STAYS = tl.constexpr(tl.PropagateNan.ALL)
# By the bytes of a head at most, to be within the 99 KiB of shared memory that every card has. None was timed.
TILES = {
    256: TileOptions(128, 64, 8, 3),
    384: TileOptions(128, 64, 8, 2),
    512: TileOptions(64, 32, 4, 3),
    1024: TileOptions(32, 32, 4, 2),
}


@triton.jit
def largest_of_keys(
    largest, main, rest, k_head, rows, first_M, begin, end, ahead, L, k_s,
    D: constexpr, MAIN: constexpr, REST: constexpr, MASKED: constexpr, N: constexpr,
):  # fmt: skip
    """(M, N): the largest so far and over some blocks of keys, of each place in a block."""
    for n in range(begin, end, N):
        columns = numbers_from(n, N)
        keys = load_head_block(k_head, columns, k_s, L, D, MAIN)
        products = tl.dot(main, keys.T, input_precision="ieee")
        if REST:
            further = load_head_block(k_head + MAIN, columns, k_s, L, D - MAIN, REST)
            products = tl.dot(rest, further.T, products, input_precision="ieee")
        if MASKED:
            visible = visible_keys(rows, columns, first_M, ahead, L)
            products = tl.where(visible, products, float("-inf"))
        largest = tl.maximum(largest, products, propagate_nan=NAN_STAYS)
    return largest


@triton.jit
def largest_logit_kernel(
    q, k, first, out,
    S, L, ahead, H, GROUP,
    q_b, q_s, q_h,
    k_b, k_s, k_h,
    D: constexpr, MAIN: constexpr, REST: constexpr,
    M: constexpr, N: constexpr,
):  # fmt: skip
    """M queries of one head."""
    # prologue: this program's queries; behind the end the last one again, which changes no maximum
    b, h = program_head(H)
    block = tl.program_id(0)
    start = block * M
    rows = tl.minimum(numbers_from(start, M), S - 1)
    q_head = q + b * q_b + h * q_h
    main = load_head_block(q_head, rows, q_s, S, D, MAIN)
    rest = main
    if REST:
        rest = load_head_block(q_head + MAIN, rows, q_s, S, D - MAIN, REST)
    first_b = first + b * S
    first_M = tl.load(first_b + rows)
    # the keys that some of the queries see, and those among them that all see
    behind = tl.minimum(start + M, S)
    lowest = tl.load(first_b + start)
    latest = tl.load(first_b + behind - 1)
    end = tl.minimum(behind + ahead, L)
    begin = lowest // N * N
    inner = tl.minimum(tl.cdiv(latest, N) * N, end)
    seen_by_first = tl.minimum(start + ahead + 1, L)
    diagonal = tl.maximum(seen_by_first // N * N, inner)
    # main loops over key blocks
    k_head = k + b * k_b + h // GROUP * k_h
    largest = fp32_zeros(M, N) - float("inf")
    largest = largest_of_keys(
        largest, main, rest, k_head, rows, first_M, begin, inner, ahead, L, k_s, D, MAIN, REST, True, N
    )
    largest = largest_of_keys(
        largest, main, rest, k_head, rows, first_M, inner, diagonal, ahead, L, k_s, D, MAIN, REST, False, N
    )
    largest = largest_of_keys(
        largest, main, rest, k_head, rows, first_M, diagonal, end, ahead, L, k_s, D, MAIN, REST, True, N
    )
    # epilogue: one number; a maximum over a tile would lose a NaN
    is_nan = largest != largest
    has_nan = tl.max(is_nan.to(tl.int32))
    of_block = tl.where(has_nan > 0, float("nan"), tl.max(largest))
    blocks = tl.num_programs(0)
    tl.store(out + wide_program_id(1) * blocks + block, of_block)


def tile_options(bytes_of_head: int) -> TileOptions:
    fitting = [size for size in TILES if bytes_of_head <= size]
    return TILES[fitting[0]]


def launch_largest_logit(q: Tensor, k: Tensor, window: int, begins_BS: Tensor | None, ahead: int) -> Tensor:
    """(H,): the largest product of a query and a key that it sees, not scaled."""
    b, s, h, width = q.shape
    _, length, g, _ = k.shape
    q = contiguous_heads(q)
    k = contiguous_heads(k)
    first_BS = first_visible_key(q, ahead, window, begins_BS)
    main, rest = split_width(width)
    options = tile_options((main + rest) * q.element_size())
    blocks = triton.cdiv(s, options.M)
    out_BHb = q.new_empty(b, h, blocks, dtype=torch.float32)
    tensors = (q, k, first_BS, out_BHb)
    sizes = (s, length, ahead, h, h // g)
    strides = outer_strides(q, k)
    launch = largest_logit_kernel[blocks, b * h]
    tile = options._asdict()
    launch(*tensors, *sizes, *strides, width, main, rest, **tile)
    return out_BHb.amax((0, 2))
