"""The merge of a block of ring attention into earlier ones, in Triton. Imported only where Triton is.

B sequences, S queries, H query heads, V width of values.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.attention.heads_triton import load_head_block, outer_strides, program_head, store_head_block
from moefold.kernels.attention.masked_triton import padded_width
from moefold.kernels.tile_triton import load_or_zero, program_block, store_inside

MERGED_ROWS = 32  # queries of one program of the merge


@triton.jit(do_not_specialize=["fresh"])
def merge_block_kernel(
    out, lse, part, part_lse,
    S, H, fresh,
    o_b, o_s, o_h,
    p_b, p_s, p_h,
    l_b, l_h,
    r_b, r_h,
    V: constexpr, VW: constexpr, M: constexpr,
):  # fmt: skip
    """Softmax over the keys of both: each side's weight is its share of the joint sum. If `fresh`, nothing is read of
    `out`."""
    # the log-sum-exps of this program's queries
    b, h = program_head(H)
    rows = program_block(0, M)
    inside = rows < S
    old_at = lse + b * l_b + h * l_h + rows
    old = load_or_zero(old_at, inside)
    new_at = part_lse + b * r_b + h * r_h + rows
    new = load_or_zero(new_at, inside)
    # their joint sum; neither side may have seen a key
    top = tl.maximum(old, new)
    saw_none = top == float("-inf")
    shift = tl.where(saw_none, 0.0, top)
    old_sum = tl.exp(old - shift)
    new_sum = tl.exp(new - shift)
    total = old_sum + new_sum
    joint = shift + tl.log(total)
    # weighted results
    is_empty = total == 0.0
    divisor = tl.where(is_empty, 1.0, total)
    out_head = out + b * o_b + h * o_h
    places = tl.where(fresh == 0, S, 0)
    merged = load_head_block(out_head, rows, o_s, places, V, VW)
    old_share = old_sum / divisor
    merged = merged * old_share[:, None]
    part_head = part + b * p_b + h * p_h
    added = load_head_block(part_head, rows, p_s, S, V, VW)
    added = added.to(tl.float32)
    new_share = new_sum / divisor
    merged += added * new_share[:, None]
    store_head_block(out_head, rows, o_s, S, merged, V, VW)
    tl.debug_barrier()  # all warps read the log-sum-exps, and one of them writes each
    store_inside(old_at, joint, inside)


def merge_block(out: Tensor, lse_BHS: Tensor, part: Tensor, part_lse_BHS: Tensor, fresh: bool) -> None:
    b, s, h, width = out.shape
    strides = outer_strides(out, part)
    l_b, l_h, _ = lse_BHS.stride()
    r_b, r_h, _ = part_lse_BHS.stride()
    lse_strides = (l_b, l_h, r_b, r_h)
    widths = (width, padded_width(out))
    query_blocks = triton.cdiv(s, MERGED_ROWS)
    launch = merge_block_kernel[query_blocks, b * h]
    tensors = (out, lse_BHS, part, part_lse_BHS)
    launch(*tensors, s, h, int(fresh), *strides, *lse_strides, *widths, MERGED_ROWS)
