"""Rows behind the last expert's (dispatch/base.py, `Rows`): whatever they hold, nothing defined depends on them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moefold.kernels.bound import BoundKernels
from moefold.kernels.experts.expert_bias import expert_bias
from moefold.kernels.experts.expert_mlp import expert_mlp
from moefold.kernels.experts.grouped_gemm import grouped_gemm, grouped_gemm_weight
from moefold.kernels.experts.swiglu import swiglu
from moefold.kernels.facts import Facts
from moefold.kernels.routing.expert_rows import gather_rows, shuffled_rows, sum_rows
from tests.kernels.test_every_op import check

TOKENS, CHOICES, WIDTH, INNER, EXPERTS = 12, 2, 16, 8, 3
KERNELS = {
    "reference": BoundKernels(Facts("cpu", "fp64")),
    "fast": BoundKernels(Facts("cpu", "fp32", hidden=WIDTH, ffn=INNER)),
}


def expert_layer(kernels: BoundKernels, dtype: torch.dtype, spare: int, fused: bool) -> list[torch.Tensor]:
    """The output and all gradients of an expert layer whose rows have `spare` undefined ones behind them, with NaN for
    their router weights."""
    generator = torch.Generator().manual_seed(1)

    def parameter(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    source = parameter(TOKENS, WIDTH)
    gate_up, down = parameter(EXPERTS, 2, INNER, WIDTH), parameter(EXPERTS, WIDTH, INNER)
    bias = parameter(EXPERTS, WIDTH)
    index, slots, _ = shuffled_rows(TOKENS, CHOICES, "cpu", drop=3)
    rows = len(index)
    weight = parameter(rows)
    index_R = F.pad(index, (0, spare), value=-1)
    weight_R = F.pad(weight, (0, spare), value=torch.nan)
    ends = torch.tensor([rows // 3, rows // 3, rows], dtype=torch.int32)
    if fused:
        y = kernels[expert_mlp](source, gate_up, down, weight_R, index_R, slots, ends, True)
    else:
        x = kernels[gather_rows](source, index_R, slots, True)
        h = kernels[grouped_gemm](x, gate_up.flatten(1, 2), ends).unflatten(-1, (2, -1))
        y = kernels[grouped_gemm](kernels[swiglu](h, weight_R), down, ends)
    y = kernels[expert_bias](y, bias, ends, weight_R)
    out = kernels[sum_rows](y, index_R, slots, True)
    out.square().sum().backward()
    gradients = [x.grad for x in (source, gate_up, down, bias, weight) if x.grad is not None]
    assert len(gradients) == 5
    return [out.detach(), *gradients]


@pytest.mark.parametrize("fused", [False, True], ids=["composed", "expert_mlp"])
@pytest.mark.parametrize("which", KERNELS)
def test_an_expert_layer_is_the_same_with_and_without_undefined_rows(which: str, fused: bool):
    dtype = torch.float64 if which == "reference" else torch.float32
    plain = expert_layer(KERNELS[which], dtype, 0, fused)
    spare = expert_layer(KERNELS[which], dtype, 7, fused)
    for mine, other in zip(spare, plain, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_a_weight_gradient_that_reads_undefined_rows_is_caught():
    def reads_to_the_end(dy: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        all_rows = ends.clone()
        all_rows[-1] = len(x)
        return grouped_gemm_weight.reference(dy, x, all_rows)

    for case in grouped_gemm_weight.cases("cpu", torch.float32):
        assert case.rows is not None
        if case.rows[0] == case.rows[1]:
            check(grouped_gemm_weight, reads_to_the_end, case, "fp32")
        else:
            with pytest.raises(AssertionError, match="undefined"):
                check(grouped_gemm_weight, reads_to_the_end, case, "fp32")
