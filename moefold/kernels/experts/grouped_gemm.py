"""Grouped GEMM: each expert's rows times that expert's matrix, all experts in one call.

R rows sorted by expert, D inner width, N outer width, E experts. Rows of expert e end before `ends_E[e]` (int32, on the
device) and begin where the previous expert's end. Rows from `ends_E[-1]` on are undefined: no defined output or
gradient depends on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.linear.matmul import matmul, plain_product, tiled_product
from moefold.kernels.linear.product import widened
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_op
from moefold.layout.tape_entries import OPEN_TAPES, entry_facts

MultiplyRows = Callable[[Tensor, Tensor], Tensor]
LONGEST_SUM = 4096  # products that a CPU adds up in one sum
PART_OF_SUM = 1024


@register_op
def grouped_gemm(x_RD: Tensor, w_END: Tensor, ends_E: Tensor) -> Tensor:
    """y_RN[r] = w_END[expert of r] @ x_RD[r]; zeros for undefined rows."""
    return multiply_by_expert(x_RD, w_END, ends_E, plain_product)


@grouped_gemm.register_fast("invariant")
def grouped_gemm_invariant(x_RD: Tensor, w_END: Tensor, ends_E: Tensor) -> Tensor:
    return multiply_by_expert(x_RD, w_END, ends_E, tiled_product)


def multiply_by_expert(x_RD: Tensor, w_END: Tensor, ends_E: Tensor, multiply: MultiplyRows) -> Tensor:
    counts = rows_per_expert(ends_E)
    by_expert = split_by_expert(x_RD, counts)
    products: list[Tensor] = []
    pairs = zip(by_expert, w_END, strict=True)
    for x, w in pairs:
        product = multiply(x, w)
        products.append(product)
    spare = len(x_RD) - sum(counts)
    if spare:
        outputs = w_END.shape[1]
        zeros = x_RD.new_zeros(spare, outputs)
        products.append(zeros)
    return torch.cat(products)


def rows_per_expert(ends_E: Tensor) -> list[int]:
    zero = ends_E.new_zeros(1)
    counts_E = ends_E.diff(prepend=zero)
    return counts_E.tolist()


def split_by_expert(x_RD: Tensor, counts: list[int]) -> tuple[Tensor, ...]:
    """The defined rows of each expert."""
    end = sum(counts)
    defined = x_RD[:end]
    return defined.split(counts)


@grouped_gemm.register_fast("torch_grouped_mm")
def grouped_gemm_torch(x_RD: Tensor, w_END: Tensor, ends_E: Tensor) -> Tensor:
    if is_long_cpu_sum(x_RD):
        y_RN = multiply_in_parts(x_RD, w_END, ends_E)
    else:
        y_RN = multiply_groups(x_RD, w_END.mT, ends_E)
    return ContiguousGradient.apply(y_RN)  # pyright: ignore[reportReturnType]


def is_long_cpu_sum(x_RD: Tensor) -> bool:
    if x_RD.device.type != "cpu" or x_RD.dtype != torch.float32:
        return False
    return x_RD.shape[1] > LONGEST_SUM


def multiply_in_parts(x_RD: Tensor, w_END: Tensor, ends_E: Tensor) -> Tensor:
    """The sum of the products of parts of D: on a CPU the error of one fp32 sum grows with its length."""
    x_parts = x_RD.split(PART_OF_SUM, 1)
    w_parts = w_END.split(PART_OF_SUM, 2)
    pairs = zip(x_parts, w_parts, strict=True)
    total: Tensor | None = None
    for x, w in pairs:
        product = multiply_groups(x, w.mT, ends_E)
        total = product if total is None else total + product
    assert total is not None, "no part of a sum"
    return total


def multiply_groups(a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    if a.device.type == "cpu" and not torch.is_grad_enabled():
        return multiply_one_by_one(a, b, ends_E)
    product = F.grouped_mm(widened(a), widened(b), offs=ends_E)
    return product.to(a.dtype)


def multiply_one_by_one(a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    """On a CPU grouped_mm multiplies expert by expert too; here each product is written in its place."""
    wide_a = widened(a)
    wide_b = widened(b)
    outputs = b.shape[-1]
    rows = len(a)
    shape = (len(ends_E), rows, outputs) if b.dim() == 2 else (rows, outputs)
    product = wide_a.new_empty(shape)
    operands = (product, wide_a, wide_b, ends_E)
    if OPEN_TAPES:
        tape = OPEN_TAPES[-1]
        tape.call_whole(multiply_into, operands)
    else:
        multiply_into(*operands)
    return product.to(a.dtype)


def halves_of_product(*operands: Tensor) -> list[tuple[Tensor | int, ...]]:
    return [(*operands, 0), (*operands, 1)]


@entry_facts(written=1, halves=halves_of_product)
def multiply_into(product: Tensor, a: Tensor, b: Tensor, ends_E: Tensor, half: int | None = None) -> None:
    """Rows of a (R, K) by each expert's matrix of b (E, K, N), or columns of a (M, R) by rows of b (R, N). `half`: of
    one half of the experts alone, about as many rows as the other."""
    sums_rows = b.dim() == 2
    ends = ends_E.numpy().tolist()  # on a CPU, where nothing has to be waited for
    begins = [0, *ends]
    for expert in range(len(ends)) if half is None else experts_of_half(ends, half):
        begin = begins[expert]
        end = ends[expert]
        if sums_rows:
            torch.mm(a[:, begin:end], b[begin:end], out=product[expert])
        elif end > begin:
            torch.mm(a[begin:end], b[expert], out=product[begin:end])
    if not sums_rows and half != 0:
        product[begins[-1] :].zero_()


def experts_of_half(ends: list[int], half: int) -> list[int]:
    """Largest first, each expert goes to the half that has fewer rows."""
    begins = [0, *ends]
    rows = [end - begin for begin, end in zip(begins, ends, strict=False)]
    halves: tuple[list[int], list[int]] = ([], [])
    lead = 0  # of the first half, in rows
    for expert in sorted(range(len(rows)), key=rows.__getitem__, reverse=True):
        chosen = 0 if lead <= 0 else 1
        halves[chosen].append(expert)
        lead += rows[expert] if chosen == 0 else -rows[expert]
    return halves[half]


@register_op
def grouped_gemm_weight(dy_RN: Tensor, x_RD: Tensor, ends_E: Tensor) -> Tensor:
    """The weights' gradient by itself: dw_END[e] = the sum over rows of e of dy_R x_R^T; zeros for an empty expert."""
    counts = rows_per_expert(ends_E)
    dy_by_expert = split_by_expert(dy_RN, counts)
    x_by_expert = split_by_expert(x_RD, counts)
    products: list[Tensor] = []
    pairs = zip(dy_by_expert, x_by_expert, strict=True)
    for dy, x in pairs:
        product = matmul(dy.mT, x)
        products.append(product)
    return torch.stack(products)


@grouped_gemm_weight.register_fast("torch_grouped_mm")
def grouped_gemm_weight_torch(dy_RN: Tensor, x_RD: Tensor, ends_E: Tensor) -> Tensor:
    return multiply_groups(dy_RN.mT, x_RD, ends_E)


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
            experts = len(counts)
            w = draw.normal(experts, n, d, seed=1)
            counts_E = torch.tensor(counts, device=draw.device)
            ends_E = counts_E.cumsum(0)
            ends = ends_E.int()
            about = f"{name}, {d} to {n}"
            if spare:
                about += f", {spare} rows undefined behind them"
            inputs = (x, w, ends)
            rows = (defined, all_rows)
            yield KernelCase(about, inputs, hidden=d, ffn=n, rows=rows)


@grouped_gemm_weight.register_cases
def grouped_gemm_weight_cases(draw: CaseInputs) -> Cases:
    for case in grouped_gemm.cases(*draw):
        x, w, ends = case.inputs
        rows = len(x)
        outputs = w.shape[1]
        dy = draw.normal(rows, outputs, seed=2)
        inputs = (dy, x, ends)
        yield replace(case, inputs=inputs)
