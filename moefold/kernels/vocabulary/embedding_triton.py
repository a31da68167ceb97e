"""The embedding's weight gradient from that of the tokens, in Triton. Imported only where Triton is.

T tokens, D width, V vocabulary rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.tile_triton import load_or_zero, program_block, tile_mask, tile_pointers, wide_program_id

ROWS_AT_ONCE = 4


@triton.jit
def embedding_wgrad_kernel(x_TD, order_T, starts_V, out_VD, D, ROWS: constexpr, COLS: constexpr, WIDE: constexpr):
    """One program per vocabulary row and block of columns."""
    # prologue: this program's columns, and where its tokens lie among the sorted
    v = wide_program_id(0)
    c = program_block(1, COLS)
    in_row = c < D
    end = tl.load(starts_V + v + 1)
    total = tl.zeros([COLS], WIDE)
    begin = tl.load(starts_V + v)
    # main loop over the tokens with this id, in their order
    for first in range(begin, end, ROWS):
        # the next few tokens
        lane = tl.arange(0, ROWS)
        r = first + lane
        mine = r < end
        t = load_or_zero(order_T + r, mine)
        # the sum of their rows
        token = t.to(tl.int64)
        at = tile_pointers(x_TD, token, c, D)
        inside = tile_mask(mine, in_row)
        x = load_or_zero(at, inside)
        wide_x = x.to(WIDE)
        total += tl.sum(wide_x, 0)
    # epilogue
    out = out_VD + v * D + c
    rounded = total.to(out_VD.dtype.element_ty)
    tl.store(out, rounded, mask=in_row)


def embedding_wgrad(x_TD: Tensor, words_T: Tensor, out_VD: Tensor) -> Tensor:
    """out[v] = the sum of x over the tokens with id v, in their order, in fp32 or better; the id -1 is left out.
    Sorting brings the tokens of an id together; ids without tokens get zeros."""
    v, d = out_VD.shape
    words_T = words_T.int()
    sorted_T, order_T = words_T.sort(stable=True)
    count = v + 1
    device = x_TD.device
    ids_V = torch.arange(count, dtype=torch.int32, device=device)
    starts_V = torch.searchsorted(sorted_T, ids_V, out_int32=True)
    is_double = x_TD.dtype == torch.float64
    wide = tl.float64 if is_double else tl.float32
    width = triton.next_power_of_2(d)
    cols = min(2048, width)
    blocks = triton.cdiv(d, cols)
    x_TD = x_TD.contiguous()
    launch = embedding_wgrad_kernel[v, blocks]
    sizes = (d, ROWS_AT_ONCE, cols, wide)
    tensors = (x_TD, order_T, starts_V, out_VD)
    launch(*tensors, *sizes, num_warps=8)
    return out_VD
