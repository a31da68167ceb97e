"""The experts' bias: each row plus the bias of its expert, times the router's weight where that is applied already.

R rows sorted by expert, N width, E experts; rows of expert e end before `ends_E[e]`, rows from `ends_E[-1]` on are
undefined.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_op


@register_op
def expert_bias(y_RN: Tensor, bias_EN: Tensor, ends_E: Tensor, weight_R: Tensor | None = None) -> Tensor:
    """y_RN[r] + bias_EN[expert of r] (x weight_R[r]). The bias' gradient is a sum over sorted rows, without atomics."""
    rows = len(y_RN)
    row_R = torch.arange(rows, dtype=ends_E.dtype, device=y_RN.device)
    expert_R = torch.searchsorted(ends_E, row_R, right=True)
    # Undefined rows have the number E: a bias of zeros, whose gradient is dropped.
    one_more = (0, 0, 0, 1)
    padded_bias = F.pad(bias_EN, one_more)
    bias_RN = padded_bias[expert_R]
    if weight_R is not None:
        weight_R1 = weight_R[:, None]
        bias_RN = bias_RN * weight_R1.to(bias_RN.dtype)
    return y_RN + bias_RN


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
