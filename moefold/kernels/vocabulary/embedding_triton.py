"""The embedding's weight gradient from that of the tokens, in Triton. Imported only where Triton is.

T tokens, D width, V vocabulary rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS_AT_ONCE = 4


@triton.jit
def embedding_wgrad_kernel(
    x_TD, order_T, starts_V, out_VD, D, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr
):
    """One program per vocabulary row and block of columns."""
    v = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)
    end = tl.load(starts_V + v + 1)
    total = tl.zeros([COLS], WIDE)
    # main loop over the tokens with this id, in their order
    for first in range(tl.load(starts_V + v), end, ROWS):
        r = first + tl.arange(0, ROWS)
        t = tl.load(order_T + r, mask=r < end, other=0).to(tl.int64)
        inside = (r < end)[:, None] & (c < D)[None, :]
        x = tl.load(x_TD + t[:, None] * D + c[None, :], mask=inside, other=0.0)
        total += tl.sum(x.to(WIDE), 0)
    tl.store(out_VD + v * D + c, total.to(out_VD.dtype.element_ty), mask=c < D)


def embedding_wgrad(x_TD: torch.Tensor, words_T: torch.Tensor, out_VD: torch.Tensor) -> torch.Tensor:
    """out[v] = the sum of x over the tokens with id v, in their order, in fp32 or better; the id -1 is left out.
    Sorting brings the tokens of an id together; ids without tokens get zeros."""
    v, d = out_VD.shape
    sorted_T, order_T = words_T.int().sort(stable=True)
    ids_V = torch.arange(v + 1, dtype=torch.int32, device=x_TD.device)
    starts_V = torch.searchsorted(sorted_T, ids_V, out_int32=True)
    wide = tl.float64 if x_TD.dtype == torch.float64 else tl.float32
    cols = min(2048, triton.next_power_of_2(d))
    grid = (v, triton.cdiv(d, cols))
    x_TD = x_TD.contiguous()
    embedding_wgrad_kernel[grid](x_TD, order_T, starts_V, out_VD, d, ROWS_AT_ONCE, cols, wide, num_warps=8)
    return out_VD
