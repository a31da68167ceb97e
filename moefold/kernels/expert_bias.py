"""Each row plus the bias of its expert, times the row's gate where the gate has acted already.

R rows sorted by expert, N width, E experts; rows of expert e end before `offsets_E[e]`.
"""

from __future__ import annotations

import torch

from moefold.kernels.registry import Case, op, random


@op
def expert_bias(
    y_RN: torch.Tensor, bias_EN: torch.Tensor, offsets_E: torch.Tensor, gate_R: torch.Tensor | None = None
) -> torch.Tensor:
    """y_RN[r] + bias_EN[expert of r] (x gate_R[r]). The bias' gradient is a sum over sorted rows, without atomics."""
    row_R = torch.arange(len(y_RN), device=y_RN.device)
    expert_R = torch.searchsorted(offsets_E, row_R.to(offsets_E.dtype), right=True)
    bias_RN = bias_EN[expert_R.clamp(max=len(bias_EN) - 1)]  # static shapes may have rows behind the last expert's
    return y_RN + (bias_RN if gate_R is None else bias_RN * gate_R[:, None].to(bias_RN.dtype))


@expert_bias.cases
def _(device: str, dtype: torch.dtype):
    wide = torch.promote_types(dtype, torch.float32)
    for counts in ([16, 16, 16, 16], [61, 0, 2, 1], [0, 0, 40, 0], [0, 0, 0, 0]):
        y, bias = random(device, dtype, sum(counts), 24), random(device, dtype, len(counts), 24, seed=1)
        offsets = torch.tensor(counts, device=device).cumsum(0).int()
        yield Case(f"rows {counts}", (y, bias, offsets))
        yield Case(f"rows {counts}, gated", (y, bias, offsets, random(device, wide, sum(counts), seed=2)))
