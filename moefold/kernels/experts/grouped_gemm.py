"""Grouped GEMM: each expert's rows times that expert's matrix, all experts in one call.

R rows sorted by expert, D inner width, N outer width, E experts. Rows of expert e end before `ends_E[e]` (int32, on the
device) and begin where the previous expert's end. Rows from `ends_E[-1]` on are undefined: no defined output or
gradient depends on them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_op


@register_op
def grouped_gemm(x_RD: Tensor, w_END: Tensor, ends_E: Tensor) -> Tensor:
    """y_RN[r] = w_END[expert of r] @ x_RD[r]; zeros for undefined rows."""
    counts = rows_per_expert(ends_E)
    by_expert = split_by_expert(x_RD, counts)
    products: list[Tensor] = []
    for x, w in zip(by_expert, w_END, strict=True):
        products.append(x @ w.mT)
    spare = len(x_RD) - sum(counts)
    if spare:
        zeros = x_RD.new_zeros(spare, w_END.shape[1])
        products.append(zeros)
    return torch.cat(products)


def rows_per_expert(ends_E: Tensor) -> list[int]:
    zero = ends_E.new_zeros(1)
    return ends_E.diff(prepend=zero).tolist()


def split_by_expert(x_RD: Tensor, counts: list[int]) -> tuple[Tensor, ...]:
    """The defined rows of each expert."""
    defined = x_RD[: sum(counts)]
    return defined.split(counts)


@grouped_gemm.register_fast("torch_grouped_mm")
def grouped_gemm_torch(x_RD: Tensor, w_END: Tensor, ends_E: Tensor) -> Tensor:
    y_RN = F.grouped_mm(x_RD, w_END.mT, offs=ends_E)
    return ContiguousGradient.apply(y_RN)  # pyright: ignore[reportReturnType]


@register_op
def grouped_gemm_weight(dy_RN: Tensor, x_RD: Tensor, ends_E: Tensor) -> Tensor:
    """The weights' gradient by itself: dw_END[e] = the sum over rows of e of dy_R x_R^T; zeros for an empty expert."""
    counts = rows_per_expert(ends_E)
    dy_by_expert = split_by_expert(dy_RN, counts)
    x_by_expert = split_by_expert(x_RD, counts)
    products: list[Tensor] = []
    for dy, x in zip(dy_by_expert, x_by_expert, strict=True):
        products.append(dy.mT @ x)
    return torch.stack(products)


@grouped_gemm_weight.register_fast("torch_grouped_mm")
def grouped_gemm_weight_torch(dy_RN: Tensor, x_RD: Tensor, ends_E: Tensor) -> Tensor:
    return F.grouped_mm(dy_RN.mT, x_RD, offs=ends_E)


class ContiguousGradient(torch.autograd.Function):
    """The identity. The backward of grouped_mm refuses expanded gradients, such as those of a plain sum."""

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


GEMM_WIDTHS = [  # D, N, undefined rows
    (32, 48, 0),
    (64, 16, 0),
    (32, 48, 5),
]


@grouped_gemm.register_cases
def grouped_gemm_cases(draw: CaseInputs) -> Cases:
    for name, counts in EXPERT_ROW_COUNTS.items():
        for d, n, spare in GEMM_WIDTHS:
            defined = sum(counts)
            all_rows = defined + spare
            x = draw.normal(all_rows, d)
            w = draw.normal(len(counts), n, d, seed=1)
            counts_E = torch.tensor(counts, device=draw.device)
            ends = counts_E.cumsum(0)
            about = f"{name}, {d} to {n}"
            if spare:
                about += f", {spare} rows undefined behind them"
            inputs = (x, w, ends.int())
            rows = (defined, all_rows)
            yield KernelCase(about, inputs, hidden=d, ffn=n, rows=rows)


@grouped_gemm_weight.register_cases
def grouped_gemm_weight_cases(draw: CaseInputs) -> Cases:
    for case in grouped_gemm.cases(*draw):
        x, w, ends = case.inputs
        outputs = w.shape[1]
        dy = draw.normal(len(x), outputs, seed=2)
        yield replace(case, inputs=(dy, x, ends))
