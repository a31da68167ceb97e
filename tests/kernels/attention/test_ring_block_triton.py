"""Blocks of ring attention in Triton against their references, by Triton's interpreter; on a GPU test_every_op.py does
it, in bf16."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels.attention import masked_triton
from moefold.kernels.attention.ring_block import attention_block, attention_block_backward, merge_attention_block
from moefold.kernels.registry import KernelCase, KernelOp, seeded_randn

GPU = torch.cuda.is_available()
interpreted = pytest.mark.skipif(GPU, reason="products of fp32 are rounded on a GPU")


def small_cases(op: KernelOp) -> list[KernelCase]:
    return [case for case in op.cases("cpu", torch.float32) if not case.name.startswith(("1x2", "2x200", "1x192"))]


@pytest.fixture(params=[(16, 16), (16, 64)], ids=str)
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    options = masked_triton.TileOptions(*request.param, 4, 2)
    monkeypatch.setattr(masked_triton, "NARROW", [options] * 3)


@interpreted
@pytest.mark.parametrize("case", small_cases(attention_block), ids=lambda case: case.name)
def test_result_and_log_sum_exp_equal_those_of_the_reference(case: KernelCase, tiles: None):
    torch.testing.assert_close(
        attention_block.implementations["triton"](*case.inputs), attention_block(*case.inputs), rtol=1e-4, atol=1e-5
    )


@interpreted
@pytest.mark.parametrize("case", small_cases(attention_block_backward), ids=lambda case: case.name)
def test_gradients_equal_those_of_the_reference(case: KernelCase, tiles: None):
    mine = attention_block_backward.implementations["triton"](*case.inputs)
    torch.testing.assert_close(mine, attention_block_backward(*case.inputs), rtol=1e-4, atol=1e-5)


@interpreted
@pytest.mark.parametrize("op", [attention_block, attention_block_backward], ids=lambda op: op.name)
def test_two_runs_of_an_odd_block_give_the_same_bits(op: KernelOp):
    odd = [case for case in small_cases(op) if case.inputs[0].shape[1] % 2 and case.inputs[0].shape[1] > 1]
    assert len(odd) == 6, "on the diagonal, wholly visible, at the end of a window; each with documents too"
    for case in odd:
        first, again = (op.implementations["triton"](*case.inputs) for _ in range(2))
        assert all(map(torch.equal, first, again)), case.name


@interpreted
@pytest.mark.parametrize("case", merge_attention_block.cases("cpu", torch.float32), ids=lambda case: case.name)
def test_a_merged_block_equals_that_of_the_reference(case: KernelCase):
    mine, theirs = (tuple(x.clone() for x in case.inputs) for _ in range(2))
    merge_attention_block.implementations["triton"](*mine)
    merge_attention_block(*theirs)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@interpreted
def test_blocks_merged_in_chunks_of_a_longer_result_leave_the_rest_alone():
    out = seeded_randn("cpu", torch.float32, 2, 12, 3, 8)
    lse = seeded_randn("cpu", torch.float32, 2, 3, 12, seed=1)
    part, part_lse = seeded_randn("cpu", torch.float32, 2, 6, 3, 8, seed=2), seeded_randn("cpu", torch.float32, 2, 3, 6)
    mine, theirs = (out.clone(), lse.clone()), (out.clone(), lse.clone())
    merge_attention_block.implementations["triton"](mine[0][:, 6:], mine[1][:, :, 6:], part, part_lse)
    merge_attention_block(theirs[0][:, 6:], theirs[1][:, :, 6:], part, part_lse)
    torch.testing.assert_close(mine, theirs)
    assert torch.equal(mine[0][:, :6], out[:, :6])
