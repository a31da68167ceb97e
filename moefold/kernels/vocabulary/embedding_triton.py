"""The gradient of words from that of their tokens, in Triton. Imported only where Triton is.

T tokens, D width, V words.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportReturnType=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def embedding_wgrad_kernel(
    x_TD, order_T, starts_V, out_VD, D, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr
):
    v = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)
    end = tl.load(starts_V + v + 1)
    total = tl.zeros([COLS], WIDE)
    for first in range(tl.load(starts_V + v), end, ROWS):
        r = first + tl.arange(0, ROWS)
        t = tl.load(order_T + r, mask=r < end, other=0).to(tl.int64)
        there = (r < end)[:, None] & (c < D)[None, :]
        total += tl.sum(tl.load(x_TD + t[:, None] * D + c[None, :], mask=there, other=0.0).to(WIDE), 0)
    tl.store(out_VD + v * D + c, total.to(out_VD.dtype.element_ty), mask=c < D)


def embedding_wgrad(x_TD: torch.Tensor, words_T: torch.Tensor, out_VD: torch.Tensor) -> torch.Tensor:
    """out[v] = the sum of x over the tokens that are word v, in their order, in fp32 or better; -1 is no word. Sorted,
    the tokens of a word lie together; words that have none are written as any other."""
    v, d = out_VD.shape
    sorted_T, order_T = words_T.int().sort(stable=True)
    starts_V = torch.searchsorted(sorted_T, torch.arange(v + 1, dtype=torch.int32, device=x_TD.device), out_int32=True)
    wide = tl.float64 if x_TD.dtype == torch.float64 else tl.float32
    cols = min(2048, triton.next_power_of_2(d))
    grid = (v, triton.cdiv(d, cols))
    embedding_wgrad_kernel[grid](x_TD.contiguous(), order_T, starts_V, out_VD, d, 4, cols, wide, num_warps=8)
    return out_VD
