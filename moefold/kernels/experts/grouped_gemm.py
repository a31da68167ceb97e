"""Each expert's rows times that expert's matrix, all experts in one call.

R rows sorted by expert, D inner width, N outer width, E experts. Rows of expert e end before `offsets_E[e]` (int32, on
the device) and begin where the previous expert's end.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moefold.kernels.registry import KernelCase, register_op, seeded_randn


@register_op
def grouped_gemm(x_RD: torch.Tensor, w_END: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """y_RN[r] = w_END[expert of r] @ x_RD[r]."""
    counts = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    return torch.cat([rows @ w.mT for rows, w in zip(x_RD.split(counts), w_END, strict=True)])


@grouped_gemm.register_fast("torch_grouped_mm")
def _(x_RD: torch.Tensor, w_END: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    return ContiguousGradient.apply(F.grouped_mm(x_RD, w_END.mT, offs=ends_E))  # pyright: ignore[reportReturnType]


@register_op
def grouped_gemm_weight(dy_RN: torch.Tensor, x_RD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """The weights' gradient by itself: dw_END[e] = the sum over rows of e of dy_R x_R^T; zeros for an empty expert."""
    counts = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    rows = sum(counts)
    pairs = zip(dy_RN[:rows].split(counts), x_RD[:rows].split(counts), strict=True)
    return torch.stack([dy.mT @ x for dy, x in pairs])


@grouped_gemm_weight.register_fast("torch_grouped_mm")
def _(dy_RN: torch.Tensor, x_RD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    return F.grouped_mm(dy_RN.mT, x_RD, offs=ends_E)


class ContiguousGradient(torch.autograd.Function):
    """grouped_mm's backward refuses expanded gradients, such as those of a plain sum."""

    @staticmethod
    def forward(ctx, y):
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        return dy.contiguous()


EXPERT_ROW_COUNTS = {
    "even": [16, 16, 16, 16],
    "skewed": [61, 0, 2, 1],
    "one expert": [0, 0, 40, 0],
    "odd": [3, 7, 1, 22],
    "no rows": [0, 0, 0, 0],
}


@grouped_gemm.register_cases
def _(device: str, dtype: torch.dtype):
    for name, counts in EXPERT_ROW_COUNTS.items():
        for d, n in [(32, 48), (64, 16)]:
            x, w = seeded_randn(device, dtype, sum(counts), d), seeded_randn(device, dtype, len(counts), n, d, seed=1)
            offsets = torch.tensor(counts, device=device).cumsum(0).int()
            yield KernelCase(f"{name}, {d} to {n}", (x, w, offsets), hidden=d, ffn=n)


@grouped_gemm_weight.register_cases
def _(device: str, dtype: torch.dtype):
    for case in grouped_gemm.make_cases(device, dtype):  # pyright: ignore[reportOptionalCall]
        x, w, offsets = case.inputs
        dy = seeded_randn(device, dtype, len(x), w.shape[1], seed=2)
        yield KernelCase(case.name, (dy, x, offsets), hidden=case.hidden, ffn=case.ffn)
