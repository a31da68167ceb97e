"""The experts' bias: each row plus the bias of its expert, times the router's weight where that is applied already.

R rows sorted by expert, N width, E experts; rows of expert e end before `ends_E[e]`, rows from `ends_E[-1]` on are
undefined.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_op


@register_op
def expert_bias(y_RN: Tensor, bias_EN: Tensor, ends_E: Tensor, weight_R: Tensor | None = None) -> Tensor:
    """y_RN[r] + bias_EN[expert of r] (x weight_R[r]). The bias' gradient is a sum over sorted rows, without atomics, in
    fp32 or better."""
    rows = len(y_RN)
    row_R = torch.arange(rows, dtype=ends_E.dtype, device=y_RN.device)
    expert_R = torch.searchsorted(ends_E, row_R, right=True)
    # Undefined rows have the number E: a bias of zeros, whose gradient is dropped.
    one_more = (0, 0, 0, 1)
    padded_bias = F.pad(bias_EN, one_more)
    bias_RN: Any = RowsOfExperts.apply(padded_bias, expert_R)
    if weight_R is not None:
        weight_R1 = weight_R[:, None]
        bias_RN = bias_RN * weight_R1.to(bias_RN.dtype)
    return y_RN + bias_RN


class RowsOfExperts(torch.autograd.Function):
    """A row of each expert's for its rows. torch's own backward rounds each of its sums to the rows' type: of thousands
    of rows in bf16 most would be lost."""

    @staticmethod
    def forward(ctx: Any, rows_EN: Tensor, expert_R: Tensor) -> Tensor:
        ctx.save_for_backward(expert_R)
        ctx.experts = len(rows_EN)
        return rows_EN[expert_R]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (expert_R,) = ctx.saved_tensors
        (dy_RN,) = gradients
        wide = torch.promote_types(dy_RN.dtype, torch.float32)
        width = dy_RN.shape[1]
        sums_EN = dy_RN.new_zeros(ctx.experts, width, dtype=wide)
        if dy_RN.is_cuda:  # which sorts them
            sums_EN.index_put_((expert_R,), dy_RN.to(wide), accumulate=True)
        else:  # where threads of index_put_ would add to a sum in any order
            sums_EN.index_add_(0, expert_R, dy_RN.to(wide))
        return sums_EN.to(dy_RN.dtype), None


BIAS_ROW_COUNTS = (
    [16, 16, 16, 16],
    [61, 0, 2, 1],
    [0, 0, 40, 0],
    [0, 0, 0, 0],
)


@expert_bias.register_cases
def expert_bias_cases(draw: CaseInputs) -> Cases:
    for counts in BIAS_ROW_COUNTS:
        for spare in (0, 5):
            defined = sum(counts)
            all_rows = defined + spare
            y = draw.normal(all_rows, 24)
            experts = len(counts)
            bias = draw.normal(experts, 24, seed=1)
            counts_E = torch.tensor(counts, device=draw.device)
            ends_E = counts_E.cumsum(0)
            ends = ends_E.int()
            weight = draw.wide(all_rows, seed=2)
            name = f"rows {counts}"
            if spare:
                name += f", {spare} undefined behind them"
            rows = (defined, all_rows)
            inputs = (y, bias, ends)
            yield KernelCase(name, inputs, rows=rows)
            yield KernelCase(f"{name}, gated", (*inputs, weight), rows=rows)
