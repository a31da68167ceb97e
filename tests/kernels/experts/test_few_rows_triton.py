"""Experts of few tokens in Triton, in its interpreter where there is no GPU, against the reference."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels.experts.expert_mlp import expert_mlp
from moefold.kernels.experts.few_rows_triton import launch_few_rows_experts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_rows_equal_those_of_the_reference():
    """Experts without rows, with more rows than a round has, rows without a token, undefined rows."""
    cases = expert_mlp.cases(DEVICE, torch.float32)
    chosen = [case for case in cases if case.name in ("more than a tile, 16 by 24", "with holes, 70 rows undefined")]
    assert len(chosen) == 2
    for case in chosen:
        source, gate_up, down, weight, index, slots, ends, *holes = case.inputs
        found = launch_few_rows_experts(source, gate_up, down, weight, index, ends)
        expected = expert_mlp(source, gate_up, down, weight, index, slots, ends, *holes)
        torch.testing.assert_close(case.defined(found), case.defined(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("undefined", [0, 1])
@pytest.mark.parametrize("chosen", [[3], [0], [6], [0, 2, 6], [1, 1, 1, 5, 5], []], ids=str)
def test_fewer_rows_than_experts_meet_the_experts_that_were_chosen(chosen: list[int], undefined: int):
    """One token for all rows; behind them, rows that are not defined."""
    rows = len(chosen) + undefined
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 24), (7, 2, 20, 24), (7, 24, 20), (rows,))
    source, gate_up, down, weight = (torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes)
    ends = torch.tensor(chosen, dtype=torch.int64).bincount(minlength=7).cumsum(0).int().to(DEVICE)
    index = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    found = launch_few_rows_experts(source, gate_up, down, weight, index, ends)
    for row, expert in enumerate(chosen):
        gate, up = gate_up[expert] @ source[0]
        expected = down[expert] @ (torch.nn.functional.silu(gate) * up * weight[row])
        torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_few_rows_take_this_way_and_give_the_same():
    """Within the rounding of bf16; with gradients the way of training is taken."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        numbers = torch.randn(*shape, device="cuda", generator=generator)
        return (numbers * shape[-1] ** -0.5).bfloat16()

    gate_up, down, source = normal(8, 2, 512, 256), normal(8, 256, 512), normal(32, 256) * 16
    ids = torch.rand(32, 8, device="cuda", generator=generator).argsort(1)[:, :2]
    order = ids.flatten().argsort(stable=True)
    ends = ids.flatten().bincount(minlength=8).cumsum(0).int()
    index, slots = (order // 2).int(), order.argsort().view(32, 2).int()
    weight = torch.rand(64, device="cuda", generator=generator)
    inputs = (source, gate_up, down, weight, index, slots, ends)
    run = expert_mlp.implementations["gluon"]
    with torch.no_grad():
        found = run(*inputs)
    assert torch.equal(found, launch_few_rows_experts(source, gate_up, down, weight, index, ends))
    expected = run(*inputs)
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert error < 1e-2
