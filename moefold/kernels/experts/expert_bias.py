"""Each row plus the bias of its expert, times the row's gate where the gate has acted already.

R rows sorted by expert, N width, E experts; rows of expert e end before `offsets_E[e]`.
"""

from __future__ import annotations

import torch

from moefold.kernels.registry import KernelCase, register_op, seeded_randn


@register_op
def expert_bias(
    y_RN: torch.Tensor, bias_EN: torch.Tensor, ends_E: torch.Tensor, weight_R: torch.Tensor | None = None
) -> torch.Tensor:
    """y_RN[r] + bias_EN[expert of r] (x gate_R[r]). The bias' gradient is a sum over sorted rows, without atomics."""
    row_R = torch.arange(len(y_RN), device=y_RN.device)
    expert_R = torch.searchsorted(ends_E, row_R.to(ends_E.dtype), right=True)
    bias_RN = bias_EN[expert_R.clamp(max=len(bias_EN) - 1)]  # static shapes may have rows behind the last expert's
    return y_RN + (bias_RN if weight_R is None else bias_RN * weight_R[:, None].to(bias_RN.dtype))


@expert_bias.register_cases
def _(device: str, dtype: torch.dtype):
    wide = torch.promote_types(dtype, torch.float32)
    for counts in ([16, 16, 16, 16], [61, 0, 2, 1], [0, 0, 40, 0], [0, 0, 0, 0]):
        y, bias = seeded_randn(device, dtype, sum(counts), 24), seeded_randn(device, dtype, len(counts), 24, seed=1)
        offsets = torch.tensor(counts, device=device).cumsum(0).int()
        yield KernelCase(f"rows {counts}", (y, bias, offsets))
        yield KernelCase(f"rows {counts}, gated", (y, bias, offsets, seeded_randn(device, wide, sum(counts), seed=2)))
