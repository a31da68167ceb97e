"""Each expert's rows times that expert's matrix, all experts in one call.

R rows sorted by expert, D inner width, N outer width, E experts. Rows of expert e end before `offsets_E[e]` (int32, on
the device) and begin where the previous expert's end.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moefold.kernels.registry import Case, op, random


@op
def grouped_gemm(x_RD: torch.Tensor, w_END: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
    """y_RN[r] = w_END[expert of r] @ x_RD[r]."""
    counts = offsets_E.diff(prepend=offsets_E.new_zeros(1)).tolist()
    return torch.cat([rows @ w.mT for rows, w in zip(x_RD.split(counts), w_END, strict=True)])


@grouped_gemm.fast("torch_grouped_mm")
def _(x_RD: torch.Tensor, w_END: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
    return ContiguousGradient.apply(F.grouped_mm(x_RD, w_END.mT, offs=offsets_E))  # pyright: ignore[reportReturnType]


@op
def grouped_gemm_weight(dy_RN: torch.Tensor, x_RD: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
    """The weights' gradient by itself: dw_END[e] = the sum over rows of e of dy_R x_R^T; zeros for an empty expert."""
    counts = offsets_E.diff(prepend=offsets_E.new_zeros(1)).tolist()
    rows = sum(counts)
    pairs = zip(dy_RN[:rows].split(counts), x_RD[:rows].split(counts), strict=True)
    return torch.stack([dy.mT @ x for dy, x in pairs])


@grouped_gemm_weight.fast("torch_grouped_mm")
def _(dy_RN: torch.Tensor, x_RD: torch.Tensor, offsets_E: torch.Tensor) -> torch.Tensor:
    return F.grouped_mm(dy_RN.mT, x_RD, offs=offsets_E)


class ContiguousGradient(torch.autograd.Function):
    """grouped_mm's backward refuses expanded gradients, such as those of a plain sum."""

    @staticmethod
    def forward(ctx, y):
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        return dy.contiguous()


ROUTINGS = {
    "even": [16, 16, 16, 16],
    "skewed": [61, 0, 2, 1],
    "one expert": [0, 0, 40, 0],
    "odd": [3, 7, 1, 22],
    "no rows": [0, 0, 0, 0],
}


@grouped_gemm.cases
def _(device: str, dtype: torch.dtype):
    for name, counts in ROUTINGS.items():
        for d, n in [(32, 48), (64, 16)]:
            x, w = random(device, dtype, sum(counts), d), random(device, dtype, len(counts), n, d, seed=1)
            offsets = torch.tensor(counts, device=device).cumsum(0).int()
            yield Case(f"{name}, {d} to {n}", (x, w, offsets), hidden=d, ffn=n)


@grouped_gemm_weight.cases
def _(device: str, dtype: torch.dtype):
    for case in grouped_gemm.make_cases(device, dtype):  # pyright: ignore[reportOptionalCall]
        x, w, offsets = case.inputs
        dy = random(device, dtype, len(x), w.shape[1], seed=2)
        yield Case(case.name, (dy, x, offsets), hidden=case.hidden, ffn=case.ffn)
